"""Progress of long loops: a bar on a terminal, lines elsewhere, both with the time that is left."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

from models.screen import Screen

_EVERY = 10.0


def watch(label: str) -> Callable[[Iterator[Any], int], Iterator[Any]]:
    """(items, total) -> the same items: with a bar on a terminal, with a line every ten seconds elsewhere."""

    def watched(items: Iterator[Any], total: int) -> Iterator[Any]:
        with contextlib.closing(items):
            if sys.stderr.isatty():
                yield from track(items, description=label, total=total, console=Console(stderr=True), transient=True)
                return
            began = told = time.monotonic()
            for number, item in enumerate(items, start=1):
                yield item
                if (now := time.monotonic()) - told > _EVERY:
                    told = now
                    print(_line(label, number, total, now - began), file=Screen(sys.stderr), flush=True)

    return watched


def _line(label: str, number: int, total: int, seconds: float) -> str:
    left = datetime.timedelta(seconds=round(seconds / number * (total - number)))
    return f"{number:,} of {total:,} {label}, {left} left"
