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
    # whole planes are turned much faster than pixels of three samples
    both_done = _resize_rows(np.moveaxis(rows_done, 0, -1), float(scale))
    return np.ascontiguousarray(np.moveaxis(both_done, -1, 0))


def _resize_rows(image: np.ndarray, scale: float) -> np.ndarray:
    """(n, ...) -> (ceil(n * scale), ...)"""
    flat = np.ascontiguousarray(image).reshape(image.shape[0], -1)
    indices, weights = _taps(image.shape[0], scale)
    result = np.empty((len(indices), flat.shape[1]), image.dtype)
    step = max(1, _BLOCK_VALUES // flat.shape[1])
    reduce = _reduce_evenly if round(1 / scale) > 1 and _is_whole(1 / scale) else _reduce
    for start in range(0, len(indices), step):
        total = reduce(flat, indices[start : start + step], weights[start : start + step], round(1 / scale))
        result[start : start + step] = _to_dtype(total, image.dtype)
    return result.reshape(-1, *image.shape[1:])


def _reduce(flat: np.ndarray, rows: np.ndarray, factors: np.ndarray, _: int) -> np.ndarray:
    """Weighted sums of rows, (outputs, m) in float64, tap after tap."""
    low = rows.min()
    source = flat[low : rows.max() + 1].astype(np.float64)
    total = source[rows[:, 0] - low] * factors[:, :1]
    for tap in range(1, rows.shape[1]):
        total += source[rows[:, tap] - low] * factors[:, tap : tap + 1]
    return total


def _reduce_evenly(flat: np.ndarray, rows: np.ndarray, factors: np.ndarray, stride: int) -> np.ndarray:
    """The same sums where all outputs have the same weights and taps move on by a whole number of rows.

    Sums of 8-bit samples that float32 holds exactly (factors 2 and 4) are taken in it: no order of them can differ.
    """
    outputs = len(rows)
    exact = flat.dtype == np.uint8 and _is_exact(tuple(factors[0].tolist()))
    # every row between the first tap and the last one, mirrored at the borders as the taps are
    between = np.concatenate([rows[:-1, :stride].ravel(), rows[-1]])
    source = flat[between].astype(np.float32 if exact else np.float64)
    span = stride * (outputs - 1) + 1
    total = source[:span:stride] * factors[0, 0].astype(source.dtype)
    product = np.empty_like(total)
    for tap in np.flatnonzero(factors[0])[1:]:
        total += np.multiply(source[tap : tap + span : stride], factors[0, tap].astype(source.dtype), out=product)
    return total


def _to_dtype(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if np.issubdtype(dtype, np.floating):
        return values
    # half up, where numpy's own rounding goes to the even neighbour; casting cuts off what is behind the point
    values += 0.5
    np.maximum(values, 0, out=values)
    return np.minimum(values, np.iinfo(dtype).max, out=values).astype(dtype)


def _is_whole(factor: float) -> bool:
    return abs(factor - round(factor)) < 1e-9 * factor


@functools.lru_cache(maxsize=256)
def _is_exact(weights: tuple[float, ...]) -> bool:
    """True when float32 holds every partial sum of 8-bit samples with these weights exactly."""
    for bits in range(1, 24):
        if all((weight * 2**bits).is_integer() for weight in weights):
            return (255 * sum(map(abs, weights)) + 1) * 2**bits <= 1 << 24
    return False


@functools.lru_cache(maxsize=256)
def _taps(length: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Source rows and weights, both (outputs, taps), counted from 0; outer taps without any weight are left out."""
    factor = 1 / scale
    if _is_whole(factor):
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
    used = np.flatnonzero(np.any(weights != 0, axis=0))
    return indices[:, used[0] : used[-1] + 1], weights[:, used[0] : used[-1] + 1]


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = 1.5 * x**3 - 2.5 * x**2 + 1
    far = -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2
    return np.where(x <= 1, near, np.where(x <= 2, far, 0.0))
