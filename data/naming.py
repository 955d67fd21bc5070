"""Which clear picture a hazy one belongs to: how the dehazing archives name their files, as explicit rules.

Every rule accepts a clear picture with the stem of the hazy one, as prepared copies of the archives have it, before the
name that the archive itself uses. Extensions may differ.
"""

import os
import re
from collections import defaultdict
from dataclasses import dataclass

from data.pairs import Problems, choose, shortened, stem
from options.errors import OptionsError
from options.registry import nearest

_NUMBER = r"[0-9]*\.?[0-9]+"
# scenes for testing at the end of the sets that do not come in two parts
_LAST = 5


@dataclass(frozen=True)
class Naming:
    """One rule.

    Attributes:
        name: as its data set is spelt.
        hazy: what the stem of a hazy picture looks like; group 1 is the scene. Empty: any stem.
        clear: the stem of the clear picture, with ``{}`` for the scene.
        scenes: of a set whose last five scenes are for testing, how many there are; else 0.
        border: pixels by which the clear pictures may be larger on each side.
        each: hazy pictures of each clear one, where they all have as many; else 0.
        also: further names of folders and of this rule.
    """

    name: str
    hazy: str = ""
    clear: str = "{}"
    scenes: int = 0
    border: int = 0
    each: int = 0
    also: tuple[str, ...] = ()

    def scene(self, file_stem: str) -> str | None:
        """The scene that a hazy stem names, or None where it is no hazy stem of this rule."""
        found = re.fullmatch(self.hazy, file_stem, re.IGNORECASE) if self.hazy else None
        return found[1] if found else None

    def clear_stems(self, hazy_name: str) -> list[str]:
        """Stems that the clear picture may have, the best first: in the same subfolder, or in one above."""
        folder, _, file = stem(hazy_name).rpartition("/")
        scene = self.scene(file)
        files = [file] if scene is None else [file, self.clear.format(scene)]
        parts = folder.split("/") if folder else []
        return ["/".join([*parts[:depth], name]) for name in files for depth in range(len(parts), -1, -1)]


_GT = "{}_GT"
RULES = (
    Naming("ITS", rf"([0-9]+)_[0-9]+_{_NUMBER}", each=10),
    Naming("OTS", rf"([0-9]+)_{_NUMBER}_{_NUMBER}", each=35),
    Naming("SOTS-indoor", r"([0-9]+)_[0-9]+", border=10, each=10, also=("ITS_SOTS",)),
    Naming("SOTS-outdoor", rf"([0-9]+)_{_NUMBER}_{_NUMBER}", also=("OTS_SOTS",)),
    Naming("O-HAZE", r"([0-9]+_outdoor)_haz[ey]", _GT, scenes=45, also=("O-HAZY",)),
    Naming("I-HAZE", r"([0-9]+_indoor)_haz[ey]", _GT, also=("I-HAZY",)),
    Naming("Dense-Haze", r"([0-9]+)_haz[ey]", _GT, scenes=55),
    Naming("NH-HAZE", r"([0-9]+)_haz[ey]", _GT, scenes=55),
    Naming("Haze4K", rf"([0-9]+)_{_NUMBER}_{_NUMBER}"),
    Naming(
        "same",
        also=("SRRS", "Snow100K", "Rain13K", "Rain100L", "Rain100H", "Test100", "Test1200", "Test2800")
        + ("GoPro", "HIDE", "SIDD"),
    ),
)


def find_rule(naming: str) -> Naming:
    """The rule called ``naming``, whatever its case, dashes and underscores.

    Raises:
        OptionsError: no such rule.
    """
    known = _by_name()
    rule = known.get(_plain(naming))
    if rule is None:
        names = ["auto", *(rule.name for rule in RULES)]
        raise OptionsError(f"naming: {naming} is not known{nearest(naming, names)} ({', '.join(names)})")
    return rule


def rule_of_folder(folder: str) -> tuple[Naming, str]:
    """The rule of the data set that a path names, and the words that name it; the deepest folder decides.

    Whole words count: ``data/O-HAZE/gt`` names O-HAZE, ``data/units`` does not name ITS.

    Raises:
        OptionsError: the path names no data set that there is a rule for.
    """
    words = re.findall(r"[A-Za-z0-9]+", str(folder))
    known = _by_name()
    for end in range(len(words), 0, -1):
        for begin in range(max(0, end - 3), end):
            rule = known.get("".join(words[begin:end]).lower())
            # a folder called "same" says nothing about names
            if rule is not None and "".join(words[begin:end]).lower() != "same":
                return rule, "-".join(words[begin:end])
    known_names = ", ".join(rule.name for rule in RULES)
    raise OptionsError(
        f"naming: auto goes by the names of the folders, and {folder} names no data set; set naming to one of "
        f"{known_names}"
    )


