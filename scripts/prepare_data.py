"""Prepare data: python -m scripts.prepare_data {archive,check,subimages,lr,lmdb,meta} ... (see --help of each).

Nothing that exists is written over. A new folder or database appears under its name when it is complete; archive,
subimages and lr go on where an interrupted run ended, when the same command is given again.
"""

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from data.backends import ImageReader, Source, open_source
from data.cache import map_ahead
from data.headers import Header
from data.io import ALPHA_POLICIES, decode, use_one_thread, write_whole
from data.lmdb_file import write_lmdb
from data.naming import RULES, Naming, find_rule, pair_by_naming
from data.pairs import Problems, pair_by_stem, shortened
from data.prepare import Grid, cut_pairs, cut_subimages, make_lr, pair_names
from models import logbook, runtime
from models.screen import Screen
from options.errors import DataError, OptionsError
from scripts import prepare_archive
from scripts.watching import watch

_MOST_WORKERS = 256
_SUFFIXES = ("{}", "{}x2", "{}x3", "{}x4", "{}x8")


def main(argv: list[str]) -> None:
    """Parse and run one command."""
    args = _parse(argv)
    logbook.start_logging()
    use_one_thread()
    # whoever reads along may leave
    with contextlib.redirect_stdout(Screen(sys.stdout)):
        args.run(args)


def check(args: argparse.Namespace) -> None:
    """Count, decode and pair the pictures of one folder or two."""
    problems = Problems(" and ".join(args.folders))
    sources = [_open(folder) for folder in args.folders]
    sets = [_look(source, problems, args) for source in sources]
    if args.naming:
        _check_naming(sources, sets, find_rule(args.naming), problems)
    elif len(sets) == 2:
        tmpls = [args.tmpl] if args.tmpl else list(_SUFFIXES)
        _check_pairs(sources, sets, tmpls, problems)
    problems.raise_if_any()
    print("no problems found")


def subimages(args: argparse.Namespace) -> None:
    """Cut pictures, or pairs of them, into crops."""
    grid = Grid(args.size, args.step, args.thresh, args.small)
    settings = {"threads": args.workers, "watch": watch("pictures cut")}
    if args.lr and not args.scale:
        raise OptionsError("--lr needs --scale, the side of the GT pictures over that of the LR ones")
    if args.scale and not args.lr:
        raise OptionsError("--scale has no meaning without --lr IN OUT; give a folder alone its own --size and --step")
    if args.lr:
        sources = _open(args.input), _open(args.lr[0])
        count = cut_pairs(sources, (args.output, args.lr[1]), grid, args.scale, **settings)
        print(f"{count} sub-images in {args.output} and as many in {args.lr[1]}, paired by name")
    else:
        count = cut_subimages(_open(args.input), args.output, grid, **settings)
        print(f"{count} sub-images in {args.output}")


def lr(args: argparse.Namespace) -> None:
    """Make low-resolution pictures."""
    tmpl = args.tmpl or f"{{}}x{args.scale}"
    source = _open(args.input)
    settings = {"alpha": args.alpha, "threads": args.workers, "watch": watch("pictures reduced")}
    cut = make_lr(source, args.output, args.scale, tmpl=tmpl, **settings)
    if cut:
        print(
            f"{_pictures(len(cut))} not a multiple of {args.scale}: the last rows or columns are left out "
            f"({', '.join(cut[:3])}{', ...' if len(cut) > 3 else ''}); paired data sets crop the GT alike"
        )
    print(f"{_pictures(len(source.names()))} in {args.output}; in option files: filename_tmpl: '{tmpl}'")


def lmdb(args: argparse.Namespace) -> None:
    """Write a folder into an LMDB."""
    source = _open(args.folder)
    names = source.names()
    began = time.perf_counter()

    def watched(entries: Iterator[Any]) -> Iterable[Any]:
        return watch("pictures written")(entries, len(names))

    settings = {"names": names, "replace_dots": args.replace_dots, "threads": args.workers}
    written = write_lmdb(source, args.output, **settings, watch=watched)
    encoded = written.pictures - written.unchanged
    kinds = f"{written.unchanged} of them as their PNG files are" + (f", {encoded} encoded as PNG" if encoded else "")
    size = f"{written.size / 2**20:,.1f} MiB in {time.perf_counter() - began:.1f} s"
    print(f"{_pictures(written.pictures)} in {args.output}, {kinds}; {size}")


