"""Bicubic resizing that equals MATLAB's ``imresize``.

Keys' cubic kernel with a = -0.5, widened by the factor when the picture shrinks (antialiasing), borders mirrored with
the edge pixel included, rows before columns. Sums run in float64, tap by tap in a fixed order, so that the bits do not
depend on the machine or on the number of threads.

Factors 1/2, 1/3, 1/4 ... place their taps in exact arithmetic: every interior pixel then has the same weights to the
last bit, and a crop with a margin comes out as the same crop of the whole picture (``data.degrade`` relies on it).
"""

import functools
import math

import numpy as np

# outputs per step: a step's float64 working set stays in the cache
_BLOCK_VALUES = 1 << 16


def imresize(image: np.ndarray, scale: float) -> np.ndarray:
    """Resize both sides by ``scale``.

    Args:
        image: ``(h, w)`` or ``(h, w, c)``; uint8, uint16 or floating point of any range.
        scale: size of the output over size of the input, above 0.

    Returns:
        ``(ceil(h * scale), ceil(w * scale)[, c])`` in the dtype of ``image``. Integers are rounded half up and clipped
        after the rows and again after the columns; floating point is neither rounded nor clipped.

    Raises:
        ValueError: another dtype, another number of axes, an empty picture, or a scale that is not above 0.
    """
    image = np.asarray(image)
    if image.ndim not in (2, 3) or not image.size:
        raise ValueError(f"image must be (h, w) or (h, w, c) and not empty, got {image.shape}")
    if image.dtype not in (np.uint8, np.uint16) and not np.issubdtype(image.dtype, np.floating):
        raise ValueError(f"image must be uint8, uint16 or floating point, got {image.dtype}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale must be above 0, got {scale}")
    rows_done = _resize_rows(image, float(scale))
    both_done = _resize_rows(rows_done.swapaxes(0, 1), float(scale))
    return np.ascontiguousarray(both_done.swapaxes(0, 1))


def _resize_rows(image: np.ndarray, scale: float) -> np.ndarray:
    """(n, ...) -> (ceil(n * scale), ...)"""
    flat = np.ascontiguousarray(image).reshape(image.shape[0], -1)
    indices, weights = _taps(image.shape[0], scale)
    result = np.empty((len(indices), flat.shape[1]), image.dtype)
    step = max(1, _BLOCK_VALUES // flat.shape[1])
    for start in range(0, len(indices), step):
        rows, factors = indices[start : start + step], weights[start : start + step]
        low = rows.min()
        source = flat[low : rows.max() + 1].astype(np.float64)
        total = source[rows[:, 0] - low] * factors[:, :1]
        for tap in range(1, rows.shape[1]):
            total += source[rows[:, tap] - low] * factors[:, tap : tap + 1]
        result[start : start + step] = _to_dtype(total, image.dtype)
    return result.reshape(-1, *image.shape[1:])


def _to_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if np.issubdtype(dtype, np.floating):
        return values
    # half up, where numpy's own rounding goes to the even neighbour
    return np.clip(np.floor(values + 0.5), 0, np.iinfo(dtype).max)


@functools.lru_cache(maxsize=256)
def _taps(length: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Source rows and weights, both (outputs, taps), counted from 0; taps without any weight are left out."""
    factor = 1 / scale
    if abs(factor - round(factor)) < 1e-9 * factor:
        factor = float(round(factor))
        outputs = -(-length // int(factor))
    else:
        outputs = math.ceil(length * scale)
    shrink = min(scale, 1.0)
    width = 4 / shrink
    # MATLAB counts pixels from 1
    centres = np.arange(1, outputs + 1) * factor + 0.5 * (1 - factor)
    left = np.floor(centres - width / 2)
    positions = left[:, None] + np.arange(math.ceil(width) + 2)
    weights = shrink * _cubic(shrink * (centres[:, None] - positions))
    weights /= weights.sum(axis=1, keepdims=True)
    mirrored = np.concatenate([np.arange(length), np.arange(length)[::-1]])
    indices = mirrored[(positions.astype(np.int64) - 1) % (2 * length)]
    used = np.any(weights != 0, axis=0)
    return indices[:, used], weights[:, used]


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, near, np.where(x <= 2, far, 0.0))
