"""What the image datasets share: options, readers, random numbers, tensors, and the crop of a training sample."""

import functools
import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Dataset

from data.augment import draw_textured_crop
from data.backends import ImageReader, IoBackend, open_source
from data.cache import open_cache
from data.io import Alpha, Color, check_policies, convert_color, to_float
from data.pairs import Problems
from data.verify import MODES, Verify
from options.errors import OptionsError
from options.registry import nearest

Phase = Literal["train", "val", "test"]
Small = Literal["error", "pad"]
PHASES = get_args(Phase)
# keeps the random numbers of samples apart from those of the order
_SAMPLE_STREAM = 2

_ONLY_IN_TRAINING = (
    "mean and std are for training sets; metrics and saved pictures need values in 0..1. Remove them here; a network "
    "that wants normalised pictures must normalise its input and undo it at its output"
)
_NOT_ELSEWHERE = (
    "mean and std act in training only; validation, test and restoring hand the network pictures in 0..1 and expect "
    "such back"
)

logger = logging.getLogger("pellucid")


class ImageDataset(Dataset):
    """Base of the image datasets.

    Args:
        phase: ``"train"``, ``"val"`` or ``"test"``.
        scale: side of the GT over side of the LQ.
        seed: with epoch and index it fixes all randomness of a sample.
        name: what logs and messages call the set.
        io_backend: ``{type: disk | memory | lmdb}``, see :mod:`data.backends` and :mod:`data.cache`.
        color: ``"rgb"``, ``"gray"`` or ``"y"``, see :func:`data.io.convert_color`.
        alpha: ``"error"``, ``"drop"``, ``"white"`` or ``"black"``, see :func:`data.io.remove_alpha`.
        mean, std: in training both tensors become ``(x - mean) / std``; one number per channel. Refused elsewhere,
            where metrics and saved pictures need values in 0..1.
        verify: ``"headers"``, ``"full"`` or ``"off"``, see :mod:`data.verify`.
    """

    def __init__(
        self,
        *,
        phase: Phase,
        scale: int,
        seed: int,
        name: str,
        io_backend: IoBackend | None,
        color: Color,
        alpha: Alpha,
        mean: list[float] | None,
        std: list[float] | None,
        verify: Verify,
    ) -> None:
        self.name = name or type(self).__name__
        for key, value, known in (("phase", phase, PHASES), ("verify", verify, MODES)):
            if value not in known:
                raise OptionsError(f"{key}: {value} is not known{nearest(value, known)} ({', '.join(known)})")
        if not isinstance(scale, int) or scale < 1:
            raise OptionsError(f"scale: {scale} is not a whole number from 1")
        if seed < 0:
            raise OptionsError(f"seed: {seed} is below 0")
        check_policies(color, alpha)
        self.phase, self.scale, self.seed = phase, scale, seed
        self.color, self.alpha, self.verify = color, alpha, verify
        self.io_backend = _backend(io_backend)
        self.cache = open_cache(self.io_backend, f"{self.name} ({phase})")
        self.mean_std = _mean_std(mean, std, 3 if color == "rgb" else 1)
        if self.mean_std and phase != "train":
            raise OptionsError(f"{self.name} ({phase}): {_ONLY_IN_TRAINING}")
        if self.mean_std:
            logger.warning(f"{self.name}: {_NOT_ELSEWHERE}")
        self.problems = Problems(f"{self.name} ({phase})")

    @classmethod
    def check_arguments(cls, *, phase: Phase, scale: int, **arguments: Any) -> None:
        """Raise OptionsError for what is wrong whatever the pictures are; called before anything is opened."""
        if phase == "train" and "gt_size" in inspect.signature(cls).parameters:
            given = {key: arguments[key] for key in ("min_texture", "small") if key in arguments}
            Crop(arguments.get("gt_size"), scale, **given)

    def preload(self) -> None:
        """With the memory backend, read what fits into it now, so that workers forked later share it."""
        if self.cache is not None:
            self.cache.fill([functools.partial(reader.to_keep, name) for reader, name in self.readings()])

    def readings(self) -> list[tuple[ImageReader, str]]:
        """Every picture of the set, with the reader it comes from."""
        return []

    def _reader(self, dataroot: str) -> ImageReader:
        return ImageReader(open_source(dataroot, self.io_backend), self.alpha, cache=self.cache)

    def _rng(self, epoch: int, index: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, epoch, index, _SAMPLE_STREAM])

    def _tensor(self, image: np.ndarray) -> torch.Tensor:
        """(h, w, 1 or 3), uint8 or uint16, any strides -> float32 (c, h, w)"""
        planes = to_float(np.ascontiguousarray(image.transpose(2, 0, 1)))
        if self.color != "rgb":
            planes = convert_color(planes.transpose(1, 2, 0), self.color).transpose(2, 0, 1)
        elif planes.shape[0] == 1:
            planes = np.repeat(planes, 3, axis=0)
        if self.mean_std:
            mean, std = self.mean_std
            planes = (planes - mean) / std
        return torch.from_numpy(np.ascontiguousarray(planes, dtype=np.float32))


