"""The operators as ``scripts/gpu_check.py`` sees them: their cases, inputs, calls, work and tolerances.

An operator is checked if it has a backend ``triton``. The cases are those of its ``cases.py``, and a few more of the
size of one window or one tile, for which float64 is quick on a GPU.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.coreset_attention import cases as coreset
from kernels.coreset_attention import noise_shape, wildcat_attention
from kernels.deform_conv import cases as deform
from kernels.deform_conv import deform_depthwise_conv2d
from kernels.layer_norm2d import cases as norm
from kernels.layer_norm2d import layer_norm2d
from kernels.taylor_attention import cases as taylor
from kernels.taylor_attention import taylor_attention
from kernels.window_attention import cases as window
from kernels.window_attention import window_attention

KERNELS = Path(__file__).resolve().parent.parent / "kernels"
# name of what is computed in -> type of the tensors; "tf32" and "fp32" differ in how float32 is multiplied
KINDS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp32/bf16": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# a tensor core keeps ten bits of each factor
TF32 = 2e-3
# a GPU adds in another order than a CPU, and its exponentials and divisions are a few units off
SLACK = 4.0

Inputs = dict[str, Any]


@dataclass(frozen=True)
class CoresetCase:
    """``(batch, heads, n, d)`` keys and values, and how they are compressed; ``n`` is a multiple of ``bins``."""

    name: str
    heads: int
    n: int
    d: int
    rank: int
    bins: int
    batch: int = 1


@dataclass(frozen=True)
class NormCase:
    """``(b, c, h, w)``, and the memory format."""

    name: str
    shape: tuple[int, int, int, int]
    channels_last: bool


@dataclass(frozen=True, eq=False)
class Op:
    """One operator.

    Args:
        name: its folder. short: its name in the table.
        small: odd cases. usual: cases like those of the networks; with some of them each program of a kernel that adds
            up takes several windows or blocks of pixels. tiny: for the self-test on a CPU.
        make: case, dtype, device -> arguments.
        call: arguments, backend -> output.
        tolerances: of ``cases.py``.
        kinds: in which ``usual`` cases are checked; ``small`` ones in the first and in bf16.
        ill_conditioned: a draw may be, so that float32 loses more in one rounding of it than in another.
        ordered: same bits every time only when ``torch.use_deterministic_algorithms`` asks for it, and given a clamp.
    """

    name: str
    short: str
    small: tuple
    usual: tuple
    tiny: tuple
    make: Callable[..., Inputs]
    call: Callable[..., Tensor]
    tolerances: dict[torch.dtype, float]
    kinds: tuple[str, ...] = ("fp32", "bf16")
    ordered: bool = False
    ill_conditioned: bool = False

    def inputs(self, case: Any, kind: str, device: str, seed: int = 0) -> Inputs:
        """Fresh arguments; ``kind`` is one of ``KINDS``."""
        arguments = self.make(case, dtype=KINDS[kind], device=device, seed=seed)
        return arguments | {"dtype": torch.bfloat16} if kind == "fp32/bf16" else arguments

    def reference(self, arguments: Inputs) -> Tensor:
        """The definition in float64 for tensors that are float64 already; see ``widened``."""
        return self.call({key: x for key, x in arguments.items() if key != "dtype"}, "reference")

    def tolerance(self, kind: str) -> float:
        """Largest relative error by itself; what PyTorch loses in the same type is allowed for besides."""
        if kind == "tf32":
            return TF32
        dtype = torch.bfloat16 if kind == "fp32/bf16" else KINDS[kind]
        return self.tolerances.get(dtype, coreset_bfloat16(dtype)) * (SLACK if dtype == torch.float32 else 1)


def operators() -> list[Op]:
    """Those that have a backend ``triton``."""
    return [op for op in (WINDOW, DEFORM, TAYLOR, CORESET, NORM) if (KERNELS / op.name / "fused.py").exists()]


def widened(arguments: Inputs) -> Inputs:
    """The same numbers in float64; what is drawn stays as it is."""
    return {key: x.detach().double() if _counts(key, x) else x for key, x in arguments.items()}


def leaves(arguments: Inputs) -> dict[str, Tensor]:
    """The tensors that get a gradient."""
    return {key: x for key, x in arguments.items() if _counts(key, x)}


@contextlib.contextmanager
def precision(kind: str) -> Iterator[None]:
    """Within the block, float32 is multiplied as ``kind`` says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def coreset_bfloat16(dtype: torch.dtype) -> float:
    """What 16 bits lose where ``cases.py`` names no tolerance."""
    return 3e-3 if dtype == torch.float16 else 2e-2


