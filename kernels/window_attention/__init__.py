"""Attention within the windows of an image, with a low-rank positional bias."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from kernels import dispatch
from kernels.window_attention import chunked, limits, reference, torch_impl

__all__ = ["window_attention"]


def window_attention(
    qkv: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    *,
    heads: int,
    window: int,
    scale: float | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Let each pixel attend to the pixels of its window.

    The windows tile the image from the top left corner. An image that is no multiple of the window is continued by
    reflection at the bottom and the right (as often as needed, the edge pixel not repeated); the pixels so added are
    attended to like any other. Logits are ``scale * q.k + q_pos.k_pos / sqrt(rank) + bias``.

    Args:
        qkv: ``(b, h, w, 3 * heads * d)``, any float dtype, ``h, w >= 1``; channels are ``[q|k|v][head][d]``. A
            permuted channels-last image has this layout.
        q_pos, k_pos: ``(heads, window**2, rank)``, or None for both; pixels of the window row by row. Rounded to
            ``dtype``.
        heads: number of heads.
        window: side of the square window in pixels.
        scale: factor of the content logits, positive; ``1 / sqrt(d)`` by default.
        bias: ``(heads, window**2, window**2)``, query first, or None.
        dtype: type in which q, k, v and the weights are multiplied; that of ``qkv`` by default.
        backend: ``"triton"``, ``"flash"``, ``"chunked"``, ``"sdpa"``, ``"torch"``, ``"reference"`` or ``"auto"``; see
            :mod:`kernels.dispatch`.

    Returns:
        ``(b, h, w, heads * d)``, in the dtype of ``qkv``.

    Raises:
        ValueError: a shape, dtype or number that does not fit the others, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.

    Example:
        >>> qkv = torch.rand(1, 17, 23, 3 * 2 * 8)
        >>> factors = torch.rand(2, 64, 4), torch.rand(2, 64, 4)
        >>> window_attention(qkv, *factors, heads=2, window=8).shape
        torch.Size([1, 17, 23, 16])
    """
    d = _head_size(qkv, heads, window)
    _check_positions(qkv, q_pos, k_pos, bias, heads, window)
    scale = 1 / math.sqrt(d) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")
    dtype = qkv.dtype if dtype is None else dtype
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a float type, got {dtype}")
    options = {"heads": heads, "window": window, "scale": float(scale), "dtype": dtype}
    return dispatch.run("window_attention", backend, qkv, q_pos, k_pos, bias, **options)


def _head_size(qkv: Tensor, heads: int, window: int) -> int:
    if qkv.ndim != 4 or qkv.shape[1] < 1 or qkv.shape[2] < 1:
        raise ValueError(f"qkv must be (b, h, w, 3 * heads * d) with h, w >= 1, got {tuple(qkv.shape)}")
    if not qkv.is_floating_point():
        raise ValueError(f"qkv must be of a float dtype, got {qkv.dtype}")
    if heads < 1 or window < 1:
        raise ValueError(f"heads and window must be at least 1, got heads={heads}, window={window}")
    if qkv.shape[3] % (3 * heads) or qkv.shape[3] == 0:
        raise ValueError(f"the channels of qkv must be 3 * heads * d with heads={heads}, got {qkv.shape[3]}")
    return qkv.shape[3] // (3 * heads)


def _check_positions(
    qkv: Tensor, q_pos: Tensor | None, k_pos: Tensor | None, bias: Tensor | None, heads: int, window: int
) -> None:
    if (q_pos is None) != (k_pos is None):
        raise ValueError(f"{'q_pos' if q_pos is None else 'k_pos'} is None; give both factors or neither")
    pixels = window * window
    for name, x in (("q_pos", q_pos), ("k_pos", k_pos), ("bias", bias)):
        if x is None:
            continue
        wanted = (heads, pixels, pixels) if name == "bias" else (heads, pixels, x.shape[-1])
        if x.ndim != 3 or x.shape != wanted or not x.shape[-1]:
            last = pixels if name == "bias" else "rank"
            raise ValueError(
                f"{name} must be (heads, window**2, ...) = ({heads}, {pixels}, {last}), got {tuple(x.shape)}"
            )
        if x.device != qkv.device:
            raise ValueError(f"{name} is on {x.device} and qkv on {qkv.device}; move one of them")
    if q_pos is not None and q_pos.shape != k_pos.shape:
        raise ValueError(f"q_pos and k_pos must have the same rank, got {q_pos.shape[-1]} and {k_pos.shape[-1]}")
    if q_pos is not None and q_pos.dtype != k_pos.dtype:
        raise ValueError(f"q_pos and k_pos must have one dtype, got {q_pos.dtype} and {k_pos.dtype}")


def _rounding(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``run``, given ``qkv`` in the type of the computation, and its result in that of the caller."""

    @functools.wraps(run)
    def rounded(qkv: Tensor, *tensors: Tensor | None, dtype: torch.dtype, **options: object) -> Tensor:
        return run(qkv.to(dtype), *tensors, **options).to(qkv.dtype)

    return rounded


dispatch.register(
    "window_attention",
    (
        dispatch.Backend(
            "triton",
            limits.run,
            limits.supports,
            "on a CUDA device, a kernel that reads the image in place and copies nothing is the fastest",
            limits.declines,
        ),
        dispatch.Backend(
            "flash",
            _rounding(torch_impl.flash),
            torch_impl.flash_supports,
            "FlashAttention is there and takes 16-bit CUDA tensors",
        ),
        dispatch.Backend(
            "chunked",
            chunked.chunked,
            chunked.supports,
            "on a CPU, products over pieces of the logits are the fastest",
            chunked.declines,
        ),
        dispatch.Backend(
            "sdpa",
            _rounding(torch_impl.sdpa),
            dispatch.always,
            "PyTorch's fused attention needs no (window**2, window**2) matrix",
        ),
        dispatch.Backend(
            "torch", _rounding(torch_impl.attention), dispatch.always, "explicit softmax, by plain PyTorch"
        ),
        dispatch.Backend(
            "reference", _rounding(reference.window_attention), dispatch.always, "the definition, for checks"
        ),
    ),
)
