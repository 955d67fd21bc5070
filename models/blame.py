"""Whose code an error comes from: a component that the user brought, or Pellucid."""

import re
import sys
import traceback
from pathlib import Path

# the names that options.load gives to the modules of import_paths
_IMPORTED = "pellucid_import_"
_OURS = Path(__file__).resolve().parent.parent
_ROOMS = ("options", "kernels", "archs", "data", "models", "scripts")
# how a data worker's traceback reads, which comes as the text of the error in the main process
_FRAME = re.compile(r'^  File "(?P<file>.+?)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)


def place_of_user(error: BaseException) -> str | None:
    """``own.py:12, in forward`` where the last code of ours or the user's is the user's; None where it is ours.

    A library's frames (torch, numpy) belong to who called it. The errors that led to this one are looked at too.
    """
    seen: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in seen:
        seen.append(link)
        link = link.__cause__
    # the first cause says most
    for cause in reversed(seen):
        place = _last_of_user(cause)
        if place is not None:
            return place
    return None


def summary(error: BaseException) -> str:
    """Type and message on a line; a data worker's traceback is left out."""
    text = str(error)
    if "Original Traceback" in text:
        return text.strip().splitlines()[-1]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def full_text(error: BaseException) -> str:
    """The whole traceback."""
    return "".join(traceback.format_exception(error))


def _last_of_user(error: BaseException) -> str | None:
    frames = [(f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)]
    if "Original Traceback" in str(error):
        frames += [(m["file"], int(m["line"]), m["function"]) for m in _FRAME.finditer(str(error))]
    users = {str(module.__file__) for name, module in list(sys.modules.items()) if name.startswith(_IMPORTED)}
    known = [frame for frame in frames if frame[0] in users or _is_ours(frame[0])]
    if not known or known[-1][0] not in users:
        return None
    file, line, function = known[-1]
    return f"{file}:{line}, in {function}"


def _is_ours(file: str) -> bool:
    path = Path(file).resolve()
    return path.is_relative_to(_OURS) and path.relative_to(_OURS).parts[0] in (*_ROOMS, "train.py", "test.py")
