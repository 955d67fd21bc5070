"""Which shipped option files train with a set of prepared data, and what has to be said on the command line."""

import os
from pathlib import Path
from typing import Any

import yaml

from data.archives import Archive

_ROOT = Path(__file__).resolve().parent.parent
_SHIPPED = "datasets"
_SHOWN = 4


def how_to_train(archive: Archive, output: str, made: list[Path]) -> str:
    """Lines to paste: the first option file that trains or judges with this data, with overrides where they are needed.

    Args:
        archive: what was prepared.
        output: the data folder, as the user called it.
        made: folders and databases in it.
    """
    base = Path(os.path.abspath(os.path.expanduser(output)))
    places = {path.relative_to(base).as_posix() for path in made}
    used = {file: keys for file in _training_files() if (keys := _keys(file, places))}
    # those that train with it before those that only judge with it
    order = sorted(used, key=lambda file: (not any(key.startswith("datasets.train.") for key, _ in used[file]), file))
    if not order:
        settings = [text.format(output) for text in archive.settings]
        if not archive.example:
            return "no shipped option file names this data"
        return f"to train with it:\n{_command(archive.example, settings)}"
    first = order[0]
    overrides = (
        [] if os.path.normpath(output) == _SHIPPED else [f"{key}={output}/{place}" for key, place in used[first]]
    )
    trains = any(key.startswith("datasets.train.") for key, _ in used[first])
    told = f"{'to train with it' if trains else 'to judge the training with it'}:\n{_command(first, overrides)}"
    more = [f"  {file}" for file in order[1 : 1 + _SHOWN]] + [f"  and {len(order) - 1 - _SHOWN} more"]
    if len(order) > 1:
        told = "\n".join([told, "and so do", *(more if len(order) > 1 + _SHOWN else more[:-1])])
    return told


def _command(file: str, overrides: list[str]) -> str:
    return " \\\n    ".join([f"  python train.py -opt {file}", *overrides])


def _training_files() -> list[str]:
    return sorted(path.relative_to(_ROOT).as_posix() for path in _ROOT.glob("options/train/*/*.yml"))


def _keys(file: str, places: set[str]) -> list[tuple[str, str]]:
    """Option and place of the roots of those sets of the file that lie among the places."""
    text = (_ROOT / file).read_text(encoding="utf-8")
    if not any(f"{_SHIPPED}/{place}" in text for place in places):
        return []
    # the loader in C reads eighty files in the time of ten
    options: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = []
    for name, data in options["datasets"].items():
        roots = {
            key: str(value).removeprefix(f"{_SHIPPED}/") for key, value in data.items() if key.startswith("dataroot")
        }
        # one side of a pair is of no use without the other
        if set(roots.values()) <= places:
            found += [(f"datasets.{name}.{key}", place) for key, place in roots.items()]
    return found
