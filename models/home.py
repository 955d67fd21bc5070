"""The folder of a run: where it lies, who may write to it, and what a run puts there before it begins."""

import datetime
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

from models import checkpoint
from models.files import write_text
from options import yaml_file
from options.errors import OptionsError, UserError
from options.schema import Options

try:
    import fcntl
except ImportError:  # not on Windows, where two runs of one name are not kept apart
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("pellucid")

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = ".lock"
# what the writers of states and of pictures leave behind when the process is killed in them
_UNFINISHED = re.compile(r"\..+\.(?:\d+\.tmp|[0-9a-f]{12})")

_COPIED = "# copied "

_held: list[Any] = []


def folder_of(options: Options, kind: str) -> Path:
    """``experiments/<name>`` or ``results/<name>`` or ``tb_logger/<name>``."""
    root = options.path.root or Path.cwd()
    given = {"experiments": options.path.experiments_root, "results": options.path.results_root}.get(kind)
    return (given or root / kind) / options.name


def locate(options: Options, auto_resume: bool) -> Options:
    """With ``--auto_resume``, the options of the run that is to be continued, wherever the command is given.

    A run that has states where the options say is left there. Otherwise the same folder is looked for from train.py's
    own folder and from the option file's, and from those above it; where it has states, the run goes on there.

    Raises:
        OptionsError: several folders hold states of a run of this name.
    """
    here = folder_of(options, "experiments")
    if not auto_resume or states_of(here):
        return options
    root, experiments = options.path.root or Path(), options.path.experiments_root
    bases = [CHECKOUT]
    if options.file is not None:
        bases += options.file.resolve().parents
    found: dict[Path, Path] = {}
    for base in bases:
        folder = base / (experiments or root / "experiments") / options.name
        if states_of(folder):
            found.setdefault(folder.resolve(), base)
    if options.file is not None and options.file.resolve().parent.name == options.name:
        own = options.file.resolve().parent
        if states_of(own):
            # the copy that a run keeps of its options
            found.setdefault(own, own.parent.parent)
    if not found:
        return options
    if len(found) > 1:
        folders = ", ".join(map(str, found))
        raise OptionsError(f"--auto_resume: {folders} all hold states of {options.name}; choose one by path.root")
    ((folder, base),) = found.items()
    logger.warning(f"--auto_resume: {here} has no saved state, but {folder} has; the run goes on there")
    path = options.path.model_copy(update={"root": base / root, "experiments_root": folder.parent})
    file = options.file.resolve() if options.file is not None else None
    if base.resolve() != Path.cwd():
        logger.warning(f"relative paths are taken from {base}, as the run did")
        os.chdir(base)
    return options.model_copy(update={"path": path, "file": file})


def states_of(folder: Path) -> list[Path]:
    """The saved states of a run, the newest first."""
    states = [state for state in (folder / "training_states").glob("*.state") if state.stem.isdigit()]
    return sorted(states, key=lambda state: int(state.stem), reverse=True)


def find_state(options: Options, auto_resume: bool, *, claim_folder: bool = False) -> Path | None:
    """The state to continue from: ``path.resume_state``, or the newest readable one of the run with ``--auto_resume``.

    Args:
        claim_folder: make the run's folder this process's own first, where it exists.

    Raises:
        OptionsError: the run has states, and none of them can be read.
        UserError: another process trains in the folder.
    """
    folder = folder_of(options, "experiments")
    if claim_folder and folder.is_dir():
        claim(folder)
    if not auto_resume:
        return options.path.resume_state
    states, problem = states_of(folder), ""
    for state in states:
        try:
            checkpoint.load_sound_state(state)
            return state
        except OptionsError as error:
            problem = str(error)
            logger.warning(f"--auto_resume: {problem}; the state before it is tried")
    if states:
        way = f"move them out of {folder} to start anew"
        raise OptionsError(f"--auto_resume: none of the {len(states)} states of the run is usable ({problem}); {way}")
    if options.path.resume_state is None:
        logger.info(f"--auto_resume: {folder} has no saved state yet, so the run starts from the beginning")
    return options.path.resume_state


def is_own(options: Options, state: Path | None) -> bool:
    """Whether a state was saved by the run of this folder, which then goes on in it."""
    return state is not None and state.resolve().parent.parent == folder_of(options, "experiments").resolve()


