"""A network from a file of weights: what it is stands in the file, in an option file, or on the command line."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from archs import ARCHS
from models.checkpoint import load_weights, read_checkpoint
from models.misfit import Loaded
from models.restoration import build
from options import basicsr_alias, check, yaml_file
from options.errors import OptionsError
from options.load import import_components

logger = logging.getLogger("pellucid")

OWN_NETWORKS = "files of your own networks: PELLUCID_IMPORT, or import_paths in the option file"


@dataclass(frozen=True)
class Description:
    """What a network is.

    Attributes:
        spec: ``type`` and arguments, checked against the constructor.
        scale: as stated beside them; None where nothing says it.
        place: where this was said, for messages.
        facts: metadata of the file of weights.
    """

    spec: dict[str, Any]
    scale: int | None
    place: str
    facts: dict[str, str]


def describe(weights: Path | str, *, opt: Path | str | None = None, network: str | None = None) -> Description:
    """What the network is that a file of weights belongs to; see :func:`network_from_file`.

    Raises:
        OptionsError: the file cannot be read, nothing says what the network is, or arguments that it does not know.
    """
    if opt is not None and network is not None:
        raise OptionsError("an option file and a network were both given; take one of them to say what the network is")
    facts = read_checkpoint(weights).metadata
    if opt is not None:
        spec, scale = _of_options(Path(opt))
        place = f"{opt}: network_g"
    else:
        import_components(None, Path())
        spec, place = (_of_text(network), "the network") if network is not None else _of_metadata(weights, facts)
        scale = None
    problems = check.component(ARCHS, spec, ("network_g",))
    if problems:
        told = "; ".join(f"{'.'.join(map(str, at[1:]))}: {text}" for at, text in problems)
        raise OptionsError(f"{place}: {told} ({OWN_NETWORKS})" if "unknown network" in told else f"{place}: {told}")
    own = opt is None and network is None
    return Description(spec, _scale_of(facts) if own else scale, place, facts)


def network_from_file(
    weights: Path | str, *, opt: Path | str | None = None, network: str | None = None, key: str | None = None
) -> tuple[nn.Module, Loaded]:
    """Build a network and load its weights to the last tensor.

    Args:
        weights: ``.safetensors``, whose metadata says with ``network_g`` what the network is, or a ``.pth``, which does
            not: one of the two others says it then. They take precedence over the metadata.
        opt: an option file with ``network_g``; of the rest ``import_paths`` and ``basicsr_alias`` count, and ``scale``
            for a network that does not state its own.
        network: type and arguments as YAML, such as ``{type: EDSR, upscale: 2}``.
        key: ``params_ema`` or ``params``; None takes the average where there is one.

    Returns:
        the network, on the CPU, in eval mode; and what was loaded, with the file's metadata.

    Raises:
        OptionsError: a file that cannot be read, nothing that says what the network is, arguments that it refuses, or
            weights that do not fit it.
    """
    return network_as_described(weights, describe(weights, opt=opt, network=network), key=key)


def network_as_described(
    weights: Path | str, description: Description, *, key: str | None = None
) -> tuple[nn.Module, Loaded]:
    """The second half of :func:`network_from_file`, for who wants the description too."""
    built = build(description.spec, scale=description.scale, place=description.place)
    loaded = load_weights(built, weights, key=key, option=None)
    logger.info(f"{description.spec['type']} from {weights}: {loaded}")
    return built.eval(), loaded


def _of_options(path: Path) -> tuple[dict[str, Any], int | None]:
    raw, _ = yaml_file.read(path)
    if basicsr_alias.is_wanted(raw.get("basicsr_alias")):
        basicsr_alias.install()
    import_components(raw.get("import_paths"), path.parent)
    if not isinstance(raw.get("network_g"), Mapping):
        raise OptionsError(f"{path} has no section network_g, which says what the network is")
    scale = raw.get("scale")
    return dict(raw["network_g"]), scale if type(scale) is int else None


def _of_text(text: str) -> dict[str, Any]:
    spec = yaml_file.value_of(text, "the network")
    if not isinstance(spec, Mapping):
        raise OptionsError(f"the network must read '{{type: NAME, argument: value, ...}}', got {text!r}")
    return dict(spec)


def _of_metadata(weights: Path | str, facts: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    place = f"{weights}: network_g of its metadata"
    if "network_g" not in facts:
        raise OptionsError(
            f"{weights} does not say what network it is for: give the option file that it was trained with (--opt "
            "FILE.yml), or type and arguments (--network '{type: NAME, ...}')"
        )
    try:
        spec = json.loads(facts["network_g"])
    except ValueError:
        spec = None
    if not isinstance(spec, dict):
        raise OptionsError(f"{place} is no JSON object: {facts['network_g'][:100]!r}")
    return spec, place


def _scale_of(facts: Mapping[str, str]) -> int | None:
    text = facts.get("scale", "")
    return int(text) if text.isdecimal() and int(text) > 0 else None
