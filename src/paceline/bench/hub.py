"""Prompts from a data set of the `datasets` library, on the hub or in a local folder of its formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.errors import OptionError, require

#: Columns that hold the prompt, when none is named: the first of these that is there.
PROMPT_COLUMNS = (
    "turns",
    "prompt",
    "question",
    "instruction",
    "messages",
    "conversations",
    "text",
    "document",
    "article",
)
SPLITS = ("test", "validation", "train")  # preferred in this order
OPTIONS = ("config", "split", "column")


def hub_rows(source: str) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of `name[:config=...][:split=...][:column=...]` in the form of a suite's, and the split they are from.

    Raises:
        OptionError: for malformed options, a data set that cannot be found or read, an unknown split or column.
    """
    name, *pairs = source.split(":")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    bad = [key for key in options if key not in OPTIONS]
    require(not bad, f"suite {source}: no such file, and as a data set its options are {', '.join(OPTIONS)}")
    data, split = _load(name, options.get("config"), options.get("split"))
    column = options.get("column") or next((c for c in PROMPT_COLUMNS if c in data.column_names), None)
    require(
        column in data.column_names,
        f"suite {name}: {'no column ' + repr(column) if column else 'no column that looks like a prompt'}; "
        f"there are {', '.join(data.column_names)}, say which with {name}:column=NAME",
    )
    for row in data:
        named = {key: row[key] for key in ("id", "task", "group") if row.get(key) is not None}
        yield {**named, "turns": _turns(row[column])}, split


def _load(name: str, config: str | None, split: str | None) -> tuple[Any, str]:
    try:
        import datasets
    except ImportError as error:
        raise OptionError(f"suite {name}: no such file; data sets need paceline's extra 'bench'") from error
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        known = datasets.get_dataset_split_names(name, config)
        chosen = split or next((s for s in SPLITS if s in known), known[0])
        require(chosen in known, f"suite {name}: no split '{chosen}'; there are {', '.join(known)}")
        return datasets.load_dataset(name, config, split=chosen), chosen
    except OptionError:
        raise
    except Exception as error:  # the library, its formats and the network raise all kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise OptionError(f"suite {name}: neither a file nor a data set that can be read: {reason}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def _turns(value: Any) -> list[Any]:
    """The user's messages in a text, a list of texts or a list of chat messages; `load_suite` checks them."""
    if not isinstance(value, list):
        return [value]
    if value and isinstance(value[0], Mapping):
        users = [m for m in value if m.get("role", m.get("from")) in ("user", "human")]
        return [m.get("content", m.get("value")) for m in users]
    return value