def prepare_folder(options: Options, kind: str, *, keep: bool, command: str) -> Path:
    """Make the run's folder this process's own and put a copy of the option file into it, and the options in force.

    An earlier run of the same name is kept: its folder is renamed, and the log says to what. Where the run goes on
    (``keep``), files that a kill left unfinished are removed.

    Raises:
        UserError: the folder cannot be made or written to, or another process trains in it.
    """
    folder = folder_of(options, kind)
    try:
        # first, since the file may be the copy in the folder that is renamed
        text = options.file.read_text(encoding="utf-8-sig") if options.file is not None else None
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "experiments":
            # before anything is moved, or a run that began in between would lose its folder
            claim(folder)
        if not keep:
            for earlier in [folder, folder_of(options, "tb_logger")] if kind == "experiments" else [folder]:
                _archive(earlier)
        folder.mkdir(parents=True, exist_ok=True)
        if kind == "experiments":
            claim(folder)
            _remove_unfinished(folder)
        _write_options(folder, options, text, command)
    except OSError as error:
        raise UserError(f"the run's folder {folder} cannot be prepared: {error}") from error
    return folder


def say_where_the_record_is(folder: Path, state: Path, iteration: int) -> None:
    """Tell that a state of another run leaves that run's record where it is."""
    origin = state.resolve().parent.parent
    if origin != folder.resolve():
        what = f"the record of iterations up to {iteration} stays with the run that the state comes from"
        logger.info(f"{what}, {origin}, and so do its best weights")


def claim(folder: Path) -> None:
    """Lock a folder for the life of this process; the system gives the lock back however the process ends.

    Raises:
        UserError: another process has it, or it cannot be written to.
    """
    if fcntl is None:
        return
    path = folder / LOCK
    while not any(_is_same(path, lock) for lock in _held):
        try:
            # not "w": what another process wrote there must stay
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            raise UserError(f"the run's folder {folder} cannot be written to: {error}") from error
        try:
            # not flock: that lock would live on in the data workers of a run that was killed
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            way = "wait for it, end it, or give this run another name"
            raise UserError(f"{folder} is in use by {holder}; {way}") from error
        except OSError as error:
            file.close()
            logger.warning(f"{folder} cannot be locked ({error}): take care that no second run uses it")
            return
        if not _is_same(path, file):
            file.close()  # renamed or replaced in between
            continue
        file.seek(0)
        file.truncate()
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        _held.append(file)


def release() -> None:
    """Give back every lock of this process."""
    while _held:
        _held.pop().close()


def _is_same(path: Path, file: Any) -> bool:
    try:
        there, own = path.stat(), os.fstat(file.fileno())
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def log_file(folder: Path, options: Options, kind: str) -> Path:
    """``train_<name>_<time>.log`` in the run's folder."""
    return folder / f"{kind}_{options.name}_{_stamp()}.log"


def _write_options(folder: Path, options: Options, text: str | None, command: str) -> None:
    header = f"{_COPIED}{datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n# command: {command}\n\n"
    if text is not None and text.startswith(_COPIED):
        # a run goes on from the copy that it made itself
        text = text.partition("\n\n")[2]
    effective = folder / f"{options.name}.effective.yml"
    if text is not None and options.file.name != effective.name:
        write_text(folder / options.file.name, header + text)
    said = "# the options in force, those of the command line and the defaults included; train.py and test.py read it\n"
    write_text(effective, said + header + text_in_force(options))


def text_in_force(options: Options) -> str:
    """All options as they would stand in a file, whose place must not matter."""
    content = options.model_dump(mode="json")
    if options.import_paths:
        base = options.file.parent if options.file is not None else Path()
        named = [Path(os.path.expanduser(path)) for path in options.import_paths]
        content["import_paths"] = [str((p if p.exists() else base / p).resolve()) for p in named]
    return yaml_file.text_of(content)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.rglob(".*.*"):
        if _UNFINISHED.fullmatch(path.name) and path.is_file():
            path.unlink()
            logger.info(f"removed {path}, which a kill left unfinished")


def _archive(folder: Path) -> None:
    if not folder.exists() or all(path.name == LOCK for path in folder.iterdir()):
        return
    archived = folder.with_name(f"{folder.name}_archived_{_stamp()}")
    while archived.exists():
        archived = archived.with_name(f"{archived.name}_")
    folder.rename(archived)
    logger.warning(f"{folder} held an earlier run, which is now {archived}")


def _stamp() -> str:
    return datetime.datetime.now().strftime("%Y%m%d_%H%M%S")
