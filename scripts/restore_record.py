"""What scripts.restore has finished: a list in each folder of results, from which an interrupted run goes on."""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from options.errors import DataError

FILE = ".pellucid-restore.jsonl"
# size in bytes and time of change in nanoseconds
Stamp = list[int]


class Record:
    """The list of one folder of results: one line for each, written when the picture is complete.

    Args:
        folder: need not exist.

    Raises:
        DataError: the list cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = folder / FILE
        # two processes may have written a result at once, and only one of them stands there
        self._entries: dict[str, list[dict[str, Any]]] = defaultdict(list)
        try:
            text = self._file.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = ""
        except UnicodeDecodeError as error:
            raise DataError(f"cannot read {self._file}: {error}; remove it to begin anew") from error
        except OSError as error:
            raise DataError(f"cannot read {self._file}: {error.strerror or error}") from error
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._entries[entry["result"]].append(entry)
            except (ValueError, KeyError, TypeError):
                continue  # a line that a kill cut off

    def results(self) -> set[str]:
        """The real paths of the results that are as they were written."""
        stamps = {self.folder / name: [e.get("stamp") for e in entries] for name, entries in self._entries.items()}
        return {os.path.realpath(path) for path, known in stamps.items() if stamp_of(path) in known}

    def has(self, target: Path, source: Path, settings: str) -> bool:
        """True when the result is there, made of this very picture with these settings."""
        facts = {"stamp": stamp_of(target), "source": stamp_of(source), "settings": settings}
        entries = self._entries.get(self._name(target), [])
        return facts["stamp"] is not None and any(facts.items() <= entry.items() for entry in entries)

    def add(self, target: Path, stamp: Stamp, *, source: Stamp | None, settings: str) -> None:
        """Note a result that is about to take its place; killed in between, it does not count.

        Args:
            stamp: of the result.
            source: of the picture as it was when it was read.

        Raises:
            DataError: the list cannot be written.
        """
        entry = {"result": self._name(target), "stamp": stamp, "source": source, "settings": settings}
        self._entries[entry["result"]].append(entry)
        try:
            with self._file.open("a+b") as file:
                # what a kill cut off has no end of line
                cut = file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write(b"\n" * bool(cut) + json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise DataError(f"cannot write {self._file}: {error.strerror or error}") from error

    def _name(self, target: Path) -> str:
        return Path(os.path.relpath(target, self.folder)).as_posix()


def stamp(found: os.stat_result) -> Stamp:
    """Size and time of change."""
    return [found.st_size, found.st_mtime_ns]


def stamp_of(path: Path) -> Stamp | None:
    """The :func:`stamp` of a file; None where there is none."""
    try:
        return stamp(path.stat())
    except OSError:
        return None
