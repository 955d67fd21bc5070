"""Which shipped option files train with a set of prepared data, and what has to be said on the command line."""

import os
import shlex
from pathlib import Path
from typing import Any

import yaml

from data.archives import Archive
from data.pairs import shortened

_ROOT = Path(__file__).resolve().parent.parent
_SHIPPED = "datasets"
_SHOWN = 4


def how_to_train(archive: Archive, output: str, made: list[Path], *, scale: int) -> str:
    """Lines to paste: the first option file that trains or judges with this data, with overrides where they are needed.

    Args:
        archive: what was prepared.
        output: the data folder, as the user called it.
        made: folders and databases in it.
        scale: of the example, where no shipped file names the data.
    """
    base = Path(os.path.abspath(os.path.expanduser(output)))
    places = {path.relative_to(base).as_posix() for path in made}
    used = {file: names for file in _training_files() if (names := _sets_among(file, places))}
    # those that train with it before those that only judge with it
    order = sorted(used, key=lambda file: ("train" not in used[file], file))
    if not order:
        return _by_example(archive, output, scale)
    first, others = order[0], order[1:]
    told = [_command(first, output, "to train with it" if "train" in used[first] else "to judge the training with it")]
    if others:
        told += ["and so do", *(f"  {file}" for file in others[:_SHOWN])]
    if len(others) > _SHOWN:
        told.append(f"  and {len(others) - _SHOWN} more")
    return "\n".join(told)


def _by_example(archive: Archive, output: str, scale: int) -> str:
    """An option file for other data, with what has to be changed in it."""
    settings = dict(text.replace("{scale}", str(scale)).split("=", 1) for text in archive.settings)
    places = [value.removeprefix("{}/") for value in settings.values() if value.startswith("{}/")]
    if not archive.example or not _are_there(output, places):
        return "no shipped option file names this data"
    settings = {key: value.replace("{}", output) for key, value in settings.items()}
    return _command(archive.example.replace("{scale}", str(scale)), output, "to train with it", settings)


def _command(file: str, output: str, purpose: str, settings: dict[str, str] | None = None) -> str:
    """The command that trains with a file and those of its sets that are there, and a word on the others."""
    overrides = {key: _yaml(value) for key, value in (settings or {}).items()}
    own, absent = {key.split(".")[1] for key in overrides}, []
    shipped = _ROOT / _SHIPPED
    elsewhere = os.path.realpath(os.path.expanduser(output)) != os.path.realpath(shipped)
    for name, roots in _sets(file).items():
        if name in own:
            continue
        if elsewhere and _are_there(output, roots.values()):
            overrides |= {f"datasets.{name}.{key}": _yaml(f"{output}/{place}") for key, place in roots.items()}
            continue
        if _are_there(shipped, roots.values()):
            continue
        absent += [f"{_SHIPPED}/{place}" for place in roots.values()]
        if name != "train":
            overrides[f"datasets.{name}"] = "null"
    words = [f"  python train.py -opt {file}", *(shlex.quote(f"{key}={value}") for key, value in overrides.items())]
    told = [f"{purpose}:", " \\\n    ".join(words)]
    if absent:
        told.append(f"not there yet, and left out where only judged on (null): {shortened(absent)}")
    begun = _options(file).get("path", {}).get("pretrain_network_g")
    if begun and not (_ROOT / begun).exists():
        told.append(f"it goes on from {begun}, which is not there yet; path.pretrain_network_g=null starts anew")
    return "\n".join(told)


def _yaml(text: str) -> str:
    """The text, quoted where YAML would read something else."""
    try:
        plain = yaml.safe_load(text) == text
    except yaml.YAMLError:
        plain = False
    return text if plain else "'{}'".format(text.replace("'", "''"))


def _are_there(folder: str | Path, places: Any) -> bool:
    return all(Path(os.path.expanduser(folder), place).exists() for place in places)


def _training_files() -> list[str]:
    return sorted(path.relative_to(_ROOT).as_posix() for path in _ROOT.glob("options/train/*/*.yml"))


def _sets_among(file: str, places: set[str]) -> list[str]:
    """Names of those sets of the file whose roots lie among the places."""
    text = (_ROOT / file).read_text(encoding="utf-8")
    if not any(f"{_SHIPPED}/{place}" in text for place in places):
        return []
    # one side of a pair is of no use without the other
    return [name for name, roots in _sets(file).items() if roots and set(roots.values()) <= places]


def _sets(file: str) -> dict[str, dict[str, str]]:
    """Name -> option -> place of the roots of all sets of a file."""
    return {
        name: {k: str(v).removeprefix(f"{_SHIPPED}/") for k, v in data.items() if k.startswith("dataroot")}
        for name, data in _options(file)["datasets"].items()
    }


def _options(file: str) -> dict[str, Any]:
    # the loader in C reads eighty files in the time of ten
    return yaml.load((_ROOT / file).read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
