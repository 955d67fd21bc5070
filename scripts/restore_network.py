"""Which network scripts.restore uses: a shipped one, or a file of weights and what says which network they are of."""

import hashlib
import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import archs
from models.from_file import describe, network_as_described
from models.infer import inference_dtype
from options.errors import OptionsError

WEIGHTS = Path(archs.__file__).parent / "weights"
SHIPPED = {"sr": "sst_tiny_x{scale}", "dehaze": "mb_taylorformer_tiny_dehaze"}
_HALF_WAYS = {torch.bfloat16: "bfloat16", torch.float16: "float16", None: "float32"}


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
    described = describe(file, opt=args.opt, network=args.network)
    spec, facts = described.spec, described.facts
    network, loaded = network_as_described(file, described, key=args.param_key)
    _check_asked(args, file, facts, network)
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
        asked = "--task dehaze" if task == "dehaze" else f"--scale {args.scale or 2}"
        ways = ", ".join([*_shipped_options(), "--weights FILE with a network of your own"])
        raise OptionsError(f"{asked}: its network is not shipped, as there is no {file}; what works: {ways}")
    return file


def _shipped_options() -> list[str]:
    """The options for which there are weights here."""
    options = {f"--scale {scale}": SHIPPED["sr"].format(scale=scale) for scale in (2, 3, 4)}
    options["--task dehaze"] = SHIPPED["dehaze"]
    return [option for option, name in options.items() if (WEIGHTS / f"{name}.safetensors").is_file()]


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
