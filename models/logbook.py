"""What a run tells: lines in BasicSR's format, a progress bar on a terminal, metrics.jsonl and tensorboard."""

import datetime
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from models import report
from models.distributed import ALONE, Processes, Told, Untold
from models.files import write_text
from models.report import SetScores
from models.screen import Screen
from options.schema import WandbOptions

logger = logging.getLogger("pellucid")
# a file or a pipe has no width to fit into
console = Console(file=Screen(sys.stdout), soft_wrap=True, width=None if Screen(sys.stdout).isatty() else 160)
LINE_FORMAT = "%(asctime)s %(levelname)s: %(message)s"


class _Early(logging.Handler):
    """Keeps what is logged before there is a file for it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def start_logging(file: Path | None = None, processes: Processes = ALONE, *, level: int = logging.INFO) -> None:
    """Send the log to the terminal and, where given, to ``file``.

    Called again it replaces what it set up before; a file then begins with what was logged since the call without one.
    Of several processes the first speaks; the others keep their warnings for it.
    """
    logger.setLevel(level)
    logger.propagate = False
    console.quiet = not processes.is_main
    if not processes.is_main:
        if not any(isinstance(handler, Untold) for handler in logger.handlers):
            logger.addHandler(Untold())
        return
    early = [record for handler in logger.handlers if isinstance(handler, _Early) for record in handler.records]
    # whoever reads along may leave; the run goes on, and the file has every line
    console.file = Screen(sys.stdout)
    for handler in [handler for handler in logger.handlers if not isinstance(handler, Told)]:
        logger.removeHandler(handler)
        handler.close()
    if processes.world > 1 and not logger.handlers:
        logger.addHandler(Told())
    if console.is_terminal:
        screen: logging.Handler = RichHandler(console=console, show_path=False, show_level=False, rich_tracebacks=False)
        screen.addFilter(lambda record: not getattr(record, "in_bar", False))
    else:
        screen = logging.StreamHandler(console.file)
        screen.setFormatter(logging.Formatter(LINE_FORMAT))
    screen.addFilter(lambda record: not getattr(record, "file_only", False))
    logger.addHandler(screen)
    written: logging.Handler = _Early() if file is None else logging.FileHandler(file, encoding="utf-8")
    written.setFormatter(logging.Formatter(LINE_FORMAT))
    logger.addHandler(written)
    for record in early:
        written.handle(record)


class Logbook:
    """The record of a training run.

    Args:
        folder: the run's folder, where ``metrics.jsonl`` lies.
        name: the run's name; its first five characters open each line, as in BasicSR.
        total: iterations of the whole run.
        start: iterations done before; later entries of an earlier try are removed from ``metrics.jsonl``.
        validated: iteration of the last complete validation; those of later ones are removed too.
        tensorboard: folder for tensorboard files, or None.
        wandb: project of Weights & Biases that mirrors tensorboard, or None.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        total: int,
        start: int = 0,
        validated: int = 0,
        tensorboard: Path | None = None,
        wandb: WandbOptions | None = None,
    ) -> None:
        self.name, self.total, self.start = name, total, start
        self.file = folder / "metrics.jsonl"
        self._forget_after({"train": start, "val": validated})
        self._writer = None
        if wandb is not None and wandb.project:
            _mirror_to_wandb(name, wandb, tensorboard)
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(tensorboard), purge_step=start + 1 if start else None)
        self._began = time.monotonic()
        self.progress: Progress | None = None
        if console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
            self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console)
            self._task = self.progress.add_task("", total=total, completed=start)
            self.progress.start()

    def step(self, iteration: int) -> None:
        """Move the progress bar."""
        if self.progress is not None:
            self.progress.update(self._task, completed=iteration)

    def train(
        self,
        iteration: int,
        epoch: int,
        *,
        lrs: Sequence[float],
        logs: Mapping[str, float],
        times: tuple[float, float],
        row: bool = True,
    ) -> None:
        """One line of training.

        Args:
            times: mean seconds of an iteration, and of waiting for its data.
            row: False shows the line and records nothing.
        """
        rates = "".join(f"{lr:.3e}," for lr in lrs)
        done = max(iteration - self.start, 1)
        left = (time.monotonic() - self._began) / done * (self.total - iteration)
        eta = datetime.timedelta(seconds=max(int(left), 0))
        line = f"[{self.name[:5]}..][epoch:{epoch:3d}, iter:{iteration:8,d}, lr:({rates})] "
        line += f"[eta: {eta}, time (data): {times[0]:.3f} ({times[1]:.3f})] "
        # the space at the end is BasicSR's too
        logger.info(line + "".join(f"{label}: {value:.4e} " for label, value in logs.items()), extra={"in_bar": True})
        if self.progress is not None:
            text = " ".join(f"{label} {value:.4f}" for label, value in logs.items() if label.startswith("l_"))
            self.progress.update(self._task, description=f"{text} lr {lrs[0]:.2e}")
        if not row:
            return
        place = {"kind": "train", "iter": iteration, "epoch": epoch, "lr": lrs[0]}
        self._append({**place, **logs, "time": times[0], "data": times[1]})
        for label, value in logs.items():
            self._scalar(f"losses/{label}" if label.startswith("l_") else label, value, iteration)
        self._scalar("lr", lrs[0], iteration)

    def validation(self, iteration: int, scores: SetScores, best: Mapping[str, tuple[float, int]]) -> None:
        """One validation of one set; ``best`` holds the best value so far and its iteration."""
        text = f"Validation {scores.name}"
        means, reference = scores.means(), scores.baseline_means()
        for label, value in means.items():
            highest, when = best[label]
            text += f"\n\t # {label}: {value:.4f}\tBest: {highest:.4f} @ {when} iter"
            if label in reference:
                text += f"\t({scores.baseline} {reference[label]:.4f}, {value - reference[label]:+.4f})"
            text += f"\t[{scores.protocol[label]}]" if scores.protocol[label] else ""
            self._scalar(f"metrics/{scores.name}/{label}", value, iteration)
        logger.info(text)
        row: dict[str, Any] = {"kind": "val", "iter": iteration, "set": scores.name, "scores": means}
        if reference:
            row["baseline"] = {scores.baseline: reference}
        self._append(row)

    def image(self, tag: str, picture: np.ndarray, iteration: int) -> None:
        """A result picture, uint8 (h, w, c), for tensorboard."""
        if self._writer is not None:
            self._writer.add_image(tag, picture, iteration, dataformats="HWC")

    def close(self) -> None:
        """Stop the progress bar and flush the files."""
        if self.progress is not None:
            self.progress.stop()
        if self._writer is not None:
            self._writer.close()

    def _scalar(self, tag: str, value: float, iteration: int) -> None:
        if self._writer is not None:
            self._writer.add_scalar(tag, value, iteration)

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _forget_after(self, last: Mapping[str, int]) -> None:
        if not self.file.exists():
            return
        lines = self.file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _is_kept(line, last)]
        text = "".join(line + "\n" for line in kept)
        write_text(self.file, text)


class Mute:
    """The logbook of a process that does not speak."""

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing; nor do the others, which are those of :class:`Logbook`."""

    train = validation = image = close = step


def _mirror_to_wandb(name: str, options: WandbOptions, tensorboard: Path | None) -> None:
    if tensorboard is None:
        logger.warning("logger.wandb mirrors tensorboard: set logger.use_tb_logger to true for it to have an effect")
        return
    try:
        import wandb
    except ImportError:
        logger.warning("logger.wandb.project is set, but wandb is not installed (pip install wandb); the run goes on")
        return
    wandb.init(project=options.project, id=options.resume_id, resume="allow", name=name, sync_tensorboard=True)


def _is_kept(line: str, last: Mapping[str, int]) -> bool:
    try:
        row = json.loads(line)
        return row["iter"] <= last[row["kind"]]
    except (ValueError, KeyError):
        return False  # a line that a kill cut off


def show(results: list[SetScores]) -> None:
    """Print the table of scores."""
    if any(scores.rows for scores in results):
        console.print(report.table([scores for scores in results if scores.rows]))
