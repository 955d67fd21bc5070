"""Around a run: seeds, the device, folders, signals, and errors turned into exit codes."""

import datetime
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kernels.dispatch import KernelUnavailable
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
    """Remembers Ctrl-C and SIGTERM until the loop is at a safe place; a second Ctrl-C stops at once.

    Args:
        shared: the process is one of several. A Ctrl-C then comes from the terminal and from the launcher, which counts
            as one; and a launcher that ends all processes does not cut short the last words of one that ends already.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self.code: int | None = None
        self._shared, self._since = shared, 0.0
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
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
        self.code = 130 if number == signal.SIGINT else 143
        logger.warning("stopping after this step; a resumable state will be saved (press Ctrl-C again to stop at once)")


def run(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Call ``main`` and return the exit code; a user's mistake is told in words, without a traceback."""
    try:
        main(argv)
    except Ended as end:
        return end.code
    except (UserError, KeyboardInterrupt, KernelUnavailable, torch.OutOfMemoryError, MemoryError) as error:
        code, text = explain(error)
        tell(text)
        return code
    return 0


def explain(error: BaseException) -> tuple[int, str] | None:
    """Exit code and words for an error that is the user's to mend; None for a mistake of the program."""
    if isinstance(error, UserError):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted"
    if isinstance(error, KernelUnavailable):
        return OptionsError.exit_code, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        ways = "lower datasets.train.batch_size_per_gpu or gt_size, or set train.use_checkpointing or train.use_amp"
        return 1, f"the device is out of memory; {ways}, or val.tile in validation ({error})"
    if isinstance(error, MemoryError):
        ways = "lower batch_size_per_gpu, gt_size or num_worker_per_gpu"
        return 1, f"the machine is out of memory ({error}); {ways}"
    return None


def tell(text: str, *, file_only: bool = False) -> None:
    """Print the reason for the end, and write it to the log file."""
    if not file_only:
        print(text if text == "interrupted" else f"error: {text}", file=sys.stderr, flush=True)
    logger.error(text, extra={"file_only": True})


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; ``deterministic`` refuses operators whose results vary from run to run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
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


def folder_of(options: Options, kind: str) -> Path:
    """``experiments/<name>`` or ``results/<name>`` or ``tb_logger/<name>``."""
    root = options.path.root or Path.cwd()
    given = {"experiments": options.path.experiments_root, "results": options.path.results_root}.get(kind)
    return (given or root / kind) / options.name


def find_state(options: Options, auto_resume: bool) -> Path | None:
    """The state file to continue from: ``path.resume_state``, or the newest of the run with ``--auto_resume``."""
    if auto_resume:
        states = list((folder_of(options, "experiments") / "training_states").glob("*.state"))
        numbered = [(int(state.stem), state) for state in states if state.stem.isdigit()]
        if numbered:
            return max(numbered)[1]
        logger.info("--auto_resume: the run has no saved state yet, so it starts from the beginning")
    return options.path.resume_state


def prepare_folder(options: Options, kind: str, *, keep: bool, command: str) -> Path:
    """Make the run's folder and put a copy of the option file into it.

    An earlier run of the same name is kept: its folder is renamed, and the log says to what.

    Raises:
        UserError: the folder cannot be made or written to.
    """
    folder = folder_of(options, kind)
    try:
        # first, since the file may be the copy in the folder that is renamed
        text = options.file.read_text(encoding="utf-8-sig") if options.file is not None else None
        if not keep:
            for earlier in [folder, folder_of(options, "tb_logger")] if kind == "experiments" else [folder]:
                _archive(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        if text is not None:
            header = f"# copied {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n# command: {command}\n\n"
            (folder / options.file.name).write_text(header + text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"the run's folder {folder} cannot be prepared: {error}") from error
    return folder


def _archive(folder: Path) -> None:
    if not folder.exists() or not any(folder.iterdir()):
        return
    archived = folder.with_name(f"{folder.name}_archived_{_stamp()}")
    while archived.exists():
        archived = archived.with_name(f"{archived.name}_")
    folder.rename(archived)
    logger.warning(f"{folder} held an earlier run, which is now {archived}")


def log_file(folder: Path, options: Options, kind: str) -> Path:
    """``train_<name>_<time>.log`` in the run's folder."""
    return folder / f"{kind}_{options.name}_{_stamp()}.log"


def _stamp() -> str:
    return datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
