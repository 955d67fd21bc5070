"""Several tested networks or checkpoints on one page.

    python -m scripts.compare results/A results/B [results/C ...] -o OUT

Each argument is a folder that test.py has written, with its page (``val.report``) and its pictures (``val.save_img``).
``OUT/index.html`` shows a column for each network, gains against the first, and any two pictures beside one another.

Only what was measured in the same way is compared: the sets, their pictures (inputs and ground truths, pixel by pixel),
the baseline and the protocol of each metric must be the same in all folders. Where they are not, nothing is written and
the differences are named; with ``--common`` the page shows what the folders share, and says at its head what it leaves
out. The files of large sets are not copied: the page shows those in the given folders.
"""

import argparse
import math
import sys
from pathlib import Path

import numpy as np

from data.io import read_image
from models import logbook, page, record, runtime
from models.record import Record, Shown, ShownSet
from options.errors import DataError, OptionsError, UserError


def main(argv: list[str]) -> None:
    """Load, hold against one another, write."""
    args = _parse(argv)
    logbook.start_logging()
    target = args.out / page.NAME
    places = [folder.resolve() for folder in args.folders]
    twice = [str(folder) for folder, place in zip(args.folders, places, strict=True) if places.count(place) > 1]
    if twice:
        raise OptionsError(f"{', '.join(twice)}: the same folder was given twice")
    if args.out.resolve() in places:
        raise OptionsError(
            f"-o {args.out} is one of the compared folders, whose own page would be lost: choose another"
        )
    if target.exists() and not args.force:
        raise OptionsError(f"{target} exists: choose another folder for -o, or give --force to replace it")
    records = [_load(folder) for folder in args.folders]
    names = _names(args.folders, records)
    differences: list[str] = []
    merged = _merge(records, names, differences)
    if differences and not args.common:
        listed = "\n  ".join(differences)
        raise DataError(f"these results cannot be compared as a whole:\n  {listed}\n--common shows what they share")
    if not merged.sets:
        raise DataError("these results have no picture in common: " + "; ".join(differences))
    merged.left_out = differences
    blind = [name for name, made in zip(names, records, strict=True) if not _has_pictures(made)]
    if blind:
        merged.remarks.append(f"{', '.join(blind)} kept no pictures, so whether theirs are the same was not checked.")
    page.write_page(target, merged)
    for entry in merged.sets:
        for name, means in zip(names, entry.means, strict=True):
            scores = ", ".join(f"{label} {value:.4f}" for label, value in means.items())
            logbook.console.print(f"{entry.name}: {name}: {scores or 'no scores'}", markup=False, highlight=False)
    logbook.console.print(f"the page is {target}", markup=False, highlight=False)


def _has_pictures(made: Record) -> bool:
    return any(shown.others for entry in made.sets for shown in entry.pictures)


def _load(folder: Path) -> Record:
    if folder.is_file():
        kind = "an option file" if folder.suffix in (".yml", ".yaml") else "a file"
        raise DataError(f"{folder} is {kind}: run test.py first, and give the folder that it writes, results/<name>")
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist: give the folders that test.py has written, results/<name>")
    return record.load(folder)


def _names(folders: list[Path], records: list[Record]) -> list[str]:
    """What each network is called: by its run, and where two runs have one name by the folder."""
    titles = [made.title for made in records]
    if len(set(titles)) < len(titles):
        return [str(folder) for folder in folders]
    return titles


def _merge(records: list[Record], names: list[str], differences: list[str]) -> Record:
    """One record of what they share; what they do not goes to ``differences``, in words."""
    first = records[0]
    for made, name in zip(records, names, strict=True):
        if made.scale != first.scale:
            raise DataError(f"{names[0]} enlarges by {first.scale}, {name} by {made.scale}: no picture is the same")
    found = {name: {entry.name: entry for entry in made.sets} for name, made in zip(names, records, strict=True)}
    sets = []
    for label in dict.fromkeys(label for own in found.values() for label in own):
        without = [name for name, own in found.items() if label not in own]
        if without:
            differences.append(f"the set {label} is missing in {', '.join(without)}")
        else:
            merged = _merge_sets({name: own[label] for name, own in found.items()}, differences)
            # else there is no more to say of it than the differences do
            sets += [merged] if merged.pictures else []
    facts, options = [made.facts[0] for made in records], [made.options[0] for made in records]
    remarks = [remark for made in records for remark in made.remarks]
    title = " and ".join(names) if len(names) == 2 else f"{len(names)} networks"
    return Record("comparison", title, names, first.scale, sets, facts, options, list(dict.fromkeys(remarks)))


