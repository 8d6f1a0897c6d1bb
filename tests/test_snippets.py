"""What the README and docs tell readers to type: Python snippets run, command lines parse."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from typer.main import get_command

from paceline.bench.methods import check_method
from paceline.cli.app import app

ROOT = Path(__file__).parents[1]
#: examples/plugin has commands, too, but only who installs it has its drafter.
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -- Python --------------------------------------------------------------------------------------------------------

#: Snippets of a page share their names, as a reader would type one after another. CONTRIBUTING shows whole files.
WITH_PYTHON = [page for page in PAGES if "\n```python\n" in page.read_text(encoding="utf-8") and page.parent != ROOT]
WITH_PYTHON += [ROOT / "README.md"]
DEFAULT_MODEL = re.compile(r"load\(\"smollm2-135m\"")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.model if DEFAULT_MODEL.search(page.read_text(encoding="utf-8")) else ())
        for page in WITH_PYTHON
    ],
    ids=name,
)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = Sybil([PythonCodeBlockParser(), SkipParser()]).parse(page)
    for example in document.examples():
        example.evaluate()


# -- command lines -------------------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[list[str]]:
    """Words of each `paceline` line in blocks of code, with what the lines before set (`D="…"`) put in."""
    values: dict[str, str] = {}
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        for line in _logical_lines(block):
            if set_to := re.fullmatch(r"(\w+)=(\S.*)", line):
                values[set_to[1]] = _expand("".join(shlex.split(_known(set_to[2]))), values)
            elif line.startswith("paceline "):
                yield [_expand(word, values) for word in shlex.split(_filled_in(line), comments=True)][1:]


def _logical_lines(block: str) -> Iterator[str]:
    """Lines, those that end in a backslash or within quotes put together with what follows."""
    gathered = ""
    for line in block.splitlines():
        gathered += line.strip()
        if gathered.endswith("\\"):
            gathered = gathered[:-1]
            continue
        try:
            shlex.split(gathered, comments=True)
        except ValueError:  # a quote is open
            continue
        yield gathered
        gathered = ""
    assert not gathered, f"an open quote: {gathered}"


def _filled_in(line: str) -> str:
    """A synopsis, `--out DIR [--order 2|3|4] [--corpus FILE …]`, as if all of it were given, of choices the first."""
    if "[--" not in line:
        return line
    return re.sub(r"(\w+)(\|\w+)+", r"\1", re.sub(r"[\[\]]| …(?=\])", "", line))


def _expand(word: str, values: dict[str, str]) -> str:
    """With what was set; what a loop sets stands for a number."""
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], "1"), word)


def check(words: list[str]) -> None:
    """Raises an error of Typer's or OptionError for a command, option or method that is not there; runs nothing."""
    command: Any = get_command(app)
    context = command.make_context("paceline", list(words))
    while hasattr(command, "resolve_command"):
        called, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(called, rest, parent=context)
    options = context.params
    drafters = options.get("drafter") or []
    policy = options.get("policy")
    methods = _split(options.get("methods"))
    for drafter in [drafters] if isinstance(drafters, str) else drafters:
        methods.append(f"{drafter}+{policy}" if policy else drafter)
    parts = [part for method in methods for part in _merged(method)]
    for method in methods + parts:
        check_method(method)


def _known(text: str) -> str:
    """Without what another program writes there, `$(…)`."""
    return re.sub(r"\$\(.*?\)(?=[\s\",]|$)", "", text)


def _split(methods: str | None) -> list[str]:
    return [method.strip() for method in _known(methods or "").split(",") if method.strip()]


def _merged(method: str) -> list[str]:
    """The drafters that a merge names."""
    found = re.search(r"merge:drafters=([^:+]*)", method)
    return [part.replace(";", ":") for part in found[1].split("|")] if found else []


COMMANDS = [(page, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: name(value) if isinstance(value, Path) else "")
def test_command(page: Path, words: list[str]) -> None:
    check(words)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("paceline generat hello", "generat"),
        ("paceline generate hello --no-such-option 3", "no-such-option"),
        ("paceline generate hello -n 0", "greater than or equal to 1"),
        ("paceline generate hello --drafter eagel", "eagel"),
        ("paceline generate hello --drafter eagle:depth=3", "no option"),
        ("paceline generate hello --drafter eagle --policy fixed:n=3", "no option"),
        ("paceline bench --suite s.jsonl --out o --methods 'ar,eagle+fixd'", "fixd"),
        ("paceline generate hello --drafter 'merge:drafters=suffix;sise=3|trigram'", "no option"),
        ("paceline bench --methods ar --out o", "suite"),
    ],
)
def test_a_wrong_command_is_noticed(line: str, message: str) -> None:
    [words] = commands(f"```\n{line}\n```\n")
    with pytest.raises(Exception, match=message):
        check(words)
