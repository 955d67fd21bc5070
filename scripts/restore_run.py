"""All pictures of one call of scripts.restore, one after the other: what is to do, progress, summary, exit code."""

import contextlib
import hashlib
import json
import logging
import os
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from models import heap, logbook, runtime
from options.errors import DataError, UserError
from scripts.restore_inputs import Job
from scripts.restore_memory import GIB, PeakMemory
from scripts.restore_network import Restorer
from scripts.restore_picture import Outcome, Pictures, look, shown
from scripts.restore_record import Record, stamp, stamp_of
from scripts.restore_watch import Watch

# what changes the pixels of a result, beside the network
_SETTINGS = ("tile", "overlap", "self_ensemble", "alpha", "quality")
_MOST_ROWS = 50
_ORDER = ("restored", "to do", "done before", "exists", "failed", "not reached")
# the exit code of pictures that are not as they should be
_INCOMPLETE = DataError.exit_code

Records = dict[Path, Record]

logger = logging.getLogger("pellucid")


def run_jobs(jobs: list[Job], restorer: Restorer, args: Namespace) -> None:
    """Restore what is not done yet, and say at the end what became of each picture.

    Raises:
        models.runtime.Ended: with the exit code, when a picture failed, a file was in the way, or Ctrl-C was pressed.
    """
    records = {job.folder: Record(job.folder) for job in jobs if job.kept}
    settings = _digest(restorer, args)
    outcomes = [_look(job, restorer.scale, records, settings, args.force) for job in jobs]
    pictures = Pictures(restorer, args)
    code = 0
    if args.dry_run:
        _plan(outcomes, pictures)
    else:
        code = _restore_all(outcomes, pictures, records, settings)
    _summarise(outcomes, dry_run=args.dry_run)
    if code:
        words = "interrupted; what is finished stays. Give the same command again to go on"
        logger.error(words)
        raise runtime.Ended(code)
    if any(outcome.status in ("failed", "exists") for outcome in outcomes):
        raise runtime.Ended(_INCOMPLETE)


@heap.kept()
def _restore_all(outcomes: list[Outcome], pictures: Pictures, records: Records, settings: str) -> int:
    """Restore the pictures that are to do; the exit code of an interruption, or 0."""
    left = [place for place, outcome in enumerate(outcomes) if outcome.status == "to do"]
    with Watch([outcomes[place] for place in left], pictures.seconds_for) as watch:
        try:
            for place in left:
                outcomes[place] = _attempt(outcomes[place], pictures, watch, records, settings)
                watch.tell(outcomes[place])
        except KeyboardInterrupt as error:
            for outcome in outcomes:
                outcome.status = "not reached" if outcome.status == "to do" else outcome.status
            return error.args[0] if error.args and isinstance(error.args[0], int) else 130
    return 0


def _look(job: Job, scale: int, records: Records, settings: str, force: bool) -> Outcome:
    """What is to be done with a picture."""
    try:
        _, size = look(job, scale)
    except DataError as error:
        return Outcome(job, "failed", error=str(error))
    outcome = Outcome(job, "to do", size, (size[0] * scale, size[1] * scale))
    return _regard(outcome, records, settings, force)


def _regard(outcome: Outcome, records: Records, settings: str, force: bool) -> Outcome:
    """The same, or another status because of what is at the place of its result."""
    job = outcome.job
    target, record = job.target, records.get(job.folder) if job.kept else None
    folder = next(folder for folder in target.parents if os.path.exists(folder))
    try:
        with contextlib.suppress(FileNotFoundError):
            # only a folder that is there says that a name is too long
            (folder / target.name).lstat()
        target.lstat()
    except FileNotFoundError:
        if os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
            return outcome
        return _failed(outcome, f"cannot write {target}: {folder} may not be written to")
    except OSError as error:
        return _failed(outcome, f"cannot write {target}: {error.strerror or error}")
    if target.is_dir():
        return _failed(outcome, f"{target} is a folder")
    if force:
        return outcome
    if record is not None and record.has(target, job.source, settings):
        return Outcome(job, "done before", outcome.size, outcome.result)
    why = "was not made from this picture with these settings" if record is not None else "exists"
    text = f"{target} {why} and is left as it is; --force writes over it"
    return Outcome(job, "exists", outcome.size, outcome.result, error=text)


