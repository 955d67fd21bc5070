"""Uniform numbers that depend on a seed and their place alone: not on the batch, the device or earlier calls."""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def uniforms(shape: tuple[int, ...], seed: int | Tensor, device: torch.device) -> Tensor:
    """Numbers in (0, 1), odd multiples of 2^-24.

    Args:
        shape: any.
        seed: a number or an integer tensor without dimensions; its lowest 32 bits count.
        device: where to make them; the same bits everywhere.

    Returns:
        float32.
    """
    # the mask comes first: a Python number may have more than 64 bits
    seed = seed.to(torch.int64) if isinstance(seed, Tensor) else seed
    state = torch.as_tensor(seed & _MASK, dtype=torch.int64, device=device)
    state = _mix((state + _GOLDEN) & _MASK)
    for size in shape:
        places = torch.arange(1, size + 1, device=device) * _GOLDEN
        state = _mix((state[..., None] + places) & _MASK)
    return ((state >> 9).float() + 0.5) / 2**23


def gumbels(uniform: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers in (0, 1) -> draws of the standard Gumbel distribution, in ``dtype``"""
    info = torch.finfo(dtype)
    return -(-uniform.to(dtype).clamp(info.tiny, 1 - info.eps / 2).log()).log()


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32 bits, held in int64, that spreads every bit: two rounds of shift, xor and multiply."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)
