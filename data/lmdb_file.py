"""Write pictures into an LMDB as BasicSR lays it out, so that its readers and ours can use it.

A folder ``x.lmdb`` with data.mdb, lock.mdb and meta_info.txt; one line ``key.png (h,w,c) 1`` per picture. BasicSR takes
the text before the first dot of a line as the key, so keys must not hold dots. Values are PNG files: those of the
source byte for byte, other kinds encoded anew without loss. JPEG files can stay what they are, too; readers go by the
bytes, not by the name in the listing.
"""

import io
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from data.backends import Source
from data.cache import map_ahead
from data.claim import claimed
from data.headers import read_header
from data.io import decode, encode, write_whole
from data.pairs import Problems, stem
from options.errors import DataError, OptionsError

_STEP = 64 << 20
_PENDING = 16 << 20
_LONGEST_KEY = 511

_MARK, _JOURNAL = ".settings.json", ".journal"

logger = logging.getLogger("pellucid")


class Written(NamedTuple):
    """What went into a database.

    Attributes:
        pictures: their number.
        unchanged: how many of them are files of the source, byte for byte.
        size: bytes of all values.
    """

    pictures: int
    unchanged: int
    size: int


class _Entry(NamedTuple):
    key: str
    value: bytes
    shape: tuple[int, int, int]
    unchanged: bool


class _Noted(NamedTuple):
    """The line of the listing, bytes of the value, and whether it is the source's file."""

    line: str
    size: int
    unchanged: bool


