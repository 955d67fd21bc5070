"""Files written whole, whatever they hold; those of tensors and plain types read without running any code from them."""

import base64
import contextlib
import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from options.errors import OptionsError, UserError

# the end of the key under which torch keeps what a module's get_extra_state returns, a tensor or not
EXTRA = "_extra_state"

_PLAIN = (str, int, float, bool, bytes, type(None))
# what torch raises on a file that is cut, mangled, or no checkpoint at all
_UNREADABLE = (
    *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError, RuntimeError, EOFError, OSError, MemoryError),
    *(ValueError, KeyError, IndexError, AttributeError, TypeError, ImportError, OverflowError, AssertionError),
)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in its place in one step.

    Raises:
        UserError: it cannot be written; a file that was there before is still whole.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    # torch and safetensors report a full disk in their own ways
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"cannot write {path}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """As :func:`write_whole`, a text in UTF-8."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_torch(content: Any, path: Path) -> None:
    """``torch.save``, so that equal contents make equal files."""
    # through an open file, or the archive's inner names would depend on the temporary name
    with path.open("wb") as file:
        torch.save(content, file)


def as_text(content: Mapping[str, Any]) -> str:
    """Plain types and tensors as a text, for a place that takes nothing else.

    Raises:
        TypeError: as :func:`on_cpu`.
    """
    with io.BytesIO() as file:
        torch.save(on_cpu(content), file)
        return base64.b64encode(file.getvalue()).decode()


def _from_text(text: str) -> dict[str, Any]:
    return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True) if text else {}


def on_cpu(value: Any, place: str = "state") -> Any:
    """The same nest of plain types, its tensors on the CPU and no larger than what they show.

    Raises:
        TypeError: something else is in it; the message says where.
    """
    if isinstance(value, Tensor):
        tensor = value.detach().cpu()
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()
    if isinstance(value, Mapping):
        return {_plain_key(key, place): on_cpu(entry, f"{place}[{key!r}]") for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(on_cpu(entry, f"{place}[{i}]") for i, entry in enumerate(value))
    if type(value) not in _PLAIN:
        raise TypeError(f"{place} is a {type(value).__name__}; a saved state holds plain types and tensors only")
    return value


def _plain_key(key: Any, place: str) -> Any:
    if type(key) not in _PLAIN:
        raise TypeError(f"{place} has a key of type {type(key).__name__}; keys are plain types")
    return key


def read(path: Path) -> tuple[Any, dict[str, str] | None]:
    """The content of a file, and the metadata of one in the safetensors format (None for others).

    Raises:
        OptionsError: no such file, or it is damaged, or holds more than tensors and plain types.
    """
    path = path.expanduser()
    # os.path, as Path raises where a name is too long
    if not os.path.exists(path):
        near = f"; {path.parent} does not exist either" if not os.path.isdir(path.parent) else ""
        raise OptionsError(f"no such file: {path}{near}")
    if not path.is_file():
        raise OptionsError(f"{path} is a folder, not a file of weights or a training state")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise OptionsError(f"cannot read {path}: {error.strerror}") from error
    try:
        if start[8:9] == b"{":
            with safe_open(path, framework="pt") as opened:
                metadata = opened.metadata() or {}
                tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
                return tensors | _from_text(metadata.pop(EXTRA, "")), metadata
        return torch.load(path, map_location="cpu", weights_only=True), None
    except _UNREADABLE as error:
        raise OptionsError(f"cannot read {path}: {_why_unreadable(path, start, error)}") from error


def _why_unreadable(path: Path, start: bytes, error: BaseException) -> str:
    if not start:
        return "it is empty"
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, not the file; fetch it with git lfs pull"
    if start.lstrip()[:1] == b"<":
        return "it is a web page, not a checkpoint; download it again"
    refused = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if refused:
        return f"it holds Python objects ({refused[1]}); only tensors and plain types are loaded, as it could run code"
    size = path.stat().st_size
    return f"it is damaged, cut short or no checkpoint ({size} bytes; {type(error).__name__})"
