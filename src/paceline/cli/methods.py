"""`paceline drafters` and `paceline policies`: what there is, with its options."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Option

from paceline.cli.console import print_json
from paceline.drafters import DRAFTERS
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.registry import Registry

log = logging.getLogger("paceline")

Json = Annotated[bool, Option("--json", help="Print one JSON list.")]


def drafters(as_json: Json = False) -> None:
    """List the drafters, their options with defaults, and the policy each has by default."""
    _show(DRAFTERS, as_json)


def policies(as_json: Json = False) -> None:
    """List the stopping policies and their options with defaults."""
    _show(POLICIES, as_json)


def describe(registry: Registry) -> list[dict[str, Any]]:
    """Name, what it is, options with their defaults (None: must be given) and, for drafters, the default policy.
    A plug-in that cannot be loaded is left out, with a warning.
    """
    found: list[dict[str, Any]] = []
    for name in registry:
        try:
            cls = registry.get(name)
        except OptionError as error:
            log.warning("%s", error)
            continue
        options = {option: parameter.default for option, parameter in registry.options(name).items()}
        policy = {"default_policy": cls.default_policy} if hasattr(cls, "default_policy") else {}
        found.append({"name": name, "about": _headline(cls), "options": options, **policy})
    return found


def _headline(cls: type) -> str:
    """One method is one file, whose docstring begins with the sentence that tells it from the others."""
    text = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
    return inspect.cleandoc(text).partition("\n")[0]


def _show(registry: Registry, as_json: bool) -> None:
    found = describe(registry)
    if as_json:
        print_json(found)
        return
    table = Table(box=None, padding=(0, 2, 1, 0))
    for title in (registry.kind, "what it is", "options and their defaults"):
        table.add_column(title)
    for entry in found:
        options = "\n".join(f"{name}={_written(value)}" for name, value in entry["options"].items())
        policy = f"\n(+{entry['default_policy']})" if "default_policy" in entry else ""
        table.add_row(Text(entry["name"] + policy), Text(entry["about"]), Text(options))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"[dim]Used as[/] {_EXAMPLE[registry.kind]}")


def _written(value: object) -> str:
    """A default as one writes it on the command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


_EXAMPLE = {
    "drafter": "--drafter NAME:OPTION=VALUE:…; (+…) is the policy it has by default",
    "policy": "--policy NAME:OPTION=VALUE:…, or after a drafter: --drafter NAME+POLICY:OPTION=VALUE",
}
