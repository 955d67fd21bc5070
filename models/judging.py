"""The score of one picture: the network's result and a baseline against the ground truth, rounded to 8 bit or not."""

from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.base import Base
from models.metrics import METRICS
from models.metrics.psnr_ssim import PEAK
from models.samples import to_uint8
from options.errors import UserError
from options.schema import MetricOptions, Options

# picture, scores of the result, scores of the baseline
Row = tuple[str, dict[str, float], dict[str, float]]
Resize = Callable[[np.ndarray, float], np.ndarray]


class Picture:
    """One picture, as both protocols see it.

    Args:
        image: RGB ``(1, c, h, w)`` or ``(c, h, w)``, any float dtype; what lies outside 0..1 is clamped.

    Attributes:
        rounded: ``(h, w, c)``, uint8, as it would be saved.

    Raises:
        ValueError: another shape, or a value that is NaN or infinite.
    """

    def __init__(self, image: Tensor) -> None:
        self.rounded = to_uint8(image)
        self._image = image

    @cached_property
    def exact(self) -> np.ndarray:
        """``(h, w, c)``, float64, 0..255, not rounded."""
        image = self._image[0] if self._image.dim() == 4 else self._image
        return image.detach().double().clamp(0, 1).mul(PEAK).permute(1, 2, 0).cpu().numpy()


def stretch(lq: Tensor) -> Tensor:
    """The contrast stretch that ``val.baseline: stretch`` judges, which knows nothing but the picture.

    In each channel of each picture the 1st percentile becomes 0 and the 99th becomes 1, linearly, and what lies beyond
    is clamped. Percentiles lie between neighbouring values in proportion (numpy's ``linear``). A channel whose two
    percentiles are equal, such as a constant one, stays as it is.

    Args:
        lq: ``(b, c, h, w)``, 0..1, any float dtype.

    Returns:
        ``(b, c, h, w)``, 0..1, in the dtype of ``lq``.
    """
    flat = lq.detach().cpu().flatten(2).double().numpy()
    low, high = np.percentile(flat, (1, 99), axis=2, keepdims=True)
    span = high - low
    wide = np.clip((flat - low) / np.where(span > 0, span, 1), 0, 1)
    return torch.from_numpy(np.where(span > 0, wide, flat)).reshape(lq.shape).to(lq)


def restored(place: str, model: Base, lq: Tensor) -> Picture:
    """The network's result.

    Raises:
        UserError: the network does not take the picture, or returns NaN; ``place`` names it.
    """
    try:
        return Picture(model.predict(lq))
    except ValueError as error:
        raise UserError(f"{place} cannot be restored: {error}") from error


def score(place: str, result: Picture, batch: Mapping[str, Any], options: Options, *, resize: Resize) -> Row:
    """What the metrics of ``val`` say of a result, and of the baseline where there is one.

    Args:
        place: names the picture in messages.
        batch: ``lq`` and ``gt`` ``(1, c, h, w)``, and the ``name``.
        resize: (uint8 (h, w, c), scale) -> uint8, for the bicubic baseline.

    Raises:
        UserError: a metric cannot be computed for the picture.
    """
    gt, kind = Picture(batch["gt"]), options.val.baseline
    pictures = [result] if kind is None else [result, _baseline(kind, batch["lq"], options.scale, resize)]
    scores: list[dict[str, float]] = [{}, {}]
    for label, metric in options.val.metrics.items():
        for own, picture in zip(scores, pictures, strict=False):
            try:
                own[label] = _value(metric, picture, gt)
            except ValueError as error:
                raise UserError(f"val.metrics.{label} cannot be computed for {place}: {error}") from error
    return batch["name"][0], scores[0], scores[1]


def _baseline(kind: str, lq: Tensor, scale: int, resize: Resize) -> Picture:
    if kind == "stretch":
        return Picture(stretch(lq))
    if kind == "input" or scale == 1:
        return Picture(lq)
    enlarged = resize(to_uint8(lq), scale)
    return Picture(torch.from_numpy(enlarged).permute(2, 0, 1).double() / PEAK)


def _value(metric: MetricOptions, picture: Picture, gt: Picture) -> float:
    function, arguments = METRICS.get(metric.type), metric.arguments()
    if metric.quantize:
        return float(function(picture.rounded, gt.rounded, **arguments))
    # so that a nearly black picture is not taken for one of the range 0..1
    known = {"data_range": PEAK} if "data_range" in signature(function).parameters else {}
    return float(function(picture.exact, gt.exact, **known, **arguments))
