"""Transparency of a picture whose colours a network restores."""

import numpy as np

from data.resize import imresize


def spread_colors(colors: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """Let the colours of what shows run on under what does not.

    What is stored under fully transparent pixels is often black, white or noise; a network that looks at it would draw
    it into the edge of what shows.

    Args:
        colors: ``(h, w, c)``, uint8 or uint16.
        alpha: ``(h, w, 1)``, in the same dtype; 0 is fully transparent.

    Returns:
        ``(h, w, c)``, in the same dtype; changed where ``alpha`` is 0, and as it was if it is 0 everywhere.
    """
    hidden = alpha == 0
    if not hidden.any() or hidden.all():
        return colors
    spread = _filled(colors.astype(np.float32), alpha.astype(np.float32))
    return np.where(hidden, np.floor(spread + 0.5).astype(colors.dtype), colors)


def enlarge_alpha(alpha: np.ndarray, scale: int) -> np.ndarray:
    """``(h, w, 1)`` -> ``(h * scale, w * scale, 1)`` by MATLAB's bicubic, in the same dtype (uint8 or uint16)."""
    if scale == 1:
        return alpha
    top = np.iinfo(alpha.dtype).max
    larger = imresize(alpha[..., 0].astype(np.float32), scale)
    return np.floor(larger.clip(0, top) + 0.5).astype(alpha.dtype)[..., None]


def _filled(colors: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Where the weight is 0: the mean, by weight, of the smallest square of 2, 4, 8 ... pixels that has one."""
    h, w = weight.shape[:2]
    if (weight > 0).all() or max(h, w) == 1:
        return colors
    even = ((0, h % 2), (0, w % 2), (0, 0))
    sums = _by_four(np.pad(weight, even))
    means = _by_four(np.pad(colors * weight, even)) / np.where(sums > 0, sums, 1)
    coarse = _filled(means, sums)
    return np.where(weight > 0, colors, coarse.repeat(2, axis=0).repeat(2, axis=1)[:h, :w])


def _by_four(values: np.ndarray) -> np.ndarray:
    h, w, c = values.shape
    return values.reshape(h // 2, 2, w // 2, 2, c).sum(axis=(1, 3))
