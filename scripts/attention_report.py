"""What bench_attention found: a table on the terminal, Markdown, JSON with machine and versions, and a plot."""

import io
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import rich.box
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from data.io import write_whole
from options.errors import DataError, OptionsError

COLUMNS = ("", "keys", "bins", "relative error", "least to most", "largest error", "ms", "times as fast")
_NAMES = {"markdown": "results.md", "json": "results.json", "plot": "results.png"}
_TITLES = {
    "gaussian": "Gaussian inputs (figure 3 of the paper)",
    "photo": "Features of photographs",
    "window": "Windows of SST with positional factors",
}
_COLORS = {"uniform keys": "tab:orange", "averaged keys": "tab:green", "Nystrom, 6 steps": "tab:purple"}
_BLUES = ("#9ecae1", "#4292c6", "#08519c", "#041f3f")


def entry(case: Any, rows: Sequence[Any], queries: int, gammas: Sequence[float]) -> dict[str, Any]:
    """One case as JSON: means and all single values; null for what is not finite.

    ``relative_error`` is of all draws, ``largest_error`` the mean over them of the largest error over the range of the
    values, ``seconds`` the shortest time, ``ratio`` how many times faster than exact attention.
    """
    base = min(rows[0].seconds)
    found = [
        {
            "method": row.method.name,
            "rank": row.method.rank,
            "bins": row.method.bins,
            "relative_error": _finite(math.fsum(row.relative) / len(row.relative)),
            "largest_error": _finite(math.fsum(row.largest) / len(row.largest)),
            "relative_errors": [_finite(value) for value in row.relative],
            "seconds": min(row.seconds),
            "turns": len(row.seconds),
            "ratio": base / min(row.seconds),
        }
        for row in rows
    ]
    settings = {"n": case.n, "scale": case.scale, "grid": case.grid, "queries": queries, "draws": len(gammas)}
    return {"kind": case.kind, "label": case.label, **settings, "gammas": list(gammas), "rows": found}


def table(found: Mapping[str, Any]) -> Table:
    """One case for the terminal."""
    made = Table(title=f"{found['kind']}: {_heading(found)}", title_justify="left", box=rich.box.SIMPLE_HEAD)
    for name in COLUMNS:
        made.add_column(name, justify="right" if name else "left")
    for row in found["rows"]:
        made.add_row(*cells(row))
    return made


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """One row as it is shown, by ``COLUMNS``."""
    errors = [value for value in row["relative_errors"] if value is not None]
    whole = len(errors) == len(row["relative_errors"])
    spread = f"{min(errors):.2g} to {max(errors):.2g}" if whole and len(errors) > 1 else ""
    count = ["" if row[name] is None else str(row[name]) for name in ("rank", "bins")]
    errors = [_figure(row[name]) for name in ("relative_error", "largest_error")]
    return row["method"], *count, errors[0], spread, errors[1], f"{row['seconds'] * 1e3:.4g}", f"{row['ratio']:.3g}"


def files(folder: str, *, force: bool) -> dict[str, Path]:
    """Where the results go.

    Raises:
        OptionsError: some are there already and ``force`` is not given, or the folder cannot be made.
    """
    made = {kind: Path(folder) / name for kind, name in _NAMES.items()}
    there = [str(path) for path in made.values() if path.exists()]
    if there and not force:
        raise OptionsError(f"{', '.join(there)} exist already; --force overwrites them, or give another --out")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionsError(f"--out {folder}: the folder cannot be made: {error.strerror or error}") from error
    return made


def write(
    targets: Mapping[str, Path],
    entries: Sequence[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any],
    notes: Sequence[str],
) -> None:
    """Write all results to the targets, which may be none.

    Raises:
        DataError: a file cannot be written.
    """
    whole = {"machine": machine(), "settings": dict(settings), "notes": list(notes), "cases": list(entries)}
    make = {
        "markdown": lambda: markdown(whole).encode(),
        "json": lambda: (json.dumps(whole, indent=1, allow_nan=False) + "\n").encode(),
        "plot": lambda: plot(entries),
    }
    for kind, path in targets.items():
        try:
            write_whole(path, make[kind]())
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from error


