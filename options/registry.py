"""Registry: a name leads to a class or function, strictly, and remembers the file it came from.

The five registries live here, in a module that imports nothing beyond the standard library, so that networks and
kernels import on a bare torch.
"""

import difflib
import inspect
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

logger = logging.getLogger("pellucid")


class UnknownName(KeyError):
    """A name that no entry carries; the message lists the nearest ones."""

    def __str__(self) -> str:
        return str(self.args[0])


class WrongArgument(TypeError):
    """An argument that the entry's signature does not take, or a required one that is missing."""


class AlreadyRegistered(ValueError):
    """Two different classes or functions under one name."""


def nearest(word: str, known: object, cutoff: float = 0.6) -> str:
    """``"; did you mean x?"`` for the one of ``known`` that begins with ``word``, or the nearest; else nothing."""
    word = str(word)
    names = {str(name).lower(): str(name) for name in known}
    match = [name for name in names if len(word) > 3 and name.startswith(word.lower())]
    if len(match) != 1:
        match = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=cutoff)
    return f"; did you mean {names[match[0]]}?" if match else ""


class Registry:
    """Names of one kind of component.

    Args:
        kind: what the entries are, in the singular, as the messages say it ("network", "loss").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = {}
        self._aliases: dict[str, tuple[str, str | None]] = {}

    def register(self, target: Any = None, *, name: str | None = None) -> Any:
        """Add a class or function: ``@R.register()``, ``@R.register(name="x")``, ``@R.register`` or ``R.register(x)``.

        The same source registered again replaces itself (a reload); a second source under the same name raises
        :class:`AlreadyRegistered`, which names both files.
        """
        if target is None:
            return lambda found: self.register(found, name=name)
        key = name or target.__name__
        old = self._entries.get(key)
        if old is not None and _source(old) != _source(target):
            files = f"{_source(old)[0]} and {_source(target)[0]}"
            raise AlreadyRegistered(f"the {self.kind} {key} is registered twice, by {files}; rename one of them")
        self._entries[key] = target
        return target

    def alias(self, alias: str, name: str, notice: str | None = None) -> None:
        """Let ``alias`` stand for ``name``; ``notice`` is logged as a warning each time the alias is used."""
        self._aliases[alias] = (name, notice)

    def get(self, name: str, *, quiet: bool = False) -> Any:
        """Return the entry called ``name``; ``quiet`` keeps the notice of an alias back, for a mere look.

        Raises:
            UnknownName: no entry or alias has this name; the nearest name and all known ones are in the message.
        """
        if name in self._aliases and name not in self._entries:
            name, notice = self._aliases[name]
            if notice and not quiet:
                logger.warning(notice)
        if name not in self._entries:
            known = self.names() + sorted(self._aliases)
            hint = nearest(name, known) or "."
            raise UnknownName(f"unknown {self.kind} {name}{hint} Known: {', '.join(known) or 'none'}")
        return self._entries[name]

    def canonical(self, name: str) -> str:
        """The name of the entry that ``name`` stands for, which may be ``name`` itself."""
        return self._aliases[name][0] if name in self._aliases and name not in self._entries else name

    def names(self) -> list[str]:
        """All registered names, sorted, without aliases."""
        return sorted(self._entries)

    def origin(self, name: str) -> str:
        """The file that the entry called ``name`` came from."""
        return _source(self.get(name))[0]

    def build(self, spec: Mapping[str, Any], **given: Any) -> Any:
        """Call the entry ``spec["type"]`` with the other keys of ``spec``; ``spec`` is left as it is.

        Args:
            spec: a mapping with ``type`` and the entry's keyword arguments.
            given: further arguments, of which those that the signature does not take are left out.

        Raises:
            UnknownName: no such entry.
            WrongArgument: a key that the signature does not take, or a missing one.
        """
        if "type" not in spec:
            raise WrongArgument(f"a {self.kind} needs a type, got {sorted(spec)}; known: {', '.join(self.names())}")
        entry = self.get(spec["type"])
        arguments = {key: value for key, value in spec.items() if key != "type"}
        if takes_options_dict(entry):
            return entry({**given, **spec})
        taken = inspect.signature(entry).parameters
        arguments = {**{key: value for key, value in given.items() if key in taken}, **arguments}
        problems = wrong_arguments(entry, arguments)
        if problems:
            told = "; ".join(f"{key}: {text}" for key, text in problems)
            raise WrongArgument(f"{self.kind} {spec['type']}: {told}")
        return entry(**arguments)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def wrong_arguments(
    entry: Callable[..., Any], arguments: Collection[str], given: Collection[str] = (), also: Collection[str] = ()
) -> list[tuple[str, str]]:
    """(argument, message) for each one that ``entry`` does not take, and each that it misses.

    An argument that is missing only because it is misspelt is told once. ``given`` are provided by the program: they
    are neither missing nor suggested; ``also`` are keys of others in the same place, to suggest.
    """
    parameters = inspect.signature(entry).parameters
    named = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    free = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = [name for name in named if name not in given]
    problems, meant = [], set()
    for key in (key for key in arguments if key not in named and not free):
        hint = nearest(key, [*own, *also])
        meant.add(hint[len("; did you mean ") : -1])
        problems.append((key, f"unknown argument of {entry.__name__}{hint or '; it takes ' + ', '.join(own)}"))
    missing = [n for n in own if named[n].default is named[n].empty and n not in arguments and n not in meant]
    return problems + [(name, f"is missing; {entry.__name__} needs it") for name in missing]


def takes_options_dict(entry: Callable[..., Any]) -> bool:
    """True for a BasicSR-style component, built as ``Class(opt)`` from one dictionary."""
    parameters = list(inspect.signature(entry).parameters.values())
    return len(parameters) == 1 and parameters[0].name in ("opt", "opts")


def _source(target: Any) -> tuple[str, str]:
    try:
        file = inspect.getsourcefile(target) or target.__module__
    except (TypeError, OSError):
        file = target.__module__
    return str(file), target.__qualname__


ARCHS = Registry("network")
MODELS = Registry("model")
DATASETS = Registry("dataset")
LOSSES = Registry("loss")
METRICS = Registry("metric")
OPTIMIZERS = Registry("optimizer")
SCHEDULERS = Registry("scheduler")
