"""Window attention by Triton, forward and backward, in place on the packed projection.

    out = softmax(scale * (q k^T + q' k'^T)) v      q' k'^T = q_pos k_pos^T / (scale sqrt(rank))

The kernels and their formulas are in ``fused_kernels.py`` and ``fused_backward.py``; here are shapes, launches and the
operators that autograd and torch.compile see. Blocks come from ``kernels/configs``. Forward is one launch; backward is
``backward`` for small windows, ``backward_q`` and ``backward_kv`` for others, one sum for each positional factor, and
for an image that is no multiple of the window the additions of ``_fold``. Nothing is added atomically: the same input
gives the same bits.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.triton_parts import tl, triton
from kernels.window_attention import fused_kernels as kernels
from kernels.window_attention import limits
from kernels.window_attention.fused_backward import backward

OP = "window_attention"
LOG2E = 1.4426950408889634
# sums over windows are split so that this many programs share the work of the backward kernels
PROGRAMS = 4096
# the same for ``backward``, whose programs each keep sums for a whole window in memory
WHOLE_PROGRAMS = 1056
# pixels of a window, up to which settings of ``backward`` hold; larger windows take two kernels
TOKENS = (64, 1024)
# columns of q and q' together, up to which settings hold
COLUMNS = (48, 64, 80)


def window_attention(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    bias: None,
    *,
    heads: int,
    window: int,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """The ``triton`` backend; see the public function for the arguments. ``bias`` must be None."""
    if q_pos is not None:
        # the small table is scaled, not the image, and rounded once, afterwards
        factor = 1 / (scale * math.sqrt(q_pos.shape[-1]))
        # half of its power of two goes to the other one, exactly: float16 has few
        half = 2.0 ** round(math.log2(abs(factor)) / 2)
        q_pos = (q_pos * (factor / half)).to(dtype).contiguous()
        k_pos = (k_pos * half).to(dtype).contiguous()
    return window_attention_forward(qkv, q_pos, k_pos, heads, window, scale, dtype)[0]


@torch.library.custom_op("pellucid::window_attention_forward", mutates_args=())
def window_attention_forward(
    qkv: Tensor, q_pos: Tensor | None, k_pos: Tensor | None, heads: int, window: int, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The result (b, h, w, heads * d), and the logarithm in base 2 of the sum of each row, (b, heads, h, w).

    ``q_pos`` and ``k_pos`` are (heads, window^2, rank), contiguous, and ``q_pos.k_pos`` is multiplied by ``scale`` as
    ``q.k`` is.
    """
    out, lse = _allocate(qkv, heads, dtype)
    shape = _Shape.of(qkv, q_pos, heads, window, scale, dtype)
    if shape.windows:
        qkv = _with_dense_channels(qkv)
        blocks = shape.settings("forward", qkv.device)
        programs = shape.windows * heads * triton.cdiv(window * window, blocks["BLOCK_M"])
        tables = (qkv, qkv) if q_pos is None else (q_pos, k_pos)
        place = (*qkv.shape[1:3], shape.down, shape.across, *qkv.stride()[:3])
        with torch.cuda.device_of(qkv):
            kernels.forward[(programs,)](qkv, *tables, out, lse, *place, **(shape.constants | blocks))
    return out, lse


