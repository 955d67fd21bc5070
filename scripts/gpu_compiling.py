"""Does everything that is shipped compile on this machine, and does ``torch.compile`` take a block of a network."""

import contextlib
import copy
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from archs.sst import Layer, RIBAttention
from kernels import launch
from kernels.dispatch import use_backend
from scripts.aot_report import compile_case
from scripts.gpu_checks import relative_error, sizes_of
from scripts.gpu_crew import Step
from scripts.gpu_ops import Op
from scripts.gpu_rows import OWN, Row

# parts that the settings of an operator are compiled in, by as many processes as there are
PARTS = 8
# two ways through the same kernels, in float32
SAME = 1e-4


def steps(ops: list[Op]) -> list[Step]:
    """Compile every shipped configuration for this GPU, a part at a time."""
    return [_step(op, part, PARTS) for part in range(PARTS) for op in ops]


def compile_part(op: Op, part: int, parts: int) -> list[Row]:
    """Compile every ``parts``-th case of ``op``, beginning with ``part``: a row for all, or one for each failure."""
    row = _row(op, part)
    if launch.interpreting():
        return [replace(row, note="skipped: the interpreter compiles nothing")]
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    found = list(importlib.import_module(f"kernels.{op.name}.fused").aot_cases())
    cases = [case for case in found if arch in case.archs][part::parts]
    problems = [(case.name, _problem(case, arch)) for case in cases]
    bad = [replace(row, ok=False, note=f"{name}: {why}") for name, why in problems if why is not None]
    if not cases:
        return [replace(row, note=f"skipped: nothing is meant for sm_{arch}")]
    return bad or [replace(row, ok=True, note=f"{len(cases)} compiled", details={"configurations": len(cases)})]


def has_kernels(ops: list[Op]) -> bool:
    """Whether the operators of :func:`graph_step` are among ``ops``."""
    return {"window_attention", "layer_norm2d"} <= {op.name for op in ops}


def graph_step(*, device: str, tiny: bool) -> Step:
    """A layer of SST through ``torch.compile(fullgraph=True)``: output and gradients as without."""
    row = Row("graph", "compile", "SST layer", "fp32", "f+b", OWN)
    return Step("graph SST layer", row, lambda: [graph(row, device=device, tiny=tiny)], seconds=120)


def graph(row: Row, *, device: str, tiny: bool) -> Row:
    """The check of :func:`graph_step`."""
    dim, heads, window, rank, size = (8, 2, 4, 2, (5, 6)) if tiny else (64, 2, 16, 16, (45, 50))
    torch.manual_seed(0)
    common = {"dim": dim, "window": window, "heads": heads, "gate_type": "DWC", "shift": False}
    layer = Layer(dim, RIBAttention(rank=rank, attention_dtype=torch.float32, **common), 2 * dim).to(device)
    x = torch.randn(1, dim, *size, device=device)
    # a compiler that fuses arithmetic only for a GPU takes a minute to be found on a CPU
    backend = "inductor" if torch.device(device).type == "cuda" else "aot_eager"
    with use_backend(OWN), _full_float32():
        eager = _outcome(layer, layer, x)
        twin = copy.deepcopy(layer)
        compiled = _outcome(torch.compile(twin, fullgraph=True, backend=backend), twin, x)
    sizes = sizes_of(eager)
    errors = {name: relative_error(compiled[name], value, sizes[name]) for name, value in eager.items()}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    right = errors[worst] <= SAME
    note = "" if right else f"{worst} is not what it is without a compiler"
    return replace(row, relerr=errors[worst], tol=SAME, ok=right, note=note, details={"errors": errors})


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Within the block, no convolution drops digits, which one of two ways may do and the other not."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _outcome(run: Any, layer: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    layer.zero_grad()
    out = run(x)
    out.square().mean().backward()
    gradients = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"output": out.detach(), **gradients}


def _problem(case: launch.AotCase, arch: int) -> str | None:
    """Why a case cannot be used on this machine, or None."""
    # whatever the compiler raises is what the row says
    try:
        compiled = compile_case(case, arch)
        # loads it, which says how many registers did not suffice and whether the shared memory does
        compiled._init_handles()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"{compiled.n_spills} spills" if compiled.n_spills else None


def _step(op: Op, part: int, parts: int) -> Step:
    return Step(f"compile {op.name} {part}", _row(op, part), lambda: compile_part(op, part, parts), seconds=120)


def _row(op: Op, part: int) -> Row:
    return Row("compile", op.short, f"part {part + 1}", what="aot", backend=OWN)
