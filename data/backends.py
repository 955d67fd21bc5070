"""Where encoded pictures lie, disk or LMDB, and a reader over it that may keep them in memory (data.cache).

A source is any object with the five members of :class:`Source`. Names are relative POSIX paths with an extension.
The order of names is natural ("2.png" before "10.png"), the same on every machine.
"""

import errno
import io
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

# pydantic reads the one of typing from Python 3.12 on only
from typing_extensions import TypedDict

from data.cache import Cache, Kept
from data.headers import Header, HeaderError, find_damage, read_header
from data.io import EXTENSIONS, decode, remove_alpha
from options.errors import DataError, OptionsError
from options.registry import nearest

_TRIES = 3
_HOPELESS = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}
_BACKENDS = {"disk": set(), "lmdb": set(), "memory": {"keep", "limit"}}
# LMDB refuses to open a database twice in one process: path -> (process, environment)
_ENVIRONMENTS: dict[str, tuple[int, Any]] = {}


class IoBackend(TypedDict, total=False):
    """Where encoded pictures lie; ``keep`` and ``limit`` (MiB) belong to ``memory``."""

    # unknown keys are refused when options are checked, too
    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012
    type: Literal["disk", "memory", "lmdb"]
    keep: Literal["decoded", "encoded"]
    limit: int
    # published files repeat the roots of an LMDB here
    db_paths: list[str] | str
    client_keys: list[str] | str


class Source(Protocol):
    """A set of encoded pictures."""

    root: str

    def names(self) -> list[str]:
        """All pictures, in natural order."""

    def path(self, name: str) -> str:
        """What to call a picture in messages."""

    def read(self, name: str) -> bytes:
        """The encoded bytes; raises DataError."""

    def open(self, name: str) -> BinaryIO:
        """A seekable file over the encoded bytes; raises DataError."""

    def stamp(self, name: str) -> tuple[int, int]:
        """Size in bytes and time of change: a picture with the same stamp is taken for unchanged."""


def open_source(dataroot: str | os.PathLike, io_backend: Mapping[str, Any] | None = None) -> Source:
    """The source that ``io_backend`` (``{type: disk | memory | lmdb}``, default disk) and a folder give.

    Raises:
        OptionsError: an unknown backend or backend key.
        DataError: the folder does not exist or holds no LMDB.
    """
    options = dict(io_backend or {})
    kind = options.pop("type", "disk")
    if kind not in _BACKENDS:
        raise OptionsError(f"io_backend.type: {kind} is not known{nearest(kind, _BACKENDS)} ({', '.join(_BACKENDS)})")
    unknown = sorted(set(options) - _BACKENDS[kind] - {"db_paths", "client_keys"})
    if unknown:
        raise OptionsError(f"io_backend.{unknown[0]} is not known for {kind}{nearest(unknown[0], _BACKENDS[kind])}")
    if not dataroot:
        raise OptionsError(
            "the folder of pictures is missing; set dataroot_gt and dataroot_lq as the dataset needs them"
        )
    root = Path(os.path.expanduser(os.path.expandvars(dataroot)))
    # os.path, as Path raises where a name is too long
    if not os.path.isdir(root):
        if os.path.exists(root):
            raise DataError(f"{root} is a file; a folder of pictures is wanted")
        where = "" if os.path.isabs(root) else f" in {os.getcwd()}"
        raise DataError(f"the folder {root} does not exist{where}")
    if (root / "data.mdb").is_file():
        if kind == "disk":
            raise OptionsError(f"{root} is an LMDB; set io_backend: {{type: lmdb}}")
        return LmdbSource(root)
    if kind == "lmdb":
        raise DataError(f"{root} is not an LMDB: it has no data.mdb")
    return FolderSource(root)


class FolderSource:
    """Picture files under a folder and its subfolders; hidden ones and other kinds of files are skipped."""

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = str(root)

    def names(self) -> list[str]:
        """Relative paths of all picture files."""
        found, seen = [], set()
        for folder, folders, files in os.walk(self.root, followlinks=True):
            here = os.path.realpath(folder)
            if here in seen:
                # a link back to a parent would go on for ever
                folders.clear()
                continue
            seen.add(here)
            folders[:] = [name for name in folders if not name.startswith(".")]
            relative = Path(folder).relative_to(self.root)
            found += [(relative / name).as_posix() for name in files if _is_picture(name)]
        return sorted(found, key=natural_key)

    def path(self, name: str) -> str:
        """The file's path."""
        return os.path.join(self.root, name)

    def read(self, name: str) -> bytes:
        """The file's bytes."""
        for left in reversed(range(_TRIES)):
            try:
                with open(self.path(name), "rb", opener=_open_regular) as file:
                    return file.read()
            except OSError as error:
                if left == 0 or error.errno in _HOPELESS:
                    raise self._unreadable(name, error) from error
                # network folders fail for a moment now and then
                time.sleep(0.2)
        raise AssertionError("unreachable")

    def open(self, name: str) -> BinaryIO:
        """The opened file."""
        try:
            return open(self.path(name), "rb", opener=_open_regular)
        except OSError as error:
            raise self._unreadable(name, error) from error

    def stamp(self, name: str) -> tuple[int, int]:
        """Size and time of change of the file."""
        try:
            found = os.stat(self.path(name))
        except OSError as error:
            raise self._unreadable(name, error) from error
        return found.st_size, found.st_mtime_ns

    def _unreadable(self, name: str, error: OSError) -> DataError:
        return DataError(f"cannot read {self.path(name)}: {error.strerror or error}")


