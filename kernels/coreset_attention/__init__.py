"""Softmax attention over a small weighted coreset of the keys, nearly linear in their number (WildCat)."""

import logging
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import dispatch
from kernels.coreset_attention import limits, reference, torch_impl
from kernels.coreset_attention.arguments import (
    check_keys,
    check_queries,
    make_mask,
    make_noise,
    make_settings,
    scale_or_default,
)
from kernels.coreset_attention.temperature import query_radii
from kernels.coreset_attention.torch_impl import Compressed

__all__ = ["Coreset", "compress_cache", "compress_kv", "noise_shape", "weighted_attention", "wildcat_attention"]

logger = logging.getLogger("pellucid")

# from here on a subset of the keys does as well
GAMMA_WARNING = 8.0
_warned: set[str] = set()
_calls = {"gamma": 0}


class Coreset(NamedTuple):
    """A few keys that stand for all; see :func:`compress_kv`.

    Attributes:
        keys: ``(b, heads, r, d)``, keys as they were given.
        values: ``(b, heads, r, dv)``, sums of all values, weighted by how each key is represented.
        weights: ``(b, heads, r)``, the same sums of ones: about how many keys each stands for. May be negative.
        lower, upper: ``(b, heads, dv)``, range of the values in each channel.
        gamma: ``(b, heads)``, gauge of the approximation: excellent up to 3, poor from 8 on.
        tau: ``(b, heads, bins)``, temperature at which keys were compared; inf where all are alike.
        pivots: ``(b, heads, r)`` int64, the token of each key; -1 for a slot that stayed empty (weight and value 0).
    """

    keys: Tensor
    values: Tensor
    weights: Tensor
    lower: Tensor
    upper: Tensor
    gamma: Tensor
    tau: Tensor
    pivots: Tensor


