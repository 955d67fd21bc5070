"""Folders made from folders: sub-images and low-resolution pictures.

A new folder grows under a working name and gets its own when it is complete. A run that was interrupted goes on where
it ended, provided that settings and pictures are the same.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from data.backends import FolderSource, ImageReader, Source
from data.cache import map_ahead
from data.claim import claimed
from data.degrade import bicubic_downsample
from data.headers import Header
from data.io import decode, write_image, write_whole
from data.pairs import Problems, pair_by_stem, stem, unique_stems
from data.verify import verify_pictures
from options.errors import DataError, OptionsError

Watch = Callable[[Iterator[Any], int], Iterable[Any]]
Small = Literal["error", "skip", "keep"]
_SETTINGS = ".settings.json"

logger = logging.getLogger("pellucid")


class Stage:
    """A folder under its working name, until :meth:`finish` renames it.

    Args:
        target: the folder to make; an empty one may exist.
        settings: plain values; what an interrupted run left is taken up if it was made with the same ones.
        claims: keeps other processes away until it is closed.

    Raises:
        DataError: the folder holds something, there is a half-made one of other settings, or another process makes it.
    """

    def __init__(self, target: str | os.PathLike, settings: dict[str, Any], claims: contextlib.ExitStack) -> None:
        self.target = Path(os.path.expanduser(target))
        text = json.dumps(settings, sort_keys=True)
        if _holds(self.target / _SETTINGS, text):
            # complete, but ended before the other side of the pairs was
            self.folder = self.target
            claims.enter_context(claimed(self.folder))
            return
        if os.path.lexists(self.target) and (not self.target.is_dir() or any(self.target.iterdir())):
            other = ", made with other settings or of other pictures," if (self.target / _SETTINGS).is_file() else ""
            raise DataError(f"{self.target} exists{other} and is left as it is; remove it or choose another name")
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        mark = self.folder / _SETTINGS
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            claims.enter_context(claimed(self.folder))
            if not any(self.folder.iterdir()):
                write_whole(mark, text.encode())
                return
        except OSError as error:
            raise DataError(f"cannot write {self.folder}: {error.strerror or error}") from error
        if not _holds(mark, text):
            raise DataError(f"{self.folder} was left by an interrupted run with other settings or pictures; remove it")
        logger.info(f"going on with what an interrupted run left in {self.folder}")

    def has(self, name: str) -> bool:
        """True when the picture is there; pictures are written whole."""
        return (self.folder / name).is_file()

    def write(self, name: str, image: np.ndarray, label: str) -> None:
        """Write one picture; ``label`` names its source in messages."""
        try:
            write_image(self.folder / name, image)
        except ValueError as error:
            raise DataError(f"{label}: {error}") from error

    def finish(self, expected: int) -> None:
        """Check the number of pictures, and give the folder its name; :meth:`settle` comes last."""
        for left in self.folder.rglob(".*"):
            # a picture that was being written when its run was killed
            if left.name != _SETTINGS:
                left.unlink()
        found = len(FolderSource(self.folder).names())
        if found != expected:
            raise DataError(f"{self.folder} holds {found} pictures, but {expected} were to be made; remove it")
        os.replace(self.folder, self.target)

    def settle(self) -> None:
        """Remove what only an interrupted run needs; while it is there, the same settings know a complete folder."""
        for left in self.target.rglob(".*"):
            left.unlink()


def _holds(mark: Path, text: str) -> bool:
    return mark.is_file() and mark.read_text(encoding="utf-8") == text


def crop_starts(length: int, side: int, step: int, thresh: int) -> list[int]:
    """Where crops begin along one axis; the last one ends at the border where more than ``thresh`` would be left out.

    Raises:
        ValueError: the picture is smaller than the crop.
    """
    if length < side:
        raise ValueError(f"a crop of {side} does not fit into {length}")
    starts = list(range(0, length - side + 1, step))
    return [*starts, length - side] if length - starts[-1] - side > thresh else starts


@dataclass(frozen=True)
class Grid:
    """Crops of ``size`` pixels every ``step`` ones; a rest beyond ``thresh`` at the border gets one more."""

    size: int = 480
    step: int = 240
    thresh: int = 0
    small: Small = "error"

    def __post_init__(self) -> None:
        for key, least in (("size", 1), ("step", 1), ("thresh", 0)):
            if getattr(self, key) < least:
                raise OptionsError(f"{key}: {getattr(self, key)} is below {least}")

    def over(self, scale: int) -> "Grid":
        """The grid of pictures that are smaller by ``scale``."""
        wrong = [key for key in ("size", "step", "thresh") if getattr(self, key) % scale]
        if wrong:
            raise OptionsError(f"{wrong[0]}: {getattr(self, wrong[0])} is not a multiple of scale {scale}")
        return Grid(self.size // scale, self.step // scale, self.thresh // scale, self.small)

    def places(self, height: int, width: int) -> list[tuple[int, int, int, int]]:
        """(top, left, height, width) of each crop, row by row; none, or the whole, of a smaller picture."""
        if min(height, width) < self.size:
            return [(0, 0, height, width)] if self.small == "keep" else []
        starts = (crop_starts(length, self.size, self.step, self.thresh) for length in (height, width))
        return [(top, left, self.size, self.size) for top, left in itertools.product(*starts)]


@dataclass(frozen=True)
class _Side:
    """One picture of a job: where it comes from, where its crops go, and its pixels per pixel of the grid."""

    source: Source
    name: str
    stage: Stage
    factor: int


@dataclass(frozen=True)
class _Job:
    """Crops to be cut out of one picture or at the same places of several."""

    stem: str
    sides: tuple[_Side, ...]
    places: list[tuple[int, int, int, int]]

    def run(self) -> None:
        for side in self.sides:
            image = None
            for number, place in enumerate(self.places, start=1):
                name = f"{self.stem}_s{number:03d}.png"
                if side.stage.has(name):
                    continue
                label = side.source.path(side.name)
                image = decode(side.source.read(side.name), label) if image is None else image
                top, left, height, width = (side.factor * value for value in place)
                side.stage.write(name, image[top : top + height, left : left + width], label)


def cut_subimages(source: Source, target: str, grid: Grid, *, threads: int, watch: Watch) -> int:
    """Cut every picture of a source into crops ``<name>_s001.png`` ...; returns their number.

    An ending x2, x3, x4 or x8 that all names have is left out, so that crops of both sides pair by name.

    Raises:
        OptionsError, DataError: wrong numbers; the folder exists; unreadable pictures, or ones smaller than the crop.
    """
    names = _names(source)
    headers = _headers(source, names, grid)
    stems = _without_suffix(dict(zip(names, unique_stems(names), strict=True)), source)
    with contextlib.ExitStack() as claims:
        stage = Stage(target, fingerprint([(source, names)], grid, "subimages"), claims)
        jobs = [
            _Job(stems[name], (_Side(source, name, stage, 1),), grid.places(headers[name].height, headers[name].width))
            for name in names
        ]
        return _run(jobs, [stage], threads, watch)


def cut_pairs(
    sources: tuple[Source, Source], targets: tuple[str, str], grid: Grid, scale: int, *, threads: int, watch: Watch
) -> int:
    """:func:`cut_subimages` of GT and LQ folders at once, at the same places and under the same names.

    Args:
        sources, targets: GT and LQ.
        grid: in GT pixels; multiples of the scale.

    Raises:
        OptionsError, DataError: also pictures without partner, or whose sizes do not fit the scale.
    """
    lower = {scale: (sources[1], targets[1])}
    return cut_scales((sources[0], targets[0]), lower, grid, scale, threads=threads, watch=watch)


def cut_scales(
    gt: tuple[Source, str],
    lower: dict[int, tuple[Source, str]],
    grid: Grid,
    unit: int,
    *,
    threads: int,
    watch: Watch,
    settle: bool = True,
) -> int:
    """:func:`cut_pairs` of one GT folder and its reductions by several scales; returns the number of each.

    Args:
        gt: source and target.
        lower: scale -> source and target of the reduction.
        grid: in GT pixels; multiples of ``unit``.
        unit: a multiple of all scales. GT pixels beyond its last multiple are in no crop, so that a further scale that
            divides it can be cut later.
        settle: see :meth:`Stage.settle`; False keeps what tells the same call later that all is done.

    Raises:
        OptionsError, DataError: as :func:`cut_pairs`.
    """
    source, target = gt
    if os.path.realpath(target) in {os.path.realpath(other) for _, other in lower.values()}:
        raise OptionsError(f"GT and LQ would both go to {target}; give two folders")
    small, names = grid.over(unit), _names(source)
    headers = _headers(source, names, grid)
    with contextlib.ExitStack() as claims:
        stages = [Stage(target, fingerprint([(source, names)], grid, f"pairs x{unit}"), claims)]
        sides = {name: [_Side(source, name, stages[0], unit)] for name in names}
        for scale, (lq_source, lq_target) in lower.items():
            pairs = _fitting_pairs(source, headers, lq_source, grid, scale)
            lq_names = [lq for _, lq in pairs]
            stages.append(Stage(lq_target, fingerprint([(lq_source, lq_names)], grid, f"pairs x{unit}", scale), claims))
            for name, lq in pairs:
                sides[name].append(_Side(lq_source, lq, stages[-1], unit // scale))
        sizes = {name: (header.height // unit, header.width // unit) for name, header in headers.items()}
        jobs = [_Job(stem(name), tuple(sides[name]), small.places(*size)) for name, size in sizes.items()]
        return _run(jobs, stages, threads, watch, settle)


def _fitting_pairs(
    source: Source, headers: dict[str, Header], lq_source: Source, grid: Grid, scale: int
) -> list[tuple[str, str]]:
    where = f"{source.root} and {lq_source.root}"
    lq_names = _names(lq_source)
    pairs, tmpl = pair_names(list(headers), lq_names, [f"{{}}x{scale}", "{}"], where)
    logger.info(f"{len(pairs)} pairs; the LQ name is {tmpl!r} filled with the GT name")
    lq_headers, problems = _headers(lq_source, lq_names, grid.over(scale)), Problems(where)
    for gt, lq in pairs:
        sizes = [(h.height, h.width) for h in (headers[gt], lq_headers[lq])]
        if not all(0 <= g - n * scale < scale for g, n in zip(*sizes, strict=True)):
            problems.add(f"{gt} is {sizes[0][0]}x{sizes[0][1]} and {lq} is {sizes[1][0]}x{sizes[1][1]}, not x{scale}")
    problems.raise_if_any()
    return pairs


def make_lr(
    source: Source,
    target: str,
    scale: int,
    *,
    tmpl: str,
    alpha: str,
    threads: int,
    watch: Watch,
    settle: bool = True,
) -> list[str]:
    """Reduce every picture by MATLAB's bicubic; returns the names of those that were cut to a multiple of the scale.

    Args:
        tmpl: the new stem, ``{}`` standing for the old one.
        alpha: what to do with transparent pixels, see :func:`data.io.remove_alpha`.
        settle: as in :func:`cut_scales`.

    Raises:
        OptionsError, DataError: wrong numbers; the folder exists; unreadable pictures, or ones smaller than a pixel.
    """
    _check_reduction(scale, tmpl)
    names = _names(source)
    headers = _headers(source, names, Grid(size=scale, step=1))
    reader = ImageReader(source, alpha)
    shown = dict(zip(names, unique_stems(names), strict=True))

    def reduce(name: str, stage: Stage) -> None:
        folder, _, file = shown[name].rpartition("/")
        new = os.path.join(folder, f"{tmpl.replace('{}', file)}.png")
        if not stage.has(new):
            stage.write(new, bicubic_downsample(reader(name), scale), reader.path(name))

    with contextlib.ExitStack() as claims:
        stage = Stage(target, fingerprint([(source, names)], tmpl, f"lr x{scale} {alpha}"), claims)
        for _ in watch(map_ahead(functools.partial(reduce, stage=stage), names, threads), len(names)):
            pass
        stage.finish(len(names))
        if settle:
            stage.settle()
    return [name for name in names if headers[name].height % scale or headers[name].width % scale]


def _check_reduction(scale: int, tmpl: str) -> None:
    if scale < 2:
        raise OptionsError(f"scale: {scale} is below 2")
    if tmpl.count("{}") != 1:
        raise OptionsError(f"tmpl: {tmpl!r} must hold {{}} once, for the name of the picture")
    if os.path.basename(tmpl) != tmpl or tmpl.startswith("."):
        raise OptionsError(f"tmpl: {tmpl!r} must be a plain name, without folders and not hidden")


def pair_names(gt: list[str], lq: list[str], tmpls: list[str], where: str) -> tuple[list[tuple[str, str]], str]:
    """``(gt, lq)`` names and the first template that pairs them all.

    Raises:
        DataError: none does; what is wrong with the last one.
    """
    for tmpl in tmpls:
        problems = Problems(where)
        pairs = pair_by_stem(gt, lq, tmpl, problems)
        if not problems:
            return pairs, tmpl
    problems.raise_if_any()
    raise AssertionError("unreachable")


def _run(jobs: list[_Job], stages: list[Stage], threads: int, watch: Watch, settle: bool = True) -> int:
    count = sum(len(job.places) for job in jobs)
    if not count:
        raise DataError("no picture is as large as the crop; nothing was written")
    for _ in watch(map_ahead(_Job.run, jobs, threads), len(jobs)):
        pass
    for stage in stages:
        stage.finish(count)
    for stage in stages if settle else []:
        stage.settle()
    return count


def _names(source: Source) -> list[str]:
    names = source.names()
    if not names:
        raise DataError(f"no images found in {source.root}")
    return names


def _headers(source: Source, names: list[str], grid: Grid) -> dict[str, Header]:
    """The headers of all pictures; unreadable and too small ones are told at once."""
    problems = Problems(source.root)
    # transparency is kept, so nothing needs to be decoded for it
    headers = verify_pictures(ImageReader(source, "drop"), names, "headers", problems)
    small = [name for name, header in headers.items() if min(header.height, header.width) < grid.size]
    for name in small if grid.small == "error" else []:
        found = headers[name]
        problems.add(f"{name} is {found.height}x{found.width}, smaller than {grid.size}; see --small")
    problems.raise_if_any()
    if small:
        done = "kept whole" if grid.small == "keep" else "left out"
        logger.warning(
            f"{source.root}: smaller than {grid.size} and {done}: {len(small)} ({small[0]}{', ...' * (len(small) > 1)})"
        )
    return headers


def _without_suffix(stems: dict[str, str], source: Source) -> dict[str, str]:
    suffixes = {match[0] if (match := re.search(r"x[2348]$", value)) else "" for value in stems.values()}
    suffix = suffixes.pop()
    if suffixes or not suffix or any(os.path.basename(value) == suffix for value in stems.values()):
        return stems
    logger.info(f"{source.root}: all names end in {suffix}, which is left out of the new ones")
    return {name: value.removesuffix(suffix) for name, value in stems.items()}


def fingerprint(sets: list[tuple[Source, list[str]]], *values: Any) -> dict[str, Any]:
    """What tells whether something was made with the same settings of the same, unchanged pictures."""
    digest = hashlib.sha256()
    for source, names in sets:
        for name in names:
            digest.update(f"{source.path(name)} {source.stamp(name)}\n".encode("utf-8", "surrogateescape"))
    return {"values": [str(value) for value in values], "pictures": digest.hexdigest()}
