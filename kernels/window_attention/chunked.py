"""Window attention on a CPU: three plain operators over pieces of the logits that stay in the cache.

    P = exp2(q' k'^T)     out = (P v) / (P 1)     q' = [a q | b q_pos | -m]     k' = [k | k_pos | 1]

a and b carry the scales and log2(e), so that one product yields the logits in base 2, less the number m of their row.
A softmax asks of m only that nothing overflows or vanishes: it is the largest of a few sampled logits, no pass over all
of them is needed, and the sum of a row is at least about 1. If some other logit is larger by 100 and more, the sum
overflows; then m is taken from all logits. v keeps its own length, with a row of ones for the sums; its mean over the
window is left out and added to the result, which in 16 bits makes the result more exact than one rounding of it would.

Backward, m is the logarithm of the sum, so that P comes out normalised, and the mean that the softmax's derivative
subtracts is one more column of the product dP. Everything is stored as it is multiplied: keys by queries, P^T.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as fwAD
from torch import Tensor

from kernels import threads
from kernels.window_attention.layout import continue_by_reflection, tiles_of

LOG2_E = math.log2(math.e)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# logits that a core works on at once: 2 MB in bfloat16; smaller pieces mean more calls, larger ones leave the cache
PIECE = 1 << 20
# most parts that the work is divided into, for each core; the fewest queries of a part, and of a piece
SHARES, SMALLEST_SHARE, FEWEST = 4, 256, 128


def chunked(
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
    """The ``chunked`` backend; reads ``qkv`` of any float dtype and rounds it to ``dtype`` once."""
    _, h, w, _ = qkv.shape
    image = continue_by_reflection(qkv, window)
    return _Attention.apply(image, q_pos, k_pos, heads, window, scale, dtype)[:, :h, :w]


def supports(
    qkv: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Every reason against ``chunked`` for this call, or None."""
    if torch.compiler.is_compiling():
        return "its loop over pieces is not for a compiler"
    reasons = []
    if qkv is not None:
        dtype = dtype or qkv.dtype
        if qkv.device.type != "cpu":
            reasons.append(f"it is made for the CPU, and this tensor is on {qkv.device.type}")
        if dtype not in DTYPES:
            reasons.append(f"powers of two overflow in {str(dtype).removeprefix('torch.')}")
        if not _is_plain(qkv):
            reasons.append("it knows no transforms (torch.func, forward derivatives, fake tensors)")
    if bias is not None:
        reasons.append("it takes no dense bias")
    return "; ".join(reasons) or None


def _is_plain(x: Tensor) -> bool:
    """True for a tensor with values that nobody wraps or differentiates forwards."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return type(x) in (Tensor, torch.nn.Parameter) and not wrapped and fwAD.unpack_dual(x).tangent is None


def declines(
    qkv: Tensor | None = None,
    *tensors: Tensor | None,
    window: int | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Why another backend is better for this call, or None."""
    if qkv is None or window is None:
        return None
    dtype = dtype or qkv.dtype
    # without the products of 16-bit numbers only the shorter v is left to gain
    if dtype == torch.float64 or (dtype == torch.float32 and window < 64):
        return f"windows of {window} in {str(dtype).removeprefix('torch.')} are slower by it"
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (qkv, *tensors))
    if dtype == torch.float32 and trained:
        return "its backward pass is slower in float32"
    if dtype == torch.bfloat16 and not _multiplies_bfloat16():
        return "this processor has no fast products in bfloat16"
    return None


@functools.cache
def _multiplies_bfloat16() -> bool:
    # PyTorch has no public names for these; without them another backend runs
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return torch.backends.mkldnn.is_available() and any(getattr(torch.cpu, name, bool)() for name in asked)


