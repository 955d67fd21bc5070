"""Look at every picture of a set before the first iteration.

``verify: headers`` reads the headers and the ends of the files, and decodes only what may hide transparent pixels;
``full`` decodes everything; ``off`` looks at nothing. What was decoded without complaint is remembered by path, size
and time of change under ``$PELLUCID_CACHE`` (default ``~/.cache/pellucid``), so that the next start is quick.
"""

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, get_args

from data.backends import ImageReader
from data.headers import Header
from data.io import decode, has_used_alpha, transparency_error, write_whole
from data.pairs import Problems
from options.errors import DataError

Verify = Literal["headers", "full", "off"]
MODES = get_args(Verify)
_THREADS = 8

logger = logging.getLogger("pellucid")


def verify_pictures(reader: ImageReader, names: list[str], mode: str, problems: Problems) -> dict[str, Header]:
    """Check each picture once; what is wrong goes to ``problems``.

    Returns:
        The headers of the pictures that passed; none with mode ``"off"``.
    """
    if mode == "off":
        return {}
    headers: dict[str, Header] = {}
    for name in dict.fromkeys(names):
        try:
            headers[name] = reader.header(name)
        except DataError as error:
            problems.add(error)
    must_decode = [n for n, h in headers.items() if mode == "full" or (h.alpha and reader.alpha == "error")]
    for name, problem in _decode_all(reader, must_decode).items():
        problems.add(problem)
        del headers[name]
    return headers


def _decode_all(reader: ImageReader, names: list[str]) -> dict[str, DataError]:
    """The pictures that cannot be used, with the reason."""
    if not names:
        return {}
    cache = _Cache(reader.source.root)
    found: dict[str, DataError] = {}

    def decode_one(name: str) -> tuple[str, bool | DataError]:
        try:
            stamp = reader.source.stamp(name)
            used_alpha = cache.get(reader.path(name), stamp)
            if used_alpha is None:
                used_alpha = has_used_alpha(decode(reader.source.read(name), reader.path(name)))
                cache.put(reader.path(name), stamp, used_alpha)
        except DataError as error:
            return name, error
        return name, used_alpha

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        for name, result in pool.map(decode_one, names):
            if isinstance(result, DataError):
                found[name] = result
            elif result and reader.alpha == "error":
                found[name] = transparency_error(reader.path(name))
    cache.save()
    return found


class _Cache:
    """What was decoded without complaint: path -> size, time of change, whether transparent pixels are there."""

    def __init__(self, root: str) -> None:
        self._known: dict[str, list[int]] = {}
        self._changed = False
        folder = os.environ.get("PELLUCID_CACHE") or os.path.expanduser("~/.cache/pellucid")
        digest = hashlib.sha256(os.path.abspath(root).encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._file = Path(folder, "verified", f"{digest}.json")
        try:
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            # no cache yet, or a damaged one: everything is looked at again
            self._known = {}

    def get(self, path: str, stamp: tuple[int, int]) -> bool | None:
        entry = self._known.get(os.path.abspath(path))
        return bool(entry[2]) if entry and tuple(entry[:2]) == tuple(stamp) else None

    def put(self, path: str, stamp: tuple[int, int], used_alpha: bool) -> None:
        self._known[os.path.abspath(path)] = [*stamp, int(used_alpha)]
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(self._known).encode("utf-8"))
        except OSError as error:
            logger.info(
                "verified pictures are not remembered: cannot write %s (%s)", self._file, error.strerror or error
            )