def _merge_sets(found: dict[str, ShownSet], differences: list[str]) -> ShownSet:
    first = next(iter(found.values()))
    labels = []
    for label in dict.fromkeys(label for entry in found.values() for label in entry.protocol):
        told = {name: entry.protocol.get(label, "not computed") for name, entry in found.items()}
        if len(set(told.values())) == 1:
            labels.append(label)
        else:
            ways = ", ".join(f"{way} in {name}" for name, way in told.items())
            differences.append(f"the metric {label} on {first.name} ({ways})")
    baseline = first.baseline
    if any(entry.baseline != baseline for entry in found.values()):
        ways = ", ".join(f"{entry.baseline or 'none'} in {name}" for name, entry in found.items())
        differences.append(f"the baseline on {first.name} ({ways})")
        baseline = None
    pictures = _merge_pictures(found, labels, differences, keep_baseline=baseline is not None)
    means = [_means([shown.scores[place] for shown in pictures]) for place in range(len(found))]
    reference = _means([shown.baseline for shown in pictures])
    protocol = {label: first.protocol[label] for label in labels}
    return ShownSet(first.name, protocol, first.better, baseline, means, reference, pictures, len(pictures))


def _merge_pictures(
    found: dict[str, ShownSet], labels: list[str], differences: list[str], *, keep_baseline: bool
) -> list[Shown]:
    known = {name: {shown.name: shown for shown in entry.pictures} for name, entry in found.items()}
    where, merged = next(iter(found.values())).name, []
    for picture in dict.fromkeys(picture for own in known.values() for picture in own):
        without = [name for name, own in known.items() if picture not in own]
        if without:
            differences.append(f"{where}/{picture} is missing in {', '.join(without)}")
            continue
        shown = {name: own[picture] for name, own in known.items()}
        kinds = [kind for kind in ("input", "gt") if not _are_equal(kind, shown)]
        if kinds:
            what = {"input": "input", "gt": "ground truth"}
            differences.append(f"{where}/{picture} has another {' and '.join(what[kind] for kind in kinds)}")
            continue
        merged.append(_merge_one(list(shown.values()), labels, keep_baseline=keep_baseline))
    return merged


def _merge_one(shown: list[Shown], labels: list[str], *, keep_baseline: bool) -> Shown:
    # the first that kept pictures, or else they would be missing for all
    first = next((own for own in shown if own.others), shown[0])

    def chosen(scores: dict[str, float]) -> dict[str, float]:
        return {label: scores[label] for label in labels if label in scores}

    others = {kind: path for kind, path in first.others.items() if kind != "baseline" or keep_baseline}
    outputs = [own.outputs[0] for own in shown]
    scores = [chosen(own.scores[0]) for own in shown]
    size = next((own.size for own in shown if own.size), None)
    baseline = chosen(shown[0].baseline) if keep_baseline else {}
    return Shown(first.name, scores, baseline, size, outputs, others)


def _are_equal(kind: str, shown: dict[str, Shown]) -> bool:
    """Whether all that kept a picture of this kind kept the same."""
    files = [own.others[kind] for own in shown.values() if kind in own.others]
    if not files:
        return True
    try:
        first = files[0].read_bytes()
        different = [path for path in files[1:] if path.read_bytes() != first]
        # another encoder writes other bytes for the same pixels
        return all(np.array_equal(read_image(path), read_image(files[0])) for path in different)
    except OSError as error:
        raise UserError(f"a picture of the page is gone: {error}; run test.py again") from error


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    rows = [row for row in rows if row]
    # as the runs themselves do, to the last digit
    return {label: math.fsum(row[label] for row in rows) / len(rows) for label in (rows[0] if rows else {})}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.compare", description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="RESULTS", help="folders that test.py has written")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="folder of the page")
    parser.add_argument("--common", action="store_true", help="show what the results share, and say what they do not")
    parser.add_argument("--force", action="store_true", help="replace a page that is there")
    args = parser.parse_args(argv)
    if len(args.folders) < 2:
        parser.error("give two folders or more")
    return args


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))
