"""The arguments of coreset attention: checked, and in the form that the implementations take."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.coreset_attention.bins import make_bins
from kernels.coreset_attention.noise import uniforms
from kernels.coreset_attention.pivots import SAMPLERS
from kernels.coreset_attention.torch_impl import Settings


def make_settings(
    n: int,
    beta: float = 1.0,
    *,
    rank: int,
    bins: int,
    grid: Sequence[int] | None,
    layout: str | None,
    sampler: str,
    tau_mult: float = 1.0,
    recentre: bool = True,
) -> Settings:
    """What the arguments of these names say, checked, for ``n`` keys."""
    _check_choice(rank, bins, sampler, tau_mult)
    made = make_bins(n, bins, grid, layout)
    return Settings(rank, made, beta, sampler, float(tau_mult), bool(recentre))


def _check_choice(rank: int, bins: int, sampler: str, tau_mult: float) -> None:
    for name, value in (("rank", rank), ("bins", bins)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    if sampler not in SAMPLERS:
        raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {sampler!r}")
    if not 0 < tau_mult < math.inf:
        raise ValueError(f"tau_mult must be a positive number, got {tau_mult}")


def scale_or_default(k: Tensor, scale: float | None) -> float:
    """The scale of the logits that is meant; ValueError for one that cannot be."""
    if scale is not None and not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")
    return 1 / math.sqrt(k.shape[-1]) if scale is None else float(scale)


def check_keys(k: Tensor, v: Tensor) -> None:
    """Raise ValueError for keys or values that cannot be."""
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4 or not x.shape[2] or not x.shape[3]:
            raise ValueError(f"{name} must be (b, heads, n, d) with n, d >= 1, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise ValueError(f"{name} must be of a float dtype, got {x.dtype}")
    if v.shape[:3] != k.shape[:3] or v.device != k.device:
        raise ValueError(
            f"v must have the batch, heads, tokens and device of k, {tuple(k.shape[:3])} on {k.device}, got "
            f"{tuple(v.shape[:3])} on {v.device}"
        )


def check_queries(q: Tensor, k: Tensor) -> None:
    """Raise ValueError for queries that do not fit the keys."""
    if q.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.device != k.device:
        raise ValueError(
            f"q must be (b, m_heads, m, d) with b={k.shape[0]} and d={k.shape[3]} on {k.device}, got {tuple(q.shape)} "
            f"on {q.device}"
        )
    if not q.is_floating_point():
        raise ValueError(f"q must be of a float dtype, got {q.dtype}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q must be a multiple of the {k.shape[1]} of k, got {q.shape[1]}")


def make_mask(key_mask: Tensor | None, k: Tensor) -> Tensor | None:
    """The mask for each head, (b, heads, n), or None."""
    if key_mask is None:
        return None
    if key_mask.dtype != torch.bool or key_mask.shape not in ((k.shape[0], k.shape[2]), k.shape[:3]):
        raise ValueError(
            f"key_mask must be a bool tensor (b, n) or (b, heads, n) of {tuple(k.shape[:3])}, got "
            f"{tuple(key_mask.shape)} of {key_mask.dtype}"
        )
    mask = key_mask if key_mask.ndim == 3 else key_mask[:, None]
    return mask.to(k.device).expand(k.shape[:3])


def make_noise(
    k: Tensor, settings: Settings, generator: torch.Generator | None, noise: Tensor | None, seed: int | Tensor
) -> Tensor | None:
    """Uniforms (heads or 1, bins, slots, places), or None where nothing is drawn."""
    _check_chance(generator, noise, seed)
    shape = settings.noise_shape
    if noise is None:
        if settings.exact or settings.sampler == "greedy":
            return None
        full = (k.shape[1], *shape)
        if generator is None:
            return uniforms(full, seed, k.device)
        return torch.rand(full, generator=generator, device=generator.device).to(k.device)
    if noise.shape not in (shape, (k.shape[1], *shape)) or not noise.is_floating_point():
        raise ValueError(
            f"noise must be uniforms of shape {shape}, or that for each of the {k.shape[1]} heads, got "
            f"{tuple(noise.shape)} of {noise.dtype}"
        )
    if settings.exact or settings.sampler == "greedy":
        return None
    return (noise if noise.ndim == 4 else noise[None]).to(k.device)


def _check_chance(generator: torch.Generator | None, noise: Tensor | None, seed: int | Tensor) -> None:
    if generator is not None and noise is not None:
        raise ValueError("noise and generator are two sources of chance; give one of them")
    if isinstance(seed, Tensor):
        whole = seed.ndim == 0 and not seed.is_floating_point() and not seed.is_complex() and seed.dtype != torch.bool
    else:
        whole = isinstance(seed, int) and not isinstance(seed, bool)
    if not whole:
        raise ValueError(f"seed must be a whole number or an integer tensor without dimensions, got {seed!r}")
