"""Shapes, inputs, costs and tolerances of the deformable convolution, for tests, benchmarks and the check on a GPU."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# largest relative error (Frobenius norm) of outputs and gradients against float64
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


@dataclass(frozen=True)
class Case:
    """``(batch, channels, height, width)``, the clamp, and the standard deviation of the offsets in pixels."""

    name: str
    batch: int
    channels: int
    height: int
    width: int
    clamp: tuple[float, float] | None = (-3.0, 3.0)
    spread: float = 2.0


SMALL = (
    Case("two odd maps", 2, 5, 7, 9),
    Case("far beyond the edges", 1, 4, 9, 7, None, 20.0),
    Case("one side only", 1, 3, 12, 10, (2.5, 60.0), 4.0),
    Case("clamped to a number", 1, 3, 6, 5, (-1.0, -1.0)),
    Case("one pixel", 1, 3, 1, 1),
    Case("one row", 1, 2, 1, 33),
    Case("one column", 1, 2, 33, 1),
    Case("one channel", 2, 1, 8, 8),
    Case("several shares", 1, 6, 70, 260),
    Case("several shares without a clamp", 1, 6, 140, 130, None),
    Case("empty batch", 0, 3, 5, 4),
)

# the embeddings of the published networks at 256 x 256
PUBLISHED = (
    Case("V1-B encoder 1", 1, 24, 256, 256),
    Case("V1-B encoder 2", 1, 48, 128, 128),
    Case("V1-B encoder 3", 1, 72, 64, 64),
    Case("V1-B latent", 1, 96, 32, 32),
)


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Any]:
    """Arguments of ``deform_depthwise_conv2d``: normal, drawn in float32 by a seeded generator; offsets stay wide."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    b, c, h, w = case.batch, case.channels, case.height, case.width
    return {
        "x": draw(b, c, h, w).to(dtype),
        "offset": (case.spread * draw(b, 18, h, w)).to(torch.promote_types(dtype, torch.float32)),
        "weight": draw(c, 1, 3, 3).to(dtype),
        "clamp": case.clamp,
    }


def flops(case: Case) -> int:
    """Multiplications and additions of the forward pass: four corners and a tap, nine times for each output."""
    return 90 * case.batch * case.channels * case.height * case.width


def bytes_moved(case: Case, *, itemsize: int) -> int:
    """Least traffic of the forward pass: x and offsets read once, and the output written once."""
    return (2 * case.channels + 18) * case.batch * case.height * case.width * itemsize
