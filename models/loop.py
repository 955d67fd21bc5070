"""fit and evaluate: the loop is bounded by iterations, never by epochs."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models import checkpoint, heap, page, progress, report
from models.base import Base
from models.batches import Preparation
from models.distributed import ALONE, PeerEnded, Processes
from models.home import folder_of
from models.judging import Judged, Row, better_of, restored, score
from models.logbook import Logbook, Mute
from models.progress import Pace, Progress
from models.report import SetScores
from models.runtime import Interrupted, StopSignal
from options.errors import UserError
from options.schema import Options

logger = logging.getLogger("pellucid")


@dataclass(frozen=True)
class PictureTools:
    """What the loop needs of pictures, given by the entry point, since models knows no data.

    Attributes:
        write: (path, uint8 (h, w, c)) -> None, writes a picture file whole.
        resize: (uint8 (h, w, c), scale) -> uint8, MATLAB's bicubic.
    """

    write: Callable[[Path, np.ndarray], None]
    resize: Callable[[np.ndarray, float], np.ndarray]


@heap.kept()
def evaluate(
    model: Base,
    loaders: Mapping[str, Iterable[Mapping[str, Any]]],
    options: Options,
    tools: PictureTools,
    *,
    picture_path: Callable[[str, str], Path] | None = None,
    on_picture: Callable[[str, Judged], None] | None = None,
    stop: StopSignal | None = None,
    processes: Processes = ALONE,
) -> list[SetScores]:
    """Judge a model on whole sets of pictures.

    Args:
        loaders: name of the set -> batches of one picture; those of this process, rank, rank + world, ...
        picture_path: (set, picture) -> where the result is written; None writes nothing.
        on_picture: called with the set and what there is to see of a picture, of which nothing is kept here.
        processes: those among which the pictures are dealt out; all of them call this.

    Returns:
        the scores of each set, in order, on each process. A set without ground truth is restored but not scored.

    Raises:
        UserError: the network does not take a picture or returns NaN, or a metric cannot be computed for it.
        Interrupted: a signal came.
    """
    results = []
    for name, loader in loaders.items():
        scores = SetScores(name, report.protocols(options.val.metrics), options.val.baseline)
        own: list[tuple[int, Row]] = []
        for turn, batch in enumerate(loader):
            picture = batch["name"][0]
            result = restored(f"{name}/{picture}", model, batch["lq"])
            if picture_path is not None:
                tools.write(picture_path(name, picture), result.rounded)
            judged = Judged(batch, result, options, resize=tools.resize)
            if on_picture is not None:
                on_picture(name, judged)
            if judged.gt is not None and scores.protocol:
                row = score(f"{name}/{picture}", judged, options.val.metrics)
                own.append((turn * processes.world + processes.rank, row))
            if _is_over(stop, processes):
                break
        scores.rows = _collected(own, stop, processes)
        if scores.protocol and not scores.rows:
            logger.warning(f"{name} has no ground truth: its pictures are restored but not scored")
        for remark in scores.unusual():
            logger.warning(remark)
        results.append(scores)
    processes.share_warnings()
    return results


def _is_over(stop: StopSignal | None, processes: Processes) -> bool:
    if stop is not None and stop.code is not None:
        processes.announce_end()
        return True
    return processes.somebody_ends()


def _collected(own: list[tuple[int, Row]], stop: StopSignal | None, processes: Processes) -> list[Row]:
    """The rows of all processes, in the order of the set."""
    parts = processes.gather((own, stop.code if stop is not None else None))
    codes = [code for _, code in parts if code is not None]
    if codes:
        raise Interrupted(max(codes))
    return [row for _, row in sorted((row for rows, _ in parts for row in rows), key=lambda pair: pair[0])]


def fit(
    model: Base,
    train_loader: Any,
    val_loaders: Mapping[str, Iterable[Mapping[str, Any]]],
    options: Options,
    tools: PictureTools,
    *,
    folder: Path,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> list[SetScores]:
    """Train to ``train.total_iter``, validating and saving on the way.

    Args:
        train_loader: endless batches from ``progress.samples`` on; has ``position`` (samples handed out), ``dataset``.
        folder: the run's folder, which exists.
        progress: how far a resumed run has come.
        processes: those that train together; all of them call this.

    Returns:
        the scores of the last validation; empty without validation sets.

    Raises:
        Interrupted: a signal came.
        UserError: a picture cannot be read, a loss is not finite, a worker died ..
        MemoryError, torch.OutOfMemoryError: as they say. A resumable state is saved in each of these cases, and at any
            other error that comes between two steps (in a metric of the user's, for instance).
    """
    run = _Fit(model, train_loader, val_loaders, options, tools, folder, progress or Progress(), processes)
    with StopSignal(shared=processes.world > 1, quiet=not processes.is_main) as stop:
        try:
            run.loop(stop)
        # whatever it is, it is raised again
        except Exception as error:
            # what these break off can be done again
            whole = isinstance(error, Interrupted | UserError | MemoryError | torch.OutOfMemoryError)
            run.rescue(whole=whole, together=isinstance(error, Interrupted))
            if isinstance(error, Interrupted):
                resume = "" if "--auto_resume" in processes.command else " --auto_resume"
                logger.info(f"interrupted; to continue: {processes.command}{resume}")
            raise
        finally:
            run.book.close()
    return run.latest


class _Fit:
    """One call of :func:`fit`."""

    def __init__(
        self,
        model: Base,
        train_loader: Any,
        val_loaders: Mapping[str, Any],
        options: Options,
        tools: PictureTools,
        folder: Path,
        progress: Progress,
        processes: Processes,
    ) -> None:
        self.model, self.train_loader, self.val_loaders = model, train_loader, val_loaders
        self.options, self.tools, self.folder, self.progress = options, tools, folder, progress
        self.latest: list[SetScores] = []
        self.processes = processes
        # False within a step, when the weights, their average and the count of steps need not belong together
        self.at_rest = True
        # iteration whose state was saved whole
        self.saved = -1
        self.book = self._open_book() if processes.is_main else Mute()

    def _open_book(self) -> Logbook:
        return Logbook(
            self.folder,
            self.options.name,
            total=self.options.train.total_iter,
            start=self.model.iteration,
            validated=self.progress.validated,
            tensorboard=folder_of(self.options, "tb_logger") if self.options.logger.use_tb_logger else None,
            wandb=self.options.logger.wandb,
        )

    def loop(self, stop: StopSignal) -> None:
        step, total = self.model.iteration, self.options.train.total_iter
        if step >= total:
            logger.warning(f"the run is at iteration {step}, and train.total_iter is {total}: nothing is left to train")
        if self._validation_due() and 0 < step != self.progress.validated:
            self.validate(stop)  # which the interrupted run did not complete
            self.save()
        with contextlib.closing(iter(self.train_loader)) as stream:
            self._steps(stream, stop)
        if not self.processes.is_main:
            return
        checkpoint.save_pth(self.folder / "models" / "net_g_latest.pth", self.model.weights())
        if self.book.file.exists():
            report.learning_curve(self.book.file, self.folder / "curve.png")
        if not self.val_loaders:
            # else the last validation has written it
            self._write_page()

    def _steps(self, stream: Iterator[Mapping[str, Any]], stop: StopSignal) -> None:
        model, train, every = self.model, self.options.train, self.options.logger
        pace, prepare = Pace(self.progress), Preparation(self.options, self.processes.rank)
        while model.iteration < train.total_iter:
            pace.start()
            batches = [next(stream) for _ in range(train.accum_iter)]
            batches = prepare(batches, model.iteration + 1)
            pace.got_data()
            self.at_rest = False
            logs = model.train_step(batches)
            self.progress.samples = self.train_loader.position
            pace.end(logs)
            self.at_rest = True
            step = model.iteration
            self.book.step(step)
            due = step % every.print_freq == 0 or step == train.total_iter
            # the first step is shown too, as a sign of life, and counts for the line that is due
            if due or step == 1:
                self._write_line(pace, row=due)
            save_due = step % every.save_checkpoint_freq == 0 or step == train.total_iter
            # before the validation, so that a kill during it costs the validation only
            if save_due:
                self.save()
            if self._validation_due():
                self.validate(stop)
                if save_due:
                    self._save_state()  # with the best scores of this step
            code = self.processes.highest(stop.code or 0)
            if code:
                raise Interrupted(code)

    def _write_line(self, pace: "Pace", *, row: bool) -> None:
        logs, times = pace.means()
        logs = self.processes.mean(logs)
        self.processes.share_warnings()
        step, lrs = self.model.iteration, self.model.learning_rates()
        self.book.train(step, self._epoch(), lrs=lrs, logs=logs, times=times, row=row)
        if row:
            pace.restart()

    def _validation_due(self) -> bool:
        step = self.model.iteration
        return bool(self.val_loaders) and (
            step % self.options.val.val_freq == 0 or step == self.options.train.total_iter
        )

    def _epoch(self) -> int:
        training_set = next(iter(self.options.phase("train").values()))
        return (self.progress.samples - 1) // (len(self.train_loader.dataset) * training_set.dataset_enlarge_ratio)

    def validate(self, stop: StopSignal) -> None:
        """Judge the model on all validation sets; keep the best weights."""
        options, step = self.options, self.model.iteration
        shown: dict[str, str] = {}

        def path_of(name: str, picture: str) -> Path:
            return self.folder / "visualization" / name / picture / f"{Path(picture).name}_{step}.png"

        def on_picture(name: str, judged: Judged) -> None:
            # one picture a set is enough to follow a run by eye
            if shown.setdefault(name, judged.name) == judged.name:
                self.book.image(f"{name}/{judged.name}", judged.output.rounded, step)

        self.latest = evaluate(
            self.model,
            self.val_loaders,
            options,
            self.tools,
            picture_path=path_of if options.val.save_img else None,
            on_picture=on_picture,
            stop=stop,
            processes=self.processes,
        )
        better = {label: better_of(metric) for label, metric in options.val.metrics.items()}
        for position, scores in enumerate(scores for scores in self.latest if scores.rows):
            improved = self.progress.update_best(scores, better, step)
            self.book.validation(step, scores, self.progress.best[scores.name])
            # the first metric of the first set decides which weights are the best
            if position == 0 and next(iter(scores.protocol)) in improved and self.processes.is_main:
                self._save_best(scores)
        self.progress.validated = step
        self._write_page()

    def _write_page(self) -> None:
        if self.processes.is_main:
            where, command = (self.folder, self.book.file), self.processes.command
            page.of_training(*where, self.model, self.options, self.latest, command=command)

    def rescue(self, *, whole: bool, together: bool) -> None:
        """Save what can be continued, before an error ends the run.

        Args:
            whole: the error leaves the weights of the last step as they are, unless the model is just changing them.
            together: all processes are there.
        """
        if self.saved == self.model.iteration:
            return  # as it was between two steps, which it may be no longer
        if self.model.changing or not (whole or self.at_rest):
            logger.warning("the error came within a step, so its state is not saved; the last saved one is good")
        elif self.model.iteration == 0:
            logger.warning("no step was finished, so there is nothing to save")
        # an infinity may be meant, as in a mask
        elif checkpoint.find_nan(self.model.weights()) is None:
            if not self.at_rest:
                logger.warning("random numbers of the step are spent: what goes on from here is not equal to the bit")
            try:
                self.save(together=together)
            except PeerEnded:
                self.save(together=False)
        else:
            # the step before may have spoilt them
            logger.warning("the weights hold NaN, so they are not saved; an earlier state is the last good one")

    def save(self, *, together: bool = True) -> None:
        """Weights and a resumable state of this iteration; not ``together`` where other processes may be gone."""
        step, keep = self.model.iteration, self.options.logger.keep_checkpoints
        if self.processes.is_main:
            checkpoint.save_pth(self.folder / "models" / f"net_g_{step}.pth", self.model.weights())
        self._save_state(together=together)
        if not self.processes.is_main:
            return
        if keep is not None:
            checkpoint.keep_last(self.folder / "models", keep)
            checkpoint.keep_last(self.folder / "training_states", keep)
        logger.info(f"saved the weights and the state of iteration {step}")

    def _save_state(self, *, together: bool = True) -> None:
        path = self.folder / "training_states" / f"{self.model.iteration}.state"
        progress.save(path, self.model, self.progress, self.options, processes=self.processes, together=together)
        self.saved = self.model.iteration

    def _save_best(self, scores: SetScores) -> None:
        weights = self.model.weights()
        key = "params_ema" if "params_ema" in weights else "params"
        facts = {"network_g": self.options.network_g.spec(), "scale": self.options.scale, "weights": key}
        facts |= {"iteration": self.model.iteration, "name": self.options.name, "scores": scores.means()}
        checkpoint.save_safetensors(self.folder / "models" / "net_g_best.safetensors", weights[key], facts)
