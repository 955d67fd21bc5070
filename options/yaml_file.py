"""YAML with numbers as people write them (``1e-4``), no duplicate keys, and the line of every key."""

import re
from pathlib import Path
from typing import Any

import yaml

from options.errors import OptionsError

Lines = dict[tuple[str | int, ...], int]


class _Loader(yaml.SafeLoader):
    """SafeLoader whose floats are those of YAML 1.2."""


_REPLACED = ("tag:yaml.org,2002:float", "tag:yaml.org,2002:int", "tag:yaml.org,2002:bool")
_FLOAT = r"""^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"""
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT, re.VERBOSE), list("-+0123456789."))
# no octal 010 and no 1:30 in base 60
_INT = re.compile(r"^(?:[-+]?[0-9]+|0x[0-9a-fA-F]+)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
# yes and no as BasicSR's files may have them; on and off are words, since off is a value of some options
_BOOL = re.compile(r"^(?:true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO)$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _BOOL, list("tTfFyYnN"))


def _whole_number(loader: yaml.SafeLoader, node: yaml.Node) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 16) if text.lower().startswith("0x") else int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)


def read(path: Path) -> tuple[dict[str, Any], Lines]:
    """Read an option file.

    Returns:
        the options, and for the path of each key (``("train", "total_iter")``) its line, from 1.

    Raises:
        OptionsError: there is no such file, it is not YAML, or a key stands twice in one section.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise OptionsError(f"there is no option file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"the option file {path} cannot be read: {error}") from None
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: Lines = {}
        problems: list[str] = []
        _walk(node, (), lines, problems, str(path))
        if problems:
            raise OptionsError("\n".join(problems))
        options = loader.construct_document(node) if node is not None else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError(f"{path} is not valid YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(options, dict):
        raise OptionsError(f"{path} must hold sections such as network_g: and train:, found {type(options).__name__}")
    return options, lines


class _Dumper(yaml.SafeDumper):
    """Quotes what this file's reader would take for a number or a truth value."""


_Dumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *_Loader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *_Loader.yaml_implicit_resolvers}
}
# the same list twice is written out twice: option files have no anchors
_Dumper.ignore_aliases = lambda self, data: True


def text_of(options: dict[str, Any]) -> str:
    """Options of plain types as YAML that :func:`read` reads back as they are."""
    return yaml.dump(options, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def value_of(text: str, place: str) -> Any:
    """The value of an override, typed as YAML types it: ``1e-4``, ``true``, ``[1, 2]``, ``~``, ``text``."""
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise OptionsError(f"{place}: {text!r} is not a YAML value: {str(error).splitlines()[0]}") from None


def _walk(node: yaml.Node | None, path: tuple[str | int, ...], lines: Lines, problems: list[str], file: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in seen and name != "<<":
                place = ".".join(map(str, (*path, name)))
                problems.append(f"{file}:{line}: {place} stands twice (first in line {seen[name]}); keep one")
            seen[name] = line
            lines[(*path, name)] = line
            _walk(value, (*path, name), lines, problems, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, index)] = value.start_mark.line + 1
            _walk(value, (*path, index), lines, problems, file)
