"""Which network scripts.restore uses: a shipped one, or a file of weights and what says which network they are of."""

import hashlib
import json
import logging
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import archs
from archs import ARCHS
from kernels import dispatch
from models.checkpoint import load_weights, read_checkpoint
from models.facts import wrong_facts
from models.infer import inference_dtype
from options import basicsr_alias, load, yaml_file
from options.errors import OptionsError

WEIGHTS = Path(archs.__file__).parent / "weights"
SHIPPED = {"sr": "sst_tiny_x{scale}", "dehaze": "mb_taylorformer_tiny_dehaze"}
_HALF_WAYS = {torch.bfloat16: "bfloat16", torch.float16: "float16", None: "float32"}

logger = logging.getLogger("pellucid")


@dataclass(frozen=True)
class Restorer:
    """A network ready to restore.

    Attributes:
        network: in eval mode, on its device.
        scale: by how much it enlarges.
        dtype: what it computes in, see :func:`models.infer.inference_dtype`.
        device: where it is.
        label: what to call it.
        digest: of the file of weights and the network's arguments.
        suffix: what to put behind the names of results.
    """

    network: nn.Module
    scale: int
    dtype: torch.dtype | None
    device: torch.device
    label: str
    digest: str
    suffix: str

    @property
    def precision(self) -> str:
        """What it computes in, in words."""
        return _HALF_WAYS[self.dtype]


def build_restorer(args: Namespace) -> Restorer:
    """Build the network that the command line asks for and load its weights.

    Raises:
        OptionsError: no such network, weights or device, or they do not fit one another.
    """
    file = weights_file(args)
    device = _device(args.device)
    facts = read_checkpoint(file).metadata
    spec, stated = _spec(args, file, facts)
    network = _build(spec, stated)
    _check_asked(args, file, facts, network)
    loaded = load_weights(network, file, key=args.param_key)
    if args.param_key not in (None, loaded.key):
        raise OptionsError(f"--param_key: {file} has no {args.param_key}, only {loaded.key}")
    try:
        dtype = inference_dtype(args.dtype, device)
    except OptionsError as error:
        raise OptionsError(str(error).replace("val.dtype", "--dtype")) from error
    content = hashlib.sha256(file.read_bytes())
    content.update(json.dumps([spec, loaded.key], sort_keys=True, default=str).encode())
    count = sum(parameter.numel() for parameter in network.parameters())
    label = f"{file.stem}: {spec['type']}, {count:,} parameters, x{network.scale}"
    haze = "dehaze" in (args.task, facts.get("task"))
    suffix = f"_x{network.scale}" if network.scale > 1 else "_dehazed" if haze else "_restored"
    return Restorer(network.eval().to(device), network.scale, dtype, device, label, content.hexdigest(), suffix)


def weights_file(args: Namespace) -> Path:
    """``--weights``, or the shipped file of the task and scale.

    Raises:
        OptionsError: there is none for them.
    """
    if args.weights is not None:
        return Path(args.weights).expanduser()
    if args.opt is not None or args.network is not None:
        raise OptionsError("--opt and --network say of which network --weights FILE is; give that file too")
    task = args.task or "sr"
    if task == "dehaze" and args.scale is not None:
        raise OptionsError(f"--scale {args.scale}: dehazing keeps the size of the picture; leave it out")
    file = WEIGHTS / f"{SHIPPED[task].format(scale=args.scale or 2)}.safetensors"
    if not file.is_file():
        here = sorted(path.name for path in WEIGHTS.glob("*.safetensors"))
        raise OptionsError(f"no network is shipped as {file} (there: {', '.join(here) or 'none'}); give --weights FILE")
    return file


def _spec(args: Namespace, file: Path, facts: Mapping[str, str]) -> tuple[dict[str, Any], int | None]:
    """The network's ``type`` and arguments, and the scale that an option file states beside them."""
    if args.network is not None:
        return _plain(args.network, "--network"), None
    if args.opt is not None:
        raw, _ = yaml_file.read(args.opt)
        if basicsr_alias.is_wanted(raw.get("basicsr_alias")):
            basicsr_alias.install()
        load.import_components(raw.get("import_paths"), Path(args.opt).parent)
        if not isinstance(raw.get("network_g"), dict):
            raise OptionsError(f"--opt {args.opt} has no section network_g")
        return raw["network_g"], raw.get("scale")
    if "network_g" in facts:
        return _plain(facts["network_g"], f"{file} (network_g)"), None
    raise OptionsError(
        f"{file} does not say which network it is of; add --opt FILE.yml, the option file of its training or test, or "
        "--network '{type: SST, ...}' with the network's arguments"
    )


def _plain(text: str, place: str) -> dict[str, Any]:
    spec = yaml_file.value_of(text, place)
    if not isinstance(spec, dict) or not isinstance(spec.get("type"), str):
        raise OptionsError(f"{place} must be like {{type: SST, dim: 32}}, got {text[:100]}")
    return spec


def _build(spec: Mapping[str, Any], stated: Any) -> nn.Module:
    try:
        dispatch.check_environment()
    except ValueError as error:
        raise OptionsError(str(error)) from error
    # without import_paths there may still be PELLUCID_IMPORT
    load.import_components(None, Path.cwd())
    try:
        network = ARCHS.build(spec)
    except (KeyError, ValueError, TypeError, RuntimeError, MemoryError, OverflowError) as error:
        raise OptionsError(f"the network: {error or 'out of memory'}") from error
    if not hasattr(network, "scale"):
        network.scale = stated if isinstance(stated, int) else 1
        logger.warning(f"{spec['type']} does not state its scale: {network.scale} is assumed")
    wrong = wrong_facts(network)
    if wrong:
        raise OptionsError("the network: " + "; ".join(wrong))
    return network


def _check_asked(args: Namespace, file: Path, facts: Mapping[str, str], network: nn.Module) -> None:
    if args.scale not in (None, network.scale):
        raise OptionsError(f"--scale {args.scale}: the network of {file} enlarges by {network.scale}")
    task = facts.get("task")
    if task and args.task not in (None, task):
        raise OptionsError(f"--task {args.task}: {file} is for {task}")
    if args.task == "sr" and network.scale == 1:
        raise OptionsError(f"--task sr: the network of {file} keeps the size")
    if args.task == "dehaze" and network.scale != 1:
        raise OptionsError(f"--task dehaze: the network of {file} enlarges by {network.scale}")
    channels = getattr(network, "in_channels", None)
    if channels not in (None, 1, 3):
        raise OptionsError(f"the network of {file} takes {channels} channels; pictures have 1 or 3")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionsError(f"--device {name} is not known; take auto, cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionsError(f"--device {name} is not known; take auto, cpu, cuda or cuda:0")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise OptionsError(f"--device {name}: PyTorch sees {count} GPUs; take cpu or auto")
    return device
