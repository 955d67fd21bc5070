"""T-MSA for graphs that other programs run: two products of vectors that end in a one, and little else.

[k^; 1] [v; 1]^T holds sum k^ v^T, sum k^, sum v and the number of pixels, and its product with [q^; 1] the numerator
and the denominator. Forward only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def taylor_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    temperature: Tensor | None,
    gate: Tensor | None,
    focus_weight: Tensor | None,
    *,
    norm: float,
    eps: float,
    gate_mode: str,
    focus_power: int | None,
) -> Tensor:
    """(b, heads, d, n) -> (b, heads, d, n), of float32 or float64"""
    queries, keys = (units(x, norm=norm, eps=eps, focus_power=focus_power) for x in (q, k))
    sums = _ended(keys[0]) @ _ended(v).transpose(-1, -2)
    both = sums.transpose(-1, -2) @ _ended(queries[0])  # (b, heads, d + 1, n)
    if focus_power is not None:
        more = keys[1] @ _ended(v).transpose(-1, -2) * focus_weight[:, None, None]
        both = both + more.transpose(-1, -2) @ queries[1]
    d = v.shape[2]
    numerator, denominator = both.split([d, 1], dim=2)
    out = numerator / (denominator + eps)
    if temperature is not None:
        out = out * temperature[:, None, None]
    if gate is not None:
        out = out * gate[:, :, None] if gate_mode == "multiply" else out + gate[:, :, None]
    return out


def units(x: Tensor, *, norm: float, eps: float, focus_power: int | None) -> Sequence[Tensor]:
    """As :func:`kernels.taylor_attention.parts.units`."""
    first = x / (_length(x) / norm + eps)
    if focus_power is None:
        return (first,)
    positive = x.relu()
    top = positive.amax(dim=-2, keepdim=True)
    top = torch.where(top > 0, top, 1.0)
    # over its largest entry, or high powers overflow
    power = (positive / top) ** focus_power
    return first, power / (_length(power) / norm + eps * top**-focus_power)


def _length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-2, keepdim=True)


def _ended(x: Tensor) -> Tensor:
    """(b, heads, d, n) -> (b, heads, d + 1, n)"""
    return F.pad(x, (0, 0, 0, 1), value=1.0)
