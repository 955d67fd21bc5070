"""Look over an unpacked archive: find its folders, and say what is missing, damaged, superfluous or misnamed."""

import fnmatch
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.archives import Archive, Pair, Part
from data.backends import FolderSource, ImageReader, natural_key
from data.cache import map_ahead
from data.headers import Header
from data.io import EXTENSIONS, decode
from data.naming import find_rule, pair_by_naming, split_one_folder
from data.pairs import Problems, shortened, stem
from options.errors import DataError

Watch = Callable[[Iterator[Any], int], Iterable[Any]]
_PACKED = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z", ".bz2", ".xz")
_BEGUN = (".part", ".crdownload", ".aria2", ".partial", ".download", ".tmp")
_LITTER = {"__macosx", "thumbs.db", ".ds_store", "desktop.ini"}
_AGAIN = "unpack or download it again"


@dataclass
class Looked:
    """What a part holds.

    Attributes:
        part: which one.
        path: the folder.
        sizes: (h, w) of every readable picture.
        size: bytes of all files.
        kinds: number of pictures of each format.
    """

    part: Part
    path: Path
    sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    size: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    @property
    def pixels(self) -> int:
        """Of all pictures."""
        return sum(h * w for h, w in self.sizes.values())

    @property
    def source(self) -> FolderSource:
        """The pictures."""
        return FolderSource(self.path)


@dataclass
class Downloads:
    """Everything below the roots: folders, as they are called there, and what is not to be left lying about."""

    roots: list[Path]
    folders: list[Path] = field(default_factory=list)
    packed: list[Path] = field(default_factory=list)
    begun: list[Path] = field(default_factory=list)
    litter: list[Path] = field(default_factory=list)
    empty: list[Path] = field(default_factory=list)

    @classmethod
    def below(cls, roots: list[str]) -> "Downloads":
        """Walk through the roots, links included.

        Raises:
            DataError: a root is no folder.
        """
        found = cls([Path(os.path.abspath(os.path.expanduser(root))) for root in roots])
        seen: set[str] = set()
        for root in found.roots:
            if not root.is_dir():
                raise DataError(
                    f"{root} is {'a file' if root.exists() else 'not there'}; an unpacked archive is wanted"
                )
            for here, folders, files in os.walk(root, followlinks=True):
                found.folders.append(Path(here))
                real = os.path.realpath(here)
                found._sort(Path(here), files)
                found.litter += [Path(here, name) for name in folders if name.lower() in _LITTER]
                # what this program makes is no download
                own = {n for n in folders if n.endswith((".lmdb", "_sub")) or n.startswith(".") or n.lower() in _LITTER}
                folders[:] = [] if real in seen else sorted(set(folders) - own)
                seen.add(real)
        return found

    def _sort(self, here: Path, files: list[str]) -> None:
        for name in files:
            low = name.lower()
            if low in _LITTER:
                self.litter.append(here / name)
            elif low.endswith(_PACKED):
                self.packed.append(here / name)
            elif low.endswith(_BEGUN) and not low.startswith("."):
                self.begun.append(here / name)

    def find(self, part: Part) -> Path | None:
        """The folder of a part, or None.

        Raises:
            DataError: two folders could be meant.
        """
        for pattern in part.folders:
            fits = [folder for folder in self.folders if self._fits(folder, pattern)]
            full: dict[str, Path] = {}
            for folder in map(_innermost, fits):
                if any(FolderSource(folder).names()):
                    full.setdefault(os.path.realpath(folder), folder)
            # a folder within another of the same name is the same find
            real = [one for one in full if not any(one != other and one.startswith(other + os.sep) for other in full)]
            if len(real) > 1:
                there = " and ".join(str(full[one]) for one in real)
                raise DataError(f"{part.place} is there more than once: {there}; give the folder above the right one")
            if real:
                return full[real[0]]
        return None

    def _fits(self, folder: Path, pattern: str) -> bool:
        if pattern == "." or pattern.startswith("./"):
            return any(folder == Path(root, pattern) for root in self.roots)
        wanted = pattern.lower().split("/")
        ends = [part.lower() for part in folder.parts[-len(wanted) :]]
        return len(ends) == len(wanted) and all(map(fnmatch.fnmatchcase, ends, wanted))

    def notes(self) -> list[str]:
        """What was left by unpacking and does no harm, in words."""
        told = []
        for found, what in (
            (self.packed, "still packed, or left after unpacking"),
            (self.litter, "left by other systems, skipped"),
        ):
            if found:
                told.append(f"{what}: {shortened([str(path) for path in found])}")
        return told


def _innermost(folder: Path) -> Path:
    """Through folders that hold nothing but a folder, as unpacking into a folder of the same name makes them."""
    while True:
        inside = [entry for entry in os.scandir(folder) if entry.name.lower() not in _LITTER]
        folders = [entry for entry in inside if entry.is_dir() and not entry.name.startswith(".")]
        if len(folders) != 1 or any(entry.name.lower().endswith(EXTENSIONS) for entry in inside):
            return folder
        folder = folder / folders[0].name


def find_parts(archive: Archive, downloads: Downloads, problems: Problems) -> dict[str, Path]:
    """Place -> folder of every part that is there; missing ones that are needed go to ``problems``."""
    found = {}
    for part in archive.parts:
        try:
            path = downloads.find(part)
        except DataError as error:
            problems.add(error)
            continue
        if path is not None:
            found[part.place] = path
        elif not part.optional:
            problems.add(_not_found(part, downloads))
    for path in downloads.begun:
        problems.add(f"{path} is a download that has not ended; finish it and unpack it")
    return found


