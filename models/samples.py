"""From what a network returns to the whole numbers that a file holds."""

import numpy as np
import torch
from torch import Tensor

_PIECE = 1 << 24


def to_uint8(image: Tensor) -> np.ndarray:
    """:func:`to_samples` of 8 bits."""
    return to_samples(image, np.uint8)


def to_samples(image: Tensor, dtype: type[np.unsignedinteger]) -> np.ndarray:
    """A picture as 8- or 16-bit samples: clamped to 0..1, times the largest one, rounded half to even.

    Args:
        image: RGB ``(c, h, w)`` or ``(1, c, h, w)``, 0..1, any float dtype.
        dtype: ``np.uint8`` or ``np.uint16``.

    Returns:
        ``(h, w, c)``.

    Raises:
        ValueError: another shape, or a value that is NaN or infinite, which would come out black or white.
    """
    if image.dim() == 4 and image.shape[0] == 1:
        image = image[0]
    if image.dim() != 3:
        raise ValueError(f"a picture must be (c, h, w) or (1, c, h, w), got {tuple(image.shape)}")
    image = image.detach()
    # the extremes need no memory, and NaN is both of them
    if image.numel() and not torch.stack(image.aminmax()).isfinite().all():
        broken = int((~torch.isfinite(image)).sum())
        raise ValueError(f"{broken} of {image.numel()} values of the picture are NaN or infinite")
    c, h, w = image.shape
    samples = np.empty((h, w, c), dtype)
    # piece by piece, as a copy of a large picture in float32 is memory that there may not be
    rows = max(1, _PIECE // max(1, c * w))
    for top in range(0, h, rows):
        piece = image[:, top : top + rows].float().clamp(0, 1).mul_(np.iinfo(dtype).max).round_()
        narrow = piece.to(torch.uint8 if dtype is np.uint8 else torch.int32)
        samples[top : top + rows] = narrow.permute(1, 2, 0).cpu().numpy()
    return samples
