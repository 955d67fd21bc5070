"""The temperature at which keys are compared, and the gauge of how well a coreset can do.

Paper: Schröder and Mackey, "WildCat: Near-Linear Attention in Theory and Practice", arXiv 2602.10056, eq. 12. With
b0 = log(n) / (beta R_Q R_K) + 2 and R the largest length of queries, and of keys less their mean,

    tau^2 = (R_K / R_Q) rho,    rho = b0 / (2 W0(b0 / (2 rho0))),    rho0 = sqrt(1 + exp(W0(2 / e^2) + 2))
"""

import torch
from torch import Tensor

RHO_0 = 3.191601025323704
# a longer query than this times what 99 of 100 reach is an outlier, which would spoil the rest
OUTLIER = 1.5


def lambert_w(x: Tensor) -> Tensor:
    """The w with ``w * exp(w) = x``, for ``x > 0``; in the dtype of ``x``."""
    w = torch.where(x > torch.e, x.log() - x.clamp(min=torch.e).log().log(), x / torch.e)
    for _ in range(8):
        w = w / (1 + w) * (1 + x.log() - w.log())
    return w


def spread(radii: Tensor, counts: Tensor) -> Tensor:
    """rho: ``radii`` = beta R_Q R_K > 0 and ``counts`` of keys >= 1, float64 -> the same shape, at least about 3.9"""
    b0 = counts.log() / radii + 2
    return b0 / (2 * lambert_w(b0 / (2 * RHO_0)))


def multiplier(query_radius: Tensor, key_radius: Tensor, counts: Tensor, *, beta: float, tau_mult: float) -> Tensor:
    """``sqrt(beta) / tau``, by which keys are multiplied; 0 where queries or keys have no length.

    Args:
        query_radius, key_radius, counts: lengths and numbers of keys, of shapes that broadcast.
        beta: scale of the logits.
        tau_mult: factor on tau.

    Returns:
        float64.
    """
    q, k, counts = (x.double() for x in (query_radius, key_radius, counts))
    radii = beta * q * k
    # below that the quotients overflow, and all keys are alike anyway
    some = ~(radii < 1e-290)
    rho = spread(torch.where(some, radii, 1.0), counts.clamp(min=1))
    found = (beta * torch.where(some, q / k, 0.0) / rho).sqrt() / tau_mult
    return torch.where(some, found, 0.0)


def query_radii(q: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths of the queries, (b, heads, m, d) -> twice (b, heads).

    Returns:
        The radius that the temperature is made for, 1.5 times the 99th percentile where that is less than the largest
        length (and not 0), and the largest length.
    """
    squares = q.to(torch.promote_types(q.dtype, torch.float32)).square().sum(dim=-1)
    m = q.shape[-2]
    if not m:
        return squares.sum(dim=-1)[None].expand(2, -1, -1).unbind(0)
    # kthvalue would do, but not with deterministic algorithms on a GPU
    highest = squares.topk(m // 100 + 1, dim=-1).values
    largest, usual = highest[..., 0], OUTLIER**2 * highest[..., -1]
    return torch.where(usual > 0, torch.minimum(largest, usual), largest).sqrt(), largest.sqrt()


def gauge(query_radius: Tensor, key_radius: Tensor, count: Tensor, *, beta: float) -> Tensor:
    """gamma = beta R_Q R_K / log n: below 3 coresets are excellent, above 8 subsets of keys do as well."""
    return beta * query_radius * key_radius / count.clamp(min=2).double().log()
