"""fit and evaluate: the loop is bounded by iterations, never by epochs."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from models import checkpoint, logbook, report
from models.base import Base
from models.infer import to_uint8
from models.logbook import Logbook
from models.metrics import METRICS
from models.report import SetScores
from models.restoration import NotFinite
from models.runtime import Interrupted, StopSignal, folder_of
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


@dataclass
class _Best:
    """Best value of each set and metric so far, with its iteration."""

    values: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)

    def update(self, scores: SetScores, better: Mapping[str, str], iteration: int) -> list[str]:
        """Take in one validation; return the metrics that improved."""
        kept = self.values.setdefault(scores.name, {})
        improved = []
        for label, value in scores.means().items():
            old = kept.get(label)
            if old is None or (value > old[0] if better[label] == "higher" else value < old[0]):
                kept[label] = (value, iteration)
                improved.append(label)
        return improved


def evaluate(
    model: Base,
    loaders: Mapping[str, Iterable[Mapping[str, Any]]],
    options: Options,
    tools: PictureTools,
    *,
    picture_path: Callable[[str, str], Path] | None = None,
    on_picture: Callable[[str, str, np.ndarray], None] | None = None,
    stop: StopSignal | None = None,
) -> list[SetScores]:
    """Judge a model on whole sets of pictures.

    Args:
        loaders: name of the set -> batches of one picture.
        picture_path: (set, picture) -> where the result is written; None writes nothing.
        on_picture: called with set, picture and result, uint8 (h, w, c).

    Returns:
        the scores of each set, in order. A set without ground truth is restored but not scored.
    """
    results = []
    for name, loader in loaders.items():
        val = options.val
        protocol = {label: report.protocol_of(metric) for label, metric in val.metrics.items()}
        scores = SetScores(name, protocol, val.baseline)
        for batch in loader:
            picture = batch["name"][0]
            result = to_uint8(model.predict(batch["lq"]))
            if picture_path is not None:
                tools.write(picture_path(name, picture), result)
            if on_picture is not None:
                on_picture(name, picture, result)
            if "gt" in batch and protocol:
                gt = to_uint8(batch["gt"])
                reference = _baseline(to_uint8(batch["lq"]), options, tools)
                scores.rows.append((picture, _scores(result, gt, options), _scores(reference, gt, options)))
            if stop is not None and stop.code is not None:
                raise Interrupted(stop.code)
        if protocol and not scores.rows:
            logger.warning(f"{name} has no ground truth: its pictures are restored but not scored")
        for remark in scores.unusual():
            logger.warning(remark)
        results.append(scores)
    return results


def fit(
    model: Base,
    train_loader: Any,
    val_loaders: Mapping[str, Iterable[Mapping[str, Any]]],
    options: Options,
    tools: PictureTools,
    *,
    folder: Path,
    best: Mapping[str, Any] | None = None,
) -> list[SetScores]:
    """Train to ``train.total_iter``, validating and saving on the way.

    Args:
        train_loader: endless batches from the first that ``model.iteration`` has not seen; ``dataset`` has a length.
        folder: the run's folder, which exists.
        best: the best scores so far, of a resumed run.

    Returns:
        the scores of the last validation; empty without validation sets.

    Raises:
        Interrupted: a signal came; a resumable state was saved.
        NotFinite: a loss or gradient was not finite; the state before that step was saved.
    """
    run = _Fit(model, val_loaders, options, tools, folder, _Best(dict(best or {})))
    with StopSignal() as stop:
        try:
            run.loop(train_loader, stop)
        except (Interrupted, NotFinite):
            run.save()
            raise
        finally:
            run.book.close()
    return run.latest


class _Fit:
    """One call of :func:`fit`."""

    def __init__(
        self,
        model: Base,
        val_loaders: Mapping[str, Any],
        options: Options,
        tools: PictureTools,
        folder: Path,
        best: _Best,
    ) -> None:
        self.model, self.val_loaders, self.options, self.tools = model, val_loaders, options, tools
        self.folder, self.best = folder, best
        self.latest: list[SetScores] = []
        board = folder_of(options, "tb_logger") if options.logger.use_tb_logger else None
        self.book = Logbook(
            folder,
            options.name,
            total=options.train.total_iter,
            start=model.iteration,
            tensorboard=board,
            wandb=options.logger.wandb,
        )

    def loop(self, train_loader: Any, stop: StopSignal) -> None:
        if self.model.iteration >= self.options.train.total_iter:
            logger.warning(f"iteration {self.model.iteration} is the last one: there is nothing left to train")
        with contextlib.closing(iter(train_loader)) as stream:
            self._steps(train_loader, stream, stop)
        self.save()
        checkpoint.save_pth(self.folder / "models" / "net_g_latest.pth", self.model.weights())
        report.learning_curve(self.book.file, self.folder / "curve.png")

    def _steps(self, train_loader: Any, stream: Iterator[Mapping[str, Any]], stop: StopSignal) -> None:
        model, options, total = self.model, self.options, self.options.train.total_iter
        training_set = next(iter(options.phase("train").values()))
        per_step = training_set.batch_size_per_gpu * options.train.accum_iter
        per_epoch = len(train_loader.dataset) * training_set.dataset_enlarge_ratio
        pace = _Pace()
        while model.iteration < total:
            pace.start()
            batches = [next(stream) for _ in range(options.train.accum_iter)]
            pace.got_data()
            logs = model.train_step(batches)
            pace.end()
            step = model.iteration
            self.book.step(step)
            if step % options.logger.print_freq == 0 or step == total:
                values = {label: value.item() for label, value in logs.items()}
                epoch = (step * per_step - 1) // per_epoch
                self.book.train(step, epoch, lrs=model.learning_rates(), logs=values, times=pace.take())
            if step % options.logger.save_checkpoint_freq == 0 and step != total:
                self.save()
            if self.val_loaders and (step % options.val.val_freq == 0 or step == total):
                self.validate(stop)
            if stop.code is not None:
                raise Interrupted(stop.code)

    def validate(self, stop: StopSignal) -> None:
        options, step = self.options, self.model.iteration
        shown: dict[str, str] = {}

        def path_of(name: str, picture: str) -> Path:
            return self.folder / "visualization" / name / picture / f"{Path(picture).name}_{step}.png"

        def on_picture(name: str, picture: str, result: np.ndarray) -> None:
            # one picture a set is enough to follow a run by eye
            if shown.setdefault(name, picture) == picture:
                self.book.image(f"{name}/{picture}", result, step)

        self.latest = evaluate(
            self.model,
            self.val_loaders,
            options,
            self.tools,
            picture_path=path_of if options.val.save_img else None,
            on_picture=on_picture,
            stop=stop,
        )
        better = {label: metric.better for label, metric in options.val.metrics.items()}
        for position, scores in enumerate(scores for scores in self.latest if scores.rows):
            improved = self.best.update(scores, better, step)
            self.book.validation(step, scores, self.best.values[scores.name])
            # the first metric of the first set decides which weights are the best
            if position == 0 and next(iter(scores.protocol)) in improved:
                self._save_best(scores)

    def save(self) -> None:
        """Weights and a resumable state of this iteration."""
        step, keep = self.model.iteration, self.options.logger.keep_checkpoints
        checkpoint.save_pth(self.folder / "models" / f"net_g_{step}.pth", self.model.weights())
        state = {"model": self.model.state_dict(), "best": self.best.values}
        checkpoint.save_state(self.folder / "training_states" / f"{step}.state", state)
        if keep is not None:
            checkpoint.keep_last(self.folder / "models", keep)
            checkpoint.keep_last(self.folder / "training_states", keep)
        logger.info(f"saved the weights and the state of iteration {step}")

    def _save_best(self, scores: SetScores) -> None:
        weights = self.model.weights()
        key = "params_ema" if "params_ema" in weights else "params"
        facts = {"network_g": self.options.network_g.spec(), "scale": self.options.scale, "weights": key}
        facts |= {"iteration": self.model.iteration, "name": self.options.name, "scores": scores.means()}
        checkpoint.save_safetensors(self.folder / "models" / "net_g_best.safetensors", weights[key], facts)


class _Pace:
    """Mean seconds of an iteration, and of waiting for its data, since the last log line."""

    def __init__(self) -> None:
        self.total = self.data = 0.0
        self.count = 0

    def start(self) -> None:
        self._began = time.perf_counter()

    def got_data(self) -> None:
        self.data += time.perf_counter() - self._began

    def end(self) -> None:
        self.total += time.perf_counter() - self._began
        self.count += 1

    def take(self) -> tuple[float, float]:
        means = self.total / max(self.count, 1), self.data / max(self.count, 1)
        self.total, self.data, self.count = 0.0, 0.0, 0
        return means


def show(results: list[SetScores]) -> None:
    """Print the table of scores."""
    if any(scores.rows for scores in results):
        logbook.console.print(report.table([scores for scores in results if scores.rows]))


def _scores(result: np.ndarray | None, gt: np.ndarray, options: Options) -> dict[str, float]:
    if result is None:
        return {}
    metrics = options.val.metrics.items()
    return {label: float(METRICS.get(m.type)(result, gt, **m.arguments())) for label, m in metrics}


def _baseline(lq: np.ndarray, options: Options, tools: PictureTools) -> np.ndarray | None:
    kind = options.val.baseline
    if kind is None:
        return None
    return lq if kind == "input" or options.scale == 1 else tools.resize(lq, options.scale)