def forced_noise(case: CoresetCase, seed: int) -> Tensor:
    """Draws so far apart that all take the same keys, whatever they round: (bins, slots, places), even bins."""
    bins, slots, places = noise_shape(case.n, rank=case.rank, bins=case.bins)
    chosen = torch.rand(bins, places, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)[:, :slots]
    return torch.full((bins, slots, places), 2.0**-24).scatter(2, chosen[..., None], 1 - 2.0**-24)


def _counts(key: str, x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and key != "noise"


def _make_coreset(case: CoresetCase, *, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(case.batch, case.heads, case.n, case.d, generator=generator) for _ in range(3))
    tensors = dict(zip("qkv", (x.to(device, dtype) for x in (q, k, v)), strict=True))
    return {**tensors, "rank": case.rank, "bins": case.bins, "noise": forced_noise(case, seed).to(device)}


def _make_deform(case: deform.Case, *, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    arguments = deform.make_inputs(case, dtype=dtype, device=device, seed=seed)
    return channels_last(arguments) if case.name.endswith("last") else arguments


def channels_last(arguments: Inputs) -> Inputs:
    """The same with every image channels-last."""
    images = {key: x for key, x in arguments.items() if isinstance(x, Tensor) and x.ndim == 4 and key != "weight"}
    return arguments | {key: x.contiguous(memory_format=torch.channels_last) for key, x in images.items()}


def _make_norm(case: NormCase, *, dtype: torch.dtype, device: str, seed: int = 0) -> Inputs:
    made = norm.make_inputs(case.shape, dtype=dtype, device=device, channels_last=case.channels_last, seed=seed)
    return dict(zip(("x", "weight", "bias"), made, strict=True))


def _named(cases: tuple, *names: str) -> tuple:
    return tuple(case for case in cases if case.name in names)


def window_work(case: window.Case, kind: str, what: str) -> dict[str, float]:
    """FLOP of products, exponentials, logits and bytes of window attention."""
    size, backward = torch.finfo(KINDS[kind]).bits // 8, what == "bwd"
    # backward reads the image, the output and its gradient, and writes the gradient of the image
    traffic = window.bytes_moved(case, itemsize=size) * (2 if backward else 1)
    products = window.flops(case, backward=backward)
    return {"bytes": traffic, "products": products, "exps": case.pairs, "pairs": case.pairs}


def deform_work(case: deform.Case, kind: str, what: str) -> dict[str, float]:
    """The same, with offsets in float32 and arithmetic that no tensor core does; backward is three times forward."""
    size, pixels = torch.finfo(KINDS[kind]).bits // 8, case.batch * case.height * case.width
    traffic, flops = (2 * case.channels * size + 18 * 4) * pixels, deform.flops(case)
    if what == "bwd":
        # x, offsets and the gradient read, two gradients written
        traffic, flops = (3 * case.channels * size + 36 * 4) * pixels, 3 * flops
    return {"bytes": traffic, "fma": flops}


def taylor_work(case: taylor.Case, kind: str, what: str) -> dict[str, float]:
    """The same; backward reads or writes seven images."""
    size = torch.finfo(KINDS[kind]).bits // 8
    backward = what == "bwd"
    traffic, flops = taylor.bytes_moved(case, itemsize=size), taylor.flops(case)
    return {"bytes": traffic * (7 / 4 if backward else 1), "products": flops * (5 / 2 if backward else 1)}


def coreset_work(case: CoresetCase, kind: str, what: str) -> dict[str, float]:
    """The same; ``what`` is always "fwd"."""
    counts = coreset.multiply_adds(case.n, case.n, case.d, dv=case.d, rank=case.rank, bins=case.bins)
    heads, size = case.batch * case.heads, torch.finfo(KINDS[kind]).bits // 8
    slots = math.ceil(case.rank / case.bins)
    exps = heads * case.n * (case.bins * slots + slots)
    return {"bytes": 4 * heads * case.n * case.d * size, "products": 2 * heads * counts[0], "exps": exps}


def norm_work(case: NormCase, kind: str, what: str) -> dict[str, float]:
    """The same; backward reads two images and writes one."""
    traffic = norm.bytes_moved(case.shape, itemsize=torch.finfo(KINDS[kind]).bits // 8)
    return {"bytes": traffic * (3 / 2 if what == "bwd" else 1)}


WINDOW = Op(
    "window_attention",
    "window",
    window.SMALL,
    (
        window.Case("w16 d32", 1, 45, 50, 6, 32, 16, 16),
        window.Case("w16 d32 many", 1, 180, 320, 6, 32, 16, 16),
        window.Case("w16 d30 many", 1, 180, 320, 6, 30, 16, 18),
        window.Case("w32 d32", 1, 40, 64, 2, 32, 32, 16),
        window.Case("w64 d32", 1, 66, 64, 2, 32, 64, 32),
        window.Case("w64 d16 light", 1, 64, 70, 3, 16, 64, 24),
    ),
    (window.Case("odd", 1, 5, 6, 1, 4, 4, 2),),
    window.make_inputs,
    lambda arguments, backend: window_attention(**arguments, backend=backend),
    window.TOLERANCES,
    ("fp32", "tf32", "bf16", "fp16", "fp32/bf16"),
)
DEFORM = Op(
    "deform_conv",
    "deform",
    deform.SMALL,
    (
        deform.Case("C24 odd", 1, 24, 121, 143),
        deform.Case("C24 last", 1, 24, 121, 143),
        deform.Case("C48", 2, 48, 64, 64),
        deform.Case("C72 last", 1, 72, 45, 80),
        deform.Case("C96 clamp 1", 1, 96, 32, 32, (-1.0, 1.0)),
    ),
    (deform.Case("odd", 1, 3, 5, 6),),
    _make_deform,
    lambda arguments, backend: deform_depthwise_conv2d(**arguments, backend=backend),
    deform.TOLERANCES,
    ordered=True,
)
TAYLOR = Op(
    "taylor_attention",
    "taylor",
    taylor.SMALL,
    (
        taylor.Case("h1 d24", 1, 1, 24, 230_400),
        taylor.Case("h2 d48 odd", 1, 2, 48, 9_999),
        taylor.Case("h8 d12", 2, 8, 12, 1_024),
        taylor.Case("h2 d48 v2", 1, 2, 48, 57_600, "v2"),
        taylor.Case("h4 d18 v2", 1, 4, 18, 14_400, "v2"),
    ),
    (taylor.Case("v2", 1, 1, 4, 35, "v2"),),
    taylor.make_inputs,
    lambda arguments, backend: taylor_attention(**arguments, backend=backend),
    taylor.TOLERANCES,
)
CORESET = Op(
    "coreset_attention",
    "wildcat",
    (CoresetCase("one bin", 2, 40, 8, 8, 1), CoresetCase("two bins", 1, 66, 5, 12, 2, 2)),
    (
        CoresetCase("n4096 d48", 2, 4096, 48, 64, 4),
        CoresetCase("n4096 d24", 2, 4096, 24, 256, 16),
        CoresetCase("n9216 d48", 1, 9216, 48, 128, 8),
    ),
    (CoresetCase("two bins", 1, 24, 4, 8, 2),),
    _make_coreset,
    lambda arguments, backend: wildcat_attention(**arguments, backend=backend),
    coreset.TOLERANCES,
    ill_conditioned=True,
)
NORM = Op(
    "layer_norm2d",
    "norm",
    tuple(
        NormCase("x".join(map(str, shape)) + (" last" if last else ""), shape, last)
        for shape in norm.SMALL
        for last in (False, True)
    ),
    (
        NormCase("C48 last", (2, 48, 96, 160), True),
        NormCase("C180 last", (1, 180, 45, 77), True),
        NormCase("C48 many last", (2, 48, 192, 320), True),
        NormCase("C192 nchw", (1, 192, 128, 160), False),
    ),
    (NormCase("odd", (1, 3, 5, 7), True),),
    _make_norm,
    lambda arguments, backend: layer_norm2d(**arguments, backend=backend),
    norm.TOLERANCES,
)
