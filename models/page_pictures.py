"""The pictures of a page: in it while they are few, beside it as files where they are many."""

import base64
import json
import mimetypes
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from models.page_tables import Look, decimals_of, number
from models.record import Record, Shown, ShownSet

# bytes of picture files that a page holds; a browser opens the resulting 21 MiB at once, and mail still takes them
BUDGET = 16 * 2**20


class Sources:
    """Where a page takes its pictures from.

    Set by set, in order: all pictures of a set go into the page if they fit into what is left of ``budget``, or else
    none of them, and the page links to their files, the small ones of the tables too.

    Args:
        record: what is shown.
        folder: of the page; links are relative to it.
        budget: bytes of picture files.

    Attributes:
        embedded, linked: names of the sets whose pictures are in the page, and beside it.
        missing: files that are not where they should be, as with processes on several machines.
    """

    def __init__(self, record: Record, folder: Path, *, budget: int = BUDGET) -> None:
        self._record, self._folder = record, folder
        self.embedded: list[str] = []
        self.linked: list[str] = []
        self.missing: list[Path] = []
        left = budget
        self._there: set[Path] = set()
        for entry in record.sets:
            files = {path for shown in entry.pictures for _, _, path in self._files(entry, shown)}
            there = {path for path in files if path.is_file()}
            self._there |= there
            self.missing += sorted(files - there)
            size = sum(path.stat().st_size for path in there)
            if files and size <= left:
                left -= size
                self.embedded.append(entry.name)
            elif files:
                self.linked.append(entry.name)

    def content(self) -> list[dict[str, Any]]:
        """What the viewer knows of each picture, in the order of the tables' rows."""
        return [self._picture(entry, shown) for entry in self._record.sets for shown in entry.pictures]

    def looks(self) -> list[Look]:
        """How the tables show each picture, in the order of their rows."""
        return [self._look(entry, shown) for entry in self._record.sets for shown in entry.pictures]

    def remarks(self) -> list[str]:
        """What the reader must know of where the pictures are."""
        found = []
        if self.embedded:
            found.append(f"The pictures of {', '.join(self.embedded)} are in this page, without loss.")
        if self.linked:
            found.append(
                f"The pictures of {', '.join(self.linked)} would make this page too large: it shows the files beside "
                "it, so keep its folder together."
            )
        if self.missing:
            found.append(f"{len(self.missing)} picture files were not found, the first of them {self.missing[0]}.")
        return found

    def _files(self, entry: ShownSet, shown: Shown) -> list[tuple[str, str, Path]]:
        """(key, label, file) of each picture, in the order in which they are offered."""
        enlarged = "input" if self._record.scale == 1 else "input, pixel by pixel"
        titles = {"input": enlarged, "baseline": entry.baseline or "baseline"}
        found = [(kind, title, shown.others[kind]) for kind, title in titles.items() if kind in shown.others]
        pairs = zip(self._record.networks, shown.outputs, strict=True)
        found += [(f"output-{place}", name, path) for place, (name, path) in enumerate(pairs) if path is not None]
        return found + ([("gt", "ground truth", shown.others["gt"])] if "gt" in shown.others else [])

    def _picture(self, entry: ShownSet, shown: Shown) -> dict[str, Any]:
        sources = []
        for key, label, path in self._files(entry, shown):
            if path in self._there:
                source = self._address(entry, path)
                sources.append({"key": key, "label": label, "src": source, "scores": self._scores(entry, shown, key)})
        h, w = shown.size or (0, 0)
        # before restoration: what was restored, or at another size what would else enlarge it
        before = "input" if self._record.scale == 1 else "baseline"
        return {"set": entry.name, "name": shown.name, "h": h, "w": w, "before": before, "sources": sources}

    def _look(self, entry: ShownSet, shown: Shown) -> Look:
        small = shown.others.get("thumbnail")
        address = self._address(entry, small) if small is not None and small.is_file() else ""
        files = [(key, path) for key, _, path in self._files(entry, shown) if path in self._there]
        # the result, where there is one
        files.sort(key=lambda file: not file[0].startswith("output"))
        return Look(address, link(files[0][1], self._folder) if files else "")

    def _address(self, entry: ShownSet, path: Path) -> str:
        return link(path, self._folder) if entry.name in self.linked else data_uri(path)

    def _scores(self, entry: ShownSet, shown: Shown, key: str) -> str:
        kind, _, place = key.partition("-")
        # not by the files: one that could not be written must not leave its score to the input
        is_input = entry.baseline == "input" or (entry.baseline == "bicubic" and self._record.scale == 1)
        judged = "input" if is_input else "baseline"
        own = shown.scores[int(place)] if kind == "output" else shown.baseline if kind == judged else {}
        return ", ".join(f"{label} {number(value, decimals_of(label, entry))}" for label, value in own.items())


def data_uri(path: Path) -> str:
    """A picture file as a ``data:`` address."""
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def link(path: Path, folder: Path) -> str:
    """The way from a page in ``folder`` to a file, for any name that the file may have."""
    return quote(os.fsencode(Path(os.path.relpath(path, folder)).as_posix()))


def as_script(content: Any) -> str:
    """JSON that may stand in a script element, whatever strings it holds."""
    return json.dumps(content).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
