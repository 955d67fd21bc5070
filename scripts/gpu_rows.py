"""Rows of ``scripts/gpu_check.py``: what one check or timing found, what follows from it, and how it is printed."""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# what a kernel can be held against where the ceilings were not measured: bytes/s, FLOP/s and exponentials/s of an H200
CEILINGS = {"bytes": 4.3e12, "bf16": 788e12, "tf32": 394e12, "fma": 60e12, "exps": 4.18e12}
# products of this dtype run at this ceiling, divided by the number of products that one takes
PRODUCTS = {"tf32": ("tf32", 1), "fp32": ("tf32", 3)} | dict.fromkeys(("bf16", "fp16", "fp32/bf16"), ("bf16", 1))
OWN = "triton"
MOST_ROWS = 110
COLUMNS = (
    ("op", -8),
    ("shape", -16),
    ("dtype", -9),
    ("pass", -4),
    ("backend", -11),
    ("ms", 8),
    ("p20-p80", 13),
    ("TF/s", 5),
    ("Gp/s", 5),
    ("GB/s", 5),
    ("%floor", 6),
    ("xbest", 6),
    ("relerr", 7),
    ("tol", 7),
    ("ok", -4),
)


@dataclass
class Row:
    """One line of the table.

    Args:
        stage: "check", "bench", "mark", "ceiling", "compile", "graph", "tune" or "about".
        op, shape, dtype, what, backend: what was run; ``what`` is the pass, "fwd", "bwd" or "f+b".
        ms, p20, p80: median milliseconds and the quantiles around it.
        relerr, tol: largest relative error, and what it may be.
        ok: whether it passed; None where there was nothing to pass (a peer, something missing or skipped).
        note: why not, or what else is to be said.
        work: of one run, "bytes", "products", "fma" (FLOP of either), "exps" and "pairs".
        details: anything else, for the JSON.
    """

    stage: str
    op: str
    shape: str = ""
    dtype: str = ""
    what: str = ""
    backend: str = ""
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    relerr: float | None = None
    tol: float | None = None
    ok: bool | None = None
    note: str = ""
    work: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    floor_ms: float | None = None
    percent: float | None = None
    xbest: float | None = None

    @property
    def counted(self) -> bool:
        """Whether it is one of the checks."""
        return self.ok is not None

    @property
    def ours(self) -> bool:
        """Whether its failure is a failure of our kernels, and not of a peer or of a measurement."""
        return self.stage in ("check", "mark", "compile", "graph") or (self.stage == "bench" and self.backend == OWN)

    @property
    def run(self) -> tuple[str, str, str, str]:
        """What it shares with its peers."""
        return self.op, self.shape, self.dtype, self.what


def finish(rows: list[Row]) -> list[Row]:
    """Fill in what needs other rows: the floor by the measured ceilings, and how many times faster than the peers.

    Args:
        rows: changed in place.

    Returns:
        The same list.
    """
    ceilings = CEILINGS | {row.shape: row.work["rate"] for row in rows if row.stage == "ceiling" and "rate" in row.work}
    for row in rows:
        if row.stage == "bench" and row.ms and row.work:
            row.floor_ms = floor_ms(row.work, row.dtype, ceilings)
            row.percent = 100 * row.floor_ms / row.ms
    for row in rows:
        if row.stage == "bench" and row.backend == OWN and row.ms:
            row.xbest = best_peer(rows, row) / row.ms if best_peer(rows, row) else None
    return rows


def floor_ms(work: dict[str, float], dtype: str, ceilings: dict[str, float]) -> float:
    """Milliseconds below which nobody can be: the slowest of memory, products, other arithmetic and exponentials."""
    name, products = PRODUCTS.get(dtype, ("fma", 1))
    seconds = [work.get(key, 0) / ceilings[key] for key in ("bytes", "fma", "exps")]
    return 1000 * max(*seconds, work.get("products", 0) * products / ceilings[name])


def best_peer(rows: Iterable[Row], own: Row, prefix: str | tuple[str, ...] = "") -> float | None:
    """Milliseconds of the fastest other backend (with a name that begins so) for the run of ``own``, or None."""
    found = [
        row.ms
        for row in rows
        if row.stage == "bench" and row.run == own.run and row.backend != OWN and row.backend.startswith(prefix)
    ]
    return min((ms for ms in found if ms), default=None)


def failed(rows: Iterable[Row]) -> int:
    """How many checks failed."""
    return sum(row.ok is False for row in rows)


def exit_code(rows: list[Row]) -> int:
    """0: every check that was made passed, and there were some; 1 otherwise."""
    return 0 if any(row.counted for row in rows) and not failed(rows) else 1


def table(rows: list[Row], most: int = MOST_ROWS) -> list[str]:
    """The lines to print: failures first, passed checks of one operator and dtype in one line, the count last.

    Args:
        rows: all of them.
        most: lines, heading and count included; failures and marks are kept rather than others.
    """
    head = " ".join(_cell(name, width) for name, width in COLUMNS)
    bad = [row for row in rows if row.ok is False]
    rest = _folded([row for row in rows if row.ok is not False])
    room = most - 2
    shown = [*bad, *rest]
    if len(shown) > room:
        marks = [row for row in rest if row.stage == "mark"]
        others = [row for row in rest if row.stage != "mark"]
        shown = [*bad, *marks, *others][: room - 1]
    left = len(bad) + len(rest) - len(shown)
    lines = [head.rstrip(), *(line(row) for row in shown)]
    if left:
        lines.append(f"... {left} more rows in results.json")
    counted = sum(row.counted for row in rows)
    return [*lines, f"{counted} checks, {failed(rows)} failed"]


