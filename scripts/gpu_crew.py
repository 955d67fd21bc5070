"""Steps run in processes of their own, so that one that hangs, crashes or loses its device costs nobody but itself.

The process that calls ``run`` touches no device. It deals the steps out, one at a time, to processes that send rows
back; one that is silent for too long is killed, one that died is replaced, and whatever happens the rows so far are
there. ``plan`` names a function that makes the steps by name: each process calls it for itself, so that nothing but
names and rows crosses between them.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from scripts.gpu_rows import Row

# seconds that a new process has for its imports and the device
START = 60.0


@dataclass(frozen=True)
class Step:
    """Something to run.

    Args:
        name: unlike all others.
        row: says what it is, for when there is no result.
        run: makes the rows.
        seconds: what it may take before it counts as hung.
        alone: nothing else runs beside it.
        late: less important than what others prepare.
    """

    name: str
    row: Row
    run: Callable[[], Iterable[Row]]
    seconds: float = 60.0
    alone: bool = False
    late: bool = False


@dataclass
class _Worker:
    process: Any
    pipe: Any
    step: Step | None = None
    until: float = 0.0


def run(
    steps: list[Step],
    plan: tuple[str, str, dict],
    rows: dict[str, list[Row]],
    *,
    until: float,
    jobs: int = 1,
    log: str = os.devnull,
    say: Callable[[str], None] = print,
) -> None:
    """Run steps in ``jobs`` processes.

    Args:
        steps: in order of importance.
        plan: module, function and its arguments; it returns at least ``steps``.
        rows: is filled, by name of the step, as they end; what was not run has one row that says why.
        until: ``time.monotonic()`` at which all must be over.
        log: file that the processes print to.
        say: is told of every failure as it happens.
    """
    waiting, crew = list(steps), []
    try:
        while (waiting or any(worker.step for worker in crew)) and time.monotonic() < until:
            while len(crew) < min(jobs, len(waiting) + sum(worker.step is not None for worker in crew)):
                crew.append(_start(plan, log))
            for worker in crew:
                if worker.step is None and waiting:
                    _give(worker, waiting.pop(0))
            rows |= _collected(crew, until, say)
    finally:
        _end(*crew)
    running = [worker.step for worker in crew if worker.step]
    for step in steps:
        if step.name not in rows:
            note = "skipped: deadline" + (" (it was running)" if step in running else "")
            rows[step.name] = [replace(step.row, ok=None, note=note)]


def _collected(crew: list[_Worker], until: float, say: Callable[[str], None]) -> dict[str, list[Row]]:
    """Rows of the steps that ended, within a quarter of a second; workers that are gone leave the crew."""
    rows = {}
    busy = [worker for worker in crew if worker.step]
    wait = max(0.0, min(0.25, until - time.monotonic()))
    ready = connection.wait([worker.pipe for worker in busy], wait)
    for worker in busy:
        step = worker.step
        if worker.pipe in ready:
            try:
                found, healthy = worker.pipe.recv()
            except (EOFError, OSError):
                worker.process.join(5)
                found, healthy = [_failure(step, f"the process died: {_exit(worker.process.exitcode)}")], False
        elif time.monotonic() > worker.until:
            found, healthy = [_failure(step, f"hung: nothing for {step.seconds:.0f} s")], False
        else:
            continue
        rows[step.name], worker.step, worker.until = found, None, 0.0
        for row in found:
            if row.ok is False:
                say(f"FAIL {step.name}: {row.note}")
        if not healthy:
            _end(worker)
            crew.remove(worker)
    return rows


def _start(plan: tuple[str, str, dict], log: str) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, plan, log), daemon=False)
    process.start()
    theirs.close()
    return _Worker(process, ours, until=time.monotonic() + START)


def _give(worker: _Worker, step: Step) -> None:
    fresh = max(0.0, worker.until - time.monotonic())
    worker.step, worker.until = step, time.monotonic() + step.seconds + fresh
    # one that died before it was asked is found dead when it is listened to
    with contextlib.suppress(OSError):
        worker.pipe.send(step.name)


def _end(*crew: _Worker) -> None:
    """Kill processes with all that they started; each may take a second to give its device back."""
    for worker in crew:
        worker.pipe.close()
        if worker.process.is_alive():
            try:
                os.killpg(worker.process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                # it has not come to lead a group yet
                worker.process.kill()
    for worker in crew:
        worker.process.join(5)


def _work(pipe: Any, plan: tuple[str, str, dict], log: str) -> None:
    """What a process does: run what it is told, until the pipe closes."""
    os.setpgrp()
    with open(log, "ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    # the one who deals out decides what an interruption means
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    module, function, arguments = plan
    steps = {step.name: step for step in getattr(importlib.import_module(module), function)(**arguments)}
    with contextlib.suppress(EOFError, OSError):
        while True:
            step = steps[pipe.recv()]
            pipe.send((_attempt(step), _is_healthy()))


def _attempt(step: Step) -> list[Row]:
    # any failure of a kernel is a row of the table
    try:
        return list(step.run())
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return [_failure(step, f"{type(error).__name__}: {error}")]


def _is_healthy() -> bool:
    """Whether the device still answers: after an illegal access it does not, whatever is asked of it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def _failure(step: Step, why: str) -> Row:
    # a peer that fails is missing; a kernel of ours that fails has failed
    return replace(step.row, ok=False if step.row.ours else None, note=why if step.row.ours else f"missing: {why}")


def _exit(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"
