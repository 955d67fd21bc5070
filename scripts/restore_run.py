"""All pictures of one call of scripts.restore, one after the other: what is to do, progress, summary, exit code."""

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

from models import logbook, runtime
from options.errors import DataError, UserError
from scripts.restore_inputs import Job
from scripts.restore_memory import GIB, PeakMemory
from scripts.restore_network import Restorer
from scripts.restore_picture import Outcome, Pictures, look, shown
from scripts.restore_record import Record
from scripts.restore_watch import Watch

# what changes the pixels of a result, beside the network
_SETTINGS = ("tile", "overlap", "self_ensemble", "alpha", "quality")
_MOST_ROWS = 50
_ORDER = ("restored", "to do", "done before", "exists", "failed", "not reached")
# the exit code of pictures that are not as they should be
_INCOMPLETE = DataError.exit_code

logger = logging.getLogger("pellucid")


def run_jobs(jobs: list[Job], restorer: Restorer, args: Namespace) -> None:
    """Restore what is not done yet, and say at the end what became of each picture.

    Raises:
        models.runtime.Ended: with the exit code, when a picture failed, a file was in the way, or Ctrl-C was pressed.
    """
    records = {job.folder: Record(job.folder) for job in jobs if job.kept}
    settings = _digest(restorer, args)
    outcomes = [_look(job, restorer.scale, records.get(job.folder), settings, args.force) for job in jobs]
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


def _restore_all(outcomes: list[Outcome], pictures: Pictures, records: dict[Path, Record], settings: str) -> int:
    """Restore the pictures that are to do; the exit code of an interruption, or 0."""
    left = [place for place, outcome in enumerate(outcomes) if outcome.status == "to do"]
    with Watch([outcomes[place] for place in left], pictures.seconds_for) as watch:
        try:
            for place in left:
                job = outcomes[place].job
                outcomes[place] = _attempt(outcomes[place], pictures, watch)
                if outcomes[place].status == "restored" and job.kept:
                    records[job.folder].add(job.target, job.source, settings)
                watch.tell(outcomes[place])
        except KeyboardInterrupt as error:
            for outcome in outcomes:
                outcome.status = "not reached" if outcome.status == "to do" else outcome.status
            return error.args[0] if error.args and isinstance(error.args[0], int) else 130
    return 0


def _look(job: Job, scale: int, record: Record | None, settings: str, force: bool) -> Outcome:
    """What is to be done with a picture."""
    try:
        _, size = look(job, scale)
    except DataError as error:
        return Outcome(job, "failed", error=str(error))
    outcome = Outcome(job, "to do", size, (size[0] * scale, size[1] * scale))
    if not os.path.lexists(job.target) or force:
        if job.target.is_dir():
            outcome.status, outcome.error = "failed", f"{job.target} is a folder"
    elif record is not None and record.has(job.target, job.source, settings):
        outcome.status = "done before"
    else:
        outcome.status = "exists"
        why = "was not made from this picture with these settings" if record is not None else "exists"
        outcome.error = f"{job.target} {why} and is left as it is; --force writes over it"
    return outcome


def _attempt(todo: Outcome, pictures: Pictures, watch: Watch) -> Outcome:
    began = time.perf_counter()
    try:
        with PeakMemory(pictures.device) as memory:
            outcome = pictures.restore(todo.job, watch.move)
        outcome.memory = memory.peak
    except (UserError, MemoryError) as error:
        text = str(error) or "memory did not suffice; give a smaller --tile"
        name = todo.job.name
        outcome = Outcome(todo.job, "failed", todo.size, error=text if name in text else f"{name}: {text}")
    outcome.seconds = time.perf_counter() - began
    return outcome


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
    folders = _folders(outcome.job for outcome in outcomes)
    logger.info(f"{told}; {'nothing was written' if dry_run else f'results in {folders}'}")


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
