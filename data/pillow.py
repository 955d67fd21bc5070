"""Bicubic reduction of 8-bit pictures that equals Pillow's ``Image.resize(size, BICUBIC)`` to the last bit.

Keys' cubic kernel with a = -0.5, widened by the factor when the picture shrinks (antialiasing), cut off and normalised
at the borders, columns before rows, weights in fixed point with 22 bits, 8 bits between the two passes. Pillow itself
is not needed.
"""

import functools

import numpy as np

_BITS = 22


def pillow_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize a picture.

    Args:
        image: ``(h, w)`` or ``(h, w, c)``, uint8.
        size: height and width of the result, each at least 1.

    Returns:
        ``(*size[, c])``, uint8.

    Raises:
        ValueError: another dtype or number of axes, an empty picture, or a side below 1.
    """
    image = np.asarray(image)
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or not image.size:
        raise ValueError(f"image must be uint8, (h, w) or (h, w, c), and not empty, got {image.dtype} {image.shape}")
    if min(size) < 1:
        raise ValueError(f"the sides of the result must be at least 1, got {tuple(size)}")
    wide = _resize_rows(image.swapaxes(0, 1), size[1]).swapaxes(0, 1)
    return np.ascontiguousarray(_resize_rows(wide, size[0]))


def _resize_rows(image: np.ndarray, outputs: int) -> np.ndarray:
    """(n, ...) -> (outputs, ...)"""
    if image.shape[0] == outputs:
        return image
    flat = np.ascontiguousarray(image).reshape(image.shape[0], -1)
    rows, weights = _taps(image.shape[0], outputs)
    # 255 times the largest sum of weights stays below 2**31, as in Pillow
    total = np.full((outputs, flat.shape[1]), 1 << (_BITS - 1), np.int32)
    for tap in range(rows.shape[1]):
        total += flat[rows[:, tap]] * weights[:, tap, None]
    return np.clip(total >> _BITS, 0, 255).astype(np.uint8).reshape(outputs, *image.shape[1:])


@functools.lru_cache(maxsize=256)
def _taps(length: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Source rows and weights in fixed point, both (outputs, taps)."""
    scale = length / outputs
    stretch = max(scale, 1.0)
    centres = (np.arange(outputs) + 0.5) * scale
    first = np.maximum(np.trunc(centres - 2 * stretch + 0.5), 0).astype(np.int64)
    end = np.minimum(np.trunc(centres + 2 * stretch + 0.5), length).astype(np.int64)
    rows = first[:, None] + np.arange((end - first).max())
    weights = _cubic((rows - centres[:, None] + 0.5) * (1 / stretch))
    weights[rows >= end[:, None]] = 0
    # summed one after the other, since another order may round otherwise
    weights /= np.cumsum(weights, axis=1)[:, -1:]
    fixed = np.trunc(weights * (1 << _BITS) + np.where(weights < 0, -0.5, 0.5)).astype(np.int32)
    return np.minimum(rows, length - 1), fixed


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
