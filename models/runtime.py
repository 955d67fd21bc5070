"""Around a run: seeds, the device, signals, and errors turned into exit codes."""

import contextlib
import logging
import os
import random
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kernels.dispatch import KernelUnavailable
from models import blame, home
from models.screen import Screen
from options.errors import OptionsError, UserError
from options.schema import Options

logger = logging.getLogger("pellucid")


class Interrupted(Exception):
    """A signal ended the run after its state was saved."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted (exit code {code})")
        self.code = code


class StopSignal:
    """Remembers Ctrl-C, SIGTERM and SIGHUP until the loop is at a safe place; a second Ctrl-C stops at once.

    A signal that the process was started to ignore (``nohup``, or in the background of a script) stays ignored.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.code = 128 + number
        # not through the log, which may be in the middle of a line of its own
        with contextlib.suppress(OSError):
            os.write(2, _STOPPING_SOON)


_STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_STOPPING_SOON = b"stopping after this step; a resumable state will be saved (press Ctrl-C again to stop at once)\n"


class _Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP at a time when there is nothing to save."""


def run(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Call ``main`` and return the exit code.

    A user's mistake is told in words, without a traceback; an error in a component that the user brought, by its place
    there, with the traceback in the log file. A mistake of this program is raised.
    """
    with _terminations_raised():
        try:
            main(argv)
        except Interrupted as stop:
            _tell_how_to_continue(argv)
            return stop.code
        except KeyboardInterrupt as stop:
            code = stop.args[0] if isinstance(stop, _Terminated) else 130
            print(
                "interrupted before the first step, or at once: what was saved before is all there is",
                file=Screen(sys.stderr),
            )
            return code
        except Exception as error:
            return _end_with(error)
        finally:
            home.release()
    return 0


def _end_with(error: Exception) -> int:
    """Tell an error, and return the exit code; raise it where it is this program's own."""
    place = blame.place_of_user(error)
    if isinstance(error, UserError):
        _tell(f"{error}\n  raised at {place}" if place else str(error))
        if place:
            logger.error(blame.full_text(error), extra={"file_only": True})
        return error.exit_code
    if isinstance(error, KernelUnavailable):
        _tell(str(error))
        return OptionsError.exit_code
    if isinstance(error, torch.OutOfMemoryError):
        ways = "lower datasets.train.batch_size_per_gpu or gt_size, or set train.use_checkpointing or train.use_amp"
        _tell(f"the device is out of memory; {ways}, or val.tile in validation ({error})")
        return 1
    if isinstance(error, MemoryError):
        _tell(f"the machine is out of memory ({error}); lower batch_size_per_gpu, gt_size or num_worker_per_gpu")
        return 1
    logger.error(blame.full_text(error), extra={"file_only": True})
    if place is None:
        raise error
    _tell(f"{blame.summary(error)}\n  raised at {place}\n  the whole traceback is in the log file, where there is one")
    return 1


def _tell(error: str, mark: str = "error: ") -> None:
    print(f"{mark}{error}", file=Screen(sys.stderr))
    logger.error(error, extra={"file_only": True})


def _tell_how_to_continue(argv: list[str]) -> None:
    resume = [] if "--auto_resume" in argv else ["--auto_resume"]
    command = shlex.join(["python", *sys.argv[:1], *argv, *resume])
    logger.info(f"interrupted; to continue: {command}")


@contextlib.contextmanager
def _terminations_raised() -> Iterator[None]:
    """SIGTERM and SIGHUP end the process through exceptions, as Ctrl-C does, wherever nothing else is said."""

    def terminate(number: int, _frame: object) -> None:
        raise _Terminated(128 + number)

    old = {}
    if threading.current_thread() is threading.main_thread():
        for number in _STOPPING:
            if signal.getsignal(number) is signal.SIG_DFL:
                old[number] = signal.signal(number, terminate)
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; ``deterministic`` refuses operators whose results vary from run to run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # the call imports the compiler, which takes seconds
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)


def choose_device(options: Options, launcher: str = "none") -> torch.device:
    """The device of the run, with one notice where it is less than the options ask for."""
    if launcher != "none" or os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
        raise OptionsError("this version trains in one process; start train.py without --launcher and torchrun")
    asked = options.num_gpu
    if asked == 0 or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        logger.warning(f"num_gpu is {asked}, but CUDA is not available: the run uses the CPU")
        return torch.device("cpu")
    if asked != "auto" and asked > 1:
        logger.warning(f"num_gpu is {asked}, but one process uses one GPU")
    return torch.device("cuda", torch.cuda.current_device())
