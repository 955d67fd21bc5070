"""Files out of a Debian package without installing it, and what its debian/copyright says of a file.

A package is an ``ar`` archive of members; ``data.tar.*`` holds the files. Formats: deb(5) and the machine-readable
copyright file, version 1.0.
"""

import fnmatch
import http.client
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from options.errors import DataError, OptionsError, UserError

_MAGIC = b"!<arch>\n"
_HEADER = 60
_CHUNK = 1 << 20


class Licence(NamedTuple):
    """What debian/copyright says of one file: who holds the copyright, and the short name of the licence."""

    holders: str
    name: str


def read_files(package: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    """Path (without a leading slash) and content of the files of a package that ``wanted`` says yes to.

    Raises:
        DataError: no Debian package, cut short, or packed in a way that Python cannot unpack.
    """
    with open(package, "rb") as file:
        kind, part = _find_data(file, package)
        if kind not in ("", ".gz", ".xz", ".bz2"):
            raise DataError(f"{package}: data.tar{kind} cannot be unpacked here; xz, gz and bz2 can")
        try:
            with tarfile.open(fileobj=part, mode=f"r|{kind[1:]}") as archive:
                for member in archive:
                    name = member.name.removeprefix("./")
                    if member.isfile() and wanted(name):
                        yield name, archive.extractfile(member).read()
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise DataError(f"{package} is damaged or cut short ({error}); remove it and get it again") from error


class _Slice:
    """A part of an open file, to be read once from its beginning to its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _find_data(file: BinaryIO, package: Path) -> tuple[str, _Slice]:
    """The ending of data.tar and its bytes."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DataError(f"{package} is no Debian package; remove it and get it again")
    while len(header := file.read(_HEADER)) == _HEADER:
        name, size = header[:16].decode("ascii", "replace").strip().rstrip("/"), header[48:58].strip()
        if not size.isdigit():
            break
        if name.startswith("data.tar"):
            return name.removeprefix("data.tar"), _Slice(file, int(size))
        file.seek(int(size) + int(size) % 2, os.SEEK_CUR)
    raise DataError(f"{package} holds no data.tar; it is cut short, remove it and get it again")


def licence_of(copyright_text: str, path: str) -> Licence:
    """What debian/copyright says of ``path``, as the source package names it; the last matching paragraph counts.

    Raises:
        DataError: no paragraph is about this file.
    """
    found = None
    for paragraph in re.split(r"\n\s*\n", copyright_text):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", paragraph, re.MULTILINE))
        if any(fnmatch.fnmatchcase(path, pattern) for pattern in fields.get("Files", "").split()):
            found = fields
    if found is None or "License" not in found:
        raise DataError(f"debian/copyright says nothing of {path}")
    lines = [line.strip() for line in found.get("Copyright", "").splitlines()]
    # addresses are nobody's business here
    holders = "; ".join(re.sub(r"\s*<[^>]*>\W*$", "", line) for line in lines if line)
    return Licence(holders, found["License"].splitlines()[0].strip())


def get_package(name: str, pool: str, folder: Path, mirror: str | None) -> Path:
    """The package file in ``folder``: the one that is there, or downloaded by apt or from a mirror.

    Args:
        name: of the package.
        pool: its path below the root of a Debian mirror.
        mirror: root of a mirror; None asks apt, with the sources that this machine is set up for.

    Raises:
        OptionsError: neither apt nor a mirror.
        UserError: the download failed.
    """
    there = sorted(folder.glob(f"{name}_*.deb"))
    if there:
        return there[-1]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {folder}: {error.strerror or error}") from error
    if mirror:
        return _from_mirror(f"{mirror.rstrip('/')}/{pool}", folder / pool.rpartition("/")[2])
    if not shutil.which("apt-get"):
        raise OptionsError(
            "apt-get is not on this machine; give --mirror with the root of a Debian mirror (the folder that holds "
            f"dists and pool), or put {pool.rpartition('/')[2]} into {folder}"
        )
    return _by_apt(name, folder)


def _by_apt(name: str, folder: Path) -> Path:
    # what an interrupted download leaves never bears the name of a package in the folder
    with tempfile.TemporaryDirectory(dir=folder, prefix=".apt-") as partial:
        done = subprocess.run(["apt-get", "download", "-q", name], cwd=partial, capture_output=True, text=True)
        came = sorted(Path(partial).glob(f"{name}_*.deb"))
        if done.returncode or not came:
            told = [line for line in done.stderr.splitlines() if line.startswith("E:")] or ["no package came"]
            raise UserError(
                f"apt-get download {name} failed: {told[-1].removeprefix('E: ')}\n  run apt-get update first, or give "
                "--mirror with the root of a Debian mirror"
            )
        return Path(shutil.move(str(came[-1]), folder / came[-1].name))


def _from_mirror(url: str, target: Path) -> Path:
    partial = target.with_name(f".{target.name}.partial")
    try:
        with urllib.request.urlopen(url, timeout=60) as answer, open(partial, "wb") as file:
            shutil.copyfileobj(answer, file, _CHUNK)
            length = answer.headers.get("Content-Length")
        if length and int(length) != partial.stat().st_size:
            raise UserError(f"{url}: {partial.stat().st_size} of {length} bytes came; try again")
        with open(partial, "rb") as file:
            # many a network answers everything with a page of its own
            if file.read(len(_MAGIC)) != _MAGIC:
                raise UserError(f"{url}: what came is no Debian package; see whether --mirror is the root of a mirror")
        os.replace(partial, target)
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UserError(f"cannot download {url}: {reason}; see whether --mirror is the root of a mirror") from error
    finally:
        partial.unlink(missing_ok=True)
    return target
