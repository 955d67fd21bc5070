"""Which picture belongs to which: listings, stems and the problems found on the way."""

import os
import re
from collections import defaultdict
from pathlib import Path

from data.backends import Source, strip_size
from options.errors import DataError, OptionsError

_SHOWN = 20


class Problems:
    """Collects what is wrong with a set, to say it all at once.

    Args:
        where: the set and its phase, as the message names it.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._found: list[str] = []

    def add(self, problem: object) -> None:
        """Note one problem."""
        self._found.append(str(problem))

    def __len__(self) -> int:
        return len(self._found)

    def raise_if_any(self) -> None:
        """Raise one DataError with the first 20 problems and the count of all."""
        if not self._found:
            return
        count = len(self._found)
        lines = self._found[:_SHOWN] + ([f"... and {count - _SHOWN} more"] if count > _SHOWN else [])
        raise DataError(f"{self.where}: {count} problem{'s' * (count > 1)}\n  " + "\n  ".join(lines))


def stem(name: str) -> str:
    """The name without its extension, with its folder."""
    return os.path.splitext(name)[0]


def shortened(names: list[str]) -> str:
    """The first five names, and dots for more."""
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def unique_stems(names: list[str]) -> list[str]:
    """A name to show for each picture: its stem; ``a_png`` and ``a_jpg`` where two differ by the extension only."""
    count: dict[str, int] = defaultdict(int)
    for name in names:
        count[stem(name)] += 1
    shown = [
        stem(name) if count[stem(name)] == 1 else "_".join(os.path.splitext(name)).replace("_.", "_") for name in names
    ]
    if len(set(shown)) < len(shown):
        twice = next(name for name in shown if shown.count(name) > 1)
        raise DataError(f"two pictures would both be called {twice}; rename one of them")
    return shown


def list_names(source: Source, meta_info_file: str | None, problems: Problems) -> list[str]:
    """The pictures of a source, or those of them that a listing names, in its order.

    Args:
        source: where the pictures are.
        meta_info_file: text file with one name per line, as it is or followed by `` (h,w,c) level``; blank lines are
            skipped. None lists everything.
        problems: gets each listed picture that does not exist, with file and line, and names that are not UTF-8.

    Raises:
        DataError: no pictures at all, or an unreadable listing.
    """
    found = source.names()
    if not found:
        raise DataError(f"{problems.where}: no images found in {source.root}")
    if meta_info_file is None:
        return _readable_names(found, source, problems)
    known = set(found)
    by_stem = {stem(name): name for name in found}
    names: dict[str, int] = {}
    for number, line in enumerate(_read_lines(meta_info_file, problems), start=1):
        if not line.strip():
            continue
        tries = (strip_size(line), line.strip().split(" ")[0])
        name = next((t for t in tries if t in known), None) or next((by_stem[t] for t in tries if t in by_stem), None)
        if name is None:
            problems.add(f"{meta_info_file}, line {number}: {source.path(tries[0])} does not exist")
        elif name in names:
            problems.add(f"{meta_info_file}, line {number}: {name} is listed before, in line {names[name]}")
        else:
            names[name] = number
    if not names:
        problems.raise_if_any()
        raise DataError(f"{problems.where}: {meta_info_file} lists no images")
    return list(names)


def pair_by_stem(
    gt_names: list[str], lq_names: list[str], filename_tmpl: str, problems: Problems, *, spare_lq: bool = False
) -> list[tuple[str, str]]:
    """``(gt, lq)`` names; the LQ stem is the template filled with the GT stem, in the same subfolder, any extension.

    Args:
        gt_names, lq_names: relative names with extension.
        filename_tmpl: holds one ``{}``.
        problems: gets pictures without a partner, or with several.
        spare_lq: LQ pictures without a GT are no problem (a listing chose the GT).
    """
    if len(re.findall(r"\{\}", filename_tmpl)) != 1 or re.search(r"[{}]", filename_tmpl.replace("{}", "")):
        raise OptionsError(f"filename_tmpl: {filename_tmpl!r} must hold {{}} once, for the name of the GT picture")
    candidates = defaultdict(list)
    for name in lq_names:
        candidates[stem(name)].append(name)
    seen: dict[str, str] = {}
    pairs, alone = [], []
    for gt in gt_names:
        folder, _, file = stem(gt).rpartition("/")
        wanted = f"{folder}/{filename_tmpl.format(file)}" if folder else filename_tmpl.format(file)
        lq = choose(candidates.get(wanted, []), os.path.splitext(gt)[1])
        if wanted in seen:
            problems.add(f"the GT pictures {seen[wanted]} and {gt} have the same stem")
        elif lq is None and candidates.get(wanted):
            problems.add(f"the GT picture {gt} has several LQ pictures: {', '.join(candidates[wanted])}")
        elif lq is None:
            alone.append(gt)
        else:
            pairs.append((gt, lq))
        seen.setdefault(wanted, gt)
    spare = [] if spare_lq else [name for key, names in candidates.items() if key not in seen for name in names]
    _report_alone(alone, "GT", "LQ", filename_tmpl, problems)
    _report_alone(spare, "LQ", "GT", filename_tmpl, problems)
    return pairs


def choose(names: list[str], extension: str) -> str | None:
    """The only name, or the only one of several that has this extension."""
    if len(names) == 1:
        return names[0]
    same = [name for name in names if os.path.splitext(name)[1] == extension]
    return same[0] if same else None


def _report_alone(names: list[str], side: str, other: str, filename_tmpl: str, problems: Problems) -> None:
    if not names:
        return
    problems.add(f"{len(names)} {side} without {other} (filename_tmpl: {filename_tmpl!r}): {shortened(names)}")


def _readable_names(names: list[str], source: Source, problems: Problems) -> list[str]:
    """The names that are text; a name of other bytes would end a run when it comes to write a table or a log."""
    readable = []
    for name in names:
        try:
            name.encode("utf-8")
        except UnicodeEncodeError:
            shown = source.path(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            problems.add(f"the name of {shown} is not UTF-8; rename the file")
        else:
            readable.append(name)
    return readable


def _read_lines(meta_info_file: str, problems: Problems) -> list[str]:
    try:
        return Path(os.path.expanduser(os.path.expandvars(meta_info_file))).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{problems.where}: cannot read meta_info_file {meta_info_file}: {reason}") from error
