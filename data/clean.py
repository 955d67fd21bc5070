"""Ground-truth pictures alone: the low-resolution side is made on the fly."""

import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np

from data.augment import draw_reduced_crop, flip_and_rotate
from data.backends import ImageReader, IoBackend
from data.dataset import Crop, ImageDataset, Phase, Small, split_key
from data.degrade import CONTEXT, Kernel, bicubic_downsample, bicubic_downsample_crop, mod_crop
from data.io import Alpha, Color
from data.pairs import list_names, unique_stems
from data.verify import Verify, verify_pictures
from options.errors import DataError, OptionsError
from options.registry import DATASETS, nearest

logger = logging.getLogger("pellucid")

_PUBLISHED = (
    "filename_tmpl has no effect: the LQ is made from the GT. To make it as the authors of SST do, whose option files "
    "carry this key, set kernel: pillow and downsample: patch (here: kernel {}, downsample {})"
)


class CleanImageDataset(ImageDataset):
    """Base of the sets that hold GT pictures and make the LQ ones; a subclass calls :meth:`_open` last.

    Attributes:
        use_hflip, use_rot, crop: how training samples are cut and turned; ``crop`` is None elsewhere.
        gt, files, names: the reader, its pictures, and what to call them.
    """

    use_hflip: bool
    use_rot: bool
    crop: Crop | None

    def __len__(self) -> int:
        return len(self.files)

    def readings(self) -> list[tuple[ImageReader, str]]:
        """Every picture of the set, with the reader it comes from."""
        return [(self.gt, file) for file in self.files]

    def _open(self, dataroot_gt: str, meta_info_file: str | None) -> None:
        """List and verify the pictures; raise DataError with all that is wrong."""
        self.gt = self._reader(dataroot_gt)
        self.files = list_names(self.gt.source, meta_info_file, self.problems)
        self.names = unique_stems(self.files)
        headers = verify_pictures(self.gt, self.files, self.verify, self.problems)
        for file, header in headers.items():
            problem = self._size_problem(file, header.height, header.width)
            if problem:
                self.problems.add(problem)
        self.problems.raise_if_any()

    def _load(self, file: str) -> np.ndarray:
        gt = self.gt(file)
        problem = self._size_problem(file, *gt.shape[:2])
        if problem:
            raise DataError(problem)
        return gt

    def _size_problem(self, file: str, height: int, width: int) -> str | None:
        if min(height, width) < self.scale:
            return f"{self.gt.path(file)} is {height}x{width}, less than one pixel at scale {self.scale}"
        height, width = height // self.scale * self.scale, width // self.scale * self.scale
        return self.crop.problem(self.gt.path(file), height, width) if self.crop else None

    def _item(self, lq: np.ndarray, gt: np.ndarray, *, file: str, name: str) -> dict[str, Any]:
        path = self.gt.path(file)
        return {"lq": self._tensor(lq), "gt": self._tensor(gt), "name": name, "lq_path": path, "gt_path": path}


@DATASETS.register()
class DownsampleImageDataset(CleanImageDataset):
    """GT pictures, and LQ ones reduced from them, as MATLAB's bicubic (in their own bit depth) or Pillow's does it.

    GT pictures are cut to multiples of the scale first. With ``downsample: image`` and without ``gt_scales`` an LQ crop
    equals the same crop of the reduced whole picture, so training sees exactly what a prepared folder would give.

    Args:
        dataroot_gt: folder (searched with its subfolders), or LMDB.
        scale, phase, seed, name, io_backend, color, alpha, mean, std, verify: see :class:`data.dataset.ImageDataset`.
        meta_info_file: lists the pictures to use, one per line.
        gt_size: side of the GT crop; needed in training, without effect elsewhere.
        use_hflip, use_rot: flips, and flips with quarter turns, in training.
        min_texture: redraw GT crops that are smoother, see :class:`data.dataset.Crop`; 0 is off.
        small: ``"error"`` or ``"pad"``, for pictures smaller than ``gt_size``.
        gt_scales: in training the GT picture is first reduced by one of these factors in (0, 1], drawn anew for each
            sample (MATLAB's bicubic; never below ``gt_size``). ``min_texture`` looks at the place before that.
        kernel: ``"matlab"`` or ``"pillow"`` (8-bit pictures only).
        downsample: ``"image"``, or ``"patch"`` to reduce the augmented GT crop by itself, without what is around it.
        filename_tmpl: published option files have it; a notice says that it has no effect.

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
        kernel: Kernel = "matlab",
        downsample: Literal["image", "patch"] = "image",
        gt_scales: list[float] | None = None,
        filename_tmpl: str | None = None,
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
        for key, value, known in (("kernel", kernel, get_args(Kernel)), ("downsample", downsample, ("image", "patch"))):
            if value not in known:
                raise OptionsError(f"{key}: {value} is not known{nearest(value, known)} ({', '.join(known)})")
        self.gt_scales = _checked_scales(gt_scales)
        if filename_tmpl is not None:
            logger.warning(f"{self.name}: {_PUBLISHED.format(kernel, downsample)}")
        self.kernel, self.downsample = kernel, downsample
        self.use_hflip, self.use_rot = use_hflip, use_rot
        self.crop = Crop(gt_size, scale, min_texture, small) if phase == "train" else None
        self._open(dataroot_gt, meta_info_file)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = split_key(key)
        file = self.files[index]
        gt = self._load(file)
        if self.kernel == "pillow" and gt.dtype != np.uint8:
            raise DataError(f"{self.gt.path(file)} has 16 bits, but Pillow reduces 8; set kernel: matlab")
        gt = mod_crop(gt, self.scale)
        if self.crop:
            gt, lq = self._sample(gt, self._rng(epoch, index))
        else:
            lq = bicubic_downsample(gt, self.scale, kernel=self.kernel)
        return self._item(lq, gt, file=file, name=self.names[index])

    def _sample(self, gt: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        side, scale = self.crop.gt_size, self.scale
        gt = self.crop.enlarge(gt, 1)
        if self.gt_scales:
            factor = self.gt_scales[int(rng.integers(len(self.gt_scales)))]
            # the outer pixels of a piece, which its own edge changes, are not among those that LQ pixels are made of
            settings = {"margin": (CONTEXT + 1) * scale, "grid": scale, "min_texture": self.crop.min_texture}
            gt, (top, left) = draw_reduced_crop(gt, side, factor, **settings, rng=rng)
        else:
            top, left = self.crop.draw(gt, rng)
        patch = gt[top : top + side, left : left + side]
        flips = {"use_hflip": self.use_hflip, "use_rot": self.use_rot}
        if self.downsample == "patch":
            # in the order of the authors of SST: turned by a quarter, the two passes round otherwise
            (patch,) = flip_and_rotate((patch,), rng, **flips)
            return patch, bicubic_downsample(patch, scale, kernel=self.kernel)
        place, length = (top // scale, left // scale), side // scale
        lq = bicubic_downsample_crop(gt, scale, place, (length, length), kernel=self.kernel)
        return tuple(flip_and_rotate((patch, lq), rng, **flips))


def _checked_scales(scales: Any) -> list[float]:
    if scales is None:
        return []
    right = isinstance(scales, Sequence) and not isinstance(scales, str) and len(scales) > 0
    if not right or not all(isinstance(x, int | float) and not isinstance(x, bool) and 0 < x <= 1 for x in scales):
        raise OptionsError(f"gt_scales: {scales!r} is no list of factors above 0 and up to 1, such as [1, 0.75, 0.5]")
    return list(scales)
