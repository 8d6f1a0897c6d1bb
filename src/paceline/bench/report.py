"""`report.html`: a benchmark's results as one page, made of what the folder holds."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from paceline.bench.config import BenchConfig
from paceline.bench.figures import figures
from paceline.bench.journal import CONFIG, RESULTS, RUNS, SAMPLES, Run
from paceline.bench.methods import is_baseline
from paceline.bench.provenance import provenance
from paceline.bench.suites import OVERALL
from paceline.errors import OptionError, first_line
from paceline.files import read_json, whole
from paceline.report import DataTable, Section, render, swatch

if TYPE_CHECKING:
    from paceline.bench.metrics import ResultRow
    from paceline.bench.samples import SampleAnswer

REPORT = "report.html"

COLUMNS = {  # head -> key, format
    "tokens/s": ("tokens_per_s", ".1f"),
    "x ar": ("speedup_ar", ".2f"),
    "x ar, 95 %": ("speedup_ar_95", ""),
    "x hf": ("speedup_hf", ".2f"),
    "decode x ar": ("decode_speedup_ar", ".2f"),
    "first token, s": ("ttft_s", ".2f"),
    "tau": ("tau", ".2f"),
    "v_d": ("v_d", ".2f"),
    "r_d": ("r_d", ".2f"),
    "same": ("identical", "d"),
    "tie": ("tie", "d"),
    "WRONG": ("wrong", "d"),
}
TERMS = [
    ("ar, hf", "paceline's own plain decoding; transformers' generate on the same weights"),
    ("x ar", "speed over plain decoding's, wall clock, prompts included"),
    ("95 %", "where that lies for prompts like these: a bootstrap over prompts, which all methods took turns on"),
    ("decode x ar", "the same after the first token, so without the prompt"),
    ("tau", "tokens a pass of the model"),
    ("v_d, r_d", "accepted tokens, of those drafted; of those in the output"),
    ("same, tie, WRONG", "greedy outputs with plain decoding's ids; that part where two tokens tie; and others"),
]


@dataclass
class BenchFolder:
    """What a folder of `paceline bench` holds; runs and samples may be missing, and were in early versions."""

    path: Path
    config: dict[str, Any]
    rows: list[ResultRow]
    runs: list[Run] = field(default_factory=list)
    samples: list[SampleAnswer] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> BenchFolder:
        """Raises OptionError for a folder that has no complete results, or damaged ones."""
        try:
            config = read_json((path / CONFIG).read_text("utf-8"))
            runs = [Run.read(line) for line in _lines(path / RUNS)] if (path / RUNS).exists() else []
            samples = _rows(path / SAMPLES) if (path / SAMPLES).exists() else []
            return cls(path, config, _rows(path / RESULTS), runs, samples)
        except FileNotFoundError as error:
            raise OptionError(
                f"{path} has no complete results of paceline bench: there is no {error.filename}"
            ) from error
        except (ValueError, TypeError) as error:
            raise OptionError(f"{path} is damaged: {first_line(error)}") from error


def write_report(path: Path) -> Path:
    """Make the report of a folder of results; returns the file.

    Raises:
        OptionError: the folder has no complete results, or damaged ones.
    """
    folder = BenchFolder.read(path)
    try:
        text = report(folder)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise OptionError(f"{path} holds no results of paceline bench: {type(error).__name__} {error}") from error
    with whole(path / REPORT) as file:
        file.write_text(text, "utf-8")
    return path / REPORT


def report(folder: BenchFolder) -> str:
    """The page."""
    config, rows = folder.config, folder.rows
    settings, machine = config["settings"], config["machine"]
    colours = {name: number for number, name in enumerate(dict.fromkeys(row["method"] for row in rows))}
    sections = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        runs = [run for run in folder.runs if run.temperature == temperature]
        sections.append(_results(here, runs, colours, config.get("profile")))
    if folder.samples:
        sections.append(provenance(folder.samples))
    sections.append(_how(folder))
    served = config.get("served", {})
    facts = [
        settings["model"] if not served else ", ".join(dict.fromkeys(served.values())),
        f"{rows[0]['prompts']} prompts of {Path(settings['suite']).name}",
        f"{settings['max_new_tokens']} new tokens",
        *([f"batch {settings['batch']}"] if settings["batch"] > 1 else []),
        *([f"{config['tier']} tier, {config['dtype']}"] if not served else []),
        f"{machine.get('gpu', machine['cpu'])}, threads: {machine['threads']}",
        config["date"][:10],
    ]
    overall = [row for row in rows if row["task"] == OVERALL]
    wrong, notes = list(_wrong(overall)), list(_slower(overall))
    return render("paceline bench", " · ".join(facts), sections, wrong=wrong, notes=notes)


def _results(
    rows: list[ResultRow], runs: list[Run], colours: dict[str, int], profile: dict[str, Any] | None
) -> Section:
    overall = [row for row in rows if row["task"] == OVERALL]
    used = {
        head: (key, form) for head, (key, form) in COLUMNS.items() if any(row.get(key) is not None for row in overall)
    }
    table = DataTable(
        ["method", *used],
        [
            [swatch(row["method"], colours[row["method"]]), *(_cell(row.get(key), form) for key, form in used.values())]
            for row in overall
        ],
    )
    temperature = rows[0]["temperature"]
    missing = "" if runs else f"There is no {RUNS} here, so what changes from pass to pass is not shown."
    return Section(
        "Greedy" if temperature == 0 else f"Temperature {temperature:g}",
        missing,
        [table],
        TERMS,
        figures(rows, runs, colours, profile),
    )


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return "{:.2f} to {:.2f}".format(*value)
    return format(value, form)


def _wrong(rows: Sequence[ResultRow]) -> Iterator[str]:
    for row in rows:
        if row["wrong"]:
            count = f"{row['wrong']} of {row['prompts']} outputs"
            yield f"WRONG: {count} of {row['method']} differ from plain decoding's by more than noise explains."


def _slower(rows: Sequence[ResultRow]) -> Iterator[str]:
    for row in rows:
        if row["speedup_ar"] is not None and row["speedup_ar"] < 1 and not is_baseline(row["method"]):
            at = f" at temperature {row['temperature']:g}" if row["temperature"] else ""
            yield f"Slower than plain decoding: {row['method']}{at}, {row['speedup_ar']:.2f} of its speed"


def _how(folder: BenchFolder) -> Section:
    facts = {**folder.config["machine"], **{key: folder.config.get(key) for key in ("tier", "dtype", "exact", "noise")}}
    facts |= {"date": folder.config["date"], "prompts_sha256": folder.config["settings"].get("prompts_sha256")}
    commands = f"{command(folder.config['settings'])}\npaceline report {shlex.quote(folder.path.name)}"
    return Section(
        "How it was measured",
        "Methods take turns on every prompt, each as often first as any other: ratios hold on a machine whose speed "
        "drifts, seconds need not. "
        + ("They are servers, asked over the network." if "served" in folder.config else "All ran in one process."),
        body=Markup("<pre>{}</pre>").format(commands),
        facts=[(name, _shown(value)) for name, value in facts.items() if value is not None],
    )


def command(settings: dict[str, Any]) -> str:
    """What makes these results again, defaults left out."""
    words = ["paceline", "bench"]
    always = None if "endpoints" in settings else "methods"
    names = {"temperatures": "temperature", "endpoints": "endpoint"}
    for one in fields(BenchConfig):
        value = settings.get(one.name, one.default)
        value = tuple(value) if isinstance(value, list) else value
        if one.name in ("out", "trace", "progress") or (value == one.default and one.name != always):
            continue
        option = "--" + names.get(one.name, one.name).replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, shlex.quote(_shown(value, digits=15))]
    return " ".join([*words, "--out", "results"])


def _shown(value: Any, digits: int = 3) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown(one, digits)}" for key, one in value.items())
    if isinstance(value, list | tuple):
        return ",".join(_shown(one, digits) for one in value)
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _rows(path: Path) -> list[Any]:
    return list(map(read_json, _lines(path)))


def _lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()