def _attempt(todo: Outcome, pictures: Pictures, watch: Watch, records: Records, settings: str) -> Outcome:
    """Restore one picture, unless somebody else has done it meanwhile."""
    began, job, force = time.perf_counter(), todo.job, pictures.force
    if not force and os.path.lexists(job.target):
        return _regard(todo, _read_again(job), settings, force)
    source = stamp_of(job.source)

    def note(found: os.stat_result) -> None:
        if job.kept:
            records[job.folder].add(job.target, stamp(found), source=source, settings=settings)

    try:
        with PeakMemory(pictures.device) as memory:
            outcome = pictures.restore(job, watch.move, settle=note)
        outcome.memory = memory.peak
    except FileExistsError:
        outcome = _regard(todo, _read_again(job), settings, force)
    except (UserError, MemoryError) as error:
        text = str(error) or "memory did not suffice; give a smaller --tile"
        outcome = _failed(todo, text if job.name in text else f"{job.name}: {text}")
    outcome.seconds = time.perf_counter() - began
    return outcome


def _read_again(job: Job) -> Records:
    """The list of the folder as another process may have continued it."""
    return {job.folder: Record(job.folder)} if job.kept else {}


def _failed(outcome: Outcome, error: str) -> Outcome:
    return Outcome(outcome.job, "failed", outcome.size, error=error)


def _plan(outcomes: list[Outcome], pictures: Pictures) -> None:
    for outcome in outcomes:
        if outcome.status == "to do":
            tile = pictures.tile_for(outcome.size)
            outcome.notes.append("at once" if tile is None else f"in tiles of {tile}")


def _summarise(outcomes: list[Outcome], *, dry_run: bool) -> None:
    shorter = len(outcomes) > _MOST_ROWS
    rows = [o for o in outcomes if not shorter or o.status not in ("restored", "done before", "to do")]
    if rows:
        logbook.console.print(_table(rows))
    for outcome in outcomes:
        if outcome.error:
            logger.error(outcome.error)
    counts = Counter(outcome.status for outcome in outcomes)
    told = ", ".join(f"{counts[status]} {status}" for status in _ORDER if counts[status])
    folders = _folders(outcome.job for outcome in outcomes if outcome.status in ("restored", "done before"))
    results = f"results in {folders}" if folders else "no results"
    logger.info(f"{told}; {'nothing was written' if dry_run else results}")


def _table(outcomes: list[Outcome]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("picture", overflow="fold")
    for title in ("width x height", "result", "seconds", "peak GiB"):
        table.add_column(title, justify="right")
    table.add_column("status")
    for outcome in outcomes:
        seconds = "" if outcome.seconds is None else f"{outcome.seconds:.1f}"
        memory = "" if outcome.memory is None else f"{outcome.memory / GIB:.2f}"
        note = f" ({', '.join(outcome.notes)})" if outcome.notes else ""
        cells = (outcome.job.name, shown(outcome.size), shown(outcome.result), seconds, memory, outcome.status + note)
        table.add_row(*map(Text, cells))
    return table


def _folders(jobs: Iterable[Job]) -> str:
    folders = list(dict.fromkeys(str(job.folder) for job in jobs))
    return ", ".join(folders[:3]) + (f" and {len(folders) - 3} more" if len(folders) > 3 else "")


def _digest(restorer: Restorer, args: Namespace) -> str:
    values = [restorer.digest, restorer.precision, *(getattr(args, name) for name in _SETTINGS)]
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:32]