def _not_found(part: Part, downloads: Downloads) -> str:
    told = f"{part.place}: no such folder with pictures (known as {', '.join(part.folders[:4])})"
    if downloads.packed:
        return f"{told}; still packed: {shortened([path.name for path in downloads.packed])}: unpack it"
    depth = min(len(root.parts) for root in downloads.roots)
    there = [str(Path(*f.parts[depth - 1 :])) for f in downloads.folders if len(f.parts) <= depth + 2]
    return f"{told}; there are: {shortened(there)}"


def look(
    part: Part, path: Path, problems: Problems, *, partial: bool, thorough: bool, threads: int, watch: Watch
) -> Looked:
    """Names, numbers, headers and sizes of one part; what is wrong goes to ``problems``.

    Args:
        partial: do not mind how many there are.
        thorough: decode every picture, not only the headers and ends of the files.
    """
    found, label = Looked(part, path), part.place
    names = found.source.names()
    _check_names(part, names, problems, partial=partial)
    reader = ImageReader(found.source, "drop")

    def read(name: str) -> tuple[Header, int] | DataError:
        try:
            header = reader.header(name)
            if thorough:
                decode(reader.source.read(name), reader.path(name))
            return header, reader.source.stamp(name)[0]
        except DataError as error:
            return error

    for name, result in zip(names, watch(map_ahead(read, names, threads), len(names)), strict=True):
        if isinstance(result, DataError):
            problems.add(f"{result}; {_AGAIN}")
            continue
        header, size = result
        found.sizes[name] = header.height, header.width
        found.size += size
        found.kinds[header.format] += 1
        if part.size and found.sizes[name] != part.size:
            right = "x".join(map(str, part.size))
            problems.add(f"{label}: {name} is {header.height}x{header.width}, and all should be {right}; {_AGAIN}")
    return found


def _check_names(part: Part, names: list[str], problems: Problems, *, partial: bool) -> None:
    label, stems = part.place, [stem(name).rpartition("/")[2] for name in names]
    odd = [name for name, one in zip(names, stems, strict=True) if not re.fullmatch(part.stem, one, re.IGNORECASE)]
    if odd:
        problems.add(f"{label}: {len(odd)} of {len(names)} are not named as in this archive: {shortened(odd)}")
    twice = [one for one, count in Counter(stems).items() if count > 1] if part.numbered else []
    if twice:
        problems.add(f"{label}: {len(twice)} names are there twice: {shortened(twice)}")
    foreign = sorted(_beyond(part, names) - set(odd), key=natural_key)
    if foreign:
        _, first, last = part.numbered
        told = f"{len(foreign)} of {len(names)} are not among the pictures {first} to {last}: {shortened(foreign)}"
        problems.add(f"{label}: {told}; they belong elsewhere")
    if partial:
        return
    gaps = _gaps(part, stems, os.path.splitext(names[0])[1])
    if gaps:
        problems.add(f"{label}: {gaps}; {_AGAIN}, or give --partial where a part is meant")
    elif part.counts and len(names) not in part.counts:
        right = " or ".join(f"{count:,}" for count in part.counts)
        problems.add(f"{label}: {len(names):,} pictures instead of {right}; {_AGAIN}, or give --partial")


def _beyond(part: Part, names: list[str]) -> set[str]:
    """Names that are none of the numbers of this part."""
    if not part.numbered:
        return set()
    form, first, last = part.numbered
    own = {form.format(number).lower() for number in range(first, last + 1)}
    return {name for name in names if stem(name).rpartition("/")[2].lower() not in own}


def _gaps(part: Part, stems: list[str], ending: str) -> str:
    """The names that a count or the numbers of hazy pictures show to be missing; empty: none."""
    if part.numbered:
        form, first, last = part.numbered
        known = set(stems)
        gone = [form.format(number) + ending for number in range(first, last + 1) if form.format(number) not in known]
        return f"{len(gone)} of {last - first + 1:,} missing: {shortened(gone)}" if gone else ""
    if not part.each:
        return ""
    scenes: dict[str, int] = defaultdict(int)
    for one in stems:
        if match := re.fullmatch(part.stem, one, re.IGNORECASE):
            scenes[match[1]] += 1
    few = [f"{scene} ({count})" for scene, count in scenes.items() if count != part.each]
    return f"{len(few)} scenes without their {part.each} hazy pictures: {shortened(few)}" if few else ""


def check_pair(pair: Pair, parts: dict[str, Looked], problems: Problems) -> int:
    """Pair by the rule, compare the sizes; returns the number of pairs."""
    gt, lq, rule = parts[pair.gt], parts[pair.lq], find_rule(pair.naming)
    hazy, clear = list(lq.sizes), list(gt.sizes)
    if gt is lq:
        hazy, clear = split_one_folder(hazy, rule)
    found = pair_by_naming(hazy, clear, rule, problems)
    alone = sorted(set(clear) - {name for name, _ in found})
    if alone:
        problems.add(f"{pair.gt}: {len(alone)} clear pictures without a hazy one: {shortened(alone)}; {_AGAIN}")
    for clear_name, hazy_name in found:
        sides = list(zip(gt.sizes[clear_name], lq.sizes[hazy_name], strict=True))
        if not any(all(g - n == 2 * border for g, n in sides) for border in {0, rule.border}):
            told = " and ".join("x".join(map(str, size)) for size in zip(*sides, strict=True))
            problems.add(f"{pair.lq}: {clear_name} and {hazy_name} do not fit, {told}; {_AGAIN}")
    return len(found)
