"""Is what a kernel computes right: output and every gradient against float64, guards, and the same bits twice."""

import contextlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kernels.coreset_attention import compress_kv
from scripts import gpu_ops
from scripts.gpu_crew import Step
from scripts.gpu_guards import Guards
from scripts.gpu_ops import CoresetCase, Inputs, Op
from scripts.gpu_rows import OWN, Row

# share of the keys that float32 and float64 must choose alike: rounding decides between two that are as good
ALIKE = 0.9
# of the largest gradient: what is smaller cancels but for rounding, like that of the logits of a window of one pixel
CANCELLED = 1e-4
# PyTorch's own arithmetic in the same type may be half as far off
PEER_SLACK = 2.0
# where that says "off" of an operator whose draws may be ill-conditioned: PyTorch's worst in float32 on so many inputs
# that differ in the last place, this much more, and never above so many tolerances. One rounding says little of another
# then: on one draw of a coreset PyTorch itself errs by 1.1e-6 to 7.5e-5
NEIGHBOURS, NEIGHBOUR_SLACK, NEIGHBOUR_CEILING = 12, 4.0, 25.0


@dataclass
class Finding:
    """Errors by tensor, and everything that was wrong, in words."""

    errors: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def worst(self) -> str:
        """Name of the tensor that is nearest to its limit or beyond it."""
        return max(self.errors, key=lambda name: _badness(self.errors[name], self.limits[name]))


def steps(ops: list[Op], *, device: str, tiny: bool, seed: int) -> list[Step]:
    """One for each operator, case and dtype: usual cases first, as what fails there matters most."""
    found = []
    for part in ("tiny",) if tiny else ("usual", "small"):
        for op in ops:
            for case in getattr(op, part):
                for kind in _kinds(op, part):
                    found.append(_step(op, case, kind, device, seed, late=part == "small"))
            if part != "small" and op is gpu_ops.CORESET:
                found.append(_choice_step(op, getattr(op, part)[0], device, seed))
    return found


def check(op: Op, case: Any, kind: str, *, device: str, seed: int = 0, backend: str = OWN) -> Row:
    """Output and gradients of one case, twice, in guarded memory, against float64."""
    row = _row(op, case, kind)
    with gpu_ops.precision(kind):
        found = compare(op, op.inputs(case, kind, device, seed), kind, backend=backend, seed=seed)
    details = {"errors": found.errors, "limits": found.limits, "wrong": found.wrong, "seed": seed}
    worst = found.worst
    note = "; ".join(found.wrong)
    return replace(
        row, relerr=found.errors[worst], tol=found.limits[worst], ok=not found.wrong, note=note, details=details
    )


def compare(op: Op, arguments: Inputs, kind: str, *, backend: str = OWN, seed: int = 0) -> Finding:
    """The check itself; ``arguments`` are of ``op.inputs``."""
    found, guards = Finding(), Guards()
    wide = gpu_ops.widened(arguments)
    exact, upstream = _run(op, wide, "reference", seed=seed)
    plain = None
    with contextlib.suppress(RuntimeError):
        plain, _ = _run(op, arguments, "torch", upstream=upstream)
    # without a clamp any output may add to any pixel, in any order
    free = ("x",) if op.ordered and arguments.get("clamp", ()) is None else ()
    names = gpu_ops.leaves(arguments)
    guarded = {key: guards.around(x, key) if key in names else x for key, x in arguments.items()}
    with guards.poisoned():
        usual = [] if not op.ordered else [_run(op, guarded, backend, upstream=upstream)[0]]
        with _bitwise(op.ordered and not free):
            twice = [_run(op, guarded, backend, upstream=upstream)[0] for _ in range(2)]
    sizes = sizes_of(exact)
    limits = dict.fromkeys(exact, op.tolerance(kind))
    if plain is not None:
        _widen(limits, _errors(plain, exact, sizes), PEER_SLACK)
    errors = [_errors(outcome, exact, sizes) for outcome in (*usual, twice[0])]
    beyond = any(error[name] > limits[name] for error in errors for name in exact)
    if op.ill_conditioned and kind == "fp32" and beyond:
        for near in _neighbours(arguments):
            about, _ = _run(op, gpu_ops.widened(near), "reference", upstream=upstream)
            other = _errors(_run(op, near, "torch", upstream=upstream)[0], about, sizes)
            _widen(limits, other, NEIGHBOUR_SLACK, ceiling=NEIGHBOUR_CEILING * op.tolerance(kind))
    for name in exact:
        _judge(found, name, [error[name] for error in errors], limits[name])
        same = name in free or torch.equal(*(outcome[name] for outcome in twice))
        if not same and not twice[0][name].isnan().any():
            found.wrong.append(f"{name} differs between two runs")
        if name != "output" and twice[0][name].dtype != arguments[name].dtype:
            found.wrong.append(f"the gradient of {name} is {twice[0][name].dtype}")
    found.wrong += guards.broken()
    return found


def _errors(outcome: dict[str, Tensor], exact: dict[str, Tensor], sizes: dict[str, float]) -> dict[str, float]:
    return {name: relative_error(outcome[name], value, sizes[name]) for name, value in exact.items()}


