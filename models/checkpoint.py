"""Weights and training states on disk.

Three kinds of files, each written whole (a temporary file beside it, then a rename) and read without running any code
from it: ``.pth`` with ``params`` and ``params_ema`` as BasicSR writes it, ``.safetensors`` with facts about the weights
beside them, ``.state`` with plain types and tensors to resume from.
"""

import copy
import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from models import files
from models.misfit import Loaded, explain
from options.errors import OptionsError

logger = logging.getLogger("pellucid")

SECTIONS = ("params_ema", "params", "state_dict", "model")
BARE = "the file itself"

_WRAPPERS = ("module.", "_orig_mod.")
_MISMATCH = re.compile(
    r"size mismatch for (\S+): copying a param with shape torch\.Size\((.*?)\) from checkpoint, "
    r"the shape in current model is torch\.Size\((.*?)\)"
)


@dataclass(frozen=True)
class Checkpoint:
    """What a file of weights holds.

    Attributes:
        path: the file.
        sections: ``params_ema``, ``params``, ... or ``the file itself``, each key -> tensor, on the CPU.
        metadata: facts that a safetensors file carries, empty for others.
    """

    path: Path
    sections: dict[str, dict[str, Tensor]]
    metadata: dict[str, str] = field(default_factory=dict)


def save_pth(path: Path | str, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write weights as ``.pth``, on the CPU, their keys without ``module.``.

    Args:
        path: the file.
        weights: ``{"params": ..., "params_ema": ...}``, the second where there is an average.

    Raises:
        UserError: the file cannot be written; one that was there before is still whole.
    """
    content = {section: files.on_cpu({_unwrap(k): v for k, v in params.items()}) for section, params in weights.items()}
    files.write_whole(Path(path), lambda temporary: files.save_torch(content, temporary))


def save_safetensors(path: Path | str, params: Mapping[str, Tensor], metadata: Mapping[str, Any] | None = None) -> None:
    """Write one set of weights as ``.safetensors``.

    Args:
        path: the file.
        params: key -> tensor; tensors that share memory are written out each.
        metadata: facts about the weights; what is not a string is written as JSON. The reader looks at ``network_g``
            (the network's ``type`` and arguments), ``scale`` and ``weights`` (``params`` or ``params_ema``).

    Raises:
        UserError: the file cannot be written; one that was there before is still whole.
    """
    facts = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in (metadata or {}).items()}
    tensors = {_unwrap(k): v for k, v in params.items() if isinstance(v, Tensor)}
    # the format knows neither shared memory nor strides
    separate = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
    extra = {_unwrap(k): v for k, v in params.items() if not isinstance(v, Tensor)}
    if extra:
        facts[files.EXTRA] = files.as_text(extra)
    # not by the library's writer of files, which lets nobody else read them
    content = save(separate, {"format": "pt", **facts})
    files.write_whole(Path(path), lambda temporary: temporary.write_bytes(content))


def save_state(path: Path | str, state: Mapping[str, Any]) -> None:
    """Write a training state.

    Args:
        path: the file.
        state: plain types (numbers, strings, None, lists, tuples, dictionaries) and tensors, nested as needed.

    Raises:
        TypeError: something else is in it, which a safe reader would refuse; the message says where.
        UserError: the file cannot be written; one that was there before is still whole.
    """
    content = files.on_cpu(state)
    files.write_whole(Path(path), lambda temporary: files.save_torch(content, temporary))


def load_state(path: Path | str) -> dict[str, Any]:
    """Read a training state, its tensors on the CPU.

    Raises:
        OptionsError: no such file, or it is damaged, or no training state.
    """
    content, _ = files.read(Path(path))
    if not isinstance(content, dict):
        raise OptionsError(f"{path} is no training state: it holds a {type(content).__name__}")
    return content


def load_sound_state(path: Path | str) -> dict[str, Any]:
    """As :func:`load_state`, and refuse a state in which a number is spoilt.

    Raises:
        OptionsError: as :func:`load_state`, or a tensor holds NaN.
    """
    state = load_state(path)
    # elsewhere (losses since the last line) one may stand for a step that was left out
    place = find_nan({"model": state.get("model")})
    if place is not None:
        way = "the run was spoilt before it was saved; take an earlier state"
        raise OptionsError(f"{path}: tensor {place} holds NaN; {way}")
    return state


def find_nan(value: Any, place: str = "") -> str | None:
    """Where in a nest of dictionaries and lists the first tensor with a NaN is (``a.b.0``), or None."""
    if isinstance(value, Tensor):
        # numbers of 8 bits cannot be asked
        value = value.float() if value.is_floating_point() and value.element_size() < 2 else value
        return place if value.is_floating_point() and bool(value.isnan().any()) else None
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    found = (find_nan(entry, f"{place}.{key}" if place else str(key)) for key, entry in entries)
    return next((name for name in found if name is not None), None)


def read_checkpoint(path: Path | str) -> Checkpoint:
    """Read a file of weights: .pth (``params_ema``, ``params``, ``state_dict``, bare) or safetensors, known by content.

    Raises:
        OptionsError: no such file, or it is damaged, or holds no weights.
    """
    path = Path(path)
    content, metadata = files.read(path)
    if metadata is not None:
        return Checkpoint(path, {metadata.get("weights", "params"): content}, metadata)
    if isinstance(content, Mapping):
        sections = {key: dict(content[key]) for key in SECTIONS if _holds_weights(content.get(key))}
        if sections:
            return Checkpoint(path, sections)
        if _holds_weights(content):
            return Checkpoint(path, {BARE: dict(content)})
    found = ", ".join(map(str, list(content)[:5])) if isinstance(content, Mapping) else type(content).__name__
    raise OptionsError(f"{path} holds no weights: found {found}; looked for {', '.join(SECTIONS)} or a bare state dict")


def load_weights(
    network: nn.Module,
    path: Path | str,
    *,
    key: str | None = None,
    strict: bool = True,
    option: str | None = "path.strict_load_g",
) -> Loaded:
    """Load a file of weights into a network.

    Args:
        network: without wrappers (DDP, compile); untouched when the file is refused.
        path: any file that :func:`read_checkpoint` reads.
        key: ``params_ema`` or ``params``; None takes the average where there is one. A key that the file lacks gives
            way, with a notice, to one that it has.
        strict: refuse a file that does not fit to the last tensor; otherwise load what fits and log the counts.
        option: what the user sets to false for ``strict=False``, for messages; None where the user cannot.

    Raises:
        OptionsError: the file cannot be read, does not fit, holds NaN (strict), or (not strict) has nothing in common
            with the network.
    """
    checkpoint = read_checkpoint(path)
    section = key if key in checkpoint.sections else next(iter(checkpoint.sections))
    if key not in (None, section):
        logger.warning(f"{path} has no {key}; {section} is used")
    _refuse_nan(checkpoint, section, strict, option)
    before = {name: copy.deepcopy(value) for name, value in network.state_dict().items()}
    state = {k if k in before else _unwrap(k): v for k, v in checkpoint.sections[section].items()}
    accepted = False
    try:
        missing, unexpected, mismatched = _load_what_fits(network, state, checkpoint.path)
        # a layer may fill in what a file lacks, and that is not loaded
        count = min(len(before) - len(missing), len(state) - len(unexpected)) - len(mismatched)
        facts = checkpoint.metadata
        result = Loaded(checkpoint.path, section, count, len(before), missing, unexpected, mismatched, facts)
        if (strict and result.problems) or count <= 0:
            raise OptionsError(explain(result, network, strict, option))
        accepted = True
    finally:
        if not accepted:
            _put_back(network, before)
    if result.problems:
        logger.warning(f"{path} fits in part: {result}")
    return result


def _refuse_nan(checkpoint: Checkpoint, section: str, strict: bool, option: str | None) -> None:
    place = find_nan(checkpoint.sections[section])
    if place is None:
        return
    text = f"{checkpoint.path}: tensor {place} holds NaN ({section})"
    if strict:
        way = "take weights of an earlier iteration" + (f"; {option}: false loads them all the same" if option else "")
        raise OptionsError(f"{text}; the run that saved it was spoilt: {way}")
    logger.warning(f"{text}; it is loaded as it is, since {option} is false")


def keep_last(folder: Path | str, n: int, *, protect: Collection[int] = ()) -> list[Path]:
    """Delete all but the ``n`` newest of the files that carry an iteration in their name.

    ``net_g_5000.pth``, ``net_g_5000.safetensors`` and ``5000.state`` carry one; files without, such as
    ``net_g_latest.pth`` and ``net_g_best.safetensors``, are never deleted, nor is the newest.

    Args:
        folder: where the files are.
        n: iterations to keep, of each kind of file (net_g, net_d, ...); at least 1.
        protect: iterations that stay whatever their age, the best one for instance.

    Returns:
        The deleted files.
    """
    if n < 1:
        raise ValueError(f"at least the newest file stays, so n must be at least 1, got {n}")
    found: dict[str, dict[int, list[Path]]] = {}
    for path in sorted(Path(folder).glob("*")):
        match = re.fullmatch(r"(|.*_)(\d+)\.(pth|safetensors|state)", path.name)
        if match and path.is_file():
            found.setdefault(match[1], {}).setdefault(int(match[2]), []).append(path)
    deleted = []
    for by_iteration in found.values():
        for iteration in sorted(by_iteration)[:-n]:
            if iteration not in protect:
                deleted += by_iteration[iteration]
    for path in deleted:
        path.unlink(missing_ok=True)
    return deleted


def _unwrap(key: str) -> str:
    """A key without the prefixes of DDP and torch.compile."""
    while key.startswith(_WRAPPERS):
        key = key.split(".", 1)[1]
    return key


def _load_what_fits(
    network: nn.Module, state: dict[str, Tensor], path: Path
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, tuple[str, str]]]:
    """Load; return the missing keys, the unexpected ones, and the mismatched ones with both shapes.

    Shapes are not compared here: a network may resample tensors while it loads them (SST does, between scales).
    """
    mismatched: dict[str, tuple[str, str]] = {}
    try:
        keys = network.load_state_dict(state, strict=False)
    except RuntimeError as error:
        for name, in_file, in_network in _MISMATCH.findall(str(error)):
            mismatched[name] = (in_file, in_network)
        if not mismatched:
            raise OptionsError(f"{path} does not fit {type(network).__name__}: {str(error)[:500]}") from error
        keys = network.load_state_dict({k: v for k, v in state.items() if k not in mismatched}, strict=False)
    missing = tuple(name for name in keys.missing_keys if name not in mismatched)
    return missing, tuple(keys.unexpected_keys), mismatched


@torch.no_grad()
def _put_back(network: nn.Module, before: Mapping[str, Tensor]) -> None:
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor):
            value.copy_(before[name])
        elif name in before:
            network.get_submodule(name.rpartition(".")[0]).set_extra_state(before[name])


def _holds_weights(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    named = all(isinstance(key, str) for key in value)
    return named and all(isinstance(entry, Tensor) or key.endswith(files.EXTRA) for key, entry in value.items())
