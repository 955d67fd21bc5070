"""From a good picture to a degraded one: bicubic reduction as MATLAB or as Pillow does it, and haze."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from data.pillow import pillow_bicubic
from data.resize import imresize

Kernel = Literal["matlab", "pillow"]
# the taps of a low-resolution pixel reach one and a half such pixels beyond it
CONTEXT = 2
# as the RESIDE data sets were made: airlight in 0..1, and beta for depths up to 1
AIRLIGHT, BETA = (0.7, 1.0), (0.6, 1.8)


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
    low = [max(0, start - CONTEXT) for start in place]
    high = [start + length + CONTEXT for start, length in zip(place, crop, strict=True)]
    around = image[low[0] * scale : high[0] * scale, low[1] * scale : high[1] * scale]
    top, left = place[0] - low[0], place[1] - low[1]
    return bicubic_downsample(around, scale, kernel=kernel)[top : top + crop[0], left : left + crop[1]]


def draw_haze(
    rng: np.random.Generator, *, airlight: Sequence[float] = AIRLIGHT, beta: Sequence[float] = BETA
) -> tuple[float, float]:
    """Airlight and scattering coefficient, each drawn uniformly from its range ``(low, high)``."""
    return float(rng.uniform(*airlight)), float(rng.uniform(*beta))


def transmission(depth: np.ndarray, beta: float) -> np.ndarray:
    """``exp(-beta * depth)``: the part of the light that reaches the camera; shape and floating dtype are kept."""
    return np.exp(-np.asarray(depth) * depth.dtype.type(beta))


def add_haze(image: np.ndarray, transmission: np.ndarray, *, airlight: float) -> np.ndarray:
    """The atmospheric scattering model, ``image * t + airlight * (1 - t)``.

    Args:
        image: ``(h, w, c)``; uint8 and uint16 come back rounded, as a file would hold them, float as it is.
        transmission: ``(h, w)``, the ``t`` in 0..1.
        airlight: the colour of dense haze, grey, in 0..1 (of the range of the dtype).

    Raises:
        ValueError: the sizes differ, or the airlight is not in 0..1.
    """
    if image.shape[:2] != transmission.shape:
        raise ValueError(f"a picture of {image.shape[:2]} and a transmission of {transmission.shape} do not fit")
    if not 0 <= airlight <= 1:
        raise ValueError(f"airlight must be in 0..1, got {airlight}")
    t = transmission[..., None]
    if np.issubdtype(image.dtype, np.floating):
        return (image * t + airlight * (1 - t)).astype(image.dtype)
    hazy = image * t + airlight * np.iinfo(image.dtype).max * (1 - t)
    return np.floor(hazy + 0.5).astype(image.dtype)
