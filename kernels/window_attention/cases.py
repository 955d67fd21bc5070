"""Shapes, inputs, costs and tolerances of window attention, for tests, benchmarks and the check on a GPU."""

from dataclasses import dataclass

import torch
from torch import Tensor

# largest relative error (Frobenius norm) of outputs and gradients against float64
TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case:
    """One shape: ``(batch, height, width)`` pixels, ``heads`` of size ``d``, factors of ``rank`` (0 for none)."""

    name: str
    batch: int
    height: int
    width: int
    heads: int
    d: int
    window: int
    rank: int

    @property
    def tokens(self) -> int:
        """Pixels after the image is continued to whole windows."""
        rows, columns = (-(-side // self.window) for side in (self.height, self.width))
        return self.batch * rows * columns * self.window**2

    @property
    def pairs(self) -> int:
        """Logits: query and key of one window and head."""
        return self.tokens * self.window**2 * self.heads


# small enough for float64 and gradients; the name says what is special
SMALL = (
    Case("whole windows", 2, 8, 12, 2, 8, 4, 4),
    Case("odd image", 2, 17, 23, 2, 6, 8, 3),
    Case("one pixel", 1, 1, 1, 2, 4, 4, 2),
    Case("one row", 1, 1, 9, 1, 4, 4, 2),
    Case("smaller than half a window", 1, 3, 5, 3, 4, 16, 5),
    Case("window of one pixel", 1, 3, 2, 2, 4, 1, 2),
    Case("published base head", 1, 19, 16, 6, 30, 16, 18),
    Case("no position", 1, 9, 8, 2, 8, 4, 0),
    Case("empty batch", 0, 8, 8, 2, 4, 4, 2),
)

# layers of the published networks, on a 640 x 360 image
PUBLISHED = (
    Case("SST-L w16", 1, 360, 640, 6, 32, 16, 16),
    Case("SST-L w32", 1, 360, 640, 6, 32, 32, 16),
    Case("SST-L+ w48", 1, 360, 640, 6, 32, 48, 16),
    Case("SST-L w64", 1, 360, 640, 6, 32, 64, 32),
    Case("SST-L+ w96", 1, 360, 640, 6, 32, 96, 32),
    Case("SST-light w64", 1, 360, 640, 3, 16, 64, 24),
)


def make_inputs(
    case: Case, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> dict[str, Tensor | int | None]:
    """Arguments of ``window_attention``: normal ``qkv`` and factors, drawn in float32 by a seeded generator."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    qkv = draw(case.batch, case.height, case.width, 3 * case.heads * case.d)
    factors = (draw(case.heads, case.window**2, case.rank) if case.rank else None for _ in range(2))
    return {
        "qkv": qkv,
        **dict(zip(("q_pos", "k_pos"), factors, strict=True)),
        "heads": case.heads,
        "window": case.window,
    }


def flops(case: Case, *, backward: bool = False) -> int:
    """Multiplications and additions of the definition; the backward pass has five products where forward has two."""
    forward = case.pairs * (2 * (case.d + case.rank) + 2 * case.d)
    return case.pairs * (6 * (case.d + case.rank) + 4 * case.d) if backward else forward


def bytes_moved(case: Case, *, itemsize: int) -> int:
    """Least traffic of the forward pass: every input read and every output written once."""
    image = 4 * case.batch * case.height * case.width * case.heads * case.d
    return (image + 2 * case.heads * case.window**2 * case.rank) * itemsize
