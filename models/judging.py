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


class Judged:
    """All there is to see of one picture once it is restored; what nobody asks for is not computed.

    Args:
        batch: ``lq``, and where there is one ``gt``, ``(1, c, h, w)``, and the ``name``.
        output: the network's result.
        resize: (uint8 (h, w, c), scale) -> uint8, for the bicubic baseline.

    Attributes:
        name: of the picture.
        output: the network's result.
    """

    def __init__(self, batch: Mapping[str, Any], output: Picture, options: Options, *, resize: Resize) -> None:
        self.name: str = batch["name"][0]
        self.output = output
        self._batch, self._resize = batch, resize
        self._baseline, self._scale = options.val.baseline, options.scale

    @cached_property
    def input(self) -> Picture:
        """What the network was given."""
        return Picture(self._batch["lq"])

    @cached_property
    def gt(self) -> Picture | None:
        """The ground truth, or None."""
        return Picture(self._batch["gt"]) if "gt" in self._batch else None

    @cached_property
    def baseline(self) -> Picture | None:
        """What ``val.baseline`` makes of the input, or None."""
        if self._baseline is None:
            return None
        if self._baseline == "stretch":
            return Picture(stretch(self._batch["lq"]))
        if self._baseline == "input" or self._scale == 1:
            return self.input
        enlarged = self._resize(self.input.rounded, self._scale)
        return Picture(torch.from_numpy(enlarged).permute(2, 0, 1).double() / PEAK)


def score(place: str, judged: Judged, metrics: Mapping[str, MetricOptions]) -> Row:
    """What the metrics say of a result, and of the baseline where there is one.

    Args:
        place: names the picture in messages.
        judged: a picture with its ground truth.

    Raises:
        UserError: a metric cannot be computed for the picture.
    """
    pictures = [picture for picture in (judged.output, judged.baseline) if picture is not None]
    scores: list[dict[str, float]] = [{}, {}]
    for label, metric in metrics.items():
        for own, picture in zip(scores, pictures, strict=False):
            try:
                own[label] = _value(metric, picture, judged.gt)
            except ValueError as error:
                raise UserError(f"val.metrics.{label} cannot be computed for {place}: {error}") from error
    return judged.name, scores[0], scores[1]


def _value(metric: MetricOptions, picture: Picture, gt: Picture) -> float:
    function, arguments = METRICS.get(metric.type), metric.arguments()
    if metric.quantize:
        return float(function(picture.rounded, gt.rounded, **arguments))
    # so that a nearly black picture is not taken for one of the range 0..1
    known = {"data_range": PEAK} if "data_range" in signature(function).parameters else {}
    return float(function(picture.exact, gt.exact, **known, **arguments))


def better_of(metric: MetricOptions) -> str:
    """ "higher" or "lower": what the options say, or else what the metric says of itself."""
    return metric.better or getattr(METRICS.get(metric.type), "better", "higher")