def line(row: Row) -> str:
    """One row of the table; what it says in words takes the place of the numbers where there are none."""
    if row.stage == "about":
        return _short(row.note, 150)
    names = [row.op, row.shape, row.dtype, row.what, row.backend]
    text = " ".join(_cell(x, width) for x, (_, width) in zip(names, COLUMNS[:5], strict=True))
    state = {True: "ok", False: "FAIL", None: "-"}[row.ok]
    numbers = _numbers(row)
    if not any(numbers):
        return f"{text} {'FAIL ' if row.ok is False else 'ok ' if row.ok else ''}{_short(row.note, 90)}".rstrip()
    text += " " + " ".join(_cell(x, width) for x, (_, width) in zip([*numbers, state], COLUMNS[5:], strict=True))
    return f"{text} {_short(row.note, 60 if row.ok is False else 24)}".rstrip()


def write(rows: list[Row], folder: Path, about: dict[str, Any]) -> None:
    """``results.json``: ``about`` and every row, infinities and NaN as words; written whole or not at all."""
    text = json.dumps({**about, "rows": [_plain(asdict(row)) for row in rows]}, indent=1, allow_nan=False)
    write_whole(folder / "results.json", text)


def write_settings(found: dict[str, Any], path: Path) -> None:
    """A file as those of ``kernels/configs`` are laid out: a line for each setting."""
    ops = []
    for op, settings in found["settings"].items():
        lines = ",\n".join(f"      {json.dumps(key)}: {json.dumps(_plain(value))}" for key, value in settings.items())
        ops.append(f"    {json.dumps(op)}: {{\n{lines}\n    }}")
    body = ",\n".join(ops)
    write_whole(path, f'{{\n  "gpu": {json.dumps(found["gpu"])},\n  "settings": {{\n{body}\n  }}\n}}')


def write_whole(path: Path, text: str) -> None:
    """Write a file, or leave the one that is there."""
    part = path.with_name(path.name + ".part")
    part.write_text(text + "\n", encoding="utf-8")
    os.replace(part, path)


def _numbers(row: Row) -> list[str]:
    ms = row.ms
    spread = "" if row.p20 is None or row.p80 is None else f"{_number(row.p20)}-{_number(row.p80)}"
    flops = row.work.get("products", 0) + row.work.get("fma", 0)
    rates = [
        f"{amount / ms * 1000 / unit:.{digits}f}" if ms and amount else ""
        for amount, unit, digits in ((flops, 1e12, 1), (row.work.get("pairs"), 1e9, 0), (row.work.get("bytes"), 1e9, 0))
    ]
    ratios = ["" if x is None else f"{x:.{digits}f}" for x, digits in ((row.percent, 0), (row.xbest, 2))]
    errors = ["" if x is None else f"{x:.1e}" for x in (row.relerr, row.tol)]
    return ["" if ms is None else _number(ms), spread, *rates, *ratios, *errors]


def _number(x: float) -> str:
    """Four digits."""
    return f"{x:.{max(0, min(4, 3 - math.floor(math.log10(x))))}f}" if x > 0 else f"{x:g}"


def _cell(text: str, width: int) -> str:
    return text[: abs(width)].ljust(-width) if width < 0 else text.rjust(width)


def _short(text: str, most: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _folded(rows: list[Row]) -> list[Row]:
    """Passed checks of one operator, dtype and pass as one row with the error that is nearest to what it may be, and
    what was skipped for one reason as one row for each operator."""
    groups: dict[tuple, list[Row]] = {}
    for number, row in enumerate(rows):
        if row.stage in ("check", "compile") and row.ok:
            key = (row.stage, row.op, row.dtype, row.what)
        elif row.ok is None and row.note.startswith("skipped: ") and row.ms is None:
            key = (row.stage, row.op, row.note)
        else:
            key = (number,)
        groups.setdefault(key, []).append(row)
    return [group[0] if len(group) == 1 else _one(group) for group in groups.values()]


def _one(group: list[Row]) -> Row:
    worst = max(group, key=lambda row: (row.relerr or 0) / (row.tol or 1))
    kind = f"{len(group)} shapes" if worst.stage == "check" else f"{len(group)} rows"
    note = worst.note if worst.ok is None else ""
    values = {key: getattr(worst, key) for key in ("stage", "op", "dtype", "what", "backend", "relerr", "tol", "ok")}
    if worst.ok is None:
        values |= {"dtype": "", "what": "", "backend": worst.stage}
    if worst.stage == "compile":
        count = sum(row.details.get("configurations", 0) for row in group)
        kind, note = f"{len(group)} parts", f"{count} compiled" if count else worst.note
    return Row(**values, shape=kind, note=note)


def _plain(x: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x