def meta(args: argparse.Namespace) -> None:
    """List a folder as meta_info_file."""
    file = Path(os.path.expanduser(args.file))
    if os.path.lexists(file):
        raise DataError(f"{file} exists and is left as it is; remove it or choose another name")
    problems = Problems(args.folder)
    source = _open(args.folder)
    headers = _headers(source, problems, args.workers)
    problems.raise_if_any()
    lines = [f"{name} ({h.height},{h.width},{h.channels})\n" for name, h in headers.items()]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, "".join(lines).encode("utf-8"))
    except OSError as error:
        raise DataError(f"cannot write {file}: {error.strerror or error}") from error
    print(f"{_pictures(len(lines))} listed in {file}")


def _look(source: Source, problems: Problems, args: argparse.Namespace) -> dict[str, Header]:
    """Print what is in a set; unreadable pictures go to ``problems``."""
    headers = _headers(source, problems, args.workers)
    if not args.headers:
        for name, error in _decode(source, list(headers), args.workers):
            problems.add(error)
            del headers[name]
    sizes = sorted(((h.height, h.width) for h in headers.values()), key=lambda size: size[0] * size[1])
    print(f"{source.root}: {_pictures(len(headers))}, readable")
    if not sizes:
        return headers
    smallest, middle, largest = (f"{w} x {h}" for h, w in (sizes[0], sizes[len(sizes) // 2], sizes[-1]))
    print(f"  width x height: {len(set(sizes))} different; smallest {smallest}, median {middle}, largest {largest}")
    kinds = Counter(f"{h.format} {_channels(h.channels)} {h.depth} bit" for h in headers.values())
    print("  kinds: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    memory = sum(h.height * h.width * h.channels * h.depth // 8 for h in headers.values())
    print(f"  memory when decoded: {memory / 2**20:,.0f} MiB")
    return headers


def _check_pairs(sources: list[Source], sets: list[dict[str, Header]], tmpls: list[str], problems: Problems) -> None:
    names = [source.names() for source in sources]
    try:
        pairs, tmpl = pair_names(*names, tmpls, problems.where)
        print(f"{len(pairs)} pairs, filename_tmpl: '{tmpl}'")
    except DataError:
        # the one that leaves the fewest alone tells most
        tmpl = max(tmpls, key=lambda tmpl: len(pair_by_stem(*names, tmpl, Problems(""))))
        pairs = pair_by_stem(*names, tmpl, problems)
    _check_scales(pairs, sets, problems)


def _check_naming(sources: list[Source], sets: list[dict[str, Header]], rule: Naming, problems: Problems) -> None:
    gt_names, lq_names = (source.names() for source in sources)
    pairs = pair_by_naming(lq_names, gt_names, rule, problems)
    spare = sorted(set(gt_names) - {gt for gt, _ in pairs})
    print(f"{len(pairs)} pairs of {len(gt_names) - len(spare)} clear pictures, naming: {rule.name}")
    if spare:
        problems.add(f"{len(spare)} clear pictures without a hazy one: {shortened(spare)}")
    _check_scales(pairs, sets, problems, border=rule.border)


def _check_scales(
    pairs: list[tuple[str, str]], sets: list[dict[str, Header]], problems: Problems, *, border: int = 0
) -> None:
    """One scale for all pairs, where the GT may be larger by a border on each side."""
    scales: dict[int | None, list[str]] = {}
    for gt, lq in pairs:
        if gt in sets[0] and lq in sets[1]:
            scales.setdefault(_scale(sets[0][gt], sets[1][lq], border), []).append(gt)
    for gt in scales.pop(None, []):
        problems.add(f"the size of {gt} is no multiple of that of its LQ picture, not even after cutting")
    if scales:
        print("scales: " + ", ".join(f"{len(found)} pairs x{scale}" for scale, found in scales.items()))
    if len(scales) > 1:
        problems.add(f"the pairs have {len(scales)} different scales")


def _scale(gt: Header, lq: Header, border: int = 0) -> int | None:
    """The scale of a pair whose GT may be larger by less than an LQ pixel; None when there is none."""
    sides = (gt.height, lq.height), (gt.width, lq.width)
    if border and all(g - n == 2 * border for g, n in sides):
        return 1
    scale = sides[0][0] // sides[0][1]
    return scale if scale and all(0 <= g - n * scale < scale for g, n in sides) else None


def _headers(source: Source, problems: Problems, workers: int) -> dict[str, Header]:
    names = source.names()
    if not names:
        raise DataError(f"no images found in {source.root}")
    reader = ImageReader(source)

    def read(name: str) -> Header | DataError:
        try:
            return reader.header(name)
        except DataError as error:
            return error

    headers = {}
    for name, found in zip(names, map_ahead(read, names, workers), strict=True):
        if isinstance(found, DataError):
            problems.add(found)
        else:
            headers[name] = found
    return headers


def _decode(source: Source, names: list[str], workers: int) -> Iterator[tuple[str, DataError]]:
    """The pictures that cannot be decoded, with the reason."""

    def attempt(name: str) -> DataError | None:
        try:
            decode(source.read(name), source.path(name))
        except DataError as error:
            return error
        return None

    found = watch("pictures decoded")(map_ahead(attempt, names, workers), len(names))
    yield from ((name, error) for name, error in zip(names, found, strict=True) if error)


def _channels(count: int) -> str:
    return {1: "grey", 2: "grey with alpha", 3: "RGB", 4: "RGB with alpha"}[count]


def _pictures(count: int) -> str:
    return f"{count} picture{'s' * (count != 1)}"


def _open(folder: str) -> Source:
    # memory takes both a folder and an LMDB
    return open_source(folder, {"type": "memory"})


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scripts.prepare_data", description=__doc__.split("\n\n")[1])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, *places: str) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        for place in places:
            added.add_argument(place)
        added.add_argument("--workers", type=_workers, default=os.cpu_count() or 1, help="pictures at a time")
        added.set_defaults(run=run)
        return added

    prepare_archive.describe(command(prepare_archive.archive))
    one = command(check)
    one.add_argument("folders", nargs="+", metavar="FOLDER", help="one folder or LMDB, or GT and LQ")
    one.add_argument("--tmpl", help="LQ name from the GT name, such as '{}x2'; default: tried out")
    one.add_argument(
        "--naming", help=f"pair by a rule of ResideDataset instead: {', '.join(rule.name for rule in RULES)}"
    )
    one.add_argument("--headers", action="store_true", help="read headers only, do not decode")
    one = command(subimages, "input", "output")
    one.add_argument("--lr", nargs=2, metavar=("IN", "OUT"), help="cut the LR pictures at the same places")
    one.add_argument("--scale", type=_count, help="with --lr: GT side over LR side")
    one.add_argument("--size", type=int, default=480, help="side of the crops")
    one.add_argument("--step", type=int, default=240, help="distance between crops")
    one.add_argument("--thresh", type=int, default=0, help="largest rest at a border that is left out")
    one.add_argument("--small", choices=("error", "skip", "keep"), default="error", help="pictures below the size")
    one = command(lr, "input", "output")
    one.add_argument("--scale", type=_count, required=True)
    one.add_argument("--tmpl", help="new name from the old one; default: '{}x<scale>'")
    one.add_argument("--alpha", choices=ALPHA_POLICIES, default="error", help="what to do with transparent pixels")
    one = command(lmdb, "folder", "output")
    one.add_argument("--replace-dots", action="store_true", help="write _ for dots in keys, which BasicSR cannot read")
    command(meta, "folder", "file")
    args = parser.parse_args(argv)
    if args.run is check and len(args.folders) > 2:
        parser.error("check takes one folder or two")
    if args.run is check and args.naming and (len(args.folders) != 2 or args.tmpl):
        parser.error("--naming pairs two folders, the clear pictures and the hazy ones, and takes no --tmpl")
    return args


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def _workers(text: str) -> int:
    if _count(text) > _MOST_WORKERS:
        # each is a thread, and each holds pictures
        raise argparse.ArgumentTypeError(f"{text} is above {_MOST_WORKERS}")
    return int(text)


if __name__ == "__main__":
    sys.exit(runtime.run(main, sys.argv[1:]))
