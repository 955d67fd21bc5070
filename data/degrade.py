"""From a good picture to a degraded one: bicubic reduction as MATLAB or as Pillow does it."""

from typing import Literal

import numpy as np

from data.pillow import pillow_bicubic
from data.resize import imresize

Kernel = Literal["matlab", "pillow"]
# the taps of a low-resolution pixel reach one and a half such pixels beyond it
_MARGIN = 2


def mod_crop(image: np.ndarray, scale: int) -> np.ndarray:
    """``(h, w, ...)`` -> a view without the bottom rows and right columns that ``scale`` does not divide."""
    return image[: image.shape[0] // scale * scale, : image.shape[1] // scale * scale]


def bicubic_downsample(image: np.ndarray, scale: int, *, kernel: Kernel = "matlab") -> np.ndarray:
    """``(h, w[, c])`` -> ``(h // scale, w // scale[, c])`` after :func:`mod_crop`; the dtype is kept.

    Raises:
        ValueError: ``kernel`` is ``"pillow"``, which reduces 8-bit pictures only, and the picture is another one.
    """
    image = mod_crop(image, scale)
    if scale == 1:
        return image
    if kernel == "pillow":
        return pillow_bicubic(image, (image.shape[0] // scale, image.shape[1] // scale))
    return imresize(image, 1 / scale)


def bicubic_downsample_crop(
    image: np.ndarray, scale: int, place: tuple[int, int], crop: tuple[int, int], *, kernel: Kernel = "matlab"
) -> np.ndarray:
    """A crop of ``bicubic_downsample(image, scale)``, to the last bit, at the cost of the crop alone.

    Args:
        image: ``(h, w[, c])``, the whole good picture.
        scale: factor of reduction.
        place: top and left in low-resolution pixels.
        crop: height and width in low-resolution pixels.
        kernel: as there.
    """
    image = mod_crop(image, scale)
    low = [max(0, start - _MARGIN) for start in place]
    high = [start + length + _MARGIN for start, length in zip(place, crop, strict=True)]
    around = image[low[0] * scale : high[0] * scale, low[1] * scale : high[1] * scale]
    top, left = place[0] - low[0], place[1] - low[1]
    return bicubic_downsample(around, scale, kernel=kernel)[top : top + crop[0], left : left + crop[1]]