def wildcat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rank: int,
    bins: int = 1,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
    layout: str | None = None,
    key_mask: Tensor | None = None,
    sampler: str = "gumbel",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    seed: int | Tensor = 0,
    tau_mult: float = 1.0,
    recentre: bool = True,
    fallback_gamma: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Softmax attention with the keys compressed to ``rank`` of them.

    Paper: Schröder and Mackey, "WildCat: Near-Linear Attention in Theory and Practice", arXiv 2602.10056, alg. 4.
    Pivots, weights and temperature are constants of the backward pass. An image's result does not depend on the
    others of its batch. No causal mask, no dropout; a positional bias of low rank goes into q and k.

    Args:
        q: ``(b, m_heads, m, d)``, any float dtype; ``m_heads`` is a multiple of the heads of k (grouped queries).
        k: ``(b, heads, n, d)``, ``n >= 1``.
        v: ``(b, heads, n, dv)``.
        rank: size of the coreset; rounded up to a multiple of the bins. Exact where it holds all keys of the image,
            or a bin's share all of the largest bin.
        bins: parts of the keys that are compressed apart, at most n are made; ``rank / bins`` should be 4 at least.
        scale: factor of the logits, positive; ``1 / sqrt(d)`` by default.
        grid: ``(h, w)`` of the tokens, row by row, with ``h * w == n``; or None where they are no image.
        layout: "tiles" of the grid (default with one), "strips" of its rows, "slices" of tokens (default without).
        key_mask: ``(b, n)`` or ``(b, heads, n)`` bool, True for keys that are there; an image without any gives 0.
        sampler: how keys are drawn: "gumbel" (default) and "cdf" by the same law, "greedy" without chance, "uniform"
            with equal chances.
        generator: draws the noise; None for noise that depends on ``seed`` alone.
        noise: uniforms in (0, 1) instead, of :func:`noise_shape`, with or without the heads.
        seed: of the noise; an integer or an integer tensor without dimensions.
        tau_mult: factor on the temperature.
        recentre: compare keys less their mean.
        fallback_gamma: heads whose gamma is above are computed exactly; None for none, with a warning above 8. Neither
            is looked at while ``torch.compile`` traces, where a fallback is refused.
        backend: ``"triton"``, ``"torch"``, ``"reference"`` or ``"auto"``; see :mod:`kernels.dispatch`.

    Returns:
        ``(b, m_heads, m, dv)``, in the dtype of ``q``; within the range of the values of each channel.

    Raises:
        ValueError: a shape, dtype or number that does not fit the others, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.

    Example:
        >>> q, k, v = torch.rand(3, 1, 2, 64 * 48, 16)
        >>> wildcat_attention(q, k, v, rank=128, bins=12, grid=(64, 48)).shape
        torch.Size([1, 2, 3072, 16])
    """
    check_keys(k, v)
    check_queries(q, k)
    beta = scale_or_default(k, scale)
    settings = make_settings(
        k.shape[2],
        beta,
        rank=rank,
        bins=bins,
        grid=grid,
        layout=layout,
        sampler=sampler,
        tau_mult=tau_mult,
        recentre=recentre,
    )
    mask = make_mask(key_mask, k)
    if fallback_gamma is not None and not fallback_gamma >= 0:
        raise ValueError(f"fallback_gamma must be a number of at least 0, got {fallback_gamma}")
    may_look = _may_look(q)
    if fallback_gamma is not None and not settings.exact and not may_look:
        raise ValueError("fallback_gamma looks at values, which torch.compile cannot trace; set it to None")
    with torch.no_grad():
        radius, largest = (x.unflatten(1, (k.shape[1], -1)).amax(dim=-1) for x in query_radii(q))
    noise = make_noise(k, settings, generator, noise, seed)
    coreset = dispatch.run("coreset_attention", backend, k, v, radius, mask, noise, step="compress", settings=settings)
    out = dispatch.run("coreset_attention", backend, q, coreset, step="attend", beta=beta)
    if settings.exact or not may_look:
        return out
    # an outlier among the queries does not move the temperature, but its own row is what a coreset would lose
    gamma = coreset.gamma * torch.where(radius > 0, largest / radius, 1)
    return _fall_back(out, (q, k, v), mask, gamma, fallback_gamma, beta)


def compress_kv(
    k: Tensor,
    v: Tensor,
    *,
    rank: int,
    bins: int = 1,
    query_radius: float | Tensor | None = None,
    scale: float | None = None,
    grid: tuple[int, int] | None = None,
    layout: str | None = None,
    key_mask: Tensor | None = None,
    sampler: str = "gumbel",
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
    seed: int | Tensor = 0,
    tau_mult: float = 1.0,
    recentre: bool = True,
    backend: str | None = None,
) -> Coreset:
    """Choose ``rank`` keys and weigh the values, for :func:`weighted_attention` (CompressKV, alg. 2).

    Args:
        k: ``(b, heads, n, d)``, any float dtype, ``n >= 1``.
        v: ``(b, heads, n, dv)``.
        query_radius: largest length of the queries that will come, a number or ``(b, heads)``; that of the keys less
            their mean by default.
        rank, bins, scale, grid, layout, key_mask, sampler, generator, noise, seed, tau_mult, recentre, backend: as in
            :func:`wildcat_attention`.

    Returns:
        The coreset, float32 at least; all keys, with weights of 1, where ``rank`` holds them.

    Raises:
        ValueError: a shape, dtype or number that does not fit the others, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.
    """
    check_keys(k, v)
    beta = scale_or_default(k, scale)
    settings = make_settings(
        k.shape[2],
        beta,
        rank=rank,
        bins=bins,
        grid=grid,
        layout=layout,
        sampler=sampler,
        tau_mult=tau_mult,
        recentre=recentre,
    )
    mask, noise = make_mask(key_mask, k), make_noise(k, settings, generator, noise, seed)
    radius = query_radius
    if radius is not None:
        if not isinstance(radius, Tensor) and not 0 <= radius < math.inf:
            raise ValueError(f"query_radius must be a length, got {radius}")
        radius = torch.as_tensor(radius, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
        if radius.ndim and radius.shape != k.shape[:2]:
            raise ValueError(f"query_radius must be a number or (b, heads), got {tuple(radius.shape)}")
        radius = radius.expand(k.shape[:2])
    found = dispatch.run("coreset_attention", backend, k, v, radius, mask, noise, step="compress", settings=settings)
    own = Coreset(*found[: len(Coreset._fields)])
    values = own.values + own.weights[..., None] * found.value_mean
    return own._replace(keys=own.keys + found.key_mean, values=values)


def weighted_attention(
    q: Tensor, coreset: Coreset, *, scale: float | None = None, backend: str | None = None
) -> Tensor:
    """Attention to a weighted coreset (WtdAttn, alg. 3).

    Args:
        q: ``(b, m_heads, m, d)``, any float dtype; ``m_heads`` is a multiple of the coreset's heads.
        coreset: of :func:`compress_kv`.
        scale: factor of the logits, the one that the keys were compressed for; ``1 / sqrt(d)`` by default.
        backend: as in :func:`wildcat_attention`.

    Returns:
        ``(b, m_heads, m, dv)``, in the dtype of ``q``; within the range of the values of each channel.

    Raises:
        ValueError: a shape, dtype or number that does not fit the others, or an unknown backend.
        KernelUnavailable: the backend that was asked for cannot run this call.
    """
    check_queries(q, coreset.keys)
    beta = scale_or_default(coreset.keys, scale)
    # any number does: it is taken off and added back
    mean = ((coreset.lower + coreset.upper) / 2)[..., None, :]
    key_mean = coreset.keys.detach().mean(dim=2, keepdim=True)
    values = coreset.values - coreset.weights[..., None] * mean
    own = Compressed(*coreset, key_mean, mean)._replace(keys=coreset.keys - key_mean, values=values)
    return dispatch.run("coreset_attention", backend, q, own, step="attend", beta=beta)


def compress_cache(
    keys: Tensor, values: Tensor, *, rank: int, protect: tuple[int, int] = (32, 32), **options: Any
) -> Coreset:
    """Compress a cache of keys and values, keeping its first and last tokens as they are.

    Args:
        keys: ``(b, heads, n, d)``, any float dtype, ``n >= 1``.
        values: ``(b, heads, n, dv)``.
        rank: size of the result, the protected tokens included.
        protect: how many first and last tokens to keep, with a weight of 1.
        options: of :func:`compress_kv`, for the tokens between; no grid.

    Returns:
        The coreset; protected tokens come first, then the chosen ones. All tokens where ``rank`` holds them.

    Raises:
        ValueError: more protected tokens than ``rank`` has room for, or what :func:`compress_kv` raises.
    """
    check_keys(keys, values)
    if len(protect) != 2 or min(protect) < 0:
        raise ValueError(f"protect must be two numbers of tokens, 0 at least, got {tuple(protect)}")
    if options.get("grid") is not None:
        raise ValueError("a cache is a sequence of tokens; grid must be None")
    n, (first, last) = keys.shape[2], protect
    if n <= rank or not first + last:
        return compress_kv(keys, values, rank=rank, **options)
    if first + last >= rank:
        raise ValueError(f"rank must be more than the {first + last} protected tokens, got {rank}")
    mask = make_mask(options.pop("key_mask", None), keys)
    kept = torch.cat([torch.arange(first), torch.arange(n - last, n)]).to(keys.device)
    between = slice(first, n - last)
    part = None if mask is None else mask[:, :, between]
    chosen = compress_kv(keys[:, :, between], values[:, :, between], rank=rank - first - last, key_mask=part, **options)
    dtype = chosen.values.dtype
    there = torch.ones(1, 1, n, dtype=torch.bool, device=keys.device) if mask is None else mask
    # what is not there may be anything, NaN included
    keys, values = (x.masked_fill(~there[..., None], 0) for x in (keys, values))
    own = there[:, :, kept].expand(*keys.shape[:2], len(kept))
    pivots = torch.cat([kept.where(own, -1), (chosen.pivots + first).where(chosen.pivots >= 0, -1)], dim=2)
    lower, upper = torch_impl.value_range(values.to(dtype).detach(), mask)
    # a slot that is empty must not have the largest logit
    keys = torch_impl.take(keys, torch_impl.filled(pivots, pivots >= 0))
    return chosen._replace(
        keys=keys.to(chosen.keys.dtype),
        values=torch.cat([values[:, :, kept].to(dtype), chosen.values], dim=2),
        weights=torch.cat([own.to(dtype), chosen.weights], dim=2),
        lower=lower,
        upper=upper,
        pivots=pivots,
    )


def noise_shape(
    n: int,
    *,
    rank: int,
    bins: int = 1,
    grid: tuple[int, int] | None = None,
    layout: str | None = None,
    sampler: str = "gumbel",
) -> tuple[int, int, int]:
    """Shape of the noise of one head, (bins, keys per bin, places of the largest bin, or 1 for "cdf").

    Args:
        n: number of keys.
        rank, bins, grid, layout, sampler: as in :func:`wildcat_attention`.

    Raises:
        ValueError: one that does not fit.
    """
    return make_settings(n, rank=rank, bins=bins, grid=grid, layout=layout, sampler=sampler).noise_shape


def _may_look(q: Tensor) -> bool:
    """Whether values may be read: not while a graph is traced or captured."""
    if torch.compiler.is_compiling():
        return False
    return not (q.is_cuda and torch.cuda.is_current_stream_capturing())


def _fall_back(
    out: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    gamma: Tensor,
    limit: float | None,
    beta: float,
) -> Tensor:
    """``out`` with the heads whose gamma is too large computed exactly, or a warning that there are some."""
    if limit is None and ("gamma" in _warned or not _is_due()):
        return out
    bad = gamma > (GAMMA_WARNING if limit is None else limit)
    if not bad.any():
        return out
    if limit is None:
        _warn(float(gamma.max()))
        return out
    q, k, v = inputs
    group = q.shape[1] // k.shape[1]
    heads = (q.unflatten(1, (k.shape[1], group))[bad], k[bad][:, None], v[bad][:, None])
    with dispatch.no_autocast(q.device.type):
        found = torch_impl.exact(*heads, None if mask is None else mask[bad][:, None], beta)
    return out.unflatten(1, (k.shape[1], group)).index_put((bad,), found.to(out.dtype)).flatten(1, 2)


def _is_due() -> bool:
    """Whether to look for a warning: at the calls 1, 2, 4, 8, ..., as a look at values makes a GPU wait."""
    _calls["gamma"] += 1
    return _calls["gamma"].bit_count() == 1


def _warn(gamma: float) -> None:
    _warned.add("gamma")
    logger.warning(
        f"coreset attention: gamma = {gamma:.1f} (largest logit over the log of the number of keys) is above "
        f"{GAMMA_WARNING:.0f}, where a coreset is no better than a subset of the keys; fallback_gamma computes "
        "such heads exactly. Told once."
    )


def _steps(module: Any) -> Any:
    """The implementation as one callable: ``step="compress"`` or ``step="attend"``."""

    def run(*tensors: Any, step: str, **options: Any) -> Any:
        return getattr(module, step)(*tensors, **options)

    return run


dispatch.register(
    "coreset_attention",
    (
        dispatch.Backend(
            "triton",
            limits.run,
            limits.supports,
            "one kernel chooses and weighs the keys of every bin, one attends to them",
            limits.declines,
        ),
        dispatch.Backend(
            "torch", _steps(torch_impl), dispatch.always, "plain PyTorch, all bins side by side, attention by SDPA"
        ),
        dispatch.Backend("reference", _steps(reference), dispatch.always, "the definition, for checks"),
    ),
)
