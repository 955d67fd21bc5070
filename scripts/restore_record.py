"""What scripts.restore has finished: a list in each folder of results, from which an interrupted run goes on."""

import json
import os
from pathlib import Path
from typing import Any

from options.errors import DataError

FILE = ".pellucid-restore.jsonl"


class Record:
    """The list of one folder of results: one line for each, written when the picture is there.

    Args:
        folder: need not exist.

    Raises:
        DataError: the list cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / FILE
        self._entries: dict[str, dict[str, Any]] = {}
        try:
            text = self._file.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read {self._file}: {error}; remove it to begin anew") from error
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._entries[entry["result"]] = entry
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill cut off

    def results(self) -> set[str]:
        """The real paths of the results that are as they were written."""
        paths = ((self.folder / name, entry) for name, entry in self._entries.items())
        return {os.path.realpath(path) for path, entry in paths if _stamp(path) == entry.get("stamp")}

    def has(self, target: Path, source: Path, settings: str) -> bool:
        """True when the result is there, made of this very picture with these settings."""
        entry = self._entries.get(self._name(target), {})
        same = entry.get("settings") == settings and entry.get("source") == _stamp(source)
        return same and entry.get("stamp") is not None and entry["stamp"] == _stamp(target)

    def add(self, target: Path, source: Path, settings: str) -> None:
        """Note a result that has just been written.

        Raises:
            DataError: the list cannot be written.
        """
        entry = {"result": self._name(target), "stamp": _stamp(target), "source": _stamp(source), "settings": settings}
        self._entries[entry["result"]] = entry
        try:
            with self._file.open("a+b") as file:
                # what a kill cut off has no end of line
                cut = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * bool(cut) + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise DataError(f"cannot write {self._file}: {error.strerror or error}") from error

    def _name(self, target: Path) -> str:
        return Path(os.path.relpath(target, self.folder)).as_posix()


def _stamp(path: Path) -> list[int] | None:
    """Size and time of change; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
