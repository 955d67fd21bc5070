"""T-MSA in two passes over parts of an image: sums of keys and values first, then each query by itself.

    sums = taylor_sums(unit(k), v)      of every part, added up        ((d + 1) x (d + 1) numbers per term and head)
    out  = taylor_map(unit(q), sums)    of every part

which is the whole attention, exactly: [k^; 1] [v; 1]^T holds sum k^ v^T, sum k^, sum v and the number of pixels, and
its product with [q^; 1] the numerator and the denominator. Plain operators that autograd follows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.exported import is_exported
from kernels.taylor_attention import open_sizes, reference


def units(x: Tensor, *, norm: float, eps: float, focus_power: int | None = None) -> tuple[Tensor, ...]:
    """The vectors of each pixel as the terms of the attention take them.

    Args:
        x: ``(b, heads, d, n)``, float32 or float64, any strides; those with ``d`` innermost are the fastest.
        norm, eps, focus_power: as in :func:`kernels.taylor_attention.taylor_attention`.

    Returns:
        vectors of length ``norm``, and with ``focus_power`` those of the focused term; ``(b, heads, d, n)`` each. They
        have a first derivative only.
    """
    if is_exported():
        return open_sizes.units(x, norm=norm, eps=eps, focus_power=focus_power)
    if focus_power is None:
        return (_unit(x, norm, eps),)
    positive = x.relu()
    top = positive.detach().amax(dim=-2, keepdim=True)
    top = torch.where(top > 0, top, 1)
    # over its largest entry, or high powers overflow; the eps, which decides on faint pixels, with it
    return _unit(x, norm, eps), _unit((positive / top) ** focus_power, norm, eps * top**-focus_power)


def taylor_sums(keys: Sequence[Tensor], v: Tensor) -> Tensor:
    """What a part of the image adds to the sums over its pixels.

    Args:
        keys: what :func:`units` makes of ``k``.
        v: ``(b, heads, d, n)``, of the dtype of ``keys``.

    Returns:
        ``(b, heads, terms * d + 1, d + 1)``: of each term ``[sum k v^T | sum k]``, then ``[sum v | n]``.
    """
    rows = [torch.cat([key @ v.mT, key.sum(dim=-1, keepdim=True)], dim=-1) for key in keys]
    last = torch.cat([v.sum(dim=-1), v.new_full((*v.shape[:2], 1), v.shape[-1])], dim=-1)
    return torch.cat([*rows, last[:, :, None]], dim=-2)


def taylor_map(
    queries: Sequence[Tensor],
    sums: Tensor,
    *,
    eps: float,
    temperature: Tensor | None = None,
    gate: Tensor | None = None,
    gate_mode: str = "multiply",
    focus_weight: Tensor | None = None,
) -> Tensor:
    """The attention of some pixels to all those that are in the sums.

    Args:
        queries: what :func:`units` makes of ``q``, ``(b, heads, d, n)`` each.
        sums: of the whole image, from :func:`taylor_sums`.
        eps, temperature, gate, gate_mode, focus_weight: as in the whole attention.

    Returns:
        ``(b, heads, d, n)``, in the dtype of ``queries``, with ``d`` innermost in memory.
    """
    d = queries[0].shape[-2]
    both = sums[..., -1:, :]
    for i, query in enumerate(queries):
        term = sums[..., i * d : (i + 1) * d, :]
        if i == 1:
            term = term * focus_weight[:, None, None]
        both = both + query.mT @ term  # (b, heads, n, d + 1)
    factor = 1 / (both[..., d:] + eps)
    if temperature is not None:
        factor = factor * temperature[:, None, None]
    if gate is None:
        return (both[..., :d] * factor).mT
    if gate_mode == "multiply":
        return (both[..., :d] * (factor * gate[..., None])).mT
    return (both[..., :d] * factor + gate[..., None]).mT


def _unit(x: Tensor, norm: float, eps: float | Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return x / (reference.length(x) / norm + eps)
    return _Unit.apply(x, norm, eps)


class _Unit(torch.autograd.Function):
    """x / (|x| / norm + eps) over the next to last axis; of a zero vector the gradient is that of x / eps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: float, eps: float | Tensor) -> Tensor:
        length = (x * x).sum(dim=-2, keepdim=True).sqrt_()
        scale = (length / norm + eps).reciprocal_()
        ctx.save_for_backward(x, length, scale)
        ctx.norm = norm
        return x * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, length, scale = ctx.saved_tensors
        along = (x * grad).sum(dim=-2, keepdim=True)
        along = torch.where(length > 0, along * scale.square() / (ctx.norm * length), 0)
        return torch.addcmul(grad * scale, x, along, value=-1), None, None
