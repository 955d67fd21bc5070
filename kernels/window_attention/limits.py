"""What the Triton kernels of window attention take, asked before they are imported."""

from typing import Any

import torch
from torch import Tensor

from kernels import launch

# columns of q and its factors that fit the registers, continued to powers of two; narrower types take half the room
COLUMNS = {torch.float32: 80, torch.float64: 256}
COLUMNS_16_BIT = 128
SMALLEST = 16  # of a product on tensor cores
# offsets inside a window are 32-bit numbers
LONGEST = 2**31


def run(*tensors: Tensor | None, **options: Any) -> Tensor:
    """The ``triton`` backend; imports triton."""
    from kernels.window_attention import fused

    return fused.window_attention(*tensors, **options)


def supports(
    qkv: Tensor | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    heads: int | None = None,
    window: int | None = None,
    dtype: torch.dtype | None = None,
    **_: Any,
) -> str | None:
    """Every reason against ``triton`` for this call, or None."""
    reasons = [launch.why_not(qkv)]
    if bias is not None:
        reasons.append("it takes no dense bias")
    if qkv is not None:
        if torch.float64 in (qkv.dtype, dtype) and not launch.interpreting():
            reasons.append("tensor cores do not compute in float64")
        if heads is not None:
            rank = 0 if q_pos is None else q_pos.shape[-1]
            reasons.append(columns_reason(qkv.shape[-1] // (3 * heads), rank, dtype or qkv.dtype))
        # in the image, and in its gradient, which is dense
        if window is not None and window * max(qkv.stride(1) + qkv.stride(2), qkv.shape[2] * qkv.shape[3]) >= LONGEST:
            reasons.append(f"{window} rows of the image must lie within 2**31 numbers")
    return "; ".join(reason for reason in reasons if reason) or None


def declines(qkv: Tensor | None = None, *_: Tensor | None, **__: Any) -> str | None:
    """Why nobody wants ``triton`` for this call without asking for it."""
    return launch.why_not_unasked(qkv)


def columns_reason(d: int, rank: int, dtype: torch.dtype) -> str | None:
    """Why heads of ``d`` with factors of ``rank`` do not fit the registers, or None."""
    most = COLUMNS.get(dtype, COLUMNS_16_BIT)
    columns = whole(d) + sum(chunks(rank))
    if columns <= most:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"{most} columns of q and its factors fit the registers in {name}, not {d} + {rank} (continued: {columns})"


def chunks(rank: int) -> tuple[int, int]:
    """Columns of the two products that the factors take, powers of two; the second is 0 where one product will do."""
    if rank == 0:
        return 0, 0
    half = whole(rank) // 2
    tail = whole(rank - half)
    return (half, tail) if half >= SMALLEST and half + tail < 2 * half else (whole(rank), 0)


def whole(columns: int) -> int:
    """The next power of two, and at least what tensor cores take."""
    size = SMALLEST
    while size < columns:
        size *= 2
    return size
