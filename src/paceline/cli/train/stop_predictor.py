"""`paceline train stop-predictor`: when to stop drafting, learnt from what a model accepts of a drafter."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import MethodOptions, ModelOptions, given_path, grouped
from paceline.errors import OptionError, require

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.training.stop_predictor.examples import Examples


@grouped
def stop_predictor(
    source: ModelOptions,
    policy: Annotated[str, Option("--policy", "-p", help="Whose predictor: cali-ts, specdec++ or disco.")],
    drafter: Annotated[str, Option("--drafter", "-d", help="NAME[:OPTION=VALUE]…: whose drafts are judged.")],
    prompts: Annotated[
        list[Path],
        Option(
            "--prompts",
            parser=given_path,
            metavar="FILE",
            help="JSONL with turns, prompt or text in a row; may be repeated.",
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            "--out",
            "-o",
            parser=given_path,
            metavar="FILE",
            help="File to write; default in the cache, where the policy finds it.",
        ),
    ] = None,
    form: Annotated[str | None, Option("--form", help="Of cali-ts: features (the default), low-rank or full.")] = None,
    limit: Annotated[int | None, Option("--limit", min=1, help="First prompts of each file.")] = None,
    examples: Annotated[
        Path | None,
        Option(
            "--examples",
            parser=given_path,
            metavar="FOLDER",
            help="Folder to keep the drafted tokens in, for other predictors; default while they are made.",
        ),
    ] = None,
    k: Annotated[int, Option("-k", min=1, help="Tokens to draft each round.")] = 10,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Of each prompt.")] = 128,
    temperature: Annotated[
        str, Option("--temperature", "-t", help="Comma-separated: the prompts take turns in them; 0 is greedy.")
    ] = "0",
    batch: Annotated[int, Option("--batch", "-b", min=1, help="Prompts at a time.")] = 1,
    epochs: Annotated[int, Option("--epochs", min=1, help="Passes over the drafted tokens.")] = 20,
    lr: Annotated[float | None, Option("--lr", help="Learning rate; default by form.")] = None,
    rank: Annotated[int, Option("--rank", min=1, help="Of the low-rank form.")] = 32,
    units: Annotated[int, Option("--units", min=1, help="Of a hidden layer in full and low-rank; 1: none.")] = 1,
    rejection_weight: Annotated[
        float | None,
        Option("--rejection-weight", help="Of rejected tokens in the loss; default 6 in specdec++, else 1."),
    ] = None,
    seed: Annotated[int, Option("--seed", min=0, max=2**31 - 1, help="Makes all of it repeatable.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the predictor by which a policy stops drafting, for one model and one drafter.

    A run that was stopped goes on when the command is given again.
    """
    from paceline.policies.predictor_file import file_name, save
    from paceline.training.stop_predictor.collect import shows_hidden
    from paceline.training.stop_predictor.fit import FORMS, WITHOUT_HIDDEN, FitConfig, fit

    if policy not in FORMS:
        raise OptionError(f"the policy '{policy}' has no predictor; there are {', '.join(FORMS)}")
    if form is not None and form not in FORMS[policy]:
        raise OptionError(f"{policy} has no predictor of form '{form}'; there is {', '.join(FORMS[policy])}")
    used = form or FORMS[policy][0]
    if rank != FitConfig.rank and used != "low-rank":
        raise OptionError(f"--rank is of the form low-rank, not of {used}")
    if units != FitConfig.units and used not in ("low-rank", "full"):
        raise OptionError(f"--units is of the forms low-rank and full, not of {used}")
    if out and out.is_dir():  # noticed else when all is drafted
        raise OptionError(f"--out names a file to write, and {out} is a folder")
    if find_spec("scipy") is None:  # asked for only after all tokens are drafted
        raise OptionError("train stop-predictor needs scipy: pip install 'paceline[train]'")
    config = FitConfig(form, rank, units, epochs, lr=lr, rejection_weight=rejection_weight, seed=seed)
    how: dict[str, Any] = {
        "k": k,
        "max_new_tokens": max_new_tokens,
        "temperatures": _numbers(temperature),
        "seed": seed,
    }
    llm = source.llm(MethodOptions(drafter=drafter, policy="fixed"))
    seen = used in WITHOUT_HIDDEN or shows_hidden(llm)  # asked for only after all tokens are drafted
    require(seen, f"the form '{used}' needs hidden states, and {llm.drafter.source or drafter} shows none")
    path = out or llm.drafter.predictors[0] / file_name(policy)
    with nullcontext(examples) if examples else _until_done(path.with_name(path.name + ".examples")) as folder:
        table = _examples(
            llm, prompts, limit, batch, {**how, "folder": folder, "anew": not examples, "method": drafter}
        )
        with _bar("epoch") as progress:
            predictor, origin = fit(
                policy,
                table,
                config,
                lambda now: progress(now.epoch, now.of, f"loss {now.loss:.4f}, held back {now.held_back:.4f}"),
            )
        save(path, predictor, origin)
    if as_json:
        print_json({"out": str(path), "policy": policy, "form": predictor.kind, **origin.trained})
    else:
        _print(origin.trained)
    print(f"stored in {path}", file=sys.stderr)


def _examples(llm: LLM, prompts: list[Path], limit: int | None, batch: int, how: dict[str, Any]) -> Examples:
    from paceline.training.data.prompts import read_prompts
    from paceline.training.data.self_distill import Draft
    from paceline.training.stop_predictor.collect import collect

    asked = [Draft(conversation).next_prompt(llm) for conversation in read_prompts(prompts, limit)]
    room = llm.target.context - how["max_new_tokens"]
    fitting = [ids for ids in asked if len(ids) <= room]
    new, context = how["max_new_tokens"], llm.target.context
    require(bool(fitting), f"no prompt leaves room for {new} new tokens in {context} tokens")
    with _bar("prompts") as progress:
        return collect(
            llm,
            fitting,
            batch=batch,
            progress=lambda done, count: progress(done, len(fitting), f"{count:,} tokens"),
            **how,
        )


@contextmanager
def _until_done(folder: Path) -> Iterator[Path]:
    """A folder that stays where a run stops with something in it to go on with."""
    try:
        yield folder
    except BaseException:
        if not any(folder.glob("*.safetensors")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder)


def _print(trained: dict[str, Any]) -> None:
    held, count = trained["held_back"], trained["parameters"]
    print(f"{count['trained']:,} parameters trained, {count['stored']:,} stored; best after epoch {trained['epoch']}")
    print(
        f"on {held['tokens']:,} held-back tokens, of which {held['acceptance']:.1%} were accepted: "
        f"loss {held['loss']:.3f} (of the acceptance rate alone {held['loss_of_the_rate']:.3f}), "
        f"AUC {held['auc']:.3f}, calibration error {held['calibration_error']:.3f}"
    )


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise OptionError(f"--temperature takes numbers with commas between them, not '{text}'") from error


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """Progress on a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of, text: bar.update(task, completed=done, total=of, description=text)
