"""Freed memory stays with the process while a network runs on a CPU.

glibc gives what is larger than 32 MB back to the system as soon as it is freed, and what is asked for next comes page
by page, each filled with zeros first: two fifths of the time that SST-tiny takes for 384x384 pixels on one core.
"""

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator

# of malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
# what glibc comes to by itself in a process that frees large pieces, and its default
_USUAL = {_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 65536}
_KEEPING = {_MMAP_MAX: 0, _TRIM_THRESHOLD: (1 << 31) - 1}

_lock = threading.Lock()
_inside = 0


def _after_fork() -> None:
    """A worker is no part of the block that its parent is in, and never comes to its end."""
    global _lock, _inside
    _lock, inside, _inside = threading.Lock(), _inside, 0
    if inside:
        _set(_glibc(), _USUAL)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Within the block what is freed is used again; at the end of the outermost one it goes back to the system.

    The peak may be a little higher than without (up to a quarter was seen): pieces that lie apart are not joined.
    Nothing happens where the C library is not glibc, the user has set its allocator by the environment, or the address
    space is limited (``ulimit -v``).
    """
    global _inside
    library = _glibc()
    if library is None:
        yield
        return
    try:
        with _lock:
            _inside += 1
            _set(library, _KEEPING)
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _set(library, _USUAL)
                library.malloc_trim(0)


def release() -> None:
    """Give back now what is free, within a block too: what the system says to be free then is what can be had."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _set(library: ctypes.CDLL, values: dict[int, int]) -> None:
    for key, value in values.items():
        library.mallopt(key, value)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    if any(key.startswith("MALLOC_") for key in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return None
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    if not hasattr(library, "gnu_get_libc_version") or _is_limited():
        return None
    library.mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    library.malloc_trim.argtypes = (ctypes.c_size_t,)
    os.register_at_fork(after_in_child=_after_fork)
    return library


def _is_limited() -> bool:
    # which Windows has not
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
