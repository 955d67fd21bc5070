"""One process at a time for a folder that is being made."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from options.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


@contextlib.contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes away from a folder, which may get another name meanwhile.

    Raises:
        DataError: another process has it, or has just finished it.
        OSError: no such folder.
    """
    if fcntl is None:
        yield
        return
    # the folder itself, not a file in it: that leaves nothing behind
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"{folder} is being made by another process; wait for it, or end it") from error
        except OSError:
            # a file system without locks
            pass
        if not folder.is_dir() or not os.path.samestat(folder.stat(), os.fstat(handle)):
            raise DataError(f"{folder} was finished by another process just now; give the command again")
        yield
    finally:
        os.close(handle)
