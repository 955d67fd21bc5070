"""Pairs as the dehazing archives have them: RESIDE (ITS, OTS, SOTS), O-HAZE, Dense-Haze, NH-HAZE, Haze4K and others."""

import logging
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.backends import IoBackend
from data.dataset import Phase, Small
from data.io import Alpha, Color
from data.naming import (
    Naming,
    check_split,
    find_rule,
    pair_by_naming,
    rule_of_folder,
    split_one_folder,
    take_split,
)
from data.paired import PairedImageDataset
from data.pairs import list_names, shortened, stem
from data.verify import Verify
from options.errors import DataError, OptionsError
from options.registry import DATASETS

# last words of folders' names, in lower case
_HAZY = ("hazy", "haze", "in", "input", "lq")
_CLEAR = ("clear", "gt", "target")
_PHASES = {"train": ("train", "training"), "val": ("val", "validation", "test"), "test": ("test", "testing")}

logger = logging.getLogger("pellucid")


@DATASETS.register()
class ResideDataset(PairedImageDataset):
    """Hazy and clear pictures, paired by the names that the archives use; one item for each hazy picture.

    The clear pictures of SOTS-indoor, larger by 10 pixels on each side, are cut to the hazy ones; any other mismatch of
    sizes is refused. The published name ``Dataset_PairedImage`` is this set.

    Args:
        dataroot_gt, dataroot_lq: folders of the clear and the hazy pictures, or LMDBs; they may be one folder.
        dataroot: instead of both, a folder with subfolders whose names end in hazy, haze, in, input or lq, and in
            clear, gt or target, directly or below Train and Test; or one with all pictures side by side.
        naming: the rule, one of :data:`data.naming.RULES` in any case; ``"auto"`` takes that of the data set named
            in ``dataroot_gt`` (or ``dataroot``), and says which.
        split: ``"train"`` or ``"test"`` of O-HAZE, Dense-Haze and NH-HAZE, whose last five scenes are for testing.
        scale: 1.
        phase, seed, name, io_backend, color, alpha, mean, std, verify: see :class:`data.dataset.ImageDataset`.
        meta_info_file: lists the hazy pictures to use, one per line.
        filename_tmpl: published option files have it; it has no effect.
        gt_size: side of the crop; needed in training, without effect elsewhere.
        use_hflip, use_rot: flips, and flips with quarter turns, in training.
        min_texture: redraw crops whose clear side is smoother, see :class:`data.dataset.Crop`; 0 is off.
        small: ``"pad"`` continues pictures smaller than ``gt_size`` as published, ``"error"`` refuses them.

    Raises:
        OptionsError: a wrong option.
        DataError: everything that is wrong with the pictures, at once. In val and test clear pictures without a hazy
            one are, too; in training they are counted in a warning.
    """

    def __init__(
        self,
        *,
        dataroot_gt: str | None = None,
        dataroot_lq: str | None = None,
        dataroot: str | None = None,
        naming: str = "auto",
        split: Literal["all", "train", "test"] = "all",
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
        small: Small = "pad",
    ) -> None:
        label = f"{name or type(self).__name__} ({phase})"
        self.naming, self.split, words = _settle(dataroot_gt, dataroot_lq, dataroot, naming, split, scale)
        if words:
            logger.warning(f"{label}: naming: auto chose {self.naming.name} for the folder {words}")
        if filename_tmpl != "{}":
            logger.warning(f"{label}: filename_tmpl has no effect; naming: {self.naming.name} pairs the pictures")
        if dataroot:
            dataroot_gt, dataroot_lq = find_sides(dataroot, phase, self.naming)
        super().__init__(
            dataroot_gt=dataroot_gt,
            dataroot_lq=dataroot_lq,
            scale=scale,
            phase=phase,
            seed=seed,
            name=name,
            io_backend=io_backend,
            meta_info_file=meta_info_file,
            gt_size=gt_size,
            use_hflip=use_hflip,
            use_rot=use_rot,
            color=color,
            alpha=alpha,
            mean=mean,
            std=std,
            verify=verify,
            min_texture=min_texture,
            small=small,
        )

    @classmethod
    def check_arguments(cls, *, phase: Phase, scale: int, **arguments: Any) -> None:
        """Raise OptionsError for what is wrong whatever the pictures are; called before anything is opened."""
        super().check_arguments(phase=phase, scale=scale, **arguments)
        roots = (arguments.get(key) for key in ("dataroot_gt", "dataroot_lq", "dataroot"))
        _settle(*roots, arguments.get("naming", "auto"), arguments.get("split", "all"), scale)

    def _pair(self) -> list[tuple[str, str]]:
        hazy = list_names(self.lq.source, self.meta_info_file, self.problems)
        if os.path.realpath(self.gt.source.root) == os.path.realpath(self.lq.source.root):
            hazy, clear = self._split_one_folder(hazy)
        else:
            clear = list_names(self.gt.source, None, self.problems)
        pairs = pair_by_naming(hazy, clear, self.naming, self.problems)
        self.problems.raise_if_any()
        if self.meta_info_file is None:
            used = {stem(name) for name, _ in pairs}
            spare = [(name, name) for name in clear if stem(name) not in used]
            self._tell_spare([name for name, _ in take_split(spare, self.naming, self.split)])
        pairs = take_split(pairs, self.naming, self.split)
        if not pairs:
            last = f"{self.naming.scenes - 4} to {self.naming.scenes}"
            raise DataError(
                f"{self.problems.where}: {self.lq.source.root} holds no picture for split: {self.split} (the scenes "
                f"{last} are for testing); where train and test lie apart, set split: all"
            )
        self._tell_count(pairs)
        return pairs

    def _split_one_folder(self, hazy: list[str]) -> tuple[list[str], list[str]]:
        root = self.lq.source.root
        if not self.naming.hazy:
            raise DataError(
                f"{self.problems.where}: hazy and clear pictures are both in {root}, where naming: {self.naming.name} "
                "cannot tell them apart; give two folders"
            )
        found, clear = split_one_folder(self.lq.source.names(), self.naming)
        hazy = [name for name in hazy if name in set(found)] if self.meta_info_file else found
        if not hazy or not clear:
            what = "hazy" if not hazy else "clear"
            raise DataError(
                f"{self.problems.where}: {root} is to hold both sides, and has no {what} picture by naming: "
                f"{self.naming.name}"
            )
        return hazy, clear

    def _tell_count(self, pairs: list[tuple[str, str]]) -> None:
        counts = Counter(clear for clear, _ in pairs).values()
        least, most = min(counts), max(counts)
        each = str(most) if least == most else f"{least} to {most}"
        told = f"{self.problems.where}: {len(pairs)} hazy pictures, {each} of each clear one ({self.naming.name})"
        if self.naming.each and least < most and self.meta_info_file is None:
            logger.warning(f"{told}; the archive has {self.naming.each}, the download may be incomplete")
        else:
            logger.info(told)

    def _tell_spare(self, names: list[str]) -> None:
        if not names:
            return
        told = f"{len(names)} clear picture{'s' * (len(names) > 1)} without a hazy one: {shortened(names)}"
        if self.phase == "train":
            logger.warning(f"{self.problems.where}: {told}; the download may be incomplete")
            return
        raise DataError(
            f"{self.problems.where}: {told}; a result over a part of a set is no result for the set: complete it, or "
            "list the hazy pictures that you mean in meta_info_file"
        )

    def _border(self, gt: tuple[int, ...], lq: tuple[int, ...]) -> int:
        border = self.naming.border
        return border if all(g - n == 2 * border for g, n in zip(gt[:2], lq[:2], strict=True)) else 0

    def _size_problem(self, gt_name: str, lq_name: str, gt: tuple[int, int], lq: tuple[int, int]) -> str | None:
        border = self._border(gt, lq)
        problem = super()._size_problem(gt_name, lq_name, tuple(side - 2 * border for side in gt), lq)
        if problem and all(g - n == 20 for g, n in zip(gt, lq, strict=True)):
            problem += "; naming: SOTS-indoor cuts 10 pixels off each side"
        return problem

    def _fit(self, gt: np.ndarray, lq: np.ndarray) -> np.ndarray:
        border = self._border(gt.shape, lq.shape)
        return gt[border : border + lq.shape[0], border : border + lq.shape[1]]


