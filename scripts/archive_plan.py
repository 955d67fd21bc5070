"""What is to be made of an archive, step by step, with counts and sizes before anything is made."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.archives import Archive, Reduced
from data.backends import FolderSource, ImageReader, natural_key
from data.cache import map_ahead
from data.io import write_whole
from data.lmdb_file import is_made, write_lmdb
from data.pairs import shortened
from data.prepare import Grid, cut_scales, fingerprint, make_lr
from data.unpacked import Looked
from options.errors import DataError
from scripts.lr_check import check_samples
from scripts.watching import watch

# bytes of a PNG for each pixel, where the pictures do not tell; reduced pictures have more detail for each
_PNG, _DENSER = 1.9, 1.15
# scales of the option files: crops at multiples of this can be cut for each of them, now or later
_UNIT = 12


@dataclass(frozen=True)
class Step:
    """One thing to be made.

    Attributes:
        what: in two words.
        target: where.
        count, size: pictures, and bytes by estimate.
        run: makes it, or goes on with it.
    """

    what: str
    target: Path
    count: int
    size: int
    run: Callable[[], None]

    @property
    def done(self) -> bool:
        """True when something has this name; whether it is the right thing is seen when it is made."""
        return os.path.lexists(self.target)

    @property
    def missing(self) -> int:
        """Bytes that are still to be written."""
        if self.done:
            return 0
        begun = self.target.with_name(f".{self.target.name}.partial")
        there = sum(file.stat().st_size for file in begun.rglob("*") if file.is_file()) if begun.is_dir() else 0
        return max(0, self.size - there)


class Plan:
    """The steps for one archive.

    Args:
        chosen: the archive.
        members: what it is merged of, or itself.
        looked: place -> what was found.
        args: of the command.
        grid: of the sub-images.
    """

    def __init__(
        self,
        chosen: Archive,
        members: list[Archive],
        looked: dict[str, Looked],
        args: argparse.Namespace,
        grid: Grid,
    ) -> None:
        self.chosen, self.members, self.looked, self.args, self.grid = chosen, members, looked, args, grid
        self.output = Path(os.path.abspath(os.path.expanduser(args.output)))
        self.steps: list[Step] = []
        if chosen.train is None:
            for place, found in looked.items():
                self._link(place, found)
            self._lmdb_of_parts()
        else:
            self._add_reduced(chosen.train, [(member, member.train) for member in members])
            if chosen.valid is not None and chosen.valid.hr in looked:
                self._add_reduced(chosen.valid, [(chosen, chosen.valid)], always=True)
            self._cut_and_store(chosen.train)
        self._meta()

    def shown(self, step: Step) -> Path:
        """The target of a step, below the data folder as the user calls it."""
        return Path(self.args.output) / step.target.relative_to(self.output)

    def _add_reduced(self, side: Reduced, sources: list[tuple[Archive, Reduced]], *, always: bool = False) -> None:
        """Links to the good pictures, and to their reductions or the making of these."""
        for member, own in sources:
            below = f"/{member.name}" if self.chosen.members else ""
            hr = self.looked[own.hr]
            self._link(f"{side.hr}{below}", hr)
            for scale in self.args.scale if "lr" in self.args.steps or always else []:
                place, found = f"{side.lr.format(scale)}{below}", self.looked.get(own.lr.format(scale))
                if found is not None:
                    self._link(place, found, lambda hr=hr, found=found, scale=scale: self._compare(hr, found, scale))
                elif "lr" in self.args.steps:
                    self._reduce(place, f"{side.hr}{below}", hr, scale)

    def _link(self, place: str, found: Looked, check: Callable[[], None] | None = None) -> None:
        target = self.output / place

        def run() -> None:
            if check is not None:
                check()
            link(target, found.path)

        self._add("link", target, len(found.sizes), 0, run)

    def _compare(self, hr: Looked, lr: Looked, scale: int) -> None:
        check_samples(hr.source, lr.source, scale, every=self.args.verify == "full")

    def _reduce(self, place: str, hr_place: str, hr: Looked, scale: int) -> None:
        target, source = self.output / place, self.output / hr_place
        settings = {"alpha": self.args.alpha, "threads": self.args.workers, "settle": False}

        def run() -> None:
            label = f"pictures reduced by {scale}"
            make_lr(FolderSource(source), str(target), scale, tmpl=f"{{}}x{scale}", **settings, watch=watch(label))

        size = int(hr.pixels / scale**2 * _per_pixel(hr) * _DENSER)
        self._add(f"reduce by {scale}", target, len(hr.sizes), size, run)

    def _cut_and_store(self, side: Reduced) -> None:
        if "subimages" in self.args.steps:
            self._cut(side)
        if "lmdb" in self.args.steps:
            hr = [self.looked[member.train.hr] for member in self.members]
            if "subimages" not in self.args.steps:
                name, size = self.chosen.whole or f"{side.hr}.lmdb", sum(found.size for found in hr)
                self._store(self.output / side.hr, self.output / name, sum(len(f.sizes) for f in hr), size)
                return
            for step in [step for step in self.steps if step.what.startswith("cut")]:
                self._store(step.target, step.target.with_name(f"{step.target.name}.lmdb"), step.count, step.size)

    def _cut(self, side: Reduced) -> None:
        """All scales in one go over the pictures, which are decoded once."""
        hr = [self.looked[member.train.hr] for member in self.members]
        sizes = [size for found in hr for size in found.sizes.values()]
        few = [name for found in hr for name, size in found.sizes.items() if min(size) < self.grid.size]
        if few and self.grid.small == "error":
            told = f"{len(few)} pictures are smaller than {self.grid.size}: {shortened(few)}"
            raise DataError(f"{self.chosen.name}: {told}; give --small skip or keep, or another --subimages")
        unit = _UNIT if not (self.grid.size % _UNIT or self.grid.step % _UNIT) else math.lcm(*self.args.scale)
        small = self.grid.over(unit)
        nothing = [name for found in hr for name, size in found.sizes.items() if min(size) < unit]
        if nothing and self.grid.small == "keep":
            told = f"{len(nothing)} pictures are smaller than {unit}: {shortened(nothing)}"
            raise DataError(f"{self.chosen.name}: {told}; kept whole, in multiples of {unit}, nothing would be left")
        count = sum(len(small.places(h // unit, w // unit)) for h, w in sizes)
        if not count:
            raise DataError(f"no picture of {self.chosen.name} is as large as {self.grid.size}; see --subimages")
        per_pixel = sum(map(_per_pixel, hr)) / len(hr)
        size = int(count * self.grid.size**2 * per_pixel)
        good = self.output / side.hr, self.output / f"{side.hr}_sub"
        lower = {
            s: (self.output / side.lr.format(s), self.output / f"{side.lr.format(s)}_sub") for s in self.args.scale
        }

        def run() -> None:
            gt, *others = ((FolderSource(a), str(b)) for a, b in (good, *lower.values()))
            pairs, settings = dict(zip(lower, others, strict=True)), {"threads": self.args.workers, "settle": False}
            cut_scales(gt, pairs, self.grid, unit, **settings, watch=watch("pictures cut"))

        self._add("cut", good[1], count, size, run)
        for scale, (_, target) in lower.items():
            self._add(f"cut x{scale}", target, count, int(size / scale**2 * _DENSER), lambda: None)

    def _lmdb_of_parts(self) -> None:
        if "lmdb" in self.args.steps:
            for place, found in self.looked.items():
                target = self.output / f"{place}.lmdb"
                self._store(self.output / place, target, len(found.sizes), found.size)

    def _store(self, folder: Path, target: Path, count: int, size: int) -> None:
        def run() -> None:
            store(FolderSource(folder), target, self.args.workers)

        self._add("store", target, count, size, run)

    def _meta(self) -> None:
        if "meta" not in self.args.steps:
            return
        cuts = [step.target for step in self.steps if step.what == "cut"]
        hr = [self.output / self.chosen.train.hr] if self.chosen.train else [self.output / p for p in self.looked]
        for folder in cuts or hr:
            name = folder.relative_to(self.output).as_posix().replace("/", "_")
            target = self.output / "meta_info" / f"meta_info_{name}.txt"
            count = sum(step.count for step in self.steps if step.target == folder or step.target.parent == folder)

            def run(folder: Path = folder, target: Path = target) -> None:
                write_listing(FolderSource(folder), target, self.args.workers)

            self._add("list", target, count, 0, run)

    def _add(self, what: str, target: Path, count: int, size: int, run: Callable[[], None]) -> None:
        self.steps.append(Step(what, target, count, size, run))


def link(target: Path, source: Path) -> None:
    """Make ``target`` lead to the folder ``source``, unless it is the same already.

    Raises:
        DataError: something else has the name, or the file system knows no links.
    """
    if target.exists() and os.path.samefile(target, source):
        return
    if os.path.islink(target) and not target.exists():
        raise DataError(f"{target} is a link to {os.readlink(target)}, which is not there any more; remove it")
    if os.path.lexists(target):
        raise DataError(f"{target} exists and is not {source}; it is left as it is, remove it or choose -o")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(source, target, target_is_directory=True)
    except OSError as error:
        raise DataError(
            f"cannot link {target} to {source}: {error.strerror or error}; unpack the archive as {target}"
        ) from error


def store(source: FolderSource, target: Path, threads: int) -> None:
    """A folder into an LMDB, PNG and JPEG files as they are; goes on with a begun one, and knows a complete one."""
    names = source.names()
    mark = json.dumps(fingerprint([(source, names)], "lmdb"), sort_keys=True)
    if is_made(target, mark):
        return

    def watched(entries: Iterator[Any]) -> Iterable[Any]:
        return watch("pictures stored")(entries, len(names))

    kinds = ("png", "jpeg")
    write_lmdb(source, target, names=names, replace_dots=True, as_is=kinds, mark=mark, threads=threads, watch=watched)


def write_listing(source: FolderSource, target: Path, threads: int) -> None:
    """A line ``name (h,w,c)`` for each picture, as ``meta_info_file`` takes it.

    Raises:
        DataError: there is another file of this name, or an unreadable picture.
    """
    names, reader = sorted(source.names(), key=natural_key), ImageReader(source, "drop")
    headers = watch("pictures listed")(map_ahead(reader.header, names, threads), len(names))
    lines = [f"{name} ({h.height},{h.width},{h.channels})\n" for name, h in zip(names, headers, strict=True)]
    data = "".join(lines).encode("utf-8")
    if os.path.lexists(target):
        if target.read_bytes() != data:
            raise DataError(f"{target} exists and lists something else; it is left as it is, remove it")
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, data)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}") from error


def _per_pixel(found: Looked) -> float:
    """Bytes of a pixel as PNG."""
    return found.size / found.pixels if set(found.kinds) == {"png"} else _PNG
