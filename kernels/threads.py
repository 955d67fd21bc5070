"""Independent pieces of work side by side on the cores of a CPU, each core with its own piece.

An operator of PyTorch divides its work over the cores and waits for the slowest; a chain of short ones waits often.
Where a computation falls into pieces that have nothing to do with one another, it is up to twice as fast to give
each core a whole piece with all its operators (kernels/window_attention/README.md).
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T, R = TypeVar("T"), TypeVar("R")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
_own = threading.local()


def side_by_side(run: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """``[run(piece) for piece in pieces]``, on as many threads as PyTorch uses here, each operator on one of them.

    ``run`` records no gradients.
    """
    count = min(torch.get_num_threads(), len(pieces))
    if count < 2:
        with torch.no_grad():
            return [run(piece) for piece in pieces]
    # these are states of a thread
    inference = torch.is_inference_mode_enabled()

    def run_one(piece: T) -> R:
        with torch.inference_mode(inference), torch.no_grad():
            return run(piece)

    return list(_pool(count).map(run_one, pieces))


def scratch(name: str, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Working memory of this thread, ``(size,)``, with anything in it; kept, since fresh memory costs page faults.

    Args:
        name: one for each piece of memory that is in use at the same time.
    """
    kept = _own.__dict__.setdefault("kept", {})
    if (name, dtype) not in kept or len(kept[name, dtype]) < size:
        # a tensor born in inference mode could not be written to outside
        with torch.inference_mode(False):
            kept[name, dtype] = torch.empty(size, dtype=dtype)
    return kept[name, dtype][:size]


def _pool(count: int) -> ThreadPoolExecutor:
    with _lock:
        if count not in _pools:
            _pools[count] = _new_pool(count)
        return _pools[count]


def _new_pool(count: int) -> ThreadPoolExecutor:
    meeting = threading.Barrier(count)

    def prepare() -> None:
        # the number belongs to a thread, which takes over the last one that was set anywhere when it first asks
        torch.get_num_threads()
        torch.set_num_threads(1)
        meeting.wait()

    own = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, thread_name_prefix="pellucid-kernel", initializer=prepare)
    # a thread for each, now: so that the number can be put back for the threads that others start later
    list(pool.map(int, range(count)))
    torch.set_num_threads(own)
    return pool


@functools.cache
def keep_freed_memory() -> None:
    """Let the C library keep what is freed: tiles that each get fresh memory spend up to a quarter in page faults."""
    # other C libraries have no such function, and Windows not one library of the process (TypeError)
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        # glibc's numbers for the size from which memory is mapped, and for what may lie idle before it is returned
        for parameter, size in ((-3, 2**25), (-1, 2**29)):
            mallopt(parameter, size)


def _start_over() -> None:
    """In a forked process: no thread came along, and nobody holds the lock."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
