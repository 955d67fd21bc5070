"""Which pictures scripts.restore takes, and where each result goes: settled before anything is done."""

import glob
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.backends import natural_key
from data.io import EXTENSIONS
from options.errors import DataError, OptionsError
from scripts.restore_record import Record

FOLDER = "restored"
FORMATS = {"png": ".png", "jpg": ".jpg", "webp": ".webp", "tiff": ".tif"}
_SHOWN = 5


@dataclass(frozen=True)
class Job:
    """One picture: where it is, where its result goes, and the folder of results that this lies in.

    ``kept`` is whether that folder keeps a list of its results; it does unless a file was named.
    """

    source: Path
    target: Path
    folder: Path
    kept: bool = True

    @property
    def name(self) -> str:
        """What to call it on the screen."""
        return str(self.source)


@dataclass(frozen=True)
class _Found:
    """A picture, the folder that was given for it (or its own one), and whether it was named itself."""

    path: Path
    root: Path
    named: bool


def plan_jobs(
    inputs: Sequence[str], output: str | None, *, recursive: bool, suffix: str, kind: str
) -> tuple[list[Job], list[str]]:
    """The pictures in natural order, and what was left aside, in words.

    Args:
        inputs: files, folders and patterns such as ``photos/*.jpg``.
        output: folder, or file name with the extension of a picture; None is ``restored`` beside each picture.
        recursive: look into folders inside folders, which come back in the results.
        suffix: put behind the name of each result; without meaning where ``output`` is a file.
        kind: key of ``FORMATS``, or ``"same"``.

    Raises:
        OptionsError: two pictures would be written to one file, or ``output`` does not fit the inputs.
        DataError: something does not exist, or there are no pictures.
    """
    found, others, closed = _find(inputs, recursive)
    left = [] if recursive else _folders_inside(inputs, output)
    single = _single_file(output, found, kind)
    if single is not None:
        jobs = [Job(found[0].path, single, single.parent, kept=False)]
    else:
        base = None if output is None else Path(os.path.expanduser(output))
        _refuse_file(base)
        jobs = [_job(one, base, suffix, kind) for one in found]
        jobs = _without_results(jobs, found)
    if not jobs:
        raise DataError(f"no pictures found in {', '.join(inputs)}: all lie in the folder of results")
    _refuse_collisions(jobs)
    count = sum(others.values())
    told = (
        [f"{count} other {'files were' if count > 1 else 'file was'} left aside ({_counts(others)})"] if count else []
    )
    told += [f"{folder} was left aside, as it cannot be looked into: {reason}" for folder, reason in closed.items()]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        told.append(f"not looked into: {', '.join(left[:_SHOWN])}{more}; --recursive looks into folders inside folders")
    again = len(found) - len(jobs)
    if again:
        several = "pictures in the folder of results were" if again > 1 else "picture in the folder of results was"
        told.append(f"{again} {several} left aside")
    return jobs, told


def _find(inputs: Sequence[str], recursive: bool) -> tuple[list[_Found], Counter[str], dict[str, str]]:
    """Every picture once, in the order of the inputs; extensions of other files; folders that are closed, and why."""
    found: dict[str, _Found] = {}
    others: Counter[str] = Counter()
    missing, closed = [], {}
    for given in inputs:
        paths = list(_expand(given))
        missing += [] if paths else [given]
        for path in paths:
            if os.path.isdir(path):
                listed = _listed(path, recursive, closed)
                others.update(extension for extension in (_extension(p) for p in listed) if extension not in EXTENSIONS)
                pictures = [_Found(p, path, False) for p in listed if _extension(p) in EXTENSIONS]
            else:
                pictures = [_Found(path, path.parent, True)]
            for one in pictures:
                found.setdefault(os.path.realpath(one.path), one)
    if missing:
        raise DataError("no such file or folder: " + ", ".join(missing))
    for given in [given for given in inputs if str(Path(os.path.expanduser(given))) in closed]:
        raise DataError(f"cannot look into {given}: {closed[str(Path(os.path.expanduser(given)))]}")
    if not found:
        hint = "" if recursive else "; --recursive looks into folders inside folders"
        kinds = ", ".join(EXTENSIONS)
        raise DataError(f"no pictures ({kinds}) found in {', '.join(inputs)}{hint}")
    return list(found.values()), others, closed