def _widen(limits: dict[str, float], errors: dict[str, float], slack: float, *, ceiling: float = math.inf) -> None:
    """Raise limits to ``slack`` times the errors, where these are numbers, and no further than ``ceiling``."""
    for name, error in errors.items():
        if math.isfinite(error):
            limits[name] = max(limits[name], min(slack * error, ceiling))


def _neighbours(arguments: Inputs) -> Iterator[Inputs]:
    """The same inputs, each number as it is or the next above or below."""
    for seed in range(NEIGHBOURS):
        generator = torch.Generator().manual_seed(seed)
        moved = {}
        for key, x in gpu_ops.leaves(arguments).items():
            steps = torch.randint(-1, 2, x.shape, generator=generator).to(x.device)
            towards = torch.where(steps == 0, x.detach(), steps * math.inf)
            moved[key] = torch.nextafter(x.detach(), towards.to(x.dtype))
        yield arguments | moved


def _judge(found: Finding, name: str, errors: list[float], limit: float) -> None:
    """Note the largest error of the ways in which a tensor was computed."""
    # NaN is larger than anything
    error = max(errors, key=lambda x: _badness(x, limit))
    found.errors[name], found.limits[name] = error, limit
    if not error <= limit:
        found.wrong.append(f"{name} is off by {error:.1e} (limit {limit:.1e})")


def sizes_of(exact: dict[str, Tensor]) -> dict[str, float]:
    """Norms that errors are divided by: where a gradient is nothing but a rest of numbers that cancel, the largest."""
    norms = {name: float(x.double().norm()) for name, x in exact.items()}
    largest = max((norm for name, norm in norms.items() if name != "output"), default=0.0)
    return {name: largest if norm < CANCELLED * largest else norm for name, norm in norms.items()}


def relative_error(x: Tensor, exact: Tensor, size: float | None = None) -> float:
    """Frobenius norm of the error over ``size``, by default that of the exact one; infinite for a wrong shape."""
    if x.shape != exact.shape:
        return math.inf
    if not x.numel():
        return 0.0
    x, exact = x.detach().double(), exact.detach().double()
    size = float(exact.norm()) if size is None else size
    return float((x - exact).norm()) / (size or 1.0)


def choice(op: Op, case: CoresetCase, *, device: str, seed: int = 0) -> Row:
    """Do kernel and float64 choose the same keys, given the same draws."""
    arguments = op.inputs(case, "fp32", device, seed)
    options = {"rank": case.rank, "bins": case.bins, "seed": seed}
    own = compress_kv(arguments["k"], arguments["v"], **options, backend=OWN).pivots
    exact = compress_kv(arguments["k"].double(), arguments["v"].double(), **options, backend="torch").pivots
    share = float((own == exact).double().mean())
    note = "" if share >= ALIKE else f"only {share:.0%} of the keys are those that float64 chooses"
    return replace(
        _choice_row(op, case), relerr=1 - share, tol=1 - ALIKE, ok=not note, note=note, details={"alike": share}
    )


def _run(
    op: Op, arguments: Inputs, backend: str, *, upstream: Tensor | None = None, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    """The output and the gradients by name, and the gradient that came from above: drawn where none is given."""
    inputs = {key: x.detach().requires_grad_() for key, x in gpu_ops.leaves(arguments).items()}
    out = op.reference(arguments | inputs) if backend == "reference" else op.call(arguments | inputs, backend)
    if upstream is None:
        generator = torch.Generator().manual_seed(seed + 1)
        # in bfloat16, so that every dtype is given the same numbers
        upstream = torch.randn(out.shape, generator=generator).bfloat16().to(out.device)
    gradients = torch.autograd.grad(out, list(inputs.values()), upstream.to(out.dtype))
    return {"output": out.detach(), **dict(zip(inputs, gradients, strict=True))}, upstream


@contextlib.contextmanager
def _bitwise(asked: bool) -> Iterator[None]:
    """Ask for the same bits every time, where an operator gives them only when asked."""
    before = torch.get_deterministic_debug_mode()
    if asked:
        torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _kinds(op: Op, part: str) -> tuple[str, ...]:
    if part == "usual":
        return op.kinds
    return ("fp32",) if part == "tiny" else (op.kinds[0], "bf16")


def _step(op: Op, case: Any, kind: str, device: str, seed: int, *, late: bool) -> Step:
    def run() -> list[Row]:
        return [check(op, case, kind, device=device, seed=seed)]

    return Step(f"check {op.name} {case.name} {kind}", _row(op, case, kind), run, late=late)


def _choice_step(op: Op, case: CoresetCase, device: str, seed: int) -> Step:
    row = _choice_row(op, case)
    return Step(f"choice {op.name} {case.name}", row, lambda: [choice(op, case, device=device, seed=seed)])


def _row(op: Op, case: Any, kind: str) -> Row:
    return Row("check", op.short, case.name, kind, "f+b", OWN)


def _choice_row(op: Op, case: CoresetCase) -> Row:
    return Row("check", op.short, case.name, "fp32", "pick", OWN)


def _badness(error: float, limit: float) -> float:
    return error / limit if error == error else math.inf