def machine() -> dict[str, Any]:
    """Processor, threads and versions, without the name of the machine."""
    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass
    versions = {"python": platform.python_version(), "torch": torch.__version__, "matplotlib": matplotlib.__version__}
    settings = {"processors": os.cpu_count(), "threads": torch.get_num_threads()}
    return {"processor": processor, **settings, "system": platform.system(), "versions": versions}


def markdown(whole: Mapping[str, Any]) -> str:
    """All cases as tables, with machine and notes."""
    place = whole["machine"]
    lines = [
        "# Approximations of attention: error and time",
        "",
        f"{place['processor']}, {place['threads']} of {place['processors']} threads, {place['system']}, "
        f"Python {place['versions']['python']}, PyTorch {place['versions']['torch']}; float32, one head.",
        "",
        *(f"- {note}" for note in whole["notes"]),
    ]
    kind = None
    for found in whole["cases"]:
        if found["kind"] != kind:
            kind = found["kind"]
            lines += ["", f"## {_TITLES[kind]}"]
        lines += ["", f"**{_heading(found)}**", "", f"| {' | '.join(COLUMNS)} |"]
        lines.append("|---|" + "---:|" * (len(COLUMNS) - 1))
        lines += [f"| {' | '.join(cells(row))} |" for row in found["rows"]]
    return "\n".join(lines) + "\n"


def plot(entries: Sequence[Mapping[str, Any]]) -> bytes:
    """Error against time as PNG, one panel per case; a line per method joins its numbers of keys."""
    columns = min(4, max(sum(entry["kind"] == kind for entry in entries) for kind in _TITLES))
    groups = [[entry for entry in entries if entry["kind"] == kind] for kind in _TITLES]
    lines = [group[start : start + columns] for group in groups for start in range(0, len(group), columns)]
    figure = Figure(figsize=(1.5 + 4 * columns, 1 + 3.2 * len(lines)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for axis, found in zip(
        axes.flat, (x for line in lines for x in line + [None] * (columns - len(line))), strict=True
    ):
        if found is None:
            axis.set_axis_off()
        else:
            _draw(axis, found)
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(len(handles), max(2, 2 * columns))
    )
    ranks = dict.fromkeys(str(row["rank"]) for found in entries for row in found["rows"] if row["rank"])
    figure.suptitle(f"Error against time, {', '.join(ranks)} keys", fontsize=10)
    file = io.BytesIO()
    figure.savefig(file, dpi=100, format="png")
    return file.getvalue()


def _draw(axis: Any, found: Mapping[str, Any]) -> None:
    lines: dict[str, list[tuple[float, float, int | None]]] = {}
    for row in found["rows"]:
        name = row["method"] if row["bins"] is None else f"{row['method']}, {row['bins']} bins"
        if row["relative_error"]:
            lines.setdefault(name, []).append((row["seconds"] * 1e3, row["relative_error"], row["rank"]))
    blues = iter(_BLUES * len(lines))
    for name, points in lines.items():
        if name.startswith("exact"):
            axis.axvline(points[0][0], color="black", ls="--", lw=1, label=name)
        elif name.startswith("mean"):
            axis.axhline(1, color="0.5", ls=":", label=name)
        else:
            own = name.startswith("WildCat")
            color = next(blues) if own else _COLORS.get(name, "tab:red" if points[0][2] is None else "tab:pink")
            style = {"marker": "o" if own else "s", "ms": 4, "lw": 1.8 if own else 1}
            axis.plot([p[0] for p in points], [p[1] for p in points], color=color, label=name, **style)
    axis.set(xscale="log", yscale="log", xlabel="ms", ylabel="relative error")
    axis.set_title(f"{found['kind']}: {found['label']}", fontsize=9)
    axis.grid(alpha=0.3)


def _heading(found: Mapping[str, Any]) -> str:
    low, high = min(found["gammas"]), max(found["gammas"])
    gamma = f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} to {high:.2g}"
    draws = f"{found['draws']} draw{'s' * (found['draws'] != 1)} of {found['queries']} queries"
    return f"{found['label']}; gamma {gamma}; {draws}"


def _figure(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
