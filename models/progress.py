"""How far a run has come, beside its weights: what a resumed run needs to go on as if it had never stopped."""

import datetime
import json
import logging
import math
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models import changes, checkpoint, home
from models.base import Base
from models.distributed import ALONE, Processes
from models.report import SetScores
from options.errors import OptionsError
from options.schema import Options

logger = logging.getLogger("pellucid")


@dataclass
class Progress:
    """Position, validations and best scores of a run.

    Attributes:
        samples: training samples taken so far, over all processes.
        validated: iteration of the last complete validation.
        best: set -> metric -> (best value so far, its iteration).
        sums: what the steps since the last log line reported, added up.
        count: how many steps these are.
    """

    samples: int = 0
    validated: int = 0
    best: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)
    count: int = 0

    def add(self, logs: Mapping[str, Tensor]) -> None:
        """Take in what one step reports."""
        for label, value in logs.items():
            self.sums[label] = self.sums.get(label, 0) + value
        self.count += 1

    def means(self) -> dict[str, float]:
        """Means over the steps since the last log line."""
        return {label: (value / self.count).item() for label, value in self.sums.items()}

    def update_best(self, scores: SetScores, better: Mapping[str, str], iteration: int) -> list[str]:
        """Take in one validation; return the metrics that improved. What is not a number is never the best."""
        kept = self.best.setdefault(scores.name, {})
        improved = []
        for label, value in scores.means().items():
            old = kept.get(label, (math.nan, 0))[0]
            if math.isnan(old) or (value > old if better[label] == "higher" else value < old):
                kept[label] = (value, iteration)
                if not math.isnan(value):
                    improved.append(label)
        return improved


class Pace:
    """Means since the last log line: of what a step reports, its seconds, and its seconds of waiting for data.

    What steps report is kept in the progress, so that a resumed run prints what an unbroken one would; seconds are
    those of this process.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._total = self._data = 0.0
        self._count = 0

    def start(self) -> None:
        """A step begins: its data are awaited."""
        self._began = time.perf_counter()

    def got_data(self) -> None:
        """The data of the step are there."""
        self._data += time.perf_counter() - self._began

    def end(self, logs: Mapping[str, Tensor]) -> None:
        """The step is done, and reports this."""
        self._progress.add(logs)
        self._total += time.perf_counter() - self._began
        self._count += 1

    def means(self) -> tuple[dict[str, float], tuple[float, float]]:
        """What the steps report, and (seconds of a step, seconds of waiting), in the mean."""
        return self._progress.means(), (self._total / self._count, self._data / self._count)

    def restart(self) -> None:
        """A log line was written: begin anew."""
        self._total = self._data = 0.0
        self._count = self._progress.count = 0
        self._progress.sums = {}


def save(
    path: Path,
    model: Base,
    progress: Progress,
    options: Options | None = None,
    *,
    processes: Processes = ALONE,
    together: bool = True,
) -> None:
    """Write a state: the model's, the progress, the random states of the processes, and what ``options`` decide.

    Args:
        processes: all of them call this, the first one writes.
        together: False writes the first process's own part only, since the others may be gone.
    """
    own = {"random": _random_states(), "sums": progress.sums, "count": progress.count}
    first, *others = processes.gather(own) if together else [own]
    if not processes.is_main:
        return
    state = {"model": model.state_dict(), "samples": progress.samples, "validated": progress.validated}
    run = changes.facts(options, processes.world) if options is not None else {}
    parts = {"world": processes.world, "others": others, "best": progress.best, "run": run}
    checkpoint.save_state(path, {**state, **first, **parts})


def resume(path: Path, model: Base, options: Options | None = None, processes: Processes = ALONE) -> Progress:
    """Bring a model, and the random states of the processes, to where a state was saved.

    Args:
        options: of this run; where they differ from those of the state, the log says what changes.

    Raises:
        OptionsError: the file is no state of this program, is spoilt by NaN, or belongs to another network or
            optimizer.
    """
    state = checkpoint.load_sound_state(path)
    lacking = [key for key in ("model", "samples", "validated", "best", "random") if key not in state]
    if lacking:
        way = "to start from the weights of a file, name it in path.pretrain_network_g"
        raise OptionsError(f"{path} is not a state that train.py saved (it has no {', '.join(lacking)}); {way}")
    model.load_state_dict(state["model"])
    try:
        own = _own_part(path, state, processes)
        if "random" in own:
            _restore_random_states(own["random"])
        best = {name: {label: tuple(pair) for label, pair in kept.items()} for name, kept in state["best"].items()}
        done = Progress(samples=int(state["samples"]), validated=int(state["validated"]), best=best)
        # states of before these were kept have none
        done.sums, done.count = dict(own.get("sums", {})), int(own.get("count", 0))
        now = changes.facts(options, processes.world) if options and state.get("run") else {}
        told = changes.describe(state["run"], now) if now else ""
    except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise OptionsError(f"{path} is damaged: {str(error).splitlines()[0]}; take an earlier state") from error
    if told:
        logger.warning(f"continuing with changes: {told}")
    return done


def go_on_in(folder: Path, state: Path, iteration: int) -> None:
    """Tell where a run goes on, and clear its folder of what an earlier try left beyond that."""
    logger.info(f"continuing from {state}, after iteration {iteration}")
    home.say_where_the_record_is(folder, state, iteration)
    set_aside_later(folder, iteration)


def set_aside_later(folder: Path, iteration: int) -> None:
    """Move states and weights of iterations after ``iteration``, from an earlier try, to a folder of their own."""
    later = [path for path in folder.glob("training_states/*.state") if _number(path.stem) > iteration]
    later += [path for path in folder.glob("models/net_g_*.pth") if _number(path.stem[6:]) > iteration]
    later += [path for path in folder.glob("models/net_g_best.safetensors") if _iteration_of(path) > iteration]
    if not later:
        return
    aside = folder / f"superseded_{datetime.datetime.now():%Y%m%d_%H%M%S_%f}"
    aside.mkdir()
    for path in later:
        path.rename(aside / path.name)
    logger.warning(f"{len(later)} files of iterations after {iteration}, from an earlier try, are now in {aside}")


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _iteration_of(path: Path) -> float:
    try:
        with safe_open(path, "pt") as file:
            return int(json.loads((file.metadata() or {}).get("iteration", "-1")))
    except (SafetensorError, OSError, ValueError, TypeError):
        return math.inf  # unreadable: no part of what is continued


def _own_part(path: Path, state: Mapping[str, Any], processes: Processes) -> Mapping[str, Any]:
    """What a state holds of this process alone; empty where it holds nothing of it."""
    parts, world = [state, *state.get("others", [])], state.get("world", 1)
    if world == processes.world == len(parts):
        return parts[processes.rank]
    if world != processes.world:
        why = f"was saved by a run of {world} processes, and this one has {processes.world}"
    else:
        why = "was saved when an error ended the run, so it has the random state of the first process only"
    logger.warning(f"{path} {why}: training goes on with the next sample, but is not equal to the bit")
    return state if processes.is_main else {}


def _random_states() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    states["numpy"] = (kind, [int(key) for key in keys], position, has_gauss, gauss)
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))
    # as many devices as there are now; a run moved to other hardware is not bit-exact anyway
    for device, state in enumerate(states.get("cuda", [])[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state, device)
