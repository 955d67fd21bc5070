"""The processes of one run: who they are, what they agree on, and how all of them end when one does.

Small things (signals, scores, random states, messages) go over gloo even where gradients go over nccl: gloo notices at
once that a process is gone. The reason for which a process ends is left as a note in the store that all of them know.
"""

import contextlib
import datetime
import hashlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from models import runtime
from models.launch import Place, find
from models.runtime import Ended
from options.errors import OptionsError, UserError
from options.schema import DistOptions, Options

logger = logging.getLogger("pellucid")
T = TypeVar("T")

# what gloo, nccl and the store say of a process that does not answer
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed out|recvvalue|sendbytes", re.I
)
# seconds: for the first process to tell what another met with; for all to come to the door
_PATIENCE, _FAREWELL = 2.0, 3.0


class PeerEnded(UserError):
    """Another process of the run ended or does not answer."""


class Processes:
    """This process and the others of its run; entered as a context, which they leave together.

    Everything that talks to the others must be called by all of them, and raises :class:`PeerEnded` where one is gone.
    A single process talks to nobody, and every call returns at once.
    """

    def __init__(self, place: Place | None = None, *, script: str = "train.py") -> None:
        place = place or Place()
        here = int(os.environ.get("LOCAL_WORLD_SIZE") or place.world)
        machines = f" --nnodes={place.world // here}" if here < place.world else ""
        starter = "srun python" if place.environment else f"torchrun{machines} --nproc_per_node={here}"
        # as it can be typed again
        self.command = f"{starter if place.world > 1 else 'python'} {script}"
        self.rank, self.world, self.local_rank = place.rank, place.world, place.local_rank
        self._environment = dict(place.environment)
        self._store: dist.Store | None = None
        # True while what may be wrong is this process's own
        self._alone = False

    @property
    def is_main(self) -> bool:
        """True for the one that writes and speaks."""
        return self.rank == 0

    @property
    def place(self) -> tuple[int, int]:
        """Its rank among how many."""
        return self.rank, self.world

    def join(self, options: Options) -> torch.device:
        """Choose the device of this process, and connect with the others.

        Raises:
            OptionsError: there are not enough GPUs, or the others were given other options.
            UserError: the others do not come within the time that the options give.
        """
        self._alone = True
        device = runtime.choose_device(options, local_rank=self.local_rank, world=self.world)
        self._alone = False
        if self.world > 1:
            self._connect(options.dist_params, device)
            self._compare(options)
        return device

    def _compare(self, options: Options) -> None:
        # a machine may keep its files elsewhere; with other numbers of steps the processes would wait for ever
        text = options.model_dump_json(exclude={"path", "import_paths"})
        found = self.gather(hashlib.sha256(text.encode()).hexdigest())
        other = [rank for rank, digest in enumerate(found) if digest != found[0]]
        if other:
            ranks = ", ".join(map(str, other))
            raise OptionsError(f"the processes were given different options (rank {ranks} and rank 0 differ)")

    def _connect(self, options: DistOptions, device: torch.device) -> None:
        if self._environment:
            for name, value in {**self._environment, "MASTER_PORT": str(options.port)}.items():
                os.environ.setdefault(name, value)
        backend = "gloo"
        if device.type == "cuda" and options.backend == "nccl":
            backend = "cpu:gloo,cuda:nccl"
        elif options.backend == "nccl" and "backend" in options.model_fields_set:
            logger.warning("dist_params.backend is nccl, but the run uses the CPU: gloo takes its place")
        timeout = datetime.timedelta(seconds=options.timeout)
        try:
            self._store, *_ = next(dist.rendezvous("env://", self.rank, self.world, timeout=timeout))
            settings = {"rank": self.rank, "world_size": self.world, "timeout": timeout}
            runtime.note_connection()
            dist.init_process_group(backend, store=dist.PrefixStore("group", self._store), **settings)
        except RuntimeError as error:
            where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            text = str(error).splitlines()[0][:300]
            raise UserError(
                f"the {self.world} processes of the run did not find each other at {where}: {text}"
            ) from error

    @contextlib.contextmanager
    def talking(self) -> Iterator[None]:
        """Around what talks to the others: a lost connection becomes :class:`PeerEnded`."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or isinstance(error, torch.OutOfMemoryError) or not _LOST.search(str(error)):
                raise
            # the place in the library's own source tells a user nothing
            text = re.sub(r"^\[[^\]]*\] ?", "", str(error).splitlines()[0])
            raise PeerEnded(text.partition(". This")[0][:200]) from error

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank, on each of them."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        with self.talking():
            dist.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """What the first process makes, on each of them."""
        if self.world == 1:
            return make()
        made = [make() if self.is_main else None]
        with self.talking():
            dist.broadcast_object_list(made, src=0)
        return made[0]

    def highest(self, number: int) -> int:
        """The highest of the numbers that they have."""
        if self.world == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.int64)
        with self.talking():
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return int(tensor)

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The mean over the processes of each value."""
        everyones = self.gather(dict(values))
        return {label: sum(own[label] for own in everyones) / self.world for label in values}

    @torch.no_grad()
    def take_from_main(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace the tensors by those of the first process."""
        if self.world > 1:
            with self.talking():
                for tensor in tensors:
                    dist.broadcast(tensor, src=0)

    def share_warnings(self) -> None:
        """Let the first process tell what others were warned of and it was not."""
        if self.world > 1:
            for rank, texts in enumerate(self.gather(_take_warnings())):
                self._tell_warnings(rank, texts)

    def announce_end(self) -> None:
        """Let the others know, in the middle of what each does alone, that the run ends."""
        self._write("ending", "")

    def somebody_ends(self) -> bool:
        """Whether one of them ends; talks to the store only, so each may ask for itself."""
        return self._has("ending")

    # the end

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self.world == 1 or isinstance(error, SystemExit):
            return
        if self._store is None:
            # so early, what is wrong is so for all; the first process of each machine tells it
            if isinstance(error, UserError) and self.local_rank > 0 and not self._alone:
                raise Ended(error.exit_code) from None
            return
        if error is None or isinstance(error, Ended):
            try:
                self.share_warnings()
                self._close()
                return
            except PeerEnded as lost:
                error = lost if error is None else error
        self._end(error)

    def _close(self) -> None:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    def _end(self, error: BaseException) -> None:
        # the launcher ends those that remain by SIGTERM, but the reason has to be told first
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if isinstance(error, Ended):
            raise error
        explained = runtime.explain(error)
        code, text = explained or (1, f"{type(error).__name__}: {error}")
        # a mistake of the program that is raised again is written by runtime.run
        trace = runtime.trace_of(error) if explained or self.rank else ""
        farewell = _FAREWELL
        if isinstance(error, PeerEnded):
            code = self._end_after_others(text)
        else:
            self._write(f"note/{self.rank}", json.dumps([code, text, _take_warnings(), trace]))
            self.announce_end()
            self._close()
            if self.is_main:
                if trace:
                    logger.error(trace, extra={"file_only": True})
                self._tell(0, text)
                self._tell_notes()
            elif not self._is_told(text) and self._claim(self.rank):
                self._tell(self.rank, text)
                # the first process waits in a step that this one has a part in, until the connection is gone
                farewell = 0
        self._write(f"left/{self.rank}", "")
        self._wait(lambda: all(self._has(f"left/{rank}") for rank in range(self.world)), farewell)
        if runtime.explain(error) is None and not self._same_as_main(text):
            return  # a mistake of the program keeps its traceback
        raise Ended(code) from None

    def _end_after_others(self, text: str) -> int:
        """Tell why the others are gone, if that is this process's part; return the exit code."""
        self._close()
        self._write(f"alive/{self.rank}", "")
        ranks = range(self.world)

        def silent() -> list[int]:
            return [rank for rank in ranks if not (self._has(f"alive/{rank}") or self._has(f"note/{rank}"))]

        # one that was killed left no note; those that live answer soon
        self._wait(lambda: bool(self._notes()) or len(silent()) < 2, _PATIENCE)
        if self.is_main:
            self._tell_notes()
        for code, *_ in self._notes().values():
            return code
        # the store is the first process's, where no launcher holds it
        gone = [rank for rank in (silent() if self._store is not None else [0]) if rank != self.rank]
        if self.rank == min(set(ranks) - set(gone)):
            names = ", ".join(map(str, gone)) or "unknown"
            way = "it was killed, ran out of memory, or its machine does not answer"
            self._tell(self.rank, f"another process of this run ended (rank {names}): {way} ({text})")
            for rank in gone:
                self._write(f"left/{rank}", "")
        return 1

    def _notes(self) -> dict[int, tuple[int, str, list[str], str]]:
        found = {rank: self._read(f"note/{rank}") for rank in range(self.world)}
        return {rank: tuple(json.loads(note)) for rank, note in found.items() if note is not None}

    def _tell_notes(self) -> None:
        told = {self._notes()[0][1]} if 0 in self._notes() else set()
        for rank, (_, text, warnings, trace) in self._notes().items():
            self._tell_warnings(rank, warnings)
            if trace and rank:
                logger.error(f"rank {rank}: {trace}", extra={"file_only": True})
            # one that waited too long has told it by itself, but not to the log file
            printed = text in told or not self._claim(rank)
            if text not in told:
                self._tell(rank, text, file_only=printed)
            told.add(text)

    def _tell_warnings(self, rank: int, texts: Iterable[str]) -> None:
        if self.is_main and rank > 0:
            known = {text for handler in logger.handlers if isinstance(handler, Told) for text in handler.texts}
            for text in texts:
                if text not in known:
                    logger.warning(f"rank {rank}: {text}")

    def _tell(self, rank: int, text: str, *, file_only: bool = False) -> None:
        runtime.tell(f"rank {rank}: {text}" if rank else text, file_only=file_only)

    def _is_told(self, text: str) -> bool:
        """Wait a little for the first process to tell it."""
        return self._wait(lambda: self._has(f"told/{self.rank}") or self._same_as_main(text), _PATIENCE)

    def _claim(self, rank: int) -> bool:
        """Whether this process is the one to print the note of another or its own."""
        return self._ask(lambda store: store.add(f"pellucid/told/{rank}", 1)) in (1, None)

    def _same_as_main(self, text: str) -> bool:
        note = None if self.is_main else self._read("note/0")
        return note is not None and json.loads(note)[1] == text

    def _wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not ready():
            if self._store is None:
                return False
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def _write(self, key: str, value: str) -> None:
        self._ask(lambda store: store.set(f"pellucid/{key}", value))

    def _read(self, key: str) -> str | None:
        return self._ask(lambda store: store.get(f"pellucid/{key}").decode()) if self._has(key) else None

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda store: store.check([f"pellucid/{key}"])))

    def _ask(self, question: Callable[[dist.Store], T]) -> T | None:
        if self._store is None:
            return None
        try:
            return question(self._store)
        except RuntimeError:
            # gone with the process that held it; each further question would print the library's own traceback
            self._store = None
            return None


ALONE = Processes()


@contextlib.contextmanager
def enter(launcher: str, *, local_rank: int = 0, script: str = "train.py") -> Iterator[Processes]:
    """This process among those of its run; see :func:`models.launch.find` for the arguments and what it raises."""
    place = find(launcher, os.environ, local_rank=local_rank, script=script)
    with Processes(place, script=script) as processes:
        yield processes


class Told(logging.Handler):
    """Remembers the warnings that were told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.add(record.getMessage())


class Untold(logging.Handler):
    """Keeps the warnings of a process that does not speak, for the one that does."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not getattr(record, "file_only", False):
            self.texts.append(record.getMessage())


def _take_warnings() -> list[str]:
    taken = []
    for handler in logger.handlers:
        if isinstance(handler, Untold):
            taken += handler.texts
            handler.texts = []
    return taken
