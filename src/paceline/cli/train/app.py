"""`paceline train`: makes drafters for a model: the data, then the training."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from typer import Option

from paceline.cli.console import harmless, print_json
from paceline.cli.options import MethodOptions, ModelOptions, given_path, grouped
from paceline.cli.train import early_exit as train_early_exit
from paceline.cli.train import guide as train_guide
from paceline.cli.train import heads as train_heads
from paceline.cli.train import prompts as train_prompts
from paceline.cli.train import stop_predictor as train_stop_predictor
from paceline.errors import OptionError

if TYPE_CHECKING:
    from paceline.training.data import generate as training_data

app = typer.Typer(help="Make drafters for a model.", no_args_is_help=False)


@app.callback()
def train() -> None: ...


app.command("early-exit")(train_early_exit.early_exit)
app.command("medusa")(train_heads.medusa)
app.command("eagle")(train_heads.eagle)
app.command("eagle3")(train_heads.eagle3)
app.command("dflash")(train_heads.dflash)
app.command("guide")(train_guide.guide)
app.command("stop-predictor")(train_stop_predictor.stop_predictor)
app.command("prompts")(train_prompts.prompts)


@app.command()
@grouped
def data(
    source: ModelOptions,
    prompts: Annotated[
        list[Path],
        Option(
            "--prompts",
            "-p",
            parser=given_path,
            metavar="FILE",
            help="JSONL with turns, prompt or text in a row; may be repeated.",
        ),
    ],
    out: Annotated[
        Path,
        Option(
            "--out",
            "-o",
            parser=given_path,
            metavar="FOLDER",
            help="Folder of the data; a run that was stopped goes on there.",
        ),
    ],
    text: Annotated[
        list[Path] | None,
        Option(
            "--text",
            parser=given_path,
            metavar="FILE",
            help="Open text to mix in: text or JSONL, .gz or not; may be repeated.",
        ),
    ] = None,
    text_share: Annotated[float | None, Option("--text-share", help="Its share of the tokens; default 0.2.")] = None,
    limit: Annotated[int | None, Option("--limit", min=1, help="First prompts of each file.")] = None,
    max_tokens: Annotated[int | None, Option("--max-tokens", min=1, help="Stop at so many generated tokens.")] = None,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Longest answer.")] = 256,
    max_length: Annotated[int, Option("--max-length", help="Longest sample; prompts count.")] = 1024,
    greedy_tokens: Annotated[int, Option("--greedy-tokens", min=0, help="Greedy at each answer's start.")] = 4,
    temperature: Annotated[float, Option("--temperature", "-t", min=0.0, help="Of the rest; 0: all greedy.")] = 0.7,
    top: Annotated[int, Option("--top", min=0, help="Likeliest tokens to keep at each position.")] = 8,
    group: Annotated[int, Option("--group", min=1, help="Prompts in each shard of the data.")] = 64,
    batch: Annotated[int, Option("--batch", "-b", min=1, help="Answers written at a time.")] = 8,
    seed: Annotated[int, Option("--seed", min=0, help="Of order and sampling.")] = 0,
    shard: Annotated[
        str | None, Option("--shard", help="i/n: every n-th shard from i (0 is first); default as launched.")
    ] = None,
    show: Annotated[int, Option("--show", min=0, help="Print so many samples with their loss masks.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let the model write the text that drafters learn from (self-distillation), mixed with open text."""
    from paceline.training.data.generate import make_data
    from paceline.training.data.self_distill import DistillConfig

    if text_share is not None and not text:
        raise OptionError("--text-share needs --text")
    if show and as_json:
        raise OptionError("--json prints one JSON object: leave out --show")
    config = DistillConfig(
        greedy_tokens=greedy_tokens,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        top=top,
        text_share=(0.2 if text_share is None else text_share) if text else 0.0,
        group=group,
        seed=seed,
    )
    llm = _placed(source).llm(MethodOptions(drafter="none"))
    with _generating() as progress:
        manifest = make_data(
            llm,
            prompts,
            out,
            config,
            text=text or (),
            limit=limit,
            max_tokens=max_tokens,
            batch=batch,
            share=_share(shard),
            facts={"command": shlex.join(["paceline", *sys.argv[1:]])},
            progress=progress,
        )
    totals = manifest["totals"]
    if as_json:
        print_json({"out": str(out), **totals})
    else:
        print(", ".join(f"{count:,} {kind}" for kind, count in totals.items()))
    if show:
        _show(out, llm.tokenizer.decode, show)


def _placed(source: ModelOptions) -> ModelOptions:
    """With a GPU for each process of a launch."""
    from dataclasses import replace

    rank = os.environ.get("LOCAL_RANK")
    return replace(source, device=f"cuda:{rank}") if source.device == "cuda" and rank else source


def _share(shard: str | None) -> tuple[int, int]:
    """Which part of the work is this process's: as told, or as `accelerate launch` or `torchrun` started it."""
    index, slash, count = (shard or f"{os.environ.get('RANK', 0)}/{os.environ.get('WORLD_SIZE', 1)}").partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise OptionError(f"--shard must be i/n with i from 0 to n - 1, not '{shard}'")
    return int(index), int(count)


@contextmanager
def _generating() -> Iterator[Callable[[training_data.DataProgress], None]]:
    """A bar on a terminal; in a log, a line for each shard."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def progress(now: training_data.DataProgress) -> None:
            speed = f"{now.tokens:,} tokens, {now.tokens / max(now.seconds, 1e-9):.0f} tokens/s"
            bar.update(task, completed=now.done, total=now.of, description=speed)
            if now.shard and not console.is_terminal:
                left = (now.of - now.done) * now.seconds / now.done
                line = f"{now.done} of {now.of} prompts, {speed}, {left / 60:.0f} min left: {now.shard}"
                print(line, file=sys.stderr, flush=True)

        yield progress


def _show(folder: Path, decode: Callable[..., Any], count: int) -> None:
    """Samples as text: what is learnt in the terminal's colour, what is not dim and between brackets."""
    from paceline.training.data.samples import PROMPT, Shard

    console = Console()
    for path in sorted(folder.glob("samples-*.safetensors")):
        for ids, mask in Shard.load(path).samples()[:count]:
            count -= 1
            console.rule(f"{len(mask) - mask.count(PROMPT)} of {len(ids)} tokens are learnt")
            text, at = Text(), 0
            for end in range(1, len(ids) + 1):
                if end == len(ids) or mask[end] != mask[at]:
                    piece = harmless(str(decode(ids[at:end])))
                    text.append(piece if mask[at] else f"[{piece}]", None if mask[at] else "dim")
                    at = end
            console.print(text, soft_wrap=True)
        if not count:
            return
