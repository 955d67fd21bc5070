"""The command ``archive`` of scripts.prepare_data: from an unpacked download to data that the option files train with.

What lies where is the table of ``data.archives``. The download stays as it is: folders are linked into the data folder,
and what is made of them is made there.
"""

import argparse
import os
import re
import shutil
from pathlib import Path

from data.archives import ARCHIVES, SCALES, Archive, find_archive
from data.io import ALPHA_POLICIES
from data.naming import find_rule
from data.pairs import Problems, shortened
from data.prepare import Grid
from data.unpacked import Downloads, Looked, check_pair, find_parts, look
from options.errors import DataError, OptionsError
from scripts.archive_plan import Plan
from scripts.option_use import how_to_train
from scripts.watching import watch

STEPS = ("lr", "subimages", "lmdb", "meta")


def describe(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(["archives, their folders in the data folder (pictures), and what is made:", *_table()])
    parser.add_argument("name", metavar="NAME", help=f"one of {', '.join(ARCHIVES)}")
    parser.add_argument("roots", nargs="+", metavar="ROOT", help="folders that the download was unpacked into")
    parser.add_argument("-o", "--output", default="datasets", help="the data folder; default: %(default)s")
    parser.add_argument(
        "--scale", nargs="+", type=int, choices=SCALES, default=list(SCALES), metavar="N", help="default: 2 3 4"
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        choices=("none", *STEPS),
        metavar="STEP",
        help="lr: bicubic reductions; subimages: crops of both; lmdb: of the crops, or of whole pictures; meta: lists "
        "with sizes; none: verify and link; default: what the option files need",
    )
    parser.add_argument(
        "--subimages", nargs=2, type=int, metavar=("SIZE", "STEP"), default=(480, 240), help="default: 480 240"
    )
    parser.add_argument("--small", choices=("error", "skip", "keep"), default="error", help="pictures below SIZE")
    parser.add_argument("--alpha", choices=ALPHA_POLICIES, default="error", help="what to do with transparent pixels")
    parser.add_argument("--verify", choices=("headers", "full"), default="headers", help="full decodes every picture")
    parser.add_argument("--partial", action="store_true", help="a part of the archive: do not mind the counts")
    parser.add_argument("--dry_run", action="store_true", help="verify, say what would be made, make nothing")


def archive(args: argparse.Namespace) -> None:
    """Verify an unpacked archive, link it into the data folder, and make what training needs."""
    chosen = find_archive(args.name)
    args.steps = _steps(chosen, args.steps)
    grid = Grid(*args.subimages, small=args.small)
    downloads = Downloads.below(args.roots)
    members = [find_archive(name) for name in chosen.members] or [chosen]
    looked = _verify(chosen, members, downloads, args)
    for note in downloads.notes():
        print(f"note: {note}")
    plan = Plan(chosen, members, looked, args, grid)
    _tell(plan, Path(args.output))
    if args.dry_run:
        print("dry run: nothing was made")
        return
    for step in plan.steps:
        print(f"{step.what}: {plan.shown(step)}", flush=True)
        step.run()
    print(f"{chosen.name} is ready in {args.output}")
    print(how_to_train(chosen, args.output, [step.target for step in plan.steps], scale=args.scale[0]))


def _table() -> list[str]:
    """A line for each archive."""
    lines = []
    for one in ARCHIVES.values():
        own = [part for part in one.parts if not re.search(r"(_LR_bicubic|/LR)/", part.place)]
        counts = [f"{part.place} ({' or '.join(f'{count:,}' for count in part.counts)})" for part in own]
        holds = ", ".join(counts) or " + ".join(one.members)
        lines.append(f"  {one.name:11} {holds}: {' '.join(one.steps) or 'links only'}")
    return lines


def _steps(chosen: Archive, asked: list[str] | None) -> tuple[str, ...]:
    if asked is None:
        return chosen.steps
    steps = tuple(step for step in STEPS if step in asked)
    if steps and "none" in asked:
        raise OptionsError(f"--steps none {' '.join(steps)}: none stands alone")
    if chosen.train is None and {"lr", "subimages"} & set(steps):
        raise OptionsError(f"--steps {' '.join(asked)}: {chosen.name} has pairs; lmdb and meta can be made of them")
    if "subimages" in steps and "lr" not in steps:
        raise OptionsError("--steps subimages: sub-images are cut of pairs; add lr, which takes those of the archive")
    return steps


def _verify(
    chosen: Archive, members: list[Archive], downloads: Downloads, args: argparse.Namespace
) -> dict[str, Looked]:
    """Place -> what is there; everything that is wrong is told at once."""
    roots = " and ".join(str(root) for root in downloads.roots)
    problems, looked = Problems(f"{chosen.name} in {roots}"), {}
    settings = {"partial": args.partial, "thorough": args.verify == "full", "threads": args.workers}
    for member in members:
        for place, path in find_parts(member, downloads, problems).items():
            part = member.part(place)
            if place not in _wanted(member, merged=bool(chosen.members), steps=args.steps, scales=args.scale):
                continue
            looked[place] = look(part, path, problems, **settings, watch=watch(f"pictures of {place} looked at"))
            _tell_part(looked[place])
        _check_reductions(member, looked, problems)
        for pair in member.pairs:
            if pair.gt in looked and pair.lq in looked:
                count = check_pair(pair, looked, problems)
                print(f"  {count:,} pairs, by the names of {find_rule(pair.naming).name}")
    problems.raise_if_any()
    return looked


def _wanted(member: Archive, *, merged: bool, steps: tuple[str, ...], scales: list[int]) -> set[str]:
    """Places of the parts that this run is about."""
    if member.train is None:
        return {part.place for part in member.parts}
    sides = [member.train] if merged or member.valid is None else [member.train, member.valid]
    lower = {side.lr.format(scale) for side in sides for scale in scales if "lr" in steps or side is member.valid}
    return lower | {side.hr for side in sides}


def _tell_part(found: Looked) -> None:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.kinds.most_common())
    print(f"{found.part.place}: {found.path}\n  {kinds or 'no readable picture'}, {_size(found.size)}", flush=True)


