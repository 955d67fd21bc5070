"""Independent pieces of work side by side on the cores of a CPU, each core with its own piece.

An operator of PyTorch divides its work over the cores and waits for the slowest; a chain of short ones waits often.
Where a computation falls into pieces that have nothing to do with one another, it is up to twice as fast to give
each core a whole piece with all its operators (kernels/window_attention/README.md).
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T, R = TypeVar("T"), TypeVar("R")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
_inside = 0
_outside_threads = 1


def side_by_side(run: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """``[run(piece) for piece in pieces]``, on as many threads as PyTorch may use, each operator on one of them.

    ``run`` records no gradients. The number of PyTorch's threads is 1 meanwhile, for the whole process.
    """
    count = min(available(), len(pieces))
    if count < 2:
        with torch.no_grad():
            return [run(piece) for piece in pieces]
    # these are states of a thread
    inference = torch.is_inference_mode_enabled()

    def run_one(piece: T) -> R:
        with torch.inference_mode(inference), torch.no_grad():
            return run(piece)

    with _one_thread_each():
        return list(_pool(count).map(run_one, pieces))


def available() -> int:
    """The number of PyTorch's threads, as it is outside of :func:`side_by_side`."""
    with _lock:
        return _outside_threads if _inside else torch.get_num_threads()


def _pool(count: int) -> ThreadPoolExecutor:
    with _lock:
        if count not in _pools:
            _pools[count] = ThreadPoolExecutor(count, thread_name_prefix="pellucid-kernel")
        return _pools[count]


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    global _inside, _outside_threads
    with _lock:
        if not _inside:
            _outside_threads = torch.get_num_threads()
            torch.set_num_threads(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                torch.set_num_threads(_outside_threads)


def _start_over() -> None:
    """In a forked process: no thread came along, nobody holds the lock, and nothing is being done side by side."""
    global _lock, _inside
    _lock = threading.Lock()
    _pools.clear()
    if _inside:
        _inside = 0
        torch.set_num_threads(_outside_threads)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_over)
