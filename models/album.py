"""The pictures of a test, written as they come, so that a page can show them and none of them stays in memory."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from models.distributed import Processes
from models.judging import Judged
from models.record import Shown
from options.errors import UserError
from options.schema import Options

logger = logging.getLogger("pellucid")
# shorter side of the small pictures in the tables, at least, where the picture has as many pixels; longer side at most
THUMBNAIL, LONGEST = 64, 256


class Album:
    """Writes the results of a test, and for its page what they came from and what they should be.

    The results lie in ``visualization/<set>/``, all else in ``page/<set>/``. Each process writes its own pictures.

    Args:
        folder: of the run's results.
        options: of the run.
        write: (path, uint8 (h, w, c)) -> None, writes a picture file whole.

    Attributes:
        picture_path: (set, picture) -> where the result is written; None where no pictures are wanted.
        on_picture: to be called with each set and picture; None where the page shows no pictures.
    """

    def __init__(self, folder: Path, options: Options, *, write: Callable[[Path, np.ndarray], None]) -> None:
        self._folder, self._write = folder, write
        self._suffix = options.val.suffix or options.name
        wanted = options.val.save_img
        self.picture_path: Callable[[str, str], Path] | None = self._result if wanted else None
        self.on_picture: Callable[[str, Judged], None] | None = self._keep if wanted and options.val.report else None
        self._kept: dict[str, list[Shown]] = {}

    def pictures(self, processes: Processes) -> dict[str, list[Shown]]:
        """Set -> the pictures of all processes, in the order of the set; all of them call this."""
        parts = processes.gather(self._kept)
        found = {}
        for name in dict.fromkeys(name for kept in parts for name in kept):
            dealt = [kept.get(name, []) for kept in parts]
            # rank, rank + world, ..: as the pictures were dealt out
            turns = range(max(map(len, dealt)))
            found[name] = [own[turn] for turn in turns for own in dealt if turn < len(own)]
        return found

    def _result(self, name: str, picture: str) -> Path:
        return self._folder / "visualization" / name / f"{picture}_{self._suffix}.png"

    def _keep(self, name: str, judged: Judged) -> None:
        result = judged.output.rounded
        shown = Shown(judged.name, outputs=[self._result(name, judged.name)], size=result.shape[:2])
        self._kept.setdefault(name, []).append(shown)
        files = {"input.png": judged.input, "gt.png": judged.gt}
        # without a baseline, or with the input as it is, there is nothing more to see
        if judged.baseline is not judged.input:
            files["baseline.png"] = judged.baseline
        content = {ending: picture.rounded for ending, picture in files.items() if picture is not None}
        for ending, pixels in {**content, "thumbnail.jpg": reduced(result)}.items():
            path = self._folder / "page" / name / f"{judged.name}_{ending}"
            try:
                self._write(path, pixels)
                shown.others[Path(ending).stem] = path
            except (UserError, ValueError) as error:
                # the scores are worth more than the page
                logger.warning(f"the page will lack a picture of {name}/{judged.name}: {error}")


def reduced(picture: np.ndarray) -> np.ndarray:
    """A small picture: means over squares, of which the shorter side has at least 64 where it has as many pixels.

    Args:
        picture: uint8 ``(h, w, c)``.

    Returns:
        uint8 ``(h // k, w // k, c)``; of a side that would have more than 256, the middle.
    """
    h, w, c = picture.shape
    k = max(min(h, w) // THUMBNAIL, 1)
    rows, columns = min(h // k, LONGEST), min(w // k, LONGEST)
    top, left = (h - rows * k) // 2, (w - columns * k) // 2
    middle = picture[top : top + rows * k, left : left + columns * k]
    squares = middle.reshape(rows, k, columns, k, c)
    return np.rint(squares.mean(axis=(1, 3))).astype(np.uint8)
