"""Pictures kept in memory, up to a limit, so that each is read and decoded once.

What is there before worker processes are forked is shared by them: pixels are never written to, so their pages are
never copied. A filled cache takes nothing more, or each worker would go on with pictures of its own.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.utils.data

from options.errors import OptionsError

KEEPS = ("decoded", "encoded")
_MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")

logger = logging.getLogger("pellucid")
Item = TypeVar("Item")
Result = TypeVar("Result")


class Kept(NamedTuple):
    """An entry: pixels or bytes, and how many bytes they take."""

    key: Any
    value: Any
    size: int


class Cache:
    """The memory behind ``io_backend: {type: memory, keep: decoded | encoded, limit: MiB}``.

    Args:
        name: what messages call the set.
        keep: ``"decoded"`` (pixels) or ``"encoded"`` (the bytes of the files).
        limit: MiB to use at most; None is half of what is free when the first picture comes.

    Raises:
        OptionsError: an unknown ``keep``, or a limit below 1.
    """

    def __init__(self, name: str, keep: str = "decoded", limit: int | None = None) -> None:
        if keep not in KEEPS:
            raise OptionsError(f"io_backend.keep: {keep} is not known ({', '.join(KEEPS)})")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise OptionsError(f"io_backend.limit: {limit} is not a whole number of MiB from 1")
        self.name, self.keep = name, keep
        self.used = 0
        self.closed = False
        self._asked = limit
        self._limit: float | None = None
        self._kept: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Any) -> Any:
        """What is kept under the key, or None."""
        return self._kept.get(key)

    def put(self, entry: Kept) -> None:
        """Keep an entry; the first one that does not fit closes the cache."""
        if self.closed:
            return
        if self.used + entry.size > self._bytes():
            self.closed = True
            if torch.utils.data.get_worker_info() is None:
                self._tell_full()
            return
        self._kept[entry.key] = entry.value
        self.used += entry.size

    def fill(self, reads: Sequence[Callable[[], Kept]]) -> None:
        """Keep what these functions return, several called at a time, until the cache is full; then close it."""
        if self.closed:
            return
        for entry in map_ahead(lambda read: read(), reads, min(8, os.cpu_count() or 1)):
            self.put(entry)
            if self.closed:
                return
        self.closed = True
        logger.info(f"{self.name}: all {len(self)} pictures are kept in memory, {self.used / _MIB:,.0f} MiB")

    def _bytes(self) -> float:
        """The limit of this process in bytes."""
        if self._asked is not None:
            self._limit = self._asked * _MIB
        elif self._limit is None:
            free = available_memory()
            processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
            self._limit = float("inf") if free is None else free / 2 / processes
        worker = torch.utils.data.get_worker_info()
        # only workers that share nothing fill a cache of their own
        return self._limit / (worker.num_workers if worker else 1)

    def _tell_full(self) -> None:
        logger.warning(
            f"{self.name}: {len(self)} pictures are kept in memory, {self.used / _MIB:,.0f} of at most "
            f"{self._bytes() / _MIB:,.0f} MiB; the others are read again each time. A higher io_backend.limit keeps "
            "more" + ("" if self.keep == "encoded" else ", and keep: encoded needs less memory")
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}, "used": 0, "closed": False, "_limit": None}


def open_cache(io_backend: Mapping[str, Any] | None, name: str) -> Cache | None:
    """The cache that ``io_backend`` asks for; None for anything but ``memory``."""
    options = io_backend or {}
    if options.get("type") != "memory":
        return None
    return Cache(name, options.get("keep", "decoded"), options.get("limit"))


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """Like ``map``, in order, with several threads that are at most two items each ahead of what was taken."""
    waiting: deque[Any] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def available_memory() -> int | None:
    """Bytes that can be used without swapping, within the limit of a container; None where nobody says."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, current = (_CGROUP / name for name in ("memory.max", "memory.current"))
        found += [int(limit.read_text()) - int(current.read_text())]
    except (OSError, ValueError):
        # another system, or a container without a limit ("max")
        pass
    return max(0, min(found)) if found else None