class LmdbSource:
    """An LMDB folder as BasicSR writes it, with a line ``name.png (h,w,c) level`` per picture in meta_info.txt.

    The database is opened on first use in each process, once for all sources over it.
    """

    def __init__(self, root: str | os.PathLike) -> None:
        self.root = str(root)

    def names(self) -> list[str]:
        """The names listed in meta_info.txt."""
        listing = Path(self.root, "meta_info.txt")
        if not listing.is_file():
            raise DataError(f"{self.root} has no meta_info.txt, which lists its pictures")
        lines = listing.read_text(encoding="utf-8-sig").splitlines()
        return sorted((strip_size(line) for line in lines if line.strip()), key=natural_key)

    def path(self, name: str) -> str:
        """The database and the key."""
        return f"{self.root}:{name}"

    def read(self, name: str) -> bytes:
        """The value under the name up to its extension or, as some writers have it, up to the first dot."""
        folder, _, file = name.rpartition("/")
        keys = (os.path.splitext(name)[0], os.path.join(folder, file.split(".")[0]), name)
        with _environment(self.root).begin(write=False) as transaction:
            for key in dict.fromkeys(keys):
                value = transaction.get(key.encode("utf-8"))
                if value is not None:
                    return bytes(value)
        raise DataError(f"{self.root} has no entry {keys[0]}, which its meta_info.txt lists")

    def open(self, name: str) -> BinaryIO:
        """The value as a file."""
        return io.BytesIO(self.read(name))

    def stamp(self, name: str) -> tuple[int, int]:
        """Size and time of change of the database."""
        found = os.stat(os.path.join(self.root, "data.mdb"))
        return found.st_size, found.st_mtime_ns


class ImageReader:
    """Pictures of one source, decoded, without transparency.

    Args:
        source: where the encoded pictures are.
        alpha: policy of :func:`data.io.remove_alpha`.
        cache: keeps what was read, as pixels or as bytes; several readers may share it.
    """

    def __init__(self, source: Source, alpha: str = "error", *, cache: Cache | None = None) -> None:
        self.source, self.alpha, self.cache = source, alpha, cache

    def __call__(self, name: str) -> np.ndarray:
        """``(h, w, 1 or 3)``, uint8 or uint16; read-only where it is kept in memory."""
        if self.cache is None or self.cache.keep == "encoded":
            return self._decoded(name)
        image = self.cache.get(self._key(name))
        if image is None:
            kept = self.to_keep(name)
            self.cache.put(kept)
            image = kept.value
        return image

    def path(self, name: str) -> str:
        """What to call a picture in messages."""
        return self.source.path(name)

    def header(self, name: str) -> Header:
        """The header of a picture that seems complete; raises DataError."""
        with self.source.open(name) as file:
            try:
                header = read_header(file)
                damage = find_damage(file, header)
            except (HeaderError, OSError) as error:
                reason = getattr(error, "strerror", None) or error
                raise DataError(f"cannot read {self.path(name)}: {reason}") from error
        if damage:
            raise DataError(f"cannot read {self.path(name)}: {damage}")
        return header

    def to_keep(self, name: str) -> Kept:
        """What the cache is to keep of a picture, read now."""
        if self.cache.keep == "encoded":
            data = self.source.read(name)
            return Kept(self._key(name), data, len(data))
        image = self._decoded(name)
        image.flags.writeable = False
        return Kept(self._key(name), image, image.nbytes)

    def _decoded(self, name: str) -> np.ndarray:
        return remove_alpha(decode(self._encoded(name), self.path(name)), self.alpha, self.path(name))

    def _encoded(self, name: str) -> bytes:
        if self.cache is None or self.cache.keep != "encoded":
            return self.source.read(name)
        data = self.cache.get(self._key(name))
        if data is None:
            kept = self.to_keep(name)
            self.cache.put(kept)
            data = kept.value
        return data

    def _key(self, name: str) -> tuple[str, str]:
        return self.source.root, name


def _open_regular(path: str, flags: int) -> int:
    # without O_NONBLOCK a pipe waits for someone to write into it
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file")
    return handle


def natural_key(name: str) -> tuple[list[tuple[int, int | str]], str]:
    """Sort key that puts "2.png" before "10.png"; equal names in other cases keep a fixed order."""
    parts = re.split(r"([0-9]+)", name.lower())
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts if part], name


def strip_size(line: str) -> str:
    """``"name.png (480,480,3) 1"`` -> ``"name.png"``; names may hold spaces."""
    return re.sub(r"\s+\(\s*\d+(\s*,\s*\d+)*\s*\)(\s+\S+)?\s*$", "", line.strip())


def _environment(root: str) -> Any:
    """The open LMDB of this process; one inherited by a fork is closed and opened anew."""
    import lmdb

    where = os.path.realpath(root)
    process, environment = _ENVIRONMENTS.get(where, (None, None))
    if process == os.getpid():
        return environment
    if environment is not None:
        environment.close()
    try:
        environment = lmdb.open(where, readonly=True, lock=False, readahead=False, meminit=False)
    except lmdb.Error as error:
        raise DataError(f"cannot open the LMDB {root}: {error}") from error
    _ENVIRONMENTS[where] = os.getpid(), environment
    return environment


def _is_picture(name: str) -> bool:
    return not name.startswith(".") and name.lower().endswith(EXTENSIONS)
