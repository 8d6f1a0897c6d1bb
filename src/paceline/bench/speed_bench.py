"""SPEED-Bench (Abramovich et al., 2026, arXiv:2604.09557): where its rows are, and which of them have no text yet.

Its `qualitative` rows, 80 of each of 11 categories, are for acceptance lengths; the `throughput_*` ones, 512 of each of
three entropies with prompts of about so many tokens, for tokens a second against concurrency. Licences keep the text of
some out of the data set, until the `prepare.py` that is published with it has fetched them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import OptionError, require
from paceline.files import at_home

NAME = "speed-bench"
HUB = "nvidia/SPEED-Bench"
CONFIGS = ("qualitative", *(f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k")))
OPTIONS = ("config", "path", "unfetched")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # what stands for the text of others


def locate(options: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The data set, or the file of it that the user has, and the options with which a suite reads that.

    Args:
        options: `config` is one of CONFIGS (default: the first), `path` a file of it, or the folder of such
            (`CONFIG.jsonl` as `prepare.py` writes it, `CONFIG.parquet`, or `CONFIG/*.parquet` as on the hub).

    Raises:
        OptionError: for an unknown option or config, and a folder that has no such file.
    """
    config = options.get("config", CONFIGS[0])
    bad = [key for key in options if key not in OPTIONS]
    require(not bad, f"{NAME} has no option {', '.join(bad)}; its options are {', '.join(OPTIONS)}")
    require(config in CONFIGS, f"{NAME} has no config {config}; there are {', '.join(CONFIGS)}")
    require(options.get("unfetched", "skip") == "skip", f"{NAME}: unfetched=skip is all that unfetched can be")
    if "path" not in options:
        return HUB, {"config": config, "split": "test"}
    path = at_home(options["path"])
    require(path.exists(), f"cannot read {path}: no such file")
    if not path.is_dir():
        return str(path), {}
    for pattern in (f"{config}.jsonl", f"{config}.parquet", f"{config}/*.parquet"):
        if files := sorted(path.glob(pattern)):
            require(len(files) == 1, f"{NAME}: {path} has several files {pattern}: name one with :path=FILE")
            return str(files[0]), {}
    raise OptionError(f"{NAME}: {path} has neither {config}.jsonl nor {config}.parquet")


def unfetched(row: Any) -> bool:
    """Whether a row's text is still to be fetched from where it is from."""
    return PLACEHOLDER in str(row)


def demand_texts(missing: int, among: int) -> None:
    """Raises OptionError when rows have no text: results of the others are not the benchmark's."""
    require(
        not missing,
        f"{NAME}: {missing} of {among} prompts are placeholders; fetch their texts with its prepare.py "
        f"(docs/speed-bench.md) and name the folder with :path=FOLDER, or leave them out with :unfetched=skip",
    )
