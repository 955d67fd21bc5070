"""Progress of scripts.restore with the time left."""

import logging
import math
import time
from collections.abc import Callable

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
from rich.table import Column
from rich.text import Text

from models import logbook
from scripts.restore_picture import Outcome, shown

_EVERY = 30.0
_NAME = 24
# of all pixels
_LITTLE = 0.05

logger = logging.getLogger("pellucid")


class Watch:
    """Progress over the pixels of all pictures: a bar on a terminal, a line now and then elsewhere.

    Args:
        outcomes: of the pictures that are to do.
        seconds_for: (h, w) -> an estimate for a picture of this size, or None while there is none.
    """

    def __init__(self, outcomes: list[Outcome], seconds_for: Callable[[tuple[int, int]], float | None]) -> None:
        self._sizes = [outcome.size for outcome in outcomes]
        self._pixels = [math.prod(size) for size in self._sizes]
        self._names = [outcome.job.source.name for outcome in outcomes]
        self._total, self._done, self._number, self._share = sum(self._pixels), 0, 0, 0.0
        self._seconds_for = seconds_for
        self._began = self._moved = time.monotonic()
        self._told = -math.inf
        self._bar: Progress | None = None
        if logbook.console.is_terminal and outcomes:
            columns = (BarColumn(bar_width=20), TextColumn("{task.percentage:3.0f} %"), _Words(self._words))
            self._bar = Progress(*columns, console=logbook.console, transient=True)

    def __enter__(self) -> "Watch":
        if self._bar is not None:
            self._task = self._bar.add_task("", total=self._total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def move(self, share: float) -> None:
        """``share`` of the present picture is done."""
        self._share, self._moved = share, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._seen())
        elif share < 1 and self._moved - self._told > _EVERY and (self._seconds_left() or 0) > _EVERY:
            self._told = self._moved
            logger.info(f"{100 * self._seen() / self._total:.0f} %: {self._words()}")

    def tell(self, outcome: Outcome) -> None:
        """One picture is finished."""
        self._done, self._share, self._moved = self._done + self._pixels[self._number], 0.0, time.monotonic()
        self._number += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        self._told = self._moved
        count = f"[{self._number}/{len(self._sizes)}]"
        if outcome.status != "restored":
            # another process may have restored it meanwhile
            level = logging.INFO if outcome.status == "done before" else logging.ERROR
            logger.log(level, f"{count} {outcome.job.name} {outcome.status}")
            return
        sizes = f"{shown(outcome.size)} -> {shown(outcome.result)}"
        notes = "".join(f"; {note}" for note in outcome.notes)
        left = _left(self._seconds_left()) if self._number < len(self._sizes) else ""
        logger.info(f"{count} {outcome.job.target}: {sizes} in {outcome.seconds:.1f} s{notes}{left}")

    def _words(self) -> str:
        if self._number == len(self._sizes):
            return ""
        name = self._names[self._number]
        # the time left is to stand on the line
        name = name if len(name) <= _NAME else f"{name[: _NAME - 8]}...{name[-5:]}"
        place = f"{name} ({self._number + 1} of {len(self._sizes)})"
        return place + _left(self._seconds_left())

    def _seen(self) -> float:
        now = self._pixels[self._number] if self._number < len(self._sizes) else 0
        return self._done + self._share * now

    def _seconds_left(self) -> float | None:
        """By what was done so far; while that is little by what the network took for a piece of noise."""
        seen = self._seen()
        # before the first pixels come the reading and the measuring, which are not to be multiplied
        guess = self._guess() if seen < _LITTLE * self._total else None
        if guess is not None:
            left = guess * (1 - seen / self._total)
        elif seen:
            left = (self._moved - self._began) * (self._total - seen) / seen
        else:
            return None
        return max(0.0, left - (time.monotonic() - self._moved))

    def _guess(self) -> float | None:
        guesses = [self._seconds_for(size) for size in self._sizes]
        return None if None in guesses else sum(guesses)


class _Words(ProgressColumn):
    """Text that is asked for whenever the bar is drawn, so that the time left runs on between two pieces."""

    def __init__(self, words: Callable[[], str]) -> None:
        super().__init__(table_column=Column(no_wrap=True, overflow="ellipsis"))
        self._ask = words

    def render(self, task: object) -> Text:
        """The text of this moment."""
        return Text(self._ask())


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    seconds = round(seconds)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return f", about {f'{hours}:{minutes:02}' if hours else minutes}:{seconds % 60:02} left"
