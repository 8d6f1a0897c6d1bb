"""Names of drafters and policies, and the method strings that combine them (`drafter[:options]+policy[:options]`)."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from math import isfinite
from typing import Any, NamedTuple, Union, get_args, get_origin

from paceline import errors
from paceline.errors import OptionError
from paceline.moved import warn_moved

AUTO = "auto"  # what an option says whose value is to be found, or measured


class Registry:
    """Classes by name, imported when asked for; other packages add theirs through an entry-point group."""

    def __init__(self, kind: str, group: str, builtin: dict[str, str]) -> None:
        self.kind, self.group = kind, group
        self._where = dict(builtin)

    def __iter__(self) -> Iterator[str]:
        plugins = (point.name for point in entry_points(group=self.group))
        return iter(dict.fromkeys([*self._where, *plugins]))

    def __contains__(self, name: object) -> bool:
        return name in list(self)

    def add(self, name: str, where: str) -> None:
        """Register `"module:Class"` under `name` for this process."""
        self._where[name] = where

    def get(self, name: str) -> type:
        """The class called `name`. Raises OptionError for an unknown name, and for a plug-in that cannot be loaded."""
        if name in self._where:
            module, _, attribute = self._where[name].partition(":")
            cls: type = getattr(import_module(module), attribute)
            return cls
        for point in entry_points(group=self.group, name=name):
            try:
                plugin: type = point.load()
            except Exception as error:  # whatever another package's import may raise
                why = f"{type(error).__name__}: {errors.first_line(error)}"
                raise OptionError(f"the {self.kind} '{name}' of another package cannot be loaded: {why}") from error
            return plugin
        raise OptionError(f"unknown {self.kind} '{name}'{_suggest(name, list(self))}")

    def options(self, name: str) -> dict[str, inspect.Parameter]:
        """The options a user may give: the class's keyword-only parameters, with resolved annotations."""
        cls = self.get(name)
        parameters = inspect.signature(cls).parameters.values()
        # Theirs alone are resolved: what else the constructor takes may be imported for type checkers only.
        names = getattr(cls.__init__, "__globals__", {})  # type: ignore[misc]  # the class's own, which is what is asked for
        return {p.name: _resolved(p, names) for p in parameters if p.kind is p.KEYWORD_ONLY}

    def parse(self, text: str) -> Spec:
        """`name:key=value:key=value` -> Spec. Raises OptionError for unknown names, options and malformed values."""
        name, *pairs = text.split(":")
        known = self.options(name)
        values: dict[str, Any] = {}
        for pair in pairs:
            key, equals, value = pair.partition("=")
            key = key.replace("-", "_")
            if key not in known:
                raise OptionError(
                    f"{self.kind} '{name}' has no option '{key}'"
                    + (f"; its options are {', '.join(known)}" if known else "; it takes none")
                )
            errors.require(bool(equals), f"option '{key}' of {self.kind} '{name}' needs a value, as in {key}=…")
            values[key] = _convert(value, known[key].annotation, f"option '{key}' of {self.kind} '{name}'")
        return Spec(text, self.get(name), values)


class Spec(NamedTuple):
    """A class with its options, as a user wrote them."""

    text: str
    cls: Any
    options: dict[str, Any]

    def build(self, *args: Any) -> Any:
        return self.cls(*args, **self.options)

    def check_remote(self, named: str = "") -> None:
        """Raises OptionError for options that a client of a server may not set: texts, which may name files."""
        texts = [name for name, value in self.options.items() if isinstance(value, str) and value != AUTO]
        errors.require(not texts, f"{named}{', '.join(texts)} cannot be set from a request")


def split_method(text: str, is_policy: Callable[[str], bool]) -> tuple[str, str | None]:
    """`"eagle:k=2+adaedl:gamma=0.2"` -> `("eagle:k=2", "adaedl:gamma=0.2")`; the policy is None when left out.

    The last `+` counts, so that a path in a drafter's option may hold one when a known policy follows.
    """
    for at in [at for at, char in enumerate(text) if char == "+"][::-1]:  # a policy's name may end in some
        if is_policy(text[at + 1 :].partition(":")[0]):
            return text[:at], text[at + 1 :]
    drafter, plus, policy = text.rpartition("+")
    return (drafter, policy) if plus and "=" not in drafter else (text, None)


def _resolved(parameter: inspect.Parameter, names: dict[str, Any]) -> inspect.Parameter:
    """With its annotation as a type, by default str."""
    wanted = parameter.annotation
    if wanted is parameter.empty:
        return parameter.replace(annotation=str)
    return parameter.replace(annotation=eval(wanted, names) if isinstance(wanted, str) else wanted)


def _convert(text: str, annotation: Any, what: str) -> Any:
    choices = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    if type(None) in choices and text.lower() == "none":
        return None
    for choice in choices:
        try:
            if choice is bool:
                return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
            if choice in (int, float, str):
                value = choice(text)
                if choice is not float or isfinite(value):
                    return value
        except (ValueError, KeyError):
            continue
    names = " or ".join(getattr(choice, "__name__", str(choice)) for choice in choices if choice is not type(None))
    raise OptionError(f"{what} must be {names}, not '{text}'")


def _suggest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; there are {', '.join(known)}"


def __getattr__(name: str) -> Any:
    if name == "require":
        warn_moved("paceline.registry.require", "paceline.errors.require")
        return errors.require
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