def write_lmdb(
    source: Source,
    target: str | os.PathLike,
    *,
    names: list[str] | None = None,
    replace_dots: bool = False,
    as_is: tuple[str, ...] = ("png",),
    mark: str | None = None,
    threads: int = 2,
    watch: Callable[[Iterator[Any]], Iterable[Any]] = iter,
) -> Written:
    """Write the pictures of a source into a new LMDB, which appears under its name when it is complete.

    Every picture is decoded on the way, a few at a time; depth, grey and transparency stay as they are.

    Args:
        source: where the pictures are.
        target: a path that ends in ``.lmdb`` and does not exist.
        names: which pictures; None is all.
        replace_dots: write ``_`` for the dots in keys.
        as_is: formats (of :class:`data.headers.Header`) whose files are taken byte for byte.
        mark: what the database is made of, in words of the caller; an interrupted run leaves what it has, and the next
            one with the same mark goes on. None: an interrupted run leaves nothing. See :func:`is_made`.
        threads: how many pictures are read, decoded and encoded at a time.
        watch: wraps the stream of finished pictures, to show progress.

    Raises:
        OptionsError: a target of another name.
        DataError: the target exists or cannot be written, no pictures, an unreadable one, or names that cannot be keys.
    """
    target = _new(target)
    names = source.names() if names is None else names
    if not names:
        raise DataError(f"no images found in {source.root}")
    keys = lmdb_keys(names, source.root, replace_dots=replace_dots)
    partial = target.with_name(f".{target.name}.{'partial' if mark else uuid.uuid4().hex[:8] + '.partial'}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with claimed(partial):
            known = _begin(partial, mark)
            rest = [name for name in names if keys[name] not in known]
            entries = map_ahead(lambda name: _entry(source, name, keys[name], as_is), rest, threads)
            written = _store(watch(entries), partial, known, [keys[name] for name in names], journal=mark is not None)
            os.rename(partial, target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        if mark is None:
            shutil.rmtree(partial, ignore_errors=True)
    return written


def _new(target: str | os.PathLike) -> Path:
    path = Path(os.path.expanduser(target))
    if path.suffix != ".lmdb":
        raise OptionsError(f"{path}: the name of an LMDB must end in .lmdb; BasicSR knows it by that")
    if os.path.lexists(path):
        raise DataError(f"{path} exists and is left as it is; remove it or choose another name")
    return path


def is_made(target: str | os.PathLike, mark: str) -> bool:
    """True when :func:`write_lmdb` made this database of the same things."""
    file = Path(os.path.expanduser(target), _MARK)
    return file.is_file() and file.read_text(encoding="utf-8") == mark


def _begin(partial: Path, mark: str | None) -> dict[str, _Noted]:
    """Key -> what is noted of the pictures that an interrupted run has stored."""
    if not any(partial.iterdir()):
        if mark is not None:
            write_whole(partial / _MARK, mark.encode("utf-8"))
        return {}
    if not is_made(partial, mark or ""):
        raise DataError(f"{partial} was left by an interrupted run with other settings or pictures; remove it")
    journal = partial / _JOURNAL
    if not journal.is_file():
        return {}
    # the last line may be cut short; it goes, and its picture is stored anew
    lines = journal.read_bytes().split(b"\n")[:-1]
    write_whole(journal, b"".join(line + b"\n" for line in lines))
    noted = (json.loads(line) for line in lines)
    found = {key: _Noted(line, size, unchanged) for key, line, size, unchanged in noted}
    logger.info(f"going on with the {len(found)} pictures that an interrupted run left in {partial}")
    return found


def lmdb_keys(names: list[str], where: str, *, replace_dots: bool = False) -> dict[str, str]:
    """Name -> key: the relative path without its extension.

    Args:
        where: what messages call the set.
        replace_dots: write ``_`` for each dot of a key.

    Raises:
        DataError: every name that cannot be a key, and every pair of names with the same key.
    """
    problems = Problems(where)
    owners: dict[str, str] = {}
    for name in names:
        key = stem(name).replace(".", "_") if replace_dots else stem(name)
        if "." in key:
            problems.add(f"{name}: BasicSR reads keys up to the first dot; rename it, or let dots be replaced by _")
        elif key.splitlines() != [key] or key != key.strip():
            problems.add(f"{name!r}: spaces around a name and line breaks in it are lost in meta_info.txt; rename it")
        elif len(key.encode()) > _LONGEST_KEY:
            problems.add(f"{name}: a key of {len(key.encode())} bytes; LMDB takes {_LONGEST_KEY}")
        elif key in owners:
            problems.add(f"{owners[key]} and {name} would both get the key {key}; rename one of them")
        owners.setdefault(key, name)
    problems.raise_if_any()
    foreign = [name for name in names if not name.isascii()]
    if foreign:
        logger.warning(
            f"{where}: the keys of {len(foreign)} pictures ({foreign[0]}, ...) are not ASCII: Pellucid reads them, "
            "BasicSR's own reader does not"
        )
    return {name: key for key, name in owners.items()}


def _entry(source: Source, name: str, key: str, as_is: tuple[str, ...]) -> _Entry:
    data = source.read(name)
    image = decode(data, source.path(name))
    unchanged = read_header(io.BytesIO(data)).format in as_is
    return _Entry(key, data if unchanged else encode(image, ".png"), image.shape, unchanged)


def _store(
    entries: Iterable[_Entry], folder: Path, noted: dict[str, _Noted], keys: list[str], *, journal: bool
) -> Written:
    """Write values as they come, and the listing, in the order of ``keys``, at the end."""
    import lmdb

    try:
        # nothing counts before the folder gets its name, or the journal says so, and a sync before that does
        with lmdb.open(str(folder), map_size=_STEP, sync=False) as environment:
            for pending in _bundles(entries):
                _put(environment, pending)
                new = {entry.key: _note(entry) for entry in pending}
                noted.update(new)
                if journal:
                    environment.sync(True)
                    with open(folder / _JOURNAL, "a", encoding="utf-8") as file:
                        file.writelines(json.dumps([key, *note]) + "\n" for key, note in new.items())
            environment.sync(True)
    except lmdb.Error as error:
        raise DataError(f"cannot write {folder}: {error}") from error
    write_whole(folder / "meta_info.txt", "".join(noted[key].line for key in keys).encode("utf-8"))
    (folder / _JOURNAL).unlink(missing_ok=True)
    return Written(len(keys), sum(note.unchanged for note in noted.values()), sum(n.size for n in noted.values()))


def _note(entry: _Entry) -> _Noted:
    return _Noted(f"{entry.key}.png ({','.join(map(str, entry.shape))}) 1\n", len(entry.value), entry.unchanged)


def _bundles(entries: Iterable[_Entry]) -> Iterator[list[_Entry]]:
    """Entries for one transaction each."""
    pending: list[_Entry] = []
    for entry in entries:
        pending.append(entry)
        if sum(len(waiting.value) for waiting in pending) > _PENDING:
            yield pending
            pending = []
    if pending:
        yield pending


def _put(environment: Any, entries: list[_Entry]) -> None:
    """One transaction; the map grows until it fits. A map made large at once would fill the disk on some systems."""
    import lmdb

    while True:
        try:
            with environment.begin(write=True) as transaction:
                for entry in entries:
                    transaction.put(entry.key.encode("utf-8"), entry.value)
            return
        except lmdb.MapFullError:
            needed = sum(len(entry.value) for entry in entries)
            environment.set_mapsize(environment.info()["map_size"] + max(_STEP, 2 * needed))
