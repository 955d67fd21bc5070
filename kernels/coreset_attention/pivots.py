"""Which keys stand for their bin: randomly pivoted Cholesky (RPNys), all bins of all heads side by side.

Paper: Schröder and Mackey, arXiv 2602.10056, alg. 1, after Chen et al., "Randomly pivoted Cholesky". Differs from the
authors' code: the factor itself is kept and solved with, where they update an explicit inverse, which is lost to
rounding on keys of images; keys that the chosen ones already stand for are never chosen.

With keys x, s = |x|^2 / 2 and g(x, y) = exp(x.y - s_x - s_y), a key is drawn with a probability proportional to
exp(2 s) times what the chosen ones leave of its g(x, x) = 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SAMPLERS = ("gumbel", "cdf", "greedy", "uniform")
# what is left of a key, in units of the precision, when the chosen ones stand for it; one unit for each of them if that
# is more: each rounds what is left, and of keys chosen for their rounding weights of 1e6 would cancel each other
EXHAUSTED = 64


class Keys(NamedTuple):
    """Keys less their mean, times the multiplier of their bin.

    Attributes:
        x: ``(..., width, d)``, float32 or float64.
        half: ``(..., width)``, half their squared lengths.
        alive: ``(..., width)`` bool, the places that hold a key, or None for all.
    """

    x: Tensor
    half: Tensor
    alive: Tensor | None


class Factor(NamedTuple):
    """Partial Cholesky factor of g: ``g(chosen, all) = lower @ rows`` and ``g(chosen, chosen) = lower @ lower.mT``.

    Attributes:
        pivots: ``(..., r)`` int64, place in the bin.
        active: ``(..., r)`` bool; a slot that is not stayed empty as nothing was left to choose.
        rows: ``(..., r, width)``; of an empty slot 0.
        lower: ``(..., r, r)``; of an empty slot that of the identity.
    """

    pivots: Tensor
    active: Tensor
    rows: Tensor
    lower: Tensor


def choose(keys: Keys, scores: Tensor | None, *, rank: int, sampler: str) -> Factor:
    """Choose up to ``rank`` keys of each bin.

    Args:
        keys: those of all bins.
        scores: for "gumbel" and "uniform" draws of the Gumbel distribution ``(..., rank, width)``, for "cdf" uniforms
            in (0, 1) ``(..., rank, 1)``; any shape that broadcasts. None for "greedy".
        rank: number of keys to choose, at most ``width``.
        sampler: one of ``SAMPLERS``.

    Returns:
        The factor, in the dtype of the keys.
    """
    x, half, alive = keys
    shape = half.shape
    left = torch.ones_like(half) if alive is None else alive.to(half.dtype).expand(shape)
    rows, lower = x.new_zeros(*shape[:-1], rank, shape[-1]), x.new_zeros(*shape[:-1], rank, rank)
    pivots, active = [], []
    for t in range(rank):
        weight = _log_weights(left, half, t, sampler)
        pivot = _draw(weight, None if scores is None else scores[..., t, :], sampler)[..., None]
        # not "larger than": keys that are not a number shall not pass for none
        some = weight.amax(dim=-1, keepdim=True) != -torch.inf
        row = _row(x, half, pivot)
        if t:
            # what the chosen ones say about this one
            known = rows[..., :t, :]
            coefficients = known.gather(-1, pivot[..., None].expand(*known.shape[:-1], 1)).mT  # (..., 1, t)
            row = row - (coefficients @ known).squeeze(-2)
            row = row.scatter(-1, torch.cat(pivots, dim=-1), 0)
            lower[..., t, :t] = coefficients.squeeze(-2).where(some, 0)
        root = left.gather(-1, pivot).sqrt()
        row = (row / root).scatter(-1, pivot, root).where(some, 0)
        rows[..., t, :] = row
        lower[..., t, t] = root.where(some, 1).squeeze(-1)
        left = (left - row.square()).clamp(min=0).scatter(-1, pivot, 0)
        pivots.append(pivot)
        active.append(some)
    return Factor(torch.cat(pivots, dim=-1), torch.cat(active, dim=-1), rows, lower)


def _row(x: Tensor, half: Tensor, pivot: Tensor) -> Tensor:
    """g of the pivot with every key of its bin: (..., width)"""
    key = x.gather(-2, pivot[..., None].expand(*pivot.shape, x.shape[-1]))
    return (x @ key.mT).squeeze(-1).sub_(half).sub_(half.gather(-1, pivot)).clamp_(max=0).exp_()


def _log_weights(left: Tensor, half: Tensor, chosen: int, sampler: str) -> Tensor:
    """Logarithm of the probability of each key, up to a constant; -inf where it is exhausted."""
    there = left > max(EXHAUSTED, chosen) * torch.finfo(left.dtype).eps
    weight = torch.zeros_like(left) if sampler == "uniform" else left.log() + 2 * half
    return weight.where(there, -torch.inf)


def _draw(weight: Tensor, scores: Tensor | None, sampler: str) -> Tensor:
    """(..., width) -> (...); any place where nothing is left"""
    if sampler == "cdf":
        top = weight.amax(dim=-1, keepdim=True)
        total = (weight - top.where(top > -torch.inf, 0)).exp().cumsum(dim=-1)
        place = (total <= scores * total[..., -1:]).sum(dim=-1)
        return place.clamp(max=weight.shape[-1] - 1)
    return (weight if scores is None else weight + scores).argmax(dim=-1)
