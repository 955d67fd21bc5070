"""Clean pictures alone: haze is laid over them on the fly, by the atmospheric scattering model."""

import hashlib
import inspect
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from data.augment import flip_and_rotate
from data.backends import IoBackend
from data.clean import CleanImageDataset
from data.dataset import Crop, Phase, Small, split_key
from data.degrade import AIRLIGHT, BETA, add_haze, draw_haze, transmission
from data.depth import draw_depth_field, read_depth
from data.io import Alpha, Color
from data.pairs import shortened, stem
from data.verify import Verify
from options.errors import DataError, OptionsError
from options.registry import DATASETS, nearest

Depth = Literal["mixture", "constant", "ramp", "layers", "bank"]
_DEPTH_KINDS = (".npy", ".png", ".tif", ".tiff")
# keeps the haze of pictures that are judged apart from that of training samples
_HELD_OUT_STREAM = 4


@DATASETS.register()
class HazeImageDataset(CleanImageDataset):
    """Clean pictures, and hazy ones made from them: ``lq = gt * t + A * (1 - t)``, ``t = exp(-beta * depth)``.

    The depth is that of the whole picture, with a maximum of 1, also where an item is a crop of it; the hazy picture
    is rounded to the bit depth of the clean one, as a file would hold it. In training each visit draws new haze. In
    val and test a picture has the same haze for ever, drawn apart from training's and whatever the run's seed is, so
    that runs can be compared.

    Args:
        dataroot_gt: folder of clean pictures (searched with its subfolders), or LMDB.
        scale: 1.
        phase, seed, name, io_backend, color, alpha, mean, std, verify: see :class:`data.dataset.ImageDataset`.
        meta_info_file: lists the pictures to use, one per line.
        gt_size: side of the crop; needed in training, without effect elsewhere.
        use_hflip, use_rot: flips, and flips with quarter turns, in training.
        min_texture: redraw crops that are smoother, see :class:`data.dataset.Crop`; 0 is off.
        small: ``"error"`` or ``"pad"``, for pictures smaller than ``gt_size``.
        airlight: lowest and highest brightness of dense haze, in 0..1; grey.
        beta: lowest and highest scattering coefficient.
        depth: kind of the depth fields drawn, or several at equal odds; see :func:`data.depth.draw_depth_field`.
        dataroot_depth: folder of depth maps to take instead, one per picture, by stem; see
            :func:`data.depth.read_depth`.
        variants: hazy pictures of each clean one in val and test; their names then end in ``_1``, ``_2``, ...
        haze_seed: with a picture's name it fixes its haze in val and test.

    Raises:
        OptionsError: a wrong option.
        DataError: everything that is wrong with the pictures, at once.
    """

    def __init__(
        self,
        *,
        dataroot_gt: str,
        scale: int = 1,
        phase: Phase = "train",
        seed: int = 0,
        name: str = "",
        io_backend: IoBackend | None = None,
        meta_info_file: str | None = None,
        gt_size: int | None = None,
        use_hflip: bool = False,
        use_rot: bool = False,
        color: Color = "rgb",
        alpha: Alpha = "error",
        mean: list[float] | None = None,
        std: list[float] | None = None,
        verify: Verify = "headers",
        min_texture: float = 0.0,
        small: Small = "error",
        airlight: Sequence[float] = AIRLIGHT,
        beta: Sequence[float] = BETA,
        depth: Depth | list[Depth] = "mixture",
        dataroot_depth: str | None = None,
        variants: int = 1,
        haze_seed: int = 0,
    ) -> None:
        super().__init__(
            phase=phase,
            scale=scale,
            seed=seed,
            name=name,
            io_backend=io_backend,
            color=color,
            alpha=alpha,
            mean=mean,
            std=std,
            verify=verify,
        )
        _check_haze(scale, airlight, beta, depth, variants=variants, haze_seed=haze_seed)
        self.haze_seed = haze_seed
        self.use_hflip, self.use_rot = use_hflip, use_rot
        self.crop = Crop(gt_size, scale, min_texture, small) if phase == "train" else None
        self.airlight, self.beta, self.depth = tuple(airlight), tuple(beta), depth
        self.variants = 1 if phase == "train" else variants
        self._open(dataroot_gt, meta_info_file)
        self.depth_files = self._find_depth(dataroot_depth) if dataroot_depth else None

    @classmethod
    def check_arguments(cls, *, phase: Phase, scale: int, **arguments: Any) -> None:
        """Raise OptionsError for what is wrong whatever the pictures are; called before anything is opened."""
        super().check_arguments(phase=phase, scale=scale, **arguments)
        known = inspect.signature(cls).parameters
        keys = ("airlight", "beta", "depth", "variants", "haze_seed")
        _check_haze(scale, **{key: arguments.get(key, known[key].default) for key in keys})

    def __len__(self) -> int:
        return len(self.files) * self.variants

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = split_key(key)
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} pictures, and none at {index}")
        place, variant = divmod(index, self.variants)
        file, name = self.files[place], self.names[place]
        gt = self._load(file)
        if self.crop:
            gt, lq = self._sample(gt, file, self._rng(epoch, index))
        else:
            lq = self._veil(gt, file, (0, 0, *gt.shape[:2]), self._held_out(name, variant))
        return self._item(lq, gt, file=file, name=name if self.variants == 1 else f"{name}_{variant + 1}")

    def _sample(self, gt: np.ndarray, file: str, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        gt = self.crop.enlarge(gt, 1)
        top, left = self.crop.draw(gt, rng)
        side = self.crop.gt_size
        lq = self._veil(gt, file, (top, left, side, side), rng)
        gt = gt[top : top + side, left : left + side]
        return tuple(flip_and_rotate((gt, lq), rng, use_hflip=self.use_hflip, use_rot=self.use_rot))

    def _veil(
        self, gt: np.ndarray, file: str, window: tuple[int, int, int, int], rng: np.random.Generator
    ) -> np.ndarray:
        """The hazy picture of a window (top, left, height, width) of the whole ``gt``."""
        airlight, beta = draw_haze(rng, airlight=self.airlight, beta=self.beta)
        top, left, height, width = window
        if self.depth_files is None:
            depth = draw_depth_field(gt.shape[:2], rng, kind=self.depth).window(*window)
        else:
            depth = self._measured(file, gt.shape[:2])[top : top + height, left : left + width]
        gt = gt[top : top + height, left : left + width]
        return add_haze(gt, transmission(depth, beta), airlight=airlight)

    def _held_out(self, name: str, variant: int) -> np.random.Generator:
        digest = hashlib.sha256(name.encode("utf-8")).digest()
        return np.random.default_rng([self.haze_seed, variant, int.from_bytes(digest[:8], "big"), _HELD_OUT_STREAM])

    def _find_depth(self, folder: str) -> dict[str, Path]:
        """Depth map of each picture, by its name."""
        root = Path(os.path.expanduser(os.path.expandvars(folder)))
        if not root.is_dir():
            raise DataError(f"{self.problems.where}: dataroot_depth: the folder {root} does not exist")
        maps: dict[str, Path] = {}
        for path in sorted(root.rglob("*")):
            if path.suffix.lower() in _DEPTH_KINDS and not path.name.startswith("."):
                key = stem(path.relative_to(root).as_posix())
                if key in maps:
                    self.problems.add(f"two depth maps for one picture: {maps[key]} and {path}")
                maps[key] = path
        alone = [file for file in self.files if stem(file) not in maps]
        if alone:
            told = f"{len(alone)} of {len(self.files)} pictures without a depth map in {root}"
            self.problems.add(f"{told}: {shortened(alone)}")
        self.problems.raise_if_any()
        return {file: maps[stem(file)] for file in self.files}

    def _measured(self, file: str, size: tuple[int, int]) -> np.ndarray:
        path = self.depth_files[file]
        depth = read_depth(path)
        if self.crop:
            depth = self.crop.enlarge(depth[..., None], 1)[..., 0]
        if depth.shape != size:
            sides = f"{depth.shape[0]}x{depth.shape[1]}, {self.gt.path(file)} is {size[0]}x{size[1]}"
            raise DataError(f"the depth map {path} is {sides}")
        return depth


def _check_haze(scale: int, airlight: Any, beta: Any, depth: Any, *, variants: Any, haze_seed: Any) -> None:
    if scale != 1:
        raise OptionsError(f"scale: {scale}, but haze does not change the size of a picture; set scale: 1")
    for key, value, highest in (("airlight", airlight, 1.0), ("beta", beta, math.inf)):
        pair = isinstance(value, Sequence) and len(value) == 2 and all(isinstance(v, int | float) for v in value)
        if not pair or not 0 <= value[0] <= value[1] <= highest or not math.isfinite(value[1]):
            bound = "within 0..1" if highest == 1 else "from 0"
            raise OptionsError(f"{key}: {value!r} is not a range [low, high] {bound}")
    if isinstance(depth, list) and not depth:
        raise OptionsError(f"depth: [] draws nothing; name one or more of {', '.join(get_args(Depth))}")
    for kind in depth if isinstance(depth, list) else [depth]:
        if kind not in get_args(Depth):
            raise OptionsError(
                f"depth: {kind} is not known{nearest(kind, get_args(Depth))} ({', '.join(get_args(Depth))})"
            )
    for key, value, least in (("variants", variants, 1), ("haze_seed", haze_seed, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise OptionsError(f"{key}: {value} is not a whole number from {least}")