class _Attention(torch.autograd.Function):
    """(b, h, w, 3 * heads * d), whole windows -> (b, h, w, heads * d), in the dtype of the image"""

    @staticmethod
    def forward(
        ctx: Any,
        image: Tensor,
        q_pos: Tensor | None,
        k_pos: Tensor | None,
        heads: int,
        window: int,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        rank = 0 if q_pos is None else q_pos.shape[-1]
        mean = tiles_of(image, window, heads, parts=3)[2].mean(dim=(4, 5), keepdim=True, dtype=_wide(image.dtype))
        q, k, vt = _operands(image, q_pos, k_pos, mean, heads=heads, window=window, scale=scale, dtype=dtype)
        out, log_sum = _forward(q, k, vt)
        ctx.sizes = image.shape, image.dtype, heads, window, scale, rank
        ctx.factor_dtypes = None if q_pos is None else (q_pos.dtype, k_pos.dtype)
        if any(ctx.needs_input_grad[:3]):
            q[..., -2] = high = (-log_sum).to(dtype)
            q[..., -1] = -log_sum - high
            ctx.save_for_backward(q, k, vt, out)
        merged = torch.empty(*image.shape[:3], image.shape[3] // 3, dtype=image.dtype)
        torch.add(_as_tiles(out.mT, image.shape, heads, window), mean, out=tiles_of(merged, window, heads, parts=1)[0])
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            text = "window_attention by chunked has no second derivative (create_graph=True)"
            raise RuntimeError(f"{text}; take backend='torch', or use_backend('window_attention', 'torch')")
        q, k, vt, out = ctx.saved_tensors
        shape, dtype, heads, window, scale, rank = ctx.sizes
        d = shape[3] // (3 * heads)
        # (groups, d + 2, pixels): the gradient, and less the mean that dP has over each row of P
        upstream = q.new_empty(len(out), d + 2, out.shape[-1])
        upstream[:, :d] = tiles_of(grad, window, heads, parts=1)[0].flatten(0, 3).flatten(1, 2).mT
        mean = -(upstream[:, :d] * out).sum(dim=1)
        upstream[:, d] = high = mean.to(q.dtype)
        upstream[:, d + 1] = mean - high
        dq, dk, dv = _backward(q, k, vt, upstream, width=d + rank)

        d_image = torch.empty(shape, dtype=dtype)
        parts = tiles_of(d_image, window, heads, parts=3)
        for part, value, factor in zip(parts, (dq, dk, dv), (scale, 1 / LOG2_E, 1.0), strict=True):
            part.copy_(_as_tiles(value[..., :d], shape, heads, window)).mul_(factor)
        if not rank:
            return d_image, None, None, None, None, None, None
        factors = (1 / math.sqrt(rank), 1 / LOG2_E)
        positions = (_over_windows(x[..., d:], heads) * f for x, f in zip((dq, dk), factors, strict=True))
        d_q_pos, d_k_pos = (x.to(own) for x, own in zip(positions, ctx.factor_dtypes, strict=True))
        return d_image, d_q_pos, d_k_pos, None, None, None, None


def _operands(
    image: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    mean: Tensor,
    *,
    heads: int,
    window: int,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """q' and k', (groups, pixels, d + rank + 2), and [v - mean | 1 | 1]^T, (groups, d + 2, pixels).

    A group is one head of one window. The last two columns are for m: it takes two numbers of 8 bits to hold one of 16.
    """
    tiles = tiles_of(image, window, heads, parts=3)
    *shape, d = tiles[0].shape
    rank = 0 if q_pos is None else q_pos.shape[-1]
    q, k = (torch.empty(*shape, d + rank + 2, dtype=dtype) for _ in range(2))
    vt = torch.empty(*shape[:4], d + 2, window, window, dtype=dtype)
    # the scale goes in before the one rounding
    q[..., :d] = tiles[0] * (scale * LOG2_E)
    k[..., :d] = tiles[1]
    vt[..., :d, :, :] = (tiles[2] - mean).movedim(-1, -3)
    if rank:
        q_pos = q_pos.to(torch.promote_types(q_pos.dtype, _wide(dtype))) * (LOG2_E / math.sqrt(rank))
        q[..., d:-2] = q_pos.reshape(heads, window, window, rank)
        k[..., d:-2] = k_pos.reshape(heads, window, window, rank)
    q[..., -2:], k[..., -2:], vt[..., d:, :, :] = 0, 1, 1
    q, k = (x.flatten(0, 3).flatten(1, 2) for x in (q, k))
    return q, k, vt.flatten(0, 3).flatten(2, 3)


def _forward(q: Tensor, k: Tensor, vt: Tensor, *, sampled: bool = True) -> tuple[Tensor, Tensor]:
    """The output, (groups, d, pixels), and the logarithms of the sums in base 2, (groups, pixels), float32 at least."""
    groups, pixels, _ = q.shape
    total = vt.new_empty(groups, vt.shape[1] - 1, pixels)

    def run(share: _Share) -> None:
        buffer = threads.scratch("weights", share.piece, q.dtype)
        if sampled:
            own = q[share.groups, share.queries]
            own[..., -2] = -torch.bmm(_sample(k[share.groups]), own.mT).amax(dim=1)
        for some, part in share.pieces():
            queries = q[some, part]
            if not sampled:
                queries[..., -2:] = 0
                # the second time for what the rounding of a large maximum leaves over
                for column in (-2, -1):
                    queries[..., column] = -torch.bmm(k[some], queries.mT).amax(dim=1)
            logits = _view(buffer, len(queries), pixels, queries.shape[1])
            torch.bmm(k[some], queries.mT, out=logits).exp2_()
            total[some, :, part] = torch.bmm(vt[some, :-1], logits)

    threads.side_by_side(run, _shares(groups, pixels))
    sums = total[:, -1].to(_wide(q.dtype))
    # two numbers tell whether all are finite, and no sum has vanished
    if sampled and groups and not (math.isfinite(float(total.sum(dtype=sums.dtype))) and float(sums.min()) > 0):
        return _forward(q, k, vt, sampled=False)
    return total[:, :-1] / sums[:, None], sums.log2() - q[..., -2] - q[..., -1]


def _backward(q: Tensor, k: Tensor, vt: Tensor, upstream: Tensor, *, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the first ``width`` columns of q' and k', with logits in base e, and by v: (groups, pixels, ...)."""
    groups, pixels, _ = q.shape
    d = vt.shape[1] - 2
    shares = _shares(groups, pixels)
    splits = max(share.split for share in shares) + 1 if shares else 1
    # (groups, width, pixels): the faster way around
    dq = q.new_empty(groups, width, pixels)
    # a key's gradient is a sum over all queries, so over the shares that they are divided into
    dtype = q.dtype if splits == 1 else _wide(q.dtype)
    dk, dv = (q.new_empty(splits, groups, pixels, columns, dtype=dtype) for columns in (width, d))

    def run(share: _Share) -> None:
        buffers = [threads.scratch(name, share.piece, q.dtype) for name in ("weights", "slopes")]
        sums: tuple[Tensor, ...] = ()
        for some, part in share.pieces():
            queries, gradient = q[some, part], upstream[some, :, part]
            weights, slopes = (_view(buffer, len(queries), pixels, queries.shape[1]) for buffer in buffers)
            torch.bmm(k[some], queries.mT, out=weights).exp2_()
            torch.bmm(vt[some].mT, gradient, out=slopes).mul_(weights)
            dq[some, :, part] = torch.bmm(k[some, :, :width].mT, slopes)
            products = torch.bmm(slopes, queries[..., :width]), torch.bmm(weights, gradient[:, :d].mT)
            if part.start == share.queries.start:
                sums = tuple(x.to(_wide(x.dtype)) for x in products)
            else:
                sums = tuple(total.add_(x) for total, x in zip(sums, products, strict=True))
            if part.stop == share.queries.stop:
                dk[share.split, some], dv[share.split, some] = sums

    threads.side_by_side(run, shares)
    return dq.mT, *(x[0] if splits == 1 else x.sum(dim=0) for x in (dk, dv))


@dataclass(frozen=True)
class _Share:
    """Groups and queries that one core takes, the ``split``-th part of the queries."""

    groups: slice
    queries: slice
    split: int
    pixels: int

    @property
    def _shape(self) -> tuple[int, int]:
        """How many groups and queries make a piece: several groups, or part of one."""
        groups, queries = self.groups.stop - self.groups.start, self.queries.stop - self.queries.start
        part = min(queries, max(PIECE // self.pixels // 16 * 16, FEWEST))
        return min(groups, max(PIECE // (part * self.pixels), 1)), part

    @property
    def piece(self) -> int:
        """Logits of a piece."""
        groups, queries = self._shape
        return groups * queries * self.pixels

    def pieces(self) -> Iterator[tuple[slice, slice]]:
        """Groups and queries of each piece."""
        groups, queries = self._shape
        for group in range(self.groups.start, self.groups.stop, groups):
            for query in range(self.queries.start, self.queries.stop, queries):
                some = slice(group, min(group + groups, self.groups.stop))
                yield some, slice(query, min(query + queries, self.queries.stop))


def _shares(groups: int, pixels: int) -> list[_Share]:
    """A few for each core, so that one that is held up has less to do in the end."""
    cores = torch.get_num_threads()
    wanted = min(max(groups * pixels**2 // PIECE, cores), SHARES * cores)
    splits = min(max(wanted // max(groups, 1), 1), max(pixels // SMALLEST_SHARE, 1))
    step, part = max(-(-groups // wanted), 1), -(-pixels // splits)
    return [
        _Share(
            groups=slice(group, min(group + step, groups)),
            queries=slice(query, min(query + part, pixels)),
            split=query // part,
            pixels=pixels,
        )
        for group in range(0, groups, step)
        for query in range(0, pixels, part)
    ]


def _sample(keys: Tensor) -> Tensor:
    """Up to 64 keys of each group, spread over rows and columns."""
    pixels = keys.shape[1]
    count = min(max(pixels // 16, 8), 64)
    step = max(pixels // count, 1)
    return keys[:, :: step + 1] if step > 1 else keys


def _view(buffer: Tensor, groups: int, keys: int, queries: int) -> Tensor:
    return buffer[: groups * keys * queries].view(groups, keys, queries)


def _as_tiles(x: Tensor, shape: torch.Size, heads: int, window: int) -> Tensor:
    """(groups, pixels, d) -> (b, rows, columns, heads, window, window, d)"""
    b, h, w, _ = shape
    return x.unflatten(1, (window, window)).unflatten(0, (b, h // window, w // window, heads))


def _over_windows(x: Tensor, heads: int) -> Tensor:
    """(groups, pixels, rank) -> (heads, pixels, rank), the sum"""
    return x.unflatten(0, (-1, heads)).sum(dim=0, dtype=_wide(x.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