def _check_reductions(member: Archive, looked: dict[str, Looked], problems: Problems) -> None:
    """Reductions that came with the archive, against its good pictures: names and sizes."""
    for side in filter(None, (member.train, member.valid)):
        for scale in SCALES:
            hr, lr = looked.get(side.hr), looked.get(side.lr.format(scale))
            if hr is None or lr is None:
                continue
            place, way = lr.part.place, "unpack it again, or remove the folder to have it made"
            wanted = {f"{_own_name(name)}x{scale}" for name in hr.source.names()}
            there = {_own_name(name) for name in lr.source.names()}
            if wanted - there:
                problems.add(f"{place}: {len(wanted - there)} missing: {shortened(sorted(wanted - there))}; {way}")
            if there - wanted:
                told = shortened(sorted(there - wanted))
                problems.add(f"{place}: {len(there - wanted)} without their picture in {hr.part.place}: {told}")
            sizes = {_own_name(name): size for name, size in lr.sizes.items()}
            for name, (height, width) in hr.sizes.items():
                own, right = f"{_own_name(name)}x{scale}", (height // scale, width // scale)
                if sizes.get(own, right) != right:
                    told = f"{sizes[own][0]}x{sizes[own][1]} and should be {right[0]}x{right[1]}"
                    problems.add(f"{place}: {own} is {told}; {way}")


def _own_name(name: str) -> str:
    return os.path.splitext(os.path.basename(name))[0]


def _tell(plan: Plan, output: Path) -> None:
    """The plan; stops where the disk is too small for it.

    Raises:
        DataError: too little space.
    """
    for step in plan.steps:
        size = f", about {_size(step.size)}" if step.size else ""
        state = " (done)" if step.done else ""
        print(f"  {step.what:12} {plan.shown(step)}  {step.count:,} picture{'s' * (step.count != 1)}{size}{state}")
    there = Path(os.path.abspath(os.path.expanduser(output)))
    while not there.exists():
        there = there.parent
    free, needed = shutil.disk_usage(there).free, sum(step.missing for step in plan.steps)
    print(f"about {_size(needed)} needed, {_size(free)} free on the disk of {output}")
    if needed > free:
        raise DataError(f"the disk of {output} has {_size(free)} free, and about {_size(needed)} are needed; choose -o")


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
