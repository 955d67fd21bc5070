"""Pairs of low-quality and ground-truth pictures from two folders."""

from typing import Any

import numpy as np

from data.augment import flip_and_rotate
from data.backends import ImageReader, IoBackend
from data.dataset import Crop, ImageDataset, Phase, Small, split_key
from data.io import Alpha, Color
from data.pairs import list_names, pair_by_stem, stem
from data.verify import Verify, verify_pictures
from options.errors import DataError
from options.registry import DATASETS


@DATASETS.register()
class PairedImageDataset(ImageDataset):
    """LQ and GT pictures that belong together by their stems, whatever their extensions.

    In training an item is a crop; in val and test it is the whole picture. A GT that is larger than LQ times scale
    by less than one LQ pixel is cut to it; any other mismatch is refused. Both folders are searched with their
    subfolders; ``name`` is the LQ's relative path without extension. The order is natural, or that of the listing.

    Args:
        dataroot_gt, dataroot_lq: folders, or LMDBs.
        scale, phase, seed, name, io_backend, color, alpha, mean, std, verify: see :class:`data.dataset.ImageDataset`.
        meta_info_file: lists the GT pictures to use, one per line.
        filename_tmpl: LQ stem for a GT stem, such as ``"{}x4"``.
        gt_size: side of the GT crop; needed in training, without effect elsewhere.
        use_hflip, use_rot: flips, and flips with quarter turns, in training.
        min_texture: redraw GT crops that are smoother, see :class:`data.dataset.Crop`; 0 is off.
        small: ``"error"`` or ``"pad"``, for pictures smaller than ``gt_size``.

    Raises:
        OptionsError: a wrong option.
        DataError: everything that is wrong with the pictures, at once.
    """

    def __init__(
        self,
        *,
        dataroot_gt: str,
        dataroot_lq: str,
        scale: int = 1,
        phase: Phase = "train",
        seed: int = 0,
        name: str = "",
        io_backend: IoBackend | None = None,
        meta_info_file: str | None = None,
        filename_tmpl: str = "{}",
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
        self.use_hflip, self.use_rot = use_hflip, use_rot
        self.crop = Crop(gt_size, scale, min_texture, small) if phase == "train" else None
        self.gt, self.lq = self._reader(dataroot_gt), self._reader(dataroot_lq)
        self.meta_info_file, self.filename_tmpl = meta_info_file, filename_tmpl
        self.pairs = self._pair()
        self._verify()

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: int | tuple[int, int]) -> dict[str, Any]:
        epoch, index = split_key(key)
        gt_name, lq_name = self.pairs[index]
        gt, lq = self._load(gt_name, lq_name)
        if self.crop:
            gt, lq = self._augment(gt, lq, self._rng(epoch, index))
        return {
            "lq": self._tensor(lq),
            "gt": self._tensor(gt),
            "name": stem(lq_name),
            "lq_path": self.lq.path(lq_name),
            "gt_path": self.gt.path(gt_name),
        }

    def readings(self) -> list[tuple[ImageReader, str]]:
        """Every picture of the set, with the reader it comes from; pair by pair."""
        return [reading for gt, lq in self.pairs for reading in ((self.gt, gt), (self.lq, lq))]

    def _pair(self) -> list[tuple[str, str]]:
        """``(gt, lq)`` names; what does not fit goes to ``self.problems``."""
        gt_names = list_names(self.gt.source, self.meta_info_file, self.problems)
        lq_names = list_names(self.lq.source, None, self.problems)
        spare = self.meta_info_file is not None
        return pair_by_stem(gt_names, lq_names, self.filename_tmpl, self.problems, spare_lq=spare)

    def _verify(self) -> None:
        gt_headers = verify_pictures(self.gt, [gt for gt, _ in self.pairs], self.verify, self.problems)
        lq_headers = verify_pictures(self.lq, [lq for _, lq in self.pairs], self.verify, self.problems)
        for gt_name, lq_name in self.pairs:
            gt, lq = gt_headers.get(gt_name), lq_headers.get(lq_name)
            if gt and lq:
                problem = self._size_problem(gt_name, lq_name, (gt.height, gt.width), (lq.height, lq.width))
                if problem:
                    self.problems.add(problem)
        self.problems.raise_if_any()

    def _size_problem(self, gt_name: str, lq_name: str, gt: tuple[int, int], lq: tuple[int, int]) -> str | None:
        if not all(0 <= g - n * self.scale < self.scale for g, n in zip(gt, lq, strict=True)):
            return (
                f"{self.gt.path(gt_name)} is {gt[0]}x{gt[1]} and {self.lq.path(lq_name)} is {lq[0]}x{lq[1]}; "
                f"at scale {self.scale} the first should be {lq[0] * self.scale}x{lq[1] * self.scale}"
            )
        side = lq[0] * self.scale, lq[1] * self.scale
        return self.crop.problem(self.gt.path(gt_name), *side) if self.crop else None

    def _load(self, gt_name: str, lq_name: str) -> tuple[np.ndarray, np.ndarray]:
        gt, lq = self.gt(gt_name), self.lq(lq_name)
        problem = self._size_problem(gt_name, lq_name, gt.shape[:2], lq.shape[:2])
        if problem:
            raise DataError(problem)
        return self._fit(gt, lq), lq

    def _fit(self, gt: np.ndarray, lq: np.ndarray) -> np.ndarray:
        """The part of the GT that lies above the LQ."""
        return gt[: lq.shape[0] * self.scale, : lq.shape[1] * self.scale]

    def _augment(self, gt: np.ndarray, lq: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        gt, lq = self.crop.enlarge(gt, 1), self.crop.enlarge(lq, self.scale)
        top, left = self.crop.draw(gt, rng)
        side, scale = self.crop.gt_size, self.scale
        gt = gt[top : top + side, left : left + side]
        lq = lq[top // scale : (top + side) // scale, left // scale : (left + side) // scale]
        return tuple(flip_and_rotate((gt, lq), rng, use_hflip=self.use_hflip, use_rot=self.use_rot))
