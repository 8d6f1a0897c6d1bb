"""Prompts from a data set of the `datasets` library, on the hub or in a local folder of its formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.bench.columns import NAMES, prompt_column, turns
from paceline.errors import OptionError, require

SPLITS = ("test", "validation", "train")  # preferred in this order
OPTIONS = ("config", "split", "column")


def hub_rows(name: str, options: Mapping[str, str]) -> Iterator[tuple[dict[str, Any], str]]:
    """The rows of a data set in the form of a suite's, and the split they are from.

    Raises:
        OptionError: for a data set that cannot be found or read, an unknown option, split or column.
    """
    bad = [key for key in options if key not in OPTIONS]
    require(not bad, f"suite {name}: no such file, and as a data set its options are {', '.join(OPTIONS)}")
    data, split = _load(name, options.get("config"), options.get("split"))
    first = data[0] if len(data) else {}
    column = prompt_column(data.column_names, first, options.get("column"), f"suite {name}")
    for row in data:
        yield {key: row[key] for key in NAMES if row.get(key) is not None} | {"turns": turns(row[column])}, split


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
