"""Standard output and error that may go away (``| head``, a closed terminal) without ending the run."""

import contextlib
import errno
import os
from typing import Any

# the reader of a pipe has gone, the terminal has hung up, the stream was closed from the start
_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


class Screen:
    """Passes on to a stream what is written, for as long as something reads there.

    Args:
        stream: text stream, or None where the process has none. Once it has gone, it leads nowhere for the rest of the
            process, so that Python's own flush at the end does not fail either.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Returns the length of ``text``, written or not."""
        try:
            self._write(text)
        except OSError as error:
            self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Never fails for want of a reader."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            # a letter that the terminal does not know, or the name of a file that is no text
            encoding = self._stream.encoding
            self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        if error.errno not in _GONE:
            return  # a full disk may have room again for the next line
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