@dataclass(frozen=True)
class Crop:
    """How training samples are cut out of pictures.

    Attributes:
        gt_size: side of the GT crop in pixels.
        scale: side of the GT over side of the LQ; crops lie on its grid.
        min_texture: what :func:`data.augment.texture` of the GT crop should exceed (8 redraws); 0 is off.
        small: ``"error"`` refuses pictures smaller than the crop, ``"pad"`` continues them.
    """

    gt_size: int
    scale: int
    min_texture: float = 0.0
    small: Small = "error"

    def __post_init__(self) -> None:
        if not isinstance(self.gt_size, int) or self.gt_size < 1:
            raise OptionsError(f"gt_size: {self.gt_size} is not a whole number from 1; a train set needs it")
        if self.gt_size % self.scale:
            down = self.gt_size // self.scale * self.scale
            near = f"{down} or {down + self.scale}" if down else str(self.scale)
            raise OptionsError(f"gt_size: {self.gt_size} is not a multiple of scale {self.scale}; take {near}")
        if self.small not in ("error", "pad"):
            raise OptionsError(f"small: {self.small} is not known{nearest(self.small, ('error', 'pad'))} (error, pad)")
        if self.min_texture < 0:
            raise OptionsError(f"min_texture: {self.min_texture} is below 0")

    def draw(self, gt: np.ndarray, rng: np.random.Generator) -> tuple[int, int]:
        """Top and left of a crop in GT pixels, multiples of the scale."""
        return draw_textured_crop(gt, (self.gt_size, self.gt_size), self.scale, self.min_texture, rng)

    def problem(self, path: str, height: int, width: int) -> str | None:
        """Why a GT picture of this size cannot be used, or None."""
        if self.small == "pad" or min(height, width) >= self.gt_size:
            return None
        return f"{path} is {height}x{width}, smaller than gt_size {self.gt_size}; remove it or set small: pad"

    def enlarge(self, image: np.ndarray, scale: int) -> np.ndarray:
        """Continue a picture that is smaller than the crop, to the bottom and to the right.

        The mirror repeats the edge pixel, so that LQ and GT pixels stay above each other at any scale.

        Args:
            image: ``(h, w, c)``.
            scale: 1 for a GT picture, the scale for an LQ picture.
        """
        side = self.gt_size // scale
        lacking = [(0, max(0, side - length)) for length in image.shape[:2]]
        return np.pad(image, [*lacking, (0, 0)], mode="symmetric") if any(n for _, n in lacking) else image


def split_key(key: int | tuple[int, int]) -> tuple[int, int]:
    """``index`` or ``(epoch, index)`` -> ``(epoch, index)``; the epoch of a plain index is 0."""
    return (int(key[0]), int(key[1])) if isinstance(key, tuple | list) else (0, int(key))


def _backend(io_backend: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(io_backend, Mapping | None):
        raise OptionsError(f"io_backend: {io_backend!r} is not a section such as {{type: disk}}")
    return dict(io_backend or {})


def _mean_std(mean: Any, std: Any, channels: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Both as ``(channels, 1, 1)``, or None where they change nothing."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise OptionsError(f"{'std' if std is None else 'mean'} is missing: give both mean and std, or neither")
    for key, values in (("mean", mean), ("std", std)):
        if not isinstance(values, Sequence) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise OptionsError(f"{key}: {values!r} is not a list of numbers, one per channel")
        if len(values) != channels:
            raise OptionsError(f"{key}: {len(values)} number{'s' * (len(values) > 1)} for {channels} channels")
    if min(std) <= 0:
        raise OptionsError(f"std: {list(std)} holds a number that is not above 0")
    if not any(mean) and all(value == 1 for value in std):
        return None
    return tuple(np.array(values, np.float32).reshape(-1, 1, 1) for values in (mean, std))
