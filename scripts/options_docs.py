"""Print every option as Markdown tables: python -m scripts.options_docs [--into FILE | --check FILE].

The sections come from options/schema.py, the arguments of components from their constructors. In a file they stand
between two marks; arguments of PyTorch's own optimizers, which change with its version, are only in what is printed.
"""

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from torch import Tensor

import archs  # noqa: F401  the components register themselves
import data  # noqa: F401
import models  # noqa: F401
from data.backends import IoBackend
from data.io import write_whole
from models import logbook
from models.runtime import run
from options import schema
from options.errors import OptionsError
from options.load import GIVEN_TO_DATASETS, GIVEN_TO_METRICS
from options.registry import ARCHS, DATASETS, LOSSES, METRICS, OPTIMIZERS, SCHEDULERS

BEGIN = "<!-- from here on written by python -m scripts.options_docs --into options/README.md -->\n"
END = "<!-- end of what is written by options_docs -->\n"
HEAD = "| option | value | default | meaning |\n|---|---|---|---|"
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "~"}
_WORDS |= {Tensor: "number", IoBackend: "{type: disk or memory or lmdb}"}
_LIMITS = (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
# registry, where a component of it stands, and what the program provides
COMPONENTS = (
    (ARCHS, "`network_g`", ()),
    (DATASETS, "`datasets.<phase>`, besides the options above", GIVEN_TO_DATASETS),
    (OPTIMIZERS, "`train.optim_g`", ("params",)),
    (SCHEDULERS, "`train.scheduler`", ()),
    (LOSSES, "`train.pixel_opt`, `train.fft_loss_opt`, `train.losses.<label>`", ()),
    (METRICS, "`val.metrics.<label>`, besides `better` and `quantize`", GIVEN_TO_METRICS),
)


def document(*, level: int = 1, torch_arguments: bool = True) -> str:
    """All options, as Markdown.

    Args:
        level: of the title; what is below has one more.
        torch_arguments: also tell the arguments of components that are PyTorch's, as the installed version has them.
    """
    title, below = "#" * level, "#" * (level + 1)
    parts = [f"{title} Options", "", HEAD, *_rows(schema.Options)]
    for key, field in schema.Options.model_fields.items():
        section, many = _section(field.annotation)
        if section is not None and section is not schema.Component:
            place = _place(key, many)
            parts += ["", f"{below} `{place}`", "", HEAD, *_rows(section, f"{place}.", deep=True)]
    for registry, place, given in COMPONENTS:
        parts += ["", f"{below} {place}"]
        for name in registry.names():
            entry = registry.get(name)
            foreign = not torch_arguments and entry.__module__.startswith("torch.")
            rows = [f"The arguments of `torch.optim.{name}`."] if foreign else _arguments(entry, given)
            parts += ["", f"`type: {name}`", "", *rows]
    return "\n".join(parts) + "\n"


def written_into(text: str) -> str:
    """``text`` with the tables between its marks.

    Raises:
        OptionsError: it does not have both marks, each once, in this order.
    """
    before, *rest = text.split(BEGIN)
    _, *after = rest[0].split(END) if len(rest) == 1 else ("",)
    if len(after) != 1:
        raise OptionsError(f"the tables go between these two lines, each of which must be there once:\n{BEGIN}{END}")
    return f"{before}{BEGIN}\n{document(level=3, torch_arguments=False)}\n{END}{after[0]}"


def _place(key: str, many: bool) -> str:
    label = {"datasets": "<phase>", "metrics": "<label>", "losses": "<label>"}.get(key, "<key>")
    return f"{key}.{label}" if many else key


def _rows(model: type[BaseModel], prefix: str = "", *, deep: bool = False) -> Iterator[str]:
    """One row for each option of a section, and, where ``deep``, for those of the sections in it."""
    for key, field in model.model_fields.items():
        if field.exclude or key == "file":
            continue
        section, many = _section(field.annotation)
        place = f"{prefix}{_place(key, many)}"
        meaning = field.description or _first(section)
        yield f"| `{place}` | {_cell(_kind(field))} | {_cell(_default(field))} | {_cell(meaning)} |"
        if deep and section is not None and section is not schema.Component:
            yield from _rows(section, f"{place}.", deep=True)


def _section(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a value may be, and whether there may be many by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    found = [_section(part)[0] for part in typing.get_args(annotation)]
    section = next((part for part in found if part is not None), None)
    return section, section is not None and typing.get_origin(annotation) is dict


def _kind(field: FieldInfo) -> str:
    section, many = _section(field.annotation)
    if section is not None:
        return "sections" if many else "section"
    return _name(field.annotation) + _limits(field.metadata)


def _name(annotation: Any) -> str:
    """A type as a user thinks of it."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(parts[0]) + _limits(parts[1:])
    if origin is typing.Literal:
        return " or ".join(map(_value, parts))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name(part) for part in parts))
    if origin is tuple:
        return f"list of {', '.join(_name(part) for part in parts)}"
    if origin is not None:
        inner = " or ".join(_name(part) for part in parts)
        return f"list of ({inner})" if " or " in inner else f"list of {inner}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(rules: Iterable[Any]) -> str:
    """``", at least 1"`` and such, of what pydantic keeps beside a type."""
    inner = [part for rule in rules for part in (rule.metadata if isinstance(rule, FieldInfo) else [rule])]
    told = [f", {words} {getattr(rule, name)}" for rule in inner for name, words in _LIMITS if hasattr(rule, name)]
    return "".join(told)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "" if isinstance(value, BaseModel) else _value(value)


def _value(value: Any) -> str:
    if value is None:
        return "~"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _arguments(entry: Callable[..., Any], given: tuple[str, ...]) -> Iterator[str]:
    rows = []
    for name, parameter in inspect.signature(entry).parameters.items():
        if name in given or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        kind = "" if parameter.annotation is parameter.empty else _name(parameter.annotation)
        default = "required" if parameter.default is parameter.empty else _value(parameter.default)
        rows.append(f"| `{name}` | {_cell(kind)} | {_cell(default)} |")
    yield from ["| argument | value | default |", "|---|---|---|", *rows] if rows else ["No arguments."]


def _first(section: type[BaseModel] | None) -> str:
    return (section.__doc__ or "").strip().split("\n")[0].rstrip(".") if section else ""


def _cell(text: str) -> str:
    return text.replace("|", "or").replace("\n", " ").strip()


def main(argv: list[str]) -> None:
    """Print the tables, or write them into a file, or tell whether they stand there."""
    parser = argparse.ArgumentParser(prog="python -m scripts.options_docs", description=__doc__.split("\n\n")[1])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--into", type=Path, metavar="FILE", help="write them between the marks of this file")
    where.add_argument("--check", type=Path, metavar="FILE", help="fail if the file does not hold them")
    args = parser.parse_args(argv)
    logbook.start_logging()
    file = args.into or args.check
    if file is None:
        print(document(), end="")
        return
    text = _read(file)
    written = written_into(text)
    if args.into:
        write_whole(file, written.encode())
    elif text != written:
        raise OptionsError(f"{file} is behind the schema; write it anew by: {parser.prog} --into {file}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionsError(f"{file} cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
