"""Around a run: seeds, the device, folders, signals, and errors turned into exit codes."""

import datetime
import logging
import os
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kernels.dispatch import KernelUnavailable
from options.errors import OptionsError, UserError
from options.schema import Options

logger = logging.getLogger("pellucid")


class Interrupted(Exception):
    """A signal ended the run after its state was saved."""

    def __init__(self, code: int) -> None:
        super().__init__(f"interrupted (exit code {code})")
        self.code = code


class StopSignal:
    """Remembers Ctrl-C and SIGTERM until the loop is at a safe place; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._old: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.code is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.code = 130 if number == signal.SIGINT else 143
        logger.warning("stopping after this step; a resumable state will be saved (press Ctrl-C again to stop at once)")


def run(main: Callable[[list[str]], None], argv: list[str]) -> int:
    """Call ``main`` and return the exit code; a user's mistake is told in words, without a traceback."""
    try:
        main(argv)
    except UserError as error:
        _tell(str(error))
        return error.exit_code
    except Interrupted as stop:
        return stop.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except KernelUnavailable as error:
        _tell(str(error))
        return OptionsError.exit_code
    except torch.OutOfMemoryError as error:
        ways = "lower datasets.train.batch_size_per_gpu or gt_size, or set train.use_checkpointing or train.use_amp"
        _tell(f"the device is out of memory; {ways}, or val.tile in validation ({error})")
        return 1
    except MemoryError as error:
        _tell(f"the machine is out of memory ({error}); lower batch_size_per_gpu, gt_size or num_worker_per_gpu")
        return 1
    return 0


def _tell(error: str) -> None:
    print(f"error: {error}", file=sys.stderr)
    logger.error(error, extra={"file_only": True})


def seed_all(seed: int, *, deterministic: bool = False) -> None:
    """Seed Python, NumPy and torch; ``deterministic`` refuses operators whose results vary from run to run."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = not deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
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
