"""``key.sub=value`` on the command line, and which mistakes come from there rather than from the file."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from options import yaml_file
from options.errors import OptionsError

Place = tuple[str | int, ...]


def apply_overrides(raw: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return ``raw`` with ``key.sub=value`` applied; values are typed like YAML and never evaluated as code.

    ``datasets.<set>=null`` leaves a set of the file out.
    """
    changed = copy.deepcopy(dict(raw))
    for text in overrides:
        key, equals, value = text.partition("=")
        steps = _steps(key)
        if not equals or not all(steps):
            raise OptionsError(f"the override {text!r} must read key.sub=value")
        section = changed
        for step in steps[:-1]:
            if section.get(step) is None:
                section[step] = {}
            section = section[step]
            if not isinstance(section, dict):
                raise OptionsError(f"the override {text!r} goes through {step}, which is a value, not a section")
        given = yaml_file.value_of(value, key)
        if steps[0] != "datasets" or len(steps) != 2 or given is not None:
            section[steps[-1]] = given
        elif section.pop(steps[-1], None) is None:
            raise OptionsError(f"the override {text!r} leaves out a set that the file does not have")
    return changed


def report(
    path: Path, problems: Sequence[tuple[Place, str]], lines: yaml_file.Lines, overrides: Sequence[str] = ()
) -> str:
    """All mistakes in one text, each with the line of the file or the override that it comes from.

    Args:
        path: the option file.
        problems: (place, message) pairs.
        lines: of the file, as :func:`options.yaml_file.read` gives them.
        overrides: what the command line changed.
    """
    rows = sorted(_row(place, text, lines, overrides) for place, text in problems)
    changed = " and its overrides" if any(not line and "the override" in text for line, text in rows) else ""
    count = f"{len(rows)} mistake{'s' if len(rows) > 1 else ''} in {path}{changed}; nothing was created"
    return "\n".join([count, *(f"  line {line}: {text}" if line else f"  {text}" for line, text in rows)])


def _row(place: Place, text: str, lines: yaml_file.Lines, overrides: Sequence[str]) -> tuple[int, str]:
    told = f"{'.'.join(map(str, place))}: {text}"
    override = _override_of(place, lines, overrides)
    if override is not None:
        return 0, f"the override {override}: {told}"
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 0), told


def _override_of(place: Place, lines: yaml_file.Lines, overrides: Sequence[str]) -> str | None:
    """The last override that set the place, or a part of it that the file does not have."""
    for text in reversed(overrides):
        steps = _steps(text.partition("=")[0])
        inside = place[: len(steps)] == steps
        if inside or (place and steps[: len(place)] == place and place not in lines):
            return text
    return None


def _steps(key: str) -> Place:
    return tuple(key.replace(":", ".").split("."))
