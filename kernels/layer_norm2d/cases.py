"""Shapes, inputs, costs and tolerances of the layer norm of pixels, for tests, benchmarks and the check on a GPU."""

import torch
from torch import Tensor

# largest relative error (Frobenius norm) of outputs and gradients against float64
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}

# (b, c, h, w)
SMALL = ((2, 8, 5, 7), (1, 3, 3, 3), (1, 48, 1, 1), (3, 5, 17, 23), (0, 4, 2, 2))
PUBLISHED = ((1, 48, 360, 640), (1, 180, 360, 640), (1, 192, 360, 640), (8, 48, 64, 64))


def make_inputs(
    shape: tuple[int, int, int, int],
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    channels_last: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias: normal, away from mean 0 and variance 1, drawn in float32 by a seeded generator."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 3 + 2
    weight, bias = (torch.randn(shape[1], generator=generator) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x
    return x.to(device, dtype), (weight + 1).to(device, dtype), bias.to(device, dtype)


def bytes_moved(shape: tuple[int, int, int, int], *, itemsize: int) -> int:
    """Least traffic of the forward pass: the image read and written once."""
    b, c, h, w = shape
    return 2 * b * c * h * w * itemsize
