"""Taylor-expanded multi-head self-attention (T-MSA), defined in plain PyTorch: short, without tricks.

    exp(x) ~ 1 + x    so that    out[i] = sum_j (1 + q[i].k[j]) v[j] / sum_j (1 + q[i].k[j])
                                        = (sum_j v[j] + q[i] (k^T v)) / (n + q[i].(sum_j k[j]) + eps)

with q and k scaled to length ``norm``: a small product, for which the expansion holds. V2 adds a second term of the
same form, in which q and k are powers of their positive parts ("focused"), weighted per head.
"""

import torch
from torch import Tensor


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
    """(b, heads, d, n) -> (b, heads, d, n); arithmetic in float32 at least; see the public function."""
    own, dtype = v.dtype, torch.promote_types(v.dtype, torch.float32)
    wide = (None if x is None else x.to(dtype) for x in (q, k, v, temperature, gate, focus_weight))
    q, k, v, temperature, gate, focus_weight = wide
    numerator, denominator = terms(unit(q, norm, eps), unit(k, norm, eps), v)
    numerator, denominator = v.sum(dim=-1, keepdim=True) + numerator, v.shape[-1] + denominator
    if focus_power is not None:
        focused = (unit(x.relu() ** focus_power, norm, eps) for x in (q, k))
        more, divisor = terms(*focused, v)
        weight = focus_weight[:, None, None]
        numerator, denominator = numerator + weight * more, denominator + weight * divisor
    out = numerator / (denominator + eps)
    if temperature is not None:
        out = out * temperature[:, None, None]
    if gate is not None:
        gate = gate[:, :, None]
        out = out * gate if gate_mode == "multiply" else out + gate
    return out.to(own)


def unit(x: Tensor, norm: float, eps: float) -> Tensor:
    """Each pixel's vector, along the next to last axis, at the length ``norm``; zero stays zero."""
    return x / (length(x) / norm + eps)


def length(x: Tensor) -> Tensor:
    """(b, heads, d, n) -> (b, heads, 1, n), with a gradient of zero at zero"""
    squares = x.square().sum(dim=-2, keepdim=True)
    positive = squares > 0
    return torch.where(positive, squares.where(positive, 1).sqrt(), 0)


def terms(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j (q[i].k[j]) v[j], (b, heads, d, n), and sum_j q[i].k[j], (b, heads, 1, n)"""
    return (k @ v.mT).mT @ q, k.sum(dim=-1, keepdim=True).mT @ q