def split_one_folder(names: list[str], rule: Naming) -> tuple[list[str], list[str]]:
    """Hazy and clear names of a folder that holds both."""
    hazy = [name for name in names if rule.scene(_file_stem(name)) is not None]
    taken = set(hazy)
    return hazy, [name for name in names if name not in taken]


def pair_by_naming(
    hazy_names: list[str], clear_names: list[str], rule: Naming, problems: Problems
) -> list[tuple[str, str]]:
    """``(clear, hazy)`` names, one pair for each hazy picture, in their order.

    Args:
        hazy_names, clear_names: relative names with extension.
        rule: how they belong together.
        problems: gets the first five hazy pictures without a partner, and the rules that would fit all.
    """
    pairs, alone = _match(hazy_names, clear_names, rule, problems)
    if not alone:
        return pairs
    known = {stem(name) for name in clear_names}
    others = [other.name for other in RULES if other is not rule and _fits_all(hazy_names, known, other)]
    count = len(hazy_names)
    told = f"naming: {rule.name} matches {len(pairs) or 'none'} of {count} hazy pictures"
    if others:
        told += f"; {', '.join(others)} match{'es' * (len(others) == 1)} all {count}"
    if rule.hazy and rule.scene(_file_stem(alone[0])) is None:
        why = f"{rule.name} names its hazy pictures otherwise"
    else:
        why = f"the first should have {rule.clear_stems(alone[0])[-1]}"
    told += f". Without a clear picture: {shortened(alone)} ({why})"
    problems.add(f"{told}; the clear pictures are called {shortened(clear_names)}" if clear_names else told)
    return pairs


def take_split(pairs: list[tuple[str, str]], rule: Naming, split: str) -> list[tuple[str, str]]:
    """The pairs of the last five scenes (``"test"``), of the others (``"train"``) or all, by the scenes' numbers."""
    if split == "all":
        return pairs
    last = rule.scenes - _LAST
    return [pair for pair in pairs if (_number(pair[1]) > last) == (split == "test")]


def check_split(rule: Naming, split: str) -> None:
    """Raise OptionsError for an unknown split, and for a data set that comes with its own."""
    known = ("all", "train", "test")
    if split not in known:
        raise OptionsError(f"split: {split} is not known{nearest(split, known)} ({', '.join(known)})")
    if split != "all" and not rule.scenes:
        those = ", ".join(rule.name for rule in RULES if rule.scenes)
        raise OptionsError(f"split: {split} is for {those}, whose last five scenes are for testing, not {rule.name}")


def _match(
    hazy_names: list[str], clear_names: list[str], rule: Naming, problems: Problems
) -> tuple[list[tuple[str, str]], list[str]]:
    """Pairs, and the hazy pictures that found none."""
    by_stem: dict[str, list[str]] = defaultdict(list)
    for name in clear_names:
        by_stem[stem(name)].append(name)
    pairs, alone = [], []
    for hazy in hazy_names:
        found = next((by_stem[wanted] for wanted in rule.clear_stems(hazy) if wanted in by_stem), [])
        clear = choose(found, os.path.splitext(hazy)[1])
        if clear is not None:
            pairs.append((clear, hazy))
        elif found:
            problems.add(f"the hazy picture {hazy} has several clear ones: {', '.join(found)}")
        else:
            alone.append(hazy)
    return pairs, alone


def _fits_all(hazy_names: list[str], clear_stems: set[str], rule: Naming) -> bool:
    return all(any(wanted in clear_stems for wanted in rule.clear_stems(hazy)) for hazy in hazy_names)


def _by_name() -> dict[str, Naming]:
    return {_plain(name): rule for rule in RULES for name in (rule.name, *rule.also)}


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", str(name)).lower()


def _file_stem(name: str) -> str:
    return stem(name).rpartition("/")[2]


def _number(hazy_name: str) -> int:
    digits = re.match(r"[0-9]+", _file_stem(hazy_name))
    return int(digits[0]) if digits else 0
