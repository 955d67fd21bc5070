"""What came of loading weights into a network, and in words why they do not fit."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class Loaded:
    """What :func:`load_weights` did.

    Attributes:
        path: the file.
        key: the part of it that was used: ``params_ema``, ``params``, ...
        loaded, total: tensors that the file provided, and tensors of the network.
        missing: the network's keys that the file lacks.
        unexpected: the file's keys that the network lacks.
        mismatched: the network's keys -> shape in the file, shape in the network.
        metadata: facts that a safetensors file carries.
    """

    path: Path
    key: str
    loaded: int
    total: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: dict[str, tuple[str, str]] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> str:
        """How many keys are missing, unexpected or of another shape, in words; empty when every tensor fits."""
        if not (self.missing or self.unexpected or self.mismatched):
            return ""
        counts = f"{len(self.missing)} missing, {len(self.unexpected)} unexpected"
        return f"{counts}, {len(self.mismatched)} of another shape"

    def __str__(self) -> str:
        text = f"{self.key}, {self.loaded} of {self.total} tensors"
        return f"{text} ({self.problems})" if self.problems else text


def explain(result: Loaded, network: nn.Module, strict: bool, option: str | None) -> str:
    """A misfit on one screen: the counts, the first few keys of each kind, the likely reason, the way out."""
    lines = [f"{result.path} ({result.key}) does not fit {type(network).__name__}: {result.problems}"]
    shapes = [f"{name}: {a} in the file, {b} in the network" for name, (a, b) in result.mismatched.items()]
    for title, names in (("missing", result.missing), ("unexpected", result.unexpected), ("another shape", shapes)):
        lines += [f"  {title}: {name[:150]}" for name in names[:3]]
        if len(names) > 3:
            lines.append(f"  {title}: and {len(names) - 3} more")
    lines.append(f"likely reason: {_likely_reason(result, network)}")
    if strict and result.loaded > 0 and option is not None:
        lines.append(f"{option}: false loads what fits")
    elif option is None:
        lines.append("--opt FILE.yml, the option file of the training, says what network the file is for")
    return "\n".join(lines)


def _likely_reason(result: Loaded, network: nn.Module) -> str:
    facts, name = result.metadata, type(network).__name__
    made_with = facts.get("network_g", "")
    kind = re.search(r'"type": "(\w+)"', made_with)
    if kind and kind[1] != name:
        return f"the file holds a {kind[1]}, the network is a {name}"
    scale = str(getattr(network, "scale", ""))
    if scale and facts.get("scale", scale) != scale:
        return f"the file is for scale {facts['scale']}, the network for scale {scale}"
    if made_with:
        return f"other arguments of the network; the file was made with {made_with[:500]}"
    misfits = len(result.mismatched)
    if result.loaded + misfits <= 0:
        return "another architecture: not one name is shared"
    if misfits > result.loaded:
        return "another width (dim, channels, heads): the names agree, most shapes do not"
    if misfits:
        return "another scale, or another number of channels at the ends: only a few shapes differ"
    return "another depth (number of blocks) or another variant of the network"
