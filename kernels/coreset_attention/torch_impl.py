"""Coreset attention by plain PyTorch: all heads and bins side by side, the attention by SDPA.

Kernel, factors and sums are float32 at least, whatever the inputs are. Values are taken less their mean, which is
added back at the end: exact, since the weights are W applied to ones, and what keeps 16-bit products accurate.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.coreset_attention.bins import Bins
from kernels.coreset_attention.noise import gumbels
from kernels.coreset_attention.pivots import Factor, Keys, choose
from kernels.coreset_attention.temperature import gauge, multiplier

# a weight is kept as it is up to exp(60); beyond, all of a head's are divided by one number
LARGEST_EXPONENT = 60.0
# what is left of a denominator, in units of the precision, when its terms have cancelled each other
CANCELLED = 32
# the attention's width is a multiple of this
ALIGNMENT = 8


@dataclass(frozen=True)
class Settings:
    """How keys are compressed: what the public functions' arguments of these names say."""

    rank: int
    bins: Bins
    beta: float
    sampler: str
    tau_mult: float
    recentre: bool

    @property
    def slots(self) -> int:
        """Keys chosen of each bin, at most."""
        return -(-self.rank // self.bins.count)

    @property
    def noise_shape(self) -> tuple[int, int, int]:
        """Of the uniforms that one head is drawn by."""
        return self.bins.count, self.slots, 1 if self.sampler == "cdf" else self.bins.width

    @property
    def exact(self) -> bool:
        """Whether every key has a slot."""
        h, w = self.bins.grid
        return self.rank >= h * w or self.slots >= self.bins.width


class Compressed(NamedTuple):
    """A coreset whose keys and values are taken less ``key_mean``, ``value_mean`` (..., 1, d)."""

    keys: Tensor
    values: Tensor
    weights: Tensor
    lower: Tensor
    upper: Tensor
    gamma: Tensor
    tau: Tensor
    pivots: Tensor
    key_mean: Tensor
    value_mean: Tensor


def compress(
    k: Tensor, v: Tensor, query_radius: Tensor | None, mask: Tensor | None, noise: Tensor | None, settings: Settings
) -> Compressed:
    """Choose and weigh keys.

    Args:
        k: ``(b, heads, n, d)``.
        v: ``(b, heads, n, dv)``.
        query_radius: ``(b, heads)``, or None for that of the keys.
        mask: ``(b, heads, n)`` bool, the keys that are there, or None for all.
        noise: uniforms in (0, 1), ``(heads, bins, slots, width)`` (the last one 1 for "cdf"), or None.
        settings: how.
    """
    dtype = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    k, v = k.to(dtype), v.to(dtype)
    if mask is not None:
        # what is not there may be anything, NaN included
        k, v = (x.masked_fill(~mask[..., None], 0) for x in (k, v))
    bins = settings.bins
    present = torch.ones(1, 1, k.shape[2], dtype=torch.bool, device=k.device) if mask is None else mask
    with torch.no_grad():
        count = present.sum(dim=-1)
        key_mean, value_mean = (_mean(x, count) for x in (k, v))
        if not settings.recentre:
            key_mean = torch.zeros_like(key_mean)
        lower, upper = value_range(v, mask)
        places, held = bins.tokens(k.device)
        # places past the end of a bin, and keys that are not there
        alive = None if mask is None and bins.even else bins.split(present[..., None]).squeeze(-1) & held
        x = bins.split(k - key_mean)
        squares = x.square().sum(dim=-1)
        if alive is not None:
            squares = squares.masked_fill(~alive, 0)
        lengths = squares.amax(dim=-1).sqrt()  # (b, heads, bins)
        radius = lengths.amax(dim=-1) if query_radius is None else query_radius.to(dtype)
        gamma = gauge(radius, lengths.amax(dim=-1), count, beta=settings.beta)
        counts = torch.full_like(lengths, bins.width) if alive is None else alive.sum(dim=-1)
        factor = multiplier(radius[..., None], lengths, counts, beta=settings.beta, tau_mult=settings.tau_mult)
        tau = (settings.beta**0.5 / factor).to(dtype)
    if settings.exact:
        keys, values, weights, pivots = _everything(k, v - value_mean, mask)
    else:
        with torch.no_grad():
            factor = factor.to(dtype)[..., None]
            keys = Keys(x.mul_(factor[..., None]), squares.mul_(factor.square() / 2), alive)
            chosen = _choose(keys, noise, settings)
            scale, back = _exponents(keys, chosen)
        tokens = places.expand(*x.shape[:2], *places.shape).gather(-1, chosen.pivots).flatten(2)
        active = chosen.active.flatten(2)
        values, weights = _weigh(bins.split(v - value_mean), chosen, scale, back)
        keys = take(k, filled(tokens, active))
        pivots = tokens.masked_fill(~active, -1)
    gauges = (lower, upper, gamma.to(dtype), tau)
    return Compressed(keys - key_mean, values, weights, *gauges, pivots, key_mean, value_mean)


def attend(q: Tensor, coreset: Compressed, beta: float) -> Tensor:
    """(b, m_heads, m, d) -> (b, m_heads, m, dv), in the dtype of ``q``; ``m_heads`` is a multiple of the coreset's."""
    weights, values = coreset.weights, coreset.values
    group = q.shape[1] // weights.shape[1]
    # one number per head that cancels, so that 16-bit weights stay in range
    largest = weights.detach().abs().amax(dim=-1, keepdim=True)
    weights = weights / largest.where(largest > 0, 1)
    values = values / largest.where(largest > 0, 1)[..., None]
    columns = torch.cat([values, weights[..., None], weights.abs()[..., None]], dim=-1)
    dtype = _product_dtype(q, columns)
    size = -(-max(q.shape[-1], columns.shape[-1]) // ALIGNMENT) * ALIGNMENT
    wide = (F.pad(x.to(dtype), (0, size - x.shape[-1])) for x in (q, coreset.keys, columns))
    query, keys, columns = wide
    if group > 1:
        keys, columns = (x.repeat_interleave(group, dim=1) for x in (keys, columns))
    sums = F.scaled_dot_product_attention(query, keys, columns, scale=beta).to(weights.dtype)
    dv = values.shape[-1]
    numerator, denominator, absolute = sums[..., :dv], sums[..., dv : dv + 1], sums[..., dv + 1 : dv + 2]
    # NaN is not cancellation, and stays
    lost = denominator <= CANCELLED * torch.finfo(dtype).eps * absolute
    mean, lower, upper = (
        x if group == 1 else x.repeat_interleave(group, dim=1)
        for x in (coreset.value_mean, coreset.lower[..., None, :], coreset.upper[..., None, :])
    )
    out = mean + (numerator / denominator.masked_fill(lost, 1)).masked_fill(lost, 0)
    return out.clamp(lower, upper).to(q.dtype)


def _product_dtype(q: Tensor, columns: Tensor) -> torch.dtype:
    """The dtype of queries and logits: theirs, but not below float32 on a CPU, where 16 bits gain nothing."""
    return q.dtype if q.device.type != "cpu" else torch.promote_types(q.dtype, columns.dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    """Attention to all keys that are there; of none, 0. Shapes as in :func:`compress` and :func:`attend`."""
    dtype = torch.promote_types(q.dtype, torch.promote_types(k.dtype, v.dtype))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    group, dv = q.shape[1] // k.shape[1], v.shape[-1]
    # kernels without an (m, n) matrix need equal lengths
    q, k, v = (F.pad(x, (0, max(q.shape[-1], dv) - x.shape[-1])) for x in (q, k, v))
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, scale=beta)[..., :dv]
    seen = mask.repeat_interleave(group, dim=1)
    k, v = (x.masked_fill(~seen[..., None], 0) for x in (k, v))
    rows = seen[:, :, None].expand(-1, -1, q.shape[2], -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=rows, scale=beta)[..., :dv]
    return out.where(seen.any(dim=-1)[..., None, None], 0)


def _choose(keys: Keys, noise: Tensor | None, settings: Settings) -> Factor:
    scores = noise if noise is None or settings.sampler == "cdf" else gumbels(noise, keys.x.dtype)
    return choose(keys, scores, rank=settings.slots, sampler=settings.sampler)


def _weigh(v: Tensor, factor: Factor, scale: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values and of ones over all keys of a bin, weighted as each chosen one represents them.

    Args:
        v: ``(b, heads, bins, width, dv)``.
        factor: of the keys.
        scale, back: of :func:`_exponents`.

    Returns:
        ``(b, heads, r, dv)`` and ``(b, heads, r)``.
    """
    rows = factor.rows * scale[..., None, :]
    sums = torch.cat([rows @ v, rows.sum(dim=-1, keepdim=True)], dim=-1)
    sums = torch.linalg.solve_triangular(factor.lower.mT, sums, upper=True) * back[..., None]
    sums = sums.masked_fill(~factor.active[..., None], 0).flatten(2, 3)
    return sums[..., :-1], sums[..., -1]


def _exponents(keys: Keys, factor: Factor) -> tuple[Tensor, Tensor]:
    """``exp(s - top)`` of every key and ``exp(top - s)`` of the chosen, for the top s of each bin; no overflow."""
    top = keys.half.amax(dim=-1, keepdim=True)
    scale = (keys.half - top).exp()
    if keys.alive is not None:
        scale = scale.masked_fill(~keys.alive, 0)
    back = (top - keys.half.gather(-1, factor.pivots)).masked_fill(~factor.active, -torch.inf)
    excess = (back.flatten(2).amax(dim=-1) - LARGEST_EXPONENT).clamp(min=0)
    return scale, (back - excess[..., None, None]).exp()


def filled(tokens: Tensor, active: Tensor) -> Tensor:
    """An empty slot takes the head's first chosen token, whose logit is no larger than the largest, or token 0."""
    first = active.to(torch.int8).argmax(dim=-1, keepdim=True)
    return tokens.where(active, tokens.gather(-1, first).clamp(min=0))


def _everything(k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens = torch.arange(k.shape[2], device=k.device).expand(k.shape[:3])
    if mask is None:
        return k, v, v.new_ones(v.shape[:3]), tokens
    values = v.masked_fill(~mask[..., None], 0)
    return take(k, filled(tokens, mask)), values, mask.to(v.dtype), tokens.masked_fill(~mask, -1)


def take(k: Tensor, tokens: Tensor) -> Tensor:
    """(b, heads, n, d), (b, heads, r) -> (b, heads, r, d)"""
    return k.gather(2, tokens[..., None].expand(*tokens.shape, k.shape[-1]))


def _mean(x: Tensor, count: Tensor) -> Tensor:
    """(b, heads, 1, d); what is not there is 0 already"""
    return x.sum(dim=2, keepdim=True) / count.clamp(min=1)[..., None, None]


def value_range(v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each channel, (b, heads, dv) each; 0 where there is none."""
    if mask is None:
        return v.amin(dim=2), v.amax(dim=2)
    some, gone = mask.any(dim=-1)[..., None], ~mask[..., None]
    low, high = v.masked_fill(gone, torch.inf).amin(dim=2), v.masked_fill(gone, -torch.inf).amax(dim=2)
    return low.where(some, 0), high.where(some, 0)
