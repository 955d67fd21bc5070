"""Restore photographs: python -m scripts.restore photo.jpg, or folders, with a shipped network or one of your own.

Results go to a folder restored/ beside the pictures, or to -o. Nothing that exists is written over without --force; the
same command given again goes on where an interrupted one ended. EXIF data and colour profile are kept, pictures come
out upright; 16-bit pictures stay so, grey ones grey, transparent ones transparent.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

TASKS = ("sr", "dehaze")
_ALPHA = ("restore", "drop", "white", "black", "error")
_FORMATS = ("same", "png", "jpg", "webp", "tiff")
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_ENDS = (
    "exit codes: 0 done; 2 wrong options; 3 a picture could not be restored, or its result exists; 130, 143, 129 "
    "interrupted; 1 anything else"
)


def main(argv: list[str]) -> None:
    """Parse, load the network, restore."""
    args = _parse(argv)
    # late, for PyTorch takes seconds to load, which neither --help nor a misspelt option should
    from data.io import use_one_thread
    from models import logbook
    from scripts.restore_inputs import plan_jobs
    from scripts.restore_network import build_restorer
    from scripts.restore_run import run_jobs

    logbook.start_logging()
    for handler in logbook.logger.handlers:
        # which kernel runs is for those who train
        handler.addFilter(lambda record: record.module != "dispatch" or record.levelno > logging.INFO)
    use_one_thread()
    restorer = build_restorer(args)
    suffix = restorer.suffix if args.suffix is None else args.suffix
    jobs, told = plan_jobs(args.inputs, args.output, recursive=args.recursive, suffix=suffix, kind=args.format)
    for words in told:
        logbook.logger.info(words)
    logbook.logger.info(f"{restorer.label}, {restorer.precision} on {restorer.device}")
    run_jobs(jobs, restorer, args)


def entry() -> int:
    """The command: returns the exit code."""
    # folders called data or models may lie where the command is given
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    _parse(sys.argv[1:])
    try:
        from models import runtime
    except KeyboardInterrupt:
        # PyTorch takes seconds to load
        return 130
    return runtime.run(main, sys.argv[1:])


def _parse(argv: list[str]) -> argparse.Namespace:
    description = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m scripts.restore", description=description[1], epilog=_ENDS, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "inputs", nargs="+", metavar="INPUT", help="pictures (jpg, png, webp, tiff, bmp), folders, patterns 'dir/*.jpg'"
    )
    add(
        "-o",
        "--output",
        metavar="OUT",
        help="folder, or a file for one picture; default: restored/ beside the pictures",
    )
    add("--recursive", action="store_true", help="also the folders inside folders")
    add("--task", choices=TASKS, help="enlarge (sr, the default) or remove haze")
    add("--scale", type=int, choices=(2, 3, 4), help="by how much to enlarge (default 2)")
    _add_network(parser)
    _add_way(parser)
    add("--suffix", type=_suffix, help="behind each name; default _x2, _dehazed or _restored")
    add("--format", choices=_FORMATS, default="same", help="of the results; default: as the picture")
    add("--quality", type=_quality, help="1 to 100, of jpg (default 95) and webp (default lossless)")
    add(
        "--alpha",
        choices=_ALPHA,
        default="restore",
        help="transparency: keep it, drop it, lay over white or black, refuse",
    )
    add("--force", action="store_true", help="write over what exists")
    add("--dry_run", "--dry-run", action="store_true", help="say what would be done, and write nothing")
    args = parser.parse_intermixed_args(_without_dashes(argv))
    if args.overlap is not None and args.tile != "auto" and args.overlap >= args.tile:
        parser.error(f"--overlap {args.overlap} leaves nothing of --tile {args.tile}")
    return args


def _without_dashes(argv: list[str]) -> list[str]:
    """What follows ``--`` as names that no option looks like; argparse loses it between options and names."""
    place = argv.index("--") if "--" in argv else len(argv)
    return argv[:place] + [os.path.join(".", name) if name.startswith("-") else name for name in argv[place + 1 :]]


def _add_network(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a network of your own").add_argument
    group("--weights", metavar="FILE", help="default: the shipped network of the task and scale")
    group("-opt", "--opt", metavar="FILE.yml", help="option file that says of which network the weights are")
    group("--network", metavar="'{type: ...}'", help="the same in words: the network's type and arguments")
    group("--param_key", metavar="KEY", help="params_ema or params; default: the average where there is one")


def _add_way(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how the network runs").add_argument
    group("--tile", type=_tile, default="auto", help="side in pixels of what it sees at once; auto: by free memory")
    group("--overlap", type=_whole, help="pixels that tiles share; default: by the network")
    group(
        "--self_ensemble",
        "--self-ensemble",
        action="store_true",
        help="mean of 8 views: a little better, 8 times slower",
    )
    group("--dtype", choices=_DTYPES, default="auto", help="default auto: bfloat16 on a GPU that has it, else float32")
    group("--device", default="auto", help="auto, cpu, cuda or cuda:1")


def _tile(text: str) -> int | str:
    return text if text == "auto" else _at_least(text, 1, "a whole number from 1, or auto")


def _whole(text: str) -> int:
    return _at_least(text, 0, "a whole number from 0")


def _quality(text: str) -> int:
    value = _at_least(text, 1, "a whole number from 1 to 100")
    if value > 100:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1 to 100")
    return value


def _suffix(text: str) -> str:
    if "/" in text or "\\" in text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} goes behind a name and holds no folders")
    return text


def _at_least(text: str, least: int, words: str) -> int:
    if not text.strip().isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not {words}")
    return int(text)


if __name__ == "__main__":
    sys.exit(entry())