@torch.library.custom_op("pellucid::window_attention_backward", mutates_args=())
def window_attention_backward(
    grad: Tensor,
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    out: Tensor,
    lse: Tensor,
    heads: int,
    window: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``qkv``, ``q_pos`` and ``k_pos``, the latter empty where there are none."""
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    shape = _Shape.of(qkv, q_pos, heads, window, scale, dtype)
    if not shape.windows:
        return d_qkv, *(qkv.new_zeros(0) if x is None else torch.zeros_like(x) for x in (q_pos, k_pos))
    # the gradient of a sum is one number with strides of zero
    grad, qkv = grad.contiguous(), _with_dense_channels(qkv)
    tables = (qkv, qkv) if q_pos is None else (q_pos, k_pos)
    edge = shape.edge(lse)
    blocks = shape.whole_settings(qkv.device)
    run = _backward_in_parts if blocks is None else functools.partial(_backward_of_whole_windows, blocks)
    with torch.cuda.device_of(qkv):
        d_q_pos, d_k_pos = run(shape, (qkv, *tables), (out, grad, lse), (d_qkv, edge))
    if shape.folds:
        _fold_edge(d_qkv[..., qkv.shape[-1] // 3 :], edge, shape)
    if q_pos is None:
        return d_qkv, qkv.new_zeros(0), qkv.new_zeros(0)
    return d_qkv, d_q_pos.sum(0).to(q_pos.dtype), d_k_pos.sum(0).to(k_pos.dtype)


def _backward_of_whole_windows(
    blocks: dict[str, Any], shape: "_Shape", inputs: tuple, results: tuple, gradients: tuple
) -> tuple[Tensor, Tensor]:
    """Fill ``gradients`` (of qkv, and at the edge) by one program for each window and head.

    Args:
        blocks: settings of the kernel. shape: with ``constants``.
        inputs: qkv, q_pos, k_pos. results: out, its gradient, lse.

    Returns:
        The gradients of q_pos and k_pos, (groups of windows, heads, window^2, rank), to be summed over the groups.
    """
    qkv, lse = inputs[0], results[2]
    whole = shape.window**2
    grid, per_program, d_q_pos = shape.split_windows(whole, WHOLE_PROGRAMS, lse)
    d_k_pos = torch.empty_like(d_q_pos)
    # dq is complete at once where all keys are one block
    d_q = torch.empty(shape.image if whole > blocks["BLOCK_N"] else 0, dtype=lse.dtype, device=lse.device)
    arguments = (*inputs, *results, *gradients, d_q, d_q_pos, d_k_pos, shape.b, *shape.place, per_program)
    backward[grid](*arguments, *qkv.stride()[:3], **(shape.constants | {"SCALE": shape.scale} | blocks))
    return d_q_pos, d_k_pos


def _backward_in_parts(shape: "_Shape", inputs: tuple, results: tuple, gradients: tuple) -> tuple[Tensor, Tensor]:
    """The same by two kernels, one for queries and one for keys, for windows of any size."""
    qkv, (out, grad, lse), (d_qkv, edge) = inputs[0], results, gradients
    constants = {**shape.constants, "SCALE": shape.scale}
    delta = torch.empty_like(lse)

    blocks = shape.settings("backward_q", qkv.device)
    grid, per_program, d_q_pos = shape.split_windows(blocks["BLOCK_M"], PROGRAMS, lse)
    arguments = (*inputs, out, grad, lse, delta, d_qkv, d_q_pos, *shape.place, per_program, *qkv.stride()[:3])
    kernels.backward_q[grid](*arguments, **(constants | blocks))

    blocks = shape.settings("backward_kv", qkv.device)
    grid, per_program, d_k_pos = shape.split_windows(blocks["BLOCK_N"], PROGRAMS, lse)
    arguments = (*inputs, grad, lse, delta, d_qkv, edge, d_k_pos, shape.b, *shape.place, per_program)
    kernels.backward_kv[grid](*arguments, *qkv.stride()[:3], **(constants | blocks))
    return d_q_pos, d_k_pos


@window_attention_forward.register_fake
def _(qkv, q_pos, k_pos, heads, window, scale, dtype):
    return _allocate(qkv, heads, dtype)


@window_attention_backward.register_fake
def _(grad, qkv, q_pos, k_pos, out, lse, heads, window, scale, dtype):
    d_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    return d_qkv, *(qkv.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q_pos, k_pos))


def _setup_context(ctx, inputs, output):
    qkv, q_pos, k_pos, *ctx.options = inputs
    ctx.save_for_backward(qkv, q_pos, k_pos, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, grad_lse):
    qkv, q_pos, k_pos, out, lse = ctx.saved_tensors
    if grad is None:
        return (None,) * (3 + len(ctx.options))
    d_qkv, d_q_pos, d_k_pos = window_attention_backward(grad, qkv, q_pos, k_pos, out, lse, *ctx.options)
    factors = (None, None) if q_pos is None else (d_q_pos, d_k_pos)
    return (d_qkv, *factors, *(None for _ in ctx.options))


def _refused(ctx, *gradients):
    raise RuntimeError(f"{OP} by triton has no second derivative (create_graph=True); take backend='reference'")


window_attention_forward.register_autograd(_backward, setup_context=_setup_context)
window_attention_backward.register_autograd(_refused)


def _allocate(qkv: Tensor, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    b, h, w, channels = qkv.shape
    out = torch.empty((b, h, w, channels // 3), dtype=qkv.dtype, device=qkv.device)
    return out, torch.empty((b, heads, h, w), dtype=_accumulator(dtype), device=qkv.device)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _with_dense_channels(qkv: Tensor) -> Tensor:
    return qkv if qkv.stride(3) == 1 else qkv.contiguous()


class _Shape:
    """The windows of one call, and what the kernels are compiled for."""

    def __init__(self, size: tuple[int, int, int], d: int, rank: int, heads: int, window: int) -> None:
        self.b, self.h, self.w = size
        self.down, self.across = -(-self.h // window), -(-self.w // window)
        self.windows = self.b * self.down * self.across
        self.heads, self.window, self.d, self.rank = heads, window, d, rank
        self.folds = folds(self.h, self.down * window, self.w, self.across * window)

    @classmethod
    def of(
        cls, qkv: Tensor, q_pos: Tensor | None, heads: int, window: int, scale: float, dtype: torch.dtype
    ) -> "_Shape":
        """The shape of one call, with ``scale`` and ``constants``."""
        rank = 0 if q_pos is None else q_pos.shape[-1]
        shape = cls(tuple(qkv.shape[:3]), qkv.shape[3] // (3 * heads), rank, heads, window)
        shape.scale = scale
        shape.constants = constants(dtype, shape.d, rank, heads, window, scale, shape.folds)
        return shape

    def settings(self, kernel: str, device: torch.device) -> dict[str, Any]:
        """Blocks, warps and stages of ``kernel``, perhaps another PRECISION."""
        return launch.settings(OP, *keys(kernel, self.constants), device=device)

    def whole_settings(self, device: torch.device) -> dict[str, Any] | None:
        """Settings of ``backward``, or None where ``backward_q`` and ``backward_kv`` are launched instead."""
        return first_settings(keys("backward", self.constants), device=device)

    def split_windows(self, block: int, programs: int, like: Tensor) -> tuple[tuple[int], int, Tensor]:
        """Grid of a backward kernel, windows for each program, and where the sums over these windows go."""
        blocks = self.heads * triton.cdiv(self.window**2, block)
        # without sums there is no reason for a program to take more than one window
        groups = min(self.windows, -(-programs // blocks)) if self.rank else self.windows
        per_program = -(-self.windows // groups)
        groups = -(-self.windows // per_program)
        sums = like.new_empty(0)
        if self.rank:
            sums = torch.empty((groups, self.heads, self.window**2, self.rank), dtype=like.dtype, device=like.device)
        return (groups * blocks,), per_program, sums

    @property
    def image(self) -> tuple[int, int, int, int]:
        """(b, h, w, heads * d)"""
        return self.b, self.h, self.w, self.heads * self.d

    @property
    def place(self) -> tuple[int, ...]:
        """Size of the image and numbers of windows, as the backward kernels take them."""
        return self.h, self.w, self.down, self.across, self.windows

    @property
    def added(self) -> tuple[int, int]:
        """Rows and columns that reflection adds."""
        return self.down * self.window - self.h, self.across * self.window - self.w

    def edge(self, like: Tensor) -> Tensor:
        """Memory for the gradients of k and v at the pixels that reflection adds."""
        rows, columns = self.added
        pixels = self.b * (rows * (self.w + columns) + self.h * columns)
        return torch.empty(2 * self.heads * self.d * pixels, dtype=like.dtype, device=like.device)


def constants(
    dtype: torch.dtype, d: int, rank: int, heads: int, window: int, scale: float, folds: int, precision: str = ""
) -> dict[str, Any]:
    """Compile-time arguments of every kernel but the blocks of rows."""
    block_r, block_t = limits.chunks(rank)
    return {
        "FACTOR": scale * LOG2E,
        "HEADS": heads,
        "D": d,
        "RANK": rank,
        "WINDOW": window,
        "FOLDS": folds,
        "TYPE": getattr(tl, str(dtype).removeprefix("torch.")),
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "PRECISION": precision or _precision(dtype),
        "BLOCK_D": limits.whole(d),
        "BLOCK_R": block_r,
        "BLOCK_T": block_t,
    }


def _precision(dtype: torch.dtype) -> str:
    """How float32 is multiplied: as ``torch.set_float32_matmul_precision`` says. Other types know one way only."""
    if dtype != torch.float32:
        return "ieee"
    return "tf32" if launch.tf32() else "tf32x3"


def keys(kernel: str, constants: dict[str, Any]) -> tuple[str, ...]:
    """Names of settings, most specific first: for up to so many columns of q and q' together, then for all.

    Those of ``backward`` hold for windows of up to so many pixels; there are none for larger windows, nor for heads
    that are no multiple of 8 numbers.
    """
    name = constants["TYPE"].name
    name = constants["PRECISION"] if name == "fp32" else name
    columns = constants["BLOCK_D"] + constants["BLOCK_R"] + constants["BLOCK_T"]
    kernels = [f"{kernel}/{name}"]
    limits = [f"/{limit}" for limit in COLUMNS if columns <= limit]
    # such heads are read in narrow pieces, each with an address in registers
    narrow = [f"/narrow{limit}" for limit in (*limits, "")] if constants["D"] % 8 else []
    if kernel == "backward":
        tokens = constants["WINDOW"] ** 2
        kernels = [] if narrow else [f"{kernel}/{name}/{limit}" for limit in TOKENS if tokens <= limit]
    return tuple(each + end for each in kernels for end in (*narrow, *limits, ""))


def first_settings(names: tuple[str, ...], **where: Any) -> dict[str, Any] | None:
    """Settings by the first of ``names`` that is known ``where`` (a device or arch), or None."""
    try:
        return launch.settings(OP, *names, **where) if names else None
    except KeyError:
        return None


def folds(h: int, padded_h: int, w: int, padded_w: int) -> int:
    """0: whole windows; 1: each added pixel is one mirror away; 2: mirrors of mirrors."""
    if padded_h == h and padded_w == w:
        return 0
    return 1 if padded_h - h < h and padded_w - w < w else 2


def _fold_edge(d_kv: Tensor, edge: Tensor, shape: _Shape) -> None:
    """Add the gradients at added pixels to those of the pixels that they are copies of; ``d_kv`` is (b, h, w, c)."""
    b, h, w, channels = d_kv.shape
    rows, columns = shape.added
    below, beside = edge.split([b * rows * (w + columns) * channels, b * h * columns * channels])
    below, beside = below.view(b, rows, w + columns, channels), beside.view(b, h, columns, channels)
    _fold(d_kv, below[:, :, :w], dim=1)
    _fold(beside, below[:, :, w:], dim=1)
    _fold(d_kv, beside, dim=2)


def _fold(target: Tensor, added: Tensor, *, dim: int) -> None:
    """Add what lies behind the end of ``target`` along ``dim`` to where reflection takes it, one mirror at a time."""
    size, length = target.shape[dim], added.shape[dim]
    if size == 1:
        target += added.sum(dim, keepdim=True)
        return
    for mirror, start in enumerate(range(0, length, size - 1)):
        part = added.narrow(dim, start, min(size - 1, length - start))
        count = part.shape[dim]
        if mirror % 2:
            target.narrow(dim, 1, count).add_(part)
        else:
            target.narrow(dim, size - 1 - count, count).add_(part.flip(dim))


def aot_cases() -> Iterator[launch.AotCase]:
    """Every way in which the kernels are compiled for the published networks."""
    from kernels.window_attention import fused_aot

    return fused_aot.aot_cases()
