"""The page of a run: one HTML file with its style, its script and, up to a size, its pictures; it needs no network.

A viewer shows one picture at a time: any two of input, baseline, output and ground truth, or how much one of them
differs from the ground truth, with a divider between them. What is chosen is loaded, and nothing else, so a page of
hundreds of pictures opens as fast as one of three. The difference is made by the browser out of the same files (blend
mode and brightness), never a picture of its own.
"""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from models import page_curves, page_tables, record
from models.album import Album
from models.base import Base
from models.distributed import Processes
from models.files import write_whole
from models.page_pictures import BUDGET, Sources, as_script
from models.page_tables import text
from models.record import Record
from models.report import SetScores
from options.errors import UserError
from options.schema import Options

logger = logging.getLogger("pellucid")
NAME = "index.html"
_CURVES = '<section id="curves" aria-labelledby="curves-title"><h2 id="curves-title">Curves</h2>'
_SCORES = '<section id="scores" aria-labelledby="scores-title"><h2 id="scores-title">Scores</h2>'
_READING = "Rounded for reading; the full value shows under the pointer. A click on a heading sorts."
_KINDS = {"test": "Test", "training": "Training", "comparison": "Comparison"}


def where(folder: Path) -> str:
    """In words: where the results of a run lie, and the page among them where there is one."""
    page = f", with the page {NAME} for the browser" if (folder / NAME).is_file() else ""
    return f"everything lies in {folder}{page}"


def of_test(
    folder: Path, model: Base, options: Options, results: Sequence[SetScores], album: Album, *, processes: Processes
) -> None:
    """Write the page of a test and its record, where ``val.report`` wants them; all processes call this.

    Raises:
        UserError: they cannot be written; whatever was written before is untouched.
    """
    if not options.val.report:
        return
    pictures = album.pictures(processes)

    def write() -> None:
        made = record.of_run("test", model, options, results, command=processes.command)
        if not options.val.save_img:
            made.remarks.append("val.save_img is false, so no pictures were kept; with true the page shows them.")
        for entry in made.sets:
            scored = {shown.name: shown for shown in entry.pictures}
            entry.pictures = pictures.get(entry.name, entry.pictures)
            entry.count = len(entry.pictures)
            for shown in entry.pictures:
                if shown.name in scored:
                    shown.scores, shown.baseline = scored[shown.name].scores, scored[shown.name].baseline
        record.save(folder, made)
        write_page(folder / NAME, made)

    processes.from_main(write)


def of_training(
    folder: Path, metrics: Path, model: Base, options: Options, results: Sequence[SetScores], *, command: str
) -> None:
    """Write the page of a training so far: curves, the latest scores, options. A failure is told, and no more.

    Args:
        metrics: the run's ``metrics.jsonl``, for the curves.
        results: of the latest validation.
    """
    if not options.val.report:
        return
    made = record.of_run("training", model, options, results, command=command)
    made.facts[0].insert(1, ("iteration", f"{model.iteration:,} of {options.train.total_iter:,}"))
    made.remarks.append("A training keeps no pictures to look at here: test.py writes a page that shows them.")
    try:
        if metrics.exists():
            made.curve = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        write_page(folder / NAME, made)
    except (OSError, ValueError, UserError) as error:
        logger.warning(f"the page {folder / NAME} could not be written: {error}")


def write_page(path: Path, made: Record, *, budget: int = BUDGET) -> None:
    """Write a page whole.

    Args:
        path: of the page; pictures that are not in it are linked relative to its folder.
        made: what it shows.
        budget: bytes of picture files that may be in the page.

    Raises:
        UserError: it cannot be written.
    """
    content = render(made, path.parent, budget=budget)
    # a name may hold bytes that are no text
    data = content.encode("utf-8", "backslashreplace")
    write_whole(path, lambda temporary: temporary.write_bytes(data))


def render(made: Record, folder: Path, *, budget: int = BUDGET) -> str:
    """The page as HTML; see :func:`write_page`."""
    sources = Sources(made, folder, budget=budget)
    pictures = sources.content()
    seen = any(picture["sources"] for picture in pictures)
    parts = {
        "title": text(made.title),
        "kind": _KINDS[made.kind],
        "lead": _lead(made),
        "remarks": "".join(f"<p>{text(remark)}</p>" for remark in [*made.remarks, *sources.remarks()]),
        "notice": _notice(made),
        "headlines": page_tables.headlines(made),
        "viewer": _template("page_viewer.html") if seen else "",
        "scores": _scores(made, sources),
        "curves": f"{_CURVES}{page_curves.curves(made.curve)}</section>" if made.curve else "",
        "runs": "The run" if len(made.networks) == 1 else "The runs",
        "facts": _facts(made),
        "options": _options(made),
        "style": _template("page.css"),
        "script": _template("page.js"),
        "content": as_script(pictures if seen else []),
    }
    # in one pass, so that nothing which is filled in is taken for a place to fill
    return re.sub(r"@@(\w+)@@", lambda place: parts[place[1]], _template("page.html"))


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _lead(made: Record) -> str:
    facts = dict(made.facts[0])
    if len(made.networks) > 1:
        return text(f"Gains are against {made.networks[0]}.")
    return text(" · ".join(facts[key] for key in ("network", "device", "when") if key in facts))


def _notice(made: Record) -> str:
    if not made.left_out:
        return ""
    entries = "".join(f"<li>{text(entry)}</li>" for entry in made.left_out)
    return f'<div class="notice" role="note"><p>Only a part is shown. Left out:</p><ul>{entries}</ul></div>'


def _scores(made: Record, sources: Sources) -> str:
    if not made.sets:
        # a training that has not been validated yet
        return ""
    are_scored = any(any(entry.means) for entry in made.sets)
    reading = f'<p class="remark">{_READING}</p>' if are_scored else ""
    return f"{_SCORES}{page_tables.tables(made, sources.looks())}{reading}</section>"


def _facts(made: Record) -> str:
    parts = []
    for name, facts in zip(made.networks, made.facts, strict=True):
        rows = "".join(
            f"<div><dt>{text(subject)}</dt><dd>{text(value)}</dd></div>" for subject, value in facts if value
        )
        heading = f"<h3>{text(name)}</h3>" if len(made.networks) > 1 else ""
        parts.append(f"{heading}<dl>{rows}</dl>")
    return "".join(parts)


def _options(made: Record) -> str:
    parts = []
    for place, (name, content) in enumerate(zip(made.networks, made.options, strict=True)):
        title = f"{name}.effective.yml" if len(made.networks) == 1 else name
        spoken = f'tabindex="0" role="region" aria-label="Options of {text(name)}"'
        parts.append(
            f"<details><summary>{text(title)}</summary>"
            f'<button type="button" class="copy" data-copies="options-{place}">Copy</button>'
            f'<pre id="options-{place}" {spoken}>{text(content)}</pre></details>'
        )
    return "".join(parts)
