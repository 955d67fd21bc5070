"""PSNR and SSIM of pictures with the range of 8 bit, rounded or not.

PSNR: peak 255, float64, over all channels. SSIM: Wang et al., "Image Quality Assessment: From Error Visibility to
Structural Similarity", IEEE TIP 2004, with a Gaussian window of 11 x 11 and sigma 1.5, K1 = 0.01, K2 = 0.03, only where
the window lies wholly in the picture, the mean over channels. Luma is that of BT.601, 16..235, not rounded.
Numerically BasicSR's values; the pictures are RGB here, and what BasicSR scores wrongly in silence is refused.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from options.registry import METRICS

WINDOW = 11
SIGMA = 1.5
PEAK = 255.0
LUMA = (65.481, 128.553, 24.966)

Metric = TypeVar("Metric", bound=Callable[..., float])


def _metric(better: str) -> Callable[[Metric], Metric]:
    """Register a metric whose ``better`` values are the "higher" or the "lower" ones."""

    def mark(function: Metric) -> Metric:
        function.better = better  # type: ignore[attr-defined]
        return METRICS.register(function)

    return mark


@_metric(better="higher")
def calculate_psnr(
    img: np.ndarray,
    img2: np.ndarray,
    crop_border: int = 0,
    *,
    input_order: str = "HWC",
    test_y_channel: bool = False,
    data_range: float | None = None,
) -> float:
    """Peak signal-to-noise ratio of two pictures.

    Args:
        img, img2: RGB ``(h, w, c)`` or grey ``(h, w)``; uint8, or any real dtype with the range 0..255.
        crop_border: pixels left out on each side.
        input_order: ``"HWC"``, or ``"CHW"`` for ``(c, h, w)``.
        test_y_channel: compare the luma of RGB pictures; grey ones are compared as they are.
        data_range: the value of white, 1 or 255 for example. None is 255, and refuses floats that look like 0..1.

    Returns:
        Decibels; ``inf`` for equal pictures.

    Raises:
        ValueError: shapes differ, values outside 0..255 or not finite, floats that look like 0..1, or a border that
            leaves nothing.
    """
    a, b = _prepare(img, img2, crop_border, input_order, test_y_channel, data_range)
    error = float(np.mean((a - b) ** 2))
    return float("inf") if error == 0 else float(10 * np.log10(PEAK**2 / error))


@_metric(better="higher")
def calculate_ssim(
    img: np.ndarray,
    img2: np.ndarray,
    crop_border: int = 0,
    *,
    input_order: str = "HWC",
    test_y_channel: bool = False,
    data_range: float | None = None,
) -> float:
    """Structural similarity of two pictures, the mean over places and channels.

    Args:
        img, img2: RGB ``(h, w, c)`` or grey ``(h, w)``; uint8, or any real dtype with the range 0..255.
        crop_border: pixels left out on each side.
        input_order: ``"HWC"``, or ``"CHW"`` for ``(c, h, w)``.
        test_y_channel: compare the luma of RGB pictures; grey ones are compared as they are.
        data_range: the value of white, 1 or 255 for example. None is 255, and refuses floats that look like 0..1.

    Returns:
        At most 1, which equal pictures reach.

    Raises:
        ValueError: as for :func:`calculate_psnr`, or less than 11 pixels on a side after the crop.
    """
    a, b = _prepare(img, img2, crop_border, input_order, test_y_channel, data_range)
    h, w = a.shape[:2]
    if min(h, w) < WINDOW:
        raise ValueError(f"SSIM needs {WINDOW} pixels a side, got {(h, w)} after a crop of {crop_border}")
    return float(np.mean([_ssim(a[..., i], b[..., i]) for i in range(a.shape[2])]))


def rgb_to_y(image: np.ndarray) -> np.ndarray:
    """Luma of BT.601: 16 for black, 235 for white, not rounded.

    Args:
        image: RGB ``(h, w, 3)``, 0..255, any real dtype.

    Returns:
        ``(h, w)``, float64.

    Raises:
        ValueError: not three channels in the last place.
    """
    if image.ndim != 3 or image.shape[2] != 3:
        raise ValueError(f"luma needs an RGB picture (h, w, 3), got {image.shape}")
    return image.astype(np.float64) @ (np.array(LUMA) / 255) + 16


def _prepare(
    img: np.ndarray, img2: np.ndarray, crop: int, order: str, luma: bool, white: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """Check both pictures and bring them to (h, w, c), float64, 0..255."""
    if white is not None and not 0 < white < float("inf"):
        raise ValueError(f"data_range must be above 0, got {white!r}")
    img, img2 = np.asarray(img), np.asarray(img2)
    if img.shape != img2.shape:
        raise ValueError(f"pictures must have the same shape, got {img.shape} and {img2.shape}")
    if img.ndim not in (2, 3):
        raise ValueError(f"a picture must be (h, w, c) or (h, w), got {img.shape}")
    if order not in ("HWC", "CHW"):
        raise ValueError(f"input_order must be HWC or CHW, got {order!r}")
    for name, image in (("img", img), ("img2", img2)):
        _refuse_values(name, image, white)
    if order == "CHW" and img.ndim == 3:
        img, img2 = img.transpose(1, 2, 0), img2.transpose(1, 2, 0)
    h, w = img.shape[:2]
    if crop < 0 or 2 * crop >= min(h, w):
        raise ValueError(f"crop_border must be 0..{(min(h, w) - 1) // 2} for a picture of {(h, w)}, got {crop}")
    window = (slice(crop, h - crop), slice(crop, w - crop))
    gain = PEAK / (white or PEAK)
    return _channels(img[window], luma, gain), _channels(img2[window], luma, gain)


def _refuse_values(name: str, image: np.ndarray, white: float | None) -> None:
    top = white or PEAK
    if image.dtype == np.uint8 and image.size and top >= PEAK:
        return
    if image.size == 0 or image.dtype.kind not in "uif":
        raise ValueError(f"{name} must hold real numbers 0..{top:g}, got {image.dtype} of shape {image.shape}")
    low, high = float(image.min()), float(image.max())
    # written so that NaN is refused too
    if not (low >= 0 and high <= top):
        raise ValueError(f"{name} must lie in 0..{top:g}, got {low:g}..{high:g}")
    if white is None and image.dtype.kind == "f" and 0 < high <= 1:
        raise ValueError(f"{name} looks like 0..1 (largest value {high:g}), which would score 48 dB too high; x 255 it")


def _channels(image: np.ndarray, luma: bool, gain: float) -> np.ndarray:
    """(h, w[, c]) -> (h, w, c), float64; c is 1 for luma"""
    image = image if gain == 1 else image * gain
    if image.ndim == 2:
        image = image[..., None]
    if luma and image.shape[2] != 1:
        return rgb_to_y(image)[..., None]
    return image.astype(np.float64)


def _ssim(a: np.ndarray, b: np.ndarray) -> float:
    """(h, w) twice, float64 -> mean of the similarity map"""
    c1, c2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2
    mean_a, mean_b = _blur(a), _blur(b)
    means = mean_a * mean_b
    squares = mean_a**2 + mean_b**2
    # the two variances are only ever needed as a sum, which saves one of five blurs
    variances = _blur(a**2 + b**2) - squares
    covariance = _blur(a * b) - means
    similarity = (2 * means + c1) * (2 * covariance + c2) / ((squares + c1) * (variances + c2))
    return float(similarity.mean())


def _blur(x: np.ndarray) -> np.ndarray:
    """(h, w) -> (h - 10, w - 10): the Gaussian, one axis after the other, where it fits"""
    taps = np.exp(-((np.arange(WINDOW) - WINDOW // 2) ** 2) / (2 * SIGMA**2))
    taps /= taps.sum()
    for _ in range(2):
        n = x.shape[0] - WINDOW + 1
        total = taps[WINDOW // 2] * x[WINDOW // 2 : WINDOW // 2 + n]
        for i in range(WINDOW // 2):
            # the window is symmetric: one product for two taps
            total += taps[i] * (x[i : i + n] + x[WINDOW - 1 - i : WINDOW - 1 - i + n])
        x = total.T
    return x
