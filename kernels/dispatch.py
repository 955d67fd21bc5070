"""Which implementation of an operator runs, and why.

An operator has several backends. The first of these that says something decides:

1. the call argument ``backend="torch"``
2. ``with use_backend("window_attention", "torch")``, or ``use_backend("torch")`` for every operator that has it
3. the environment variable ``PELLUCID_KERNELS_WINDOW_ATTENTION=torch``
4. the environment variable ``PELLUCID_KERNELS=torch``, again for every operator that has it
5. nobody: the first backend, in the operator's order, that can run the call and does not decline it

``auto`` at any step means step 5. A backend that was asked for and cannot run raises :class:`KernelUnavailable`; only
step 5 moves on to another one. A backend answers from metadata alone (device, dtype, shapes), so that
``torch.compile(fullgraph=True)`` can trace the choice.
"""

import contextlib
import difflib
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("pellucid")

BACKENDS = ("triton", "flash", "chunked", "sdpa", "torch", "reference")
AUTO = "auto"
ENVIRONMENT = "PELLUCID_KERNELS"


class KernelUnavailable(RuntimeError):
    """A backend was asked for that cannot run this call; the message says who asked, why not, and what would work."""


@dataclass(frozen=True)
class Backend:
    """One implementation of an operator.

    Args:
        name: one of ``BACKENDS``.
        run: the implementation; takes the operator's tensors and options.
        supports: takes the same, each of which may be missing; returns None, or the reason why it cannot run.
        why: what speaks for it, as ``explain`` says it.
        declines: takes the same as ``supports``; returns None, or why another one is better for this call. Heard only
            where nobody asked for this backend.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None]
    why: str
    declines: Callable[..., str | None] | None = None

    def against(self, tensors: tuple, options: dict, *, asked: bool) -> str | None:
        """The reason not to take it for this call, or None."""
        reason = self.supports(*tensors, **options)
        if reason is None and not asked and self.declines is not None:
            reason = self.declines(*tensors, **options)
        return reason


_OPS: dict[str, tuple[Backend, ...]] = {}
_in_use: list[tuple[str | None, str]] = []
_decisions: dict[tuple[str, str, str], str] = {}


def always(*tensors: Tensor | None, **options: Any) -> None:
    """The ``supports`` of a backend that runs every call."""
    return None


def register(op: str, backends: tuple[Backend, ...]) -> None:
    """Give ``op`` its backends, best first.

    Raises:
        ValueError: a backend's name is not one of ``BACKENDS``.
    """
    for backend in backends:
        _check_name(backend.name, BACKENDS, "backend")
    _OPS[op] = backends


def run(op: str, backend: str | None, *tensors: Tensor | None, **options: Any) -> Any:
    """Choose a backend for this call and run it, in the dtype of its tensors whatever autocast says.

    Args:
        op: name of the operator.
        backend: the call argument, or None.
        tensors: the operator's tensors, of which the first is one.
        options: its other arguments.

    Raises:
        KernelUnavailable: the backend that was asked for cannot run this call.
        ValueError: unknown operator or backend.
    """
    chosen, _ = _choose(op, backend, tensors, options)
    with no_autocast(tensors[0].device.type):
        return chosen.run(*tensors, **options)


@contextlib.contextmanager
def use_backend(op: str, name: str | None = None) -> Iterator[None]:
    """Within the block, run ``op`` by the backend ``name``.

    ``use_backend(name)``, without an operator, speaks for every operator that has this backend. The innermost block
    that speaks for an operator decides. Holds for the whole process, threads included.

    Raises:
        ValueError: unknown operator or backend; the known ones are in the message.
    """
    if name is None:
        _check_name(op, (*BACKENDS, AUTO), "backend")
        entry = (None, op)
    else:
        _check_name(name, (*_names(op), AUTO), f"backend of {op}")
        entry = (op, name)
    _in_use.append(entry)
    try:
        yield
    finally:
        # the last of equal ones: blocks end from the inside
        del _in_use[len(_in_use) - 1 - _in_use[::-1].index(entry)]


def check_environment() -> None:
    """See that the environment variables name operators and backends that there are.

    Raises:
        ValueError: one does not; the nearest and all known names are in the message.
    """
    for variable, value in os.environ.items():
        name = value.strip().lower()
        if variable == ENVIRONMENT and name:
            _check_name(name, (*BACKENDS, AUTO), "backend", f", asked for by {variable}={value}")
        elif variable.startswith(f"{ENVIRONMENT}_"):
            op = variable.removeprefix(f"{ENVIRONMENT}_").lower()
            _check_name(op, _folders(), "operator", f" in the name of {variable}")
            if name:
                _check_name(name, (*_names(op), AUTO), f"backend of {op}", f", asked for by {variable}={value}")


def no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Arithmetic in the dtype of the tensors, whatever autocast says outside."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def available(op: str, *tensors: Tensor | None, **options: Any) -> list[str]:
    """Names of the backends of ``op`` that can run here, best first.

    Args:
        op: name of the operator, which is the name of its folder.
        tensors, options: the operator's arguments; left out, only what holds for every call is asked.
    """
    return [b.name for b in _backends(op) if b.supports(*tensors, **options) is None]


def explain(op: str, *tensors: Tensor | None, backend: str | None = None, **options: Any) -> str:
    """Which backend the call would take and why, and for each other one why not, one per line."""
    try:
        chosen, source = _choose(op, backend, tensors, options)
    except KernelUnavailable as error:
        return str(error)
    lines = [f"{op}: {chosen.name}, {source}: {chosen.why}"]
    passed = False
    for other in _backends(op):
        passed = passed or other is chosen
        if other is not chosen:
            reason = other.against(tensors, options, asked=False)
            rank = "would work; comes later in the order" if passed else "would work; comes earlier in the order"
            lines.append(f"  not {other.name}: {reason or rank}")
    return "\n".join(lines)


def requested(op: str) -> str | None:
    """The backend that somebody asks for, by ``use_backend`` or in the environment; None for the automatic choice.

    Raises:
        ValueError: unknown operator or backend.
    """
    return _asked_for(op, None)[0]


def decisions() -> list[str]:
    """What this process has chosen so far, one sentence for each operator, backend and reason. Not under a compiler."""
    return list(_decisions.values())


def _choose(op: str, backend: str | None, tensors: tuple, options: dict) -> tuple[Backend, str]:
    """The backend for this call, and where the choice comes from."""
    backends = _backends(op)
    name, source = _asked_for(op, backend)
    for candidate in backends:
        if name is not None and candidate.name != name:
            continue
        reason = candidate.against(tensors, options, asked=name is not None)
        if reason is None:
            # a logger call would break the graph
            if not torch.compiler.is_compiling():
                _log_once(op, candidate, source)
            return candidate, source
        if name is not None:
            usable = ", ".join(available(op, *tensors, **options)) or "none"
            raise KernelUnavailable(
                f"{op}: the backend {name}, asked for by {source}, cannot run this call: {reason}. Usable now: {usable}"
            )
    raise KernelUnavailable(f"{op}: no backend can run this call:\n{_reasons(backends, tensors, options)}")


def _asked_for(op: str, argument: str | None) -> tuple[str | None, str]:
    """The name that the first step that speaks asks for (None for the automatic choice), and that step."""
    names = _names(op)
    for name, source, for_all in _requests(op, argument):
        if name == AUTO:
            return None, f"chosen automatically ({source})"
        known = BACKENDS if for_all else names
        if name not in known:
            _check_name(name, (*known, AUTO), f"backend of {op}", f", asked for by {source}")
        if name in names:
            return name, source
    return None, "chosen automatically"


def _requests(op: str, argument: str | None) -> list[tuple[str, str, bool]]:
    """All requests that concern ``op``, first one first: (name, who asks, whether it speaks for every operator)."""
    found = []
    if argument is not None:
        found.append((argument, f"backend={argument!r}", False))
    for target, name in reversed(_in_use):
        if target is None:
            found.append((name, f"use_backend({name!r})", True))
        elif target == op:
            found.append((name, f"use_backend({op!r}, {name!r})", False))
    own = f"{ENVIRONMENT}_{op.upper()}"
    for variable, for_all in ((own, False), (ENVIRONMENT, True)):
        value = os.environ.get(variable, "")
        if value:
            found.append((value.strip().lower(), f"{variable}={value}", for_all))
    return found


def _backends(op: str) -> tuple[Backend, ...]:
    if op not in _OPS:
        _check_name(op, _folders(), "operator")
        importlib.import_module(f"kernels.{op}")
    return _OPS[op]


def _folders() -> list[str]:
    return sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))


def _names(op: str) -> list[str]:
    return [backend.name for backend in _backends(op)]


def _check_name(name: str, known: Iterable[str], kind: str, asked: str = "") -> None:
    known = list(known)
    if name not in known:
        match = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {match[0]}?" if match else ""
        raise ValueError(f"unknown {kind} {name!r}{asked}{hint} Known: {', '.join(known)}")


def _reasons(backends: tuple[Backend, ...], tensors: tuple, options: dict) -> str:
    return "\n".join(f"  {b.name}: {b.supports(*tensors, **options)}" for b in backends)


def _log_once(op: str, backend: Backend, source: str) -> None:
    decision = (op, backend.name, source)
    if decision not in _decisions:
        _decisions[decision] = f"{op} runs by {backend.name}, {source}: {backend.why}"
        logger.info(_decisions[decision])