# as published, the rule goes by the names of the folders
DATASETS.alias("Dataset_PairedImage", "ResideDataset")


def find_sides(dataroot: str, phase: str, naming: Naming) -> tuple[str, str]:
    """Folders of the clear and the hazy pictures below ``dataroot``.

    Raises:
        DataError: they are not there, or two folders could be meant.
    """
    root = Path(os.path.expanduser(os.path.expandvars(dataroot)))
    if not root.is_dir():
        raise DataError(f"dataroot: the folder {root} does not exist")
    below = [path for path in _folders(root) if path.name.lower() in _PHASES[phase]]
    for parent in (root, *sorted(below, key=lambda path: _PHASES[phase].index(path.name.lower()))):
        clear, hazy = (_named(parent, words) for words in (_CLEAR, _HAZY))
        if clear and hazy:
            return str(clear), str(hazy)
    files = [path.name for path in root.iterdir() if path.is_file()]
    if naming.hazy and all(split_one_folder(files, naming)):
        return str(root), str(root)
    raise DataError(
        f"dataroot: {root} has no pair of folders whose names end in {', '.join(_HAZY)} and in {', '.join(_CLEAR)}, "
        f"directly or below {' or '.join(_PHASES[phase])}; it has {', '.join(p.name for p in _folders(root)) or 'none'}"
    )


def _settle(
    dataroot_gt: Any, dataroot_lq: Any, dataroot: Any, naming: Any, split: Any, scale: int
) -> tuple[Naming, str, str]:
    """The rule, the split, and the words of the path that chose the rule (empty: the user did)."""
    if scale != 1:
        raise OptionsError(f"scale: {scale}, but hazy and clear pictures have one size; set scale: 1")
    if dataroot and (dataroot_gt or dataroot_lq):
        raise OptionsError("dataroot: give it alone, or dataroot_gt and dataroot_lq without it")
    if not dataroot and not (dataroot_gt and dataroot_lq):
        missing = "dataroot_lq" if dataroot_gt else "dataroot_gt"
        raise OptionsError(f"{missing}: is missing; give dataroot_gt and dataroot_lq, or dataroot for both")
    rule, words = rule_of_folder(dataroot or dataroot_gt) if naming == "auto" else (find_rule(naming), "")
    check_split(rule, split)
    return rule, split, words


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _named(parent: Path, words: tuple[str, ...]) -> Path | None:
    found = [
        path for path in _folders(parent) if re.split(r"[-_ .]", path.name.lower().removesuffix(".lmdb"))[-1] in words
    ]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise DataError(f"dataroot: {parent} has {names}; set dataroot_gt and dataroot_lq to the two that you mean")
    return found[0] if found else None
