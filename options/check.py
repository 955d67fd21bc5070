"""Components against the signatures of their constructors, before anything is created.

A network, data set, loss, metric, optimizer or schedule is a ``type`` and keyword arguments. The names are checked
against the constructor of that type, the values against its annotations.
"""

import inspect
import logging
import re
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.errors import PydanticUserError

from options.errors import OptionsError
from options.registry import Registry, UnknownName, nearest, takes_options_dict, wrong_arguments

# an infinite or undefined number is never what was meant
_STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False)
# what a constructor may raise for want of weights, or of anything else that is there when the run builds it
_LEFT_TO_THE_RUN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
)
Problem = tuple[tuple[str | int, ...], str]


def component(
    registry: Registry, spec: Any, path: tuple[str | int, ...], given: Iterable[str] = (), *, also: Iterable[str] = ()
) -> list[Problem]:
    """Check one component.

    Args:
        registry: where ``type`` is looked up.
        spec: what the option file says; anything but a mapping is left to the schema.
        path: the place in the option file.
        given: arguments that the program provides, so that the file need not.
        also: keys that the section may have besides, to suggest for a misspelt one.

    Returns:
        a pair (place, message) for each problem.
    """
    if not isinstance(spec, Mapping):
        return []
    if "type" not in spec:
        typo = nearest("type", spec, 0.7)
        known = f"type is missing (one of {', '.join(registry.names())})"
        return [((*path, "type"), f"{known}; is {typo.split()[-1][:-1]} a misspelling of it?" if typo else known)]
    if not isinstance(spec["type"], str):
        return [((*path, "type"), f"must be the name of a {registry.kind}, got {spec['type']!r}")]
    try:
        entry = registry.get(spec["type"], quiet=True)
    except UnknownName as error:
        return [((*path, "type"), str(error))]
    if takes_options_dict(entry):
        return []
    values = {key: value for key, value in spec.items() if key != "type"}
    problems = [((*path, key), text) for key, text in wrong_arguments(entry, values, tuple(given), tuple(also))]
    return problems + _values(entry, values, path)


def network(registry: Registry, spec: Any, *, scale: int) -> list[Problem]:
    """What the constructor of a network refuses, found by building it without any memory for its weights.

    Only a ValueError counts: whatever else a constructor meets there may be due to the missing weights. What it logs is
    kept back, for the run that builds the network tells it.

    Args:
        registry: where ``type`` is looked up.
        spec: the section, which :func:`component` found nothing against.
        scale: of the run; 0 where it is not known.
    """
    if not isinstance(spec, Mapping):
        return []
    import torch

    silent = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            built = registry.build({**spec, "type": registry.canonical(spec["type"])})
    except ValueError as error:
        return [(_named(str(error), spec, ("network_g",)), str(error))]
    except _LEFT_TO_THE_RUN:
        return []
    finally:
        logging.disable(silent)
    own = getattr(built, "scale", None)
    if type(own) is int and scale and own != scale:
        return [(("network_g",), f"scale is {scale}, but the network {spec['type']} enlarges by {own}")]
    return []


def dataset_arguments(registry: Registry, spec: Mapping[str, Any], path: tuple, *, phase: str, scale: int) -> list:
    """What a data set says about its arguments before it opens a folder, where its class can (``check_arguments``)."""
    hook = getattr(registry.get(spec["type"], quiet=True), "check_arguments", None)
    if hook is None:
        return []
    try:
        hook(phase=phase, scale=scale, **{key: value for key, value in spec.items() if key != "type"})
    except OptionsError as error:
        key, colon, text = str(error).partition(": ")
        return [((*path, key), text)] if colon else [(path, key)]
    return []


def _named(text: str, spec: Mapping[str, Any], path: tuple) -> tuple:
    """The place of the first argument that a message names."""
    named = (word for word in re.findall(r"\w+", text) if word in spec)
    return next(((*path, word) for word in named), path)


def _values(entry: Callable[..., Any], values: Mapping[str, Any], path: tuple) -> list[Problem]:
    function = entry.__init__ if inspect.isclass(entry) else entry
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        return []
    fields = {name: (hints[name], ...) for name in values if name in hints}
    try:
        # the names of fields are arguments here, so a clash with pydantic's own attributes is harmless
        model = create_model("Arguments", __config__=_STRICT, **fields)
    except (PydanticUserError, NameError):
        return []
    try:
        converted = model(**{name: values[name] for name in fields})
    except ValidationError as error:
        return [((*path, *place), describe(found)) for place, found in _by_place(error.errors(), values).items()]
    # the constructor gets the value as it stands in the file: what pydantic would convert is told instead
    pairs = ((name, values[name], getattr(converted, name)) for name in fields)
    return [((*path, name), f"{wanted}, got {value!r}") for name, value, own in pairs if (wanted := _kind(value, own))]


def _kind(value: Any, converted: Any) -> str | None:
    """What was wanted, where a text stands for a number or truth value, or 2.0 for a whole number."""
    if isinstance(value, str) and isinstance(converted, bool):
        return "must be true or false"
    if isinstance(value, str) and isinstance(converted, (int, float)):
        return "must be a number"
    if isinstance(value, (int, float)) and type(value) is not type(converted) and isinstance(converted, int):
        return "must be true or false" if isinstance(converted, bool) else "must be a whole number"
    return None


def describe(found: Mapping[str, Any]) -> str:
    """One sentence for a pydantic error, the offending value in it."""
    if found["type"] == "extra_forbidden":
        return "unknown option"
    message = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if found["type"] == "missing":
        return "is missing"
    if found["type"] == "value_error":
        return message
    value = repr(found["input"])
    return f"{message}, got {value if len(value) <= 60 else value[:57] + '...'}"


def _by_place(errors: list[Any], values: Mapping[str, Any]) -> dict[tuple, Any]:
    """One error for each place; of those that the members of a union report, the ones deepest in the value."""
    first: dict[tuple, Any] = {}
    for found in errors:
        first.setdefault(_place(found["loc"], values), found)
    return {at: found for at, found in first.items() if not any(at == deeper[: len(at)] != deeper for deeper in first)}


def _place(loc: tuple, values: Mapping[str, Any]) -> tuple:
    """The part of pydantic's location that is a place in the file (union members add names of types)."""
    place, inside = [loc[0]], values.get(loc[0])
    for step in loc[1:]:
        if isinstance(inside, (list, tuple)) and isinstance(step, int):
            inside = inside[step] if step < len(inside) else None
        elif isinstance(inside, Mapping) and step in inside:
            inside = inside[step]
        else:
            continue
        place.append(step)
    return tuple(place)
