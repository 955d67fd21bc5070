"""Whether a Triton kernel can be launched here, and with which settings. Imports no triton.

Settings are read from ``kernels/configs/``: one file per GPU, named after it (``nvidia_h200.json``); for what that does
not hold, one per architecture (``sm_90.json``); and for what that does not hold, ``default.json``. Nothing is measured
at run time; ``scripts/aot_report.py`` compiles what an operator lists and fails if anything spills. A file is::

    {"gpu": "NVIDIA H200", "settings": {"<op>": {"<key>": {"BLOCK": 64, "num_warps": 8, "triton": "3.6.0", "ms": 1}}}}

where ``triton`` is the version that it was chosen with, and ``ms`` what it took then (null: compiled, not yet timed).
"""

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIGS = Path(__file__).parent / "configs"
# how a setting was found, not part of it
RECORD = ("triton", "ms", "note")
CAPABILITY = (8, 0)
# of triton; PyTorch itself brings older ones
OLDEST = (3, 6)

_found: dict[str, bool] = {}


@dataclass(frozen=True)
class AotCase:
    """One way in which a kernel is compiled, for ``scripts/aot_report.py``.

    Args:
        name: operator, pass, dtype and shape, in words.
        kernel: the function under ``triton.jit``.
        signature: type of each run-time argument, in order: ``"*bf16"``, ``"fp32"``, ``"i32"``, ``"i64"``.
        constants: value of each compile-time argument, block sizes included.
        options: ``num_warps`` and ``num_stages``.
        aligned: integer arguments that are multiples of 16; pointers always are.
        tensor_cores: whether instructions of the tensor cores must be there.
        archs: compute capabilities that this case is for; 90 is H100 and H200, 80 is A100.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    aligned: tuple[str, ...] = ()
    tensor_cores: bool = True
    archs: tuple[int, ...] = (90, 80)


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter, as ``TRITON_INTERPRET=1`` asks for."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")


def why_not(x: Tensor | None = None) -> str | None:
    """Why a Triton kernel cannot take ``x``, or None; without ``x``, why none can run at all. Metadata only."""
    if not _known("triton", _has_triton):
        return "triton is not installed (pip install 'pellucid[triton]', on Linux)"
    if not _known("new", _is_new):
        return "triton is older than 3.6 (pip install 'pellucid[triton]')"
    if interpreting():
        return None
    if x is None and not torch.cuda.is_available():
        return "there is no CUDA device"
    if x is not None and x.device.type != "cuda":
        return f"it needs a CUDA tensor, this one is on {x.device.type} (TRITON_INTERPRET=1 interprets it, for tests)"
    return _why_not_compiled() or (None if x is None else _why_not_on(x.device))


def _why_not_compiled() -> str | None:
    if torch.version.hip:
        return "it is written for GPUs of NVIDIA"
    # torch.compile needs one itself, and cannot trace how it is looked for
    if not torch.compiler.is_compiling() and not _known("compiler", _has_compiler):
        return "triton compiles its launchers by gcc or clang (or CC) with Python.h, and one of these is missing"
    return None


def _why_not_on(device: torch.device) -> str | None:
    gpu = torch.cuda.get_device_properties(device)
    if (gpu.major, gpu.minor) < CAPABILITY:
        return f"it needs compute capability 8.0 or more, {device} has {gpu.major}.{gpu.minor}"
    return None


def why_not_unasked(x: Tensor | None = None) -> str | None:
    """Why nobody wants a kernel that can take ``x`` unless they ask for it, or None: the interpreter is slow."""
    if x is not None and interpreting():
        return "TRITON_INTERPRET=1 interprets the kernel, which only tests want"
    return None


def tf32() -> bool:
    """Whether PyTorch lets products of float32 round their factors to tf32."""
    # once somebody uses this newer setting, the older one refuses to be read; by itself the older one sets both
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.get_float32_matmul_precision() != "highest" if newer is None else newer == "tf32"


def settings(op: str, *keys: str, device: torch.device | str = "cpu", arch: int | None = None) -> dict[str, Any]:
    """Launch settings of ``op`` for the first of ``keys`` that the file of this GPU, of its architecture, or else the
    default, holds.

    Args:
        op: name of the operator.
        keys: most specific first.
        device: where the kernel is launched; a CPU, which interprets, takes the default.
        arch: instead of ``device``, the compute capability that a kernel is compiled for, like 90.

    Raises:
        KeyError: no file has any of the keys.
    """
    device = torch.device(device)
    files = ()
    if arch is not None:
        files = (f"sm_{arch}",)
    elif device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        files = (slug(gpu.name), f"sm_{gpu.major}{gpu.minor}")
    return dict(_settings(op, keys, (*files, "default")))


def slug(gpu: str) -> str:
    """The name of a GPU as its file is called: ``"NVIDIA H200"`` is ``"nvidia_h200"``."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


@functools.cache
def configuration(name: str) -> dict[str, Any]:
    """``settings`` of the file ``name`` (without ``.json``), by operator and key; empty where there is no such file."""
    path = CONFIGS / f"{name}.json"
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} is no file of settings, {{"gpu": ..., "settings": ...}}: {error!r}') from error


@functools.cache
def _settings(op: str, keys: tuple[str, ...], files: tuple[str, ...]) -> dict[str, Any]:
    for file in files:
        known = configuration(file).get(op, {})
        for key in keys:
            if key in known:
                return {k: v for k, v in known[key].items() if k not in RECORD}
    raise KeyError(f"{CONFIGS.name} has no settings of {op} for {' or '.join(keys)}")


def _known(fact: str, find: Callable[[], bool]) -> bool:
    if fact not in _found:
        _found[fact] = find()
    return _found[fact]


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):
        # something hides it from import: a finder, or a None among the modules
        return False


def _is_new() -> bool:
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        # a build under another name
        return True
    return tuple(map(int, version.split(".")[:2])) >= OLDEST


def _has_compiler() -> bool:
    if sys.platform != "linux":
        # builds for other systems bring one
        return True
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include", "posix_prefix"), "Python.h").exists()
