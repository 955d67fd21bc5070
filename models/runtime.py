"""Around a run: seeds, the device, signals, and errors turned into exit codes."""

import contextlib
import errno
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from kernels.dispatch import KernelUnavailable
from models import blame, home
from models.screen import Screen
from options.errors import OptionsError, UserError
from options.schema import Options

logger = logging.getLogger("pellucid")


class Ended(Exception):
    """The run is at its end and has said why: nothing is left but the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"ended with exit code {code}")
        self.code = code


class Interrupted(Ended):
    """A signal ended the run after its state was saved."""


class StopSignal:
    """Remembers Ctrl-C, SIGTERM and SIGHUP until the loop is at a safe place; a second Ctrl-C stops at once.

    A signal that the process was started to ignore (``nohup``, or in the background of a script) stays ignored.

    Args:
        shared: the process is one of several. A Ctrl-C then comes from the terminal and from the launcher, which counts
            as one; and a launcher that ends all processes does not cut short the last words of one that ends already.
        quiet: another process speaks.
    """

    def __init__(self, *, shared: bool = False, quiet: bool = False) -> None:
        self.code: int | None = None
        self._shared, self._quiet, self._since = shared, quiet, 0.0
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for number, handler in self._old.items():
            ending = self._shared and kind is not None and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if ending else handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.code is not None and number == signal.SIGINT:
            if self._shared and time.monotonic() - self._since < 1:
                return
            raise KeyboardInterrupt
        if self.code is not None and self._shared:
            return
        self._since = time.monotonic()
        self.code = 128 + number
        if not self._quiet:
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
    code = _run(main, argv)
    if _connected:
        # threads of the connection may still run in PyTorch, which ends the process by an abort then, one time in ten
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            Screen(stream).flush()
        os._exit(code)
    return code


def note_connection() -> None:
    """From now on this process is connected with others."""
    _connected.append(True)


_connected: list[bool] = []


def _run(main: Callable[[list[str]], None], argv: list[str]) -> int:
    with _terminations_raised():
        try:
            main(argv)
        except Ended as end:
            return end.code
        except (Exception, KeyboardInterrupt) as error:
            trace, explained = trace_of(error), explain(error)
            if trace:
                logger.error(trace, extra={"file_only": True})
            if explained is None:
                raise
            code, text = explained
            tell(text)
            return code
        finally:
            home.release()
    return 0


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and words for an error that is the user's to mend; None for a mistake of the program."""
    place = blame.place_of_user(error)
    if isinstance(error, UserError):
        return error.exit_code, f"{error}\n  raised at {place}" if place else str(error)
    if isinstance(error, KeyboardInterrupt):
        return error.args[0] if isinstance(error, _Terminated) else 130, _INTERRUPTED
    if isinstance(error, KernelUnavailable):
        return OptionsError.exit_code, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        ways = "lower datasets.train.batch_size_per_gpu or gt_size, or set train.use_checkpointing or train.use_amp"
        return 1, f"the device is out of memory; {ways}, or val.tile in validation ({error})"
    if isinstance(error, MemoryError):
        ways = "lower batch_size_per_gpu, gt_size or num_worker_per_gpu"
        return 1, f"the machine is out of memory ({error}); {ways}"
    if _is_of_the_system(error):
        named = f"{_shortened(error.filename)}: " if error.filename else ""
        return UserError.exit_code, f"{named}{error.strerror or error}" + (f"\n  raised at {place}" if place else "")
    if place is None:
        return None
    where = "the whole traceback is in the log file, where there is one"
    return 1, f"{blame.summary(error)}\n  raised at {place}\n  {where}"


# what a path can meet with, and a disk, whichever part of the program comes first to it
_OF_A_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EROFS, errno.ELOOP)
_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT)


def _is_of_the_system(error: BaseException) -> bool:
    if not isinstance(error, OSError):
        return False
    return error.errno in _OF_A_DISK or (error.errno in _OF_A_PATH and bool(error.filename))


def _shortened(path: str | bytes | int) -> str:
    name = os.fsdecode(path) if isinstance(path, str | bytes) else f"file {path}"
    return name if len(name) <= 300 else f"{name[:120]}...{name[-120:]} ({len(name)} letters)"


_INTERRUPTED = "interrupted: what was saved before is all there is"


def trace_of(error: BaseException) -> str:
    """The traceback for the log file, where it says more than the words do; else empty."""
    told = explain(error) is not None and not blame.place_of_user(error) and not _is_of_the_system(error)
    return "" if told else blame.full_text(error)


def tell(text: str, *, file_only: bool = False) -> None:
    """Print the reason for the end, and write it to the log file."""
    if not file_only:
        print(text if text == _INTERRUPTED else f"error: {text}", file=Screen(sys.stderr), flush=True)
    logger.error(text, extra={"file_only": True})


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


def choose_device(options: Options, *, local_rank: int = 0, world: int = 1) -> torch.device:
    """The device of this process, with one notice where it is less than the options ask for.

    Args:
        local_rank: number of this process on its machine; it takes the GPU of this number.
        world: number of processes of the run.

    Raises:
        OptionsError: more processes on this machine than it has GPUs.
    """
    asked = options.num_gpu
    if asked == 0 or (asked == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        logger.warning(f"num_gpu is {asked}, but CUDA is not available: the run uses the CPU")
        return torch.device("cpu")
    if asked != "auto" and asked != world:
        way = "" if world > 1 else f"; torchrun --nproc_per_node={asked} uses them all"
        logger.warning(f"num_gpu is {asked}, but one process uses one GPU, and the run has {world} of them{way}")
    if world == 1:
        return torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise OptionsError(
            f"this machine has {count} GPUs, but process {local_rank + 1} of the run was started on it: start it with "
            f"--nproc_per_node={count}, or on the CPU with num_gpu=0"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