def _folders_inside(inputs: Sequence[str], output: str | None) -> list[str]:
    """Folders inside the given ones in natural order, without hidden ones and those of results."""
    given = [path for one in inputs for path in _expand(one) if os.path.isdir(path)]
    listed = [(folder, next(os.walk(folder), ("", [], []))[1]) for folder in given]
    inside = {folder / name for folder, names in listed for name in names if not name.startswith(".")}
    results = {os.path.realpath(os.path.expanduser(output))} if output is not None else set()
    results |= {os.path.realpath(folder) for folder in given} | {os.path.realpath(f / FOLDER) for f in given}
    return sorted((str(path) for path in inside if os.path.realpath(path) not in results), key=natural_key)


def _expand(given: str) -> Iterator[Path]:
    path = Path(os.path.expanduser(given))
    # os.path, as Path raises where a name is too long or a folder closed
    if os.path.exists(path) or not glob.has_magic(given):
        yield from [path] if os.path.exists(path) else []
        return
    yield from (Path(match) for match in sorted(glob.glob(str(path), recursive=True), key=natural_key))


def _listed(folder: Path, recursive: bool, closed: dict[str, str]) -> list[Path]:
    """The files of a folder in natural order, hidden ones left out; what cannot be looked into is put down, and why."""
    listed = []

    def note(error: OSError) -> None:
        closed[str(error.filename)] = error.strerror or str(error)

    for where, folders, files in os.walk(folder, onerror=note):
        folders[:] = [name for name in folders if recursive and not name.startswith(".")]
        listed += [Path(where) / name for name in files if not name.startswith(".")]
    return sorted(listed, key=lambda path: natural_key(str(path)))


def _extension(path: Path) -> str:
    return path.suffix.lower()


def _single_file(output: str | None, found: list[_Found], kind: str) -> Path | None:
    """``output`` where it names a file and not a folder."""
    path = None if output is None else Path(os.path.expanduser(output))
    if path is None or os.path.isdir(path) or _extension(path) not in EXTENSIONS:
        return None
    if len(found) > 1 or not found[0].named:
        given = f"{len(found)} pictures were" if len(found) > 1 else f"the folder {found[0].root} was"
        raise OptionsError(f"-o {output} names one file, but {given} given; name a folder")
    if kind != "same":
        raise OptionsError(f"-o {output} says the format by its extension; leave --format out")
    return path


def _refuse_file(base: Path | None) -> None:
    for path in [] if base is None else [base, *base.parents]:
        if os.path.exists(path) and not os.path.isdir(path):
            kinds = ", ".join(EXTENSIONS)
            raise OptionsError(f"-o {base}: {path} is a file and no picture; name a folder, or a file with {kinds}")


def _job(one: _Found, base: Path | None, suffix: str, kind: str) -> Job:
    relative = one.path.relative_to(one.root)
    folder = one.root / FOLDER if base is None else base
    extension = one.path.suffix if kind == "same" else FORMATS[kind]
    return Job(one.path, folder / relative.with_name(f"{one.path.stem}{suffix}{extension}"), folder)


def _without_results(jobs: list[Job], found: list[_Found]) -> list[Job]:
    """Without the results of earlier runs, and without what else lies in a folder of results inside a given folder."""
    folders = {job.folder for job in jobs}
    real = {os.path.realpath(folder) for folder in folders}
    results = set().union(*(Record(folder).results() for folder in folders))

    def is_result(one: _Found) -> bool:
        root = os.path.realpath(one.root)
        within = {folder for folder in real if folder != root and _inside(Path(folder), root)}
        stray = not one.named and any(_inside(one.path, folder) for folder in within)
        return stray or os.path.realpath(one.path) in results

    return [job for job, one in zip(jobs, found, strict=True) if not is_result(one)]


def _inside(path: Path, folder: str) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(folder)


def _refuse_collisions(jobs: list[Job]) -> None:
    writers: dict[str, list[Job]] = defaultdict(list)
    for job in jobs:
        writers[os.path.realpath(job.target)].append(job)
    lines = [
        f"{several[0].target} would be written by {', '.join(job.name for job in several[:_SHOWN])}"
        + (f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else "")
        for several in writers.values()
        if len(several) > 1
    ]
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        way = "give them one after the other with another -o, or another --format or --suffix"
        raise OptionsError("\n  ".join(["several pictures would go to one file; " + way, *lines[:_SHOWN], *more]))
    sources = {os.path.realpath(job.source): job for job in jobs}
    for target, (job, *_) in writers.items():
        if target in sources:
            raise OptionsError(f"{job.target} is one of the pictures themselves; name another -o or --suffix")


def _counts(extensions: Counter[str]) -> str:
    return ", ".join(f"{count} {extension or 'without extension'}" for extension, count in extensions.most_common(5))
