"""`paceline bench`: methods side by side under one clock."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from paceline.cli.console import print_json
from paceline.cli.options import ModelOptions, Verifier, given_path, grouped
from paceline.errors import OptionError


@grouped
def bench(
    source: ModelOptions,
    suite: Annotated[
        str, Option("--suite", help="JSONL or parquet file, folder, id of a data set on the hub, or speed-bench.")
    ],
    out: Annotated[
        Path,
        Option(
            "--out",
            "-o",
            parser=given_path,
            metavar="FOLDER",
            help="Folder of the results; a run that was stopped goes on there.",
        ),
    ],
    methods: Annotated[
        str, Option("--methods", help="Comma-separated: ar (plain decoding), hf, hf-lookup, …, DRAFTER[+POLICY].")
    ] = "ar,hf,auto",
    endpoint: Annotated[
        str,
        Option("--endpoint", metavar="[NAME=]URL,…", help="Measure servers with the OpenAI API instead of methods."),
    ] = "",
    tasks: Annotated[str, Option("--tasks", help="Only these, comma-separated.")] = "",
    limit: Annotated[int | None, Option("--limit", min=1, help="First prompts of each task.")] = None,
    turns: Annotated[int, Option("--turns", min=1, help="User turns of each conversation.")] = 1,
    max_new_tokens: Annotated[int, Option("--max-new-tokens", "-n", min=1, help="Most tokens to generate.")] = 128,
    temperature: Annotated[
        str, Option("--temperature", "-t", help="Comma-separated; 0 is greedy decoding, where ids are compared.")
    ] = "0",
    top_k: Annotated[int, Option("--top-k", min=0, help="0: off.")] = 0,
    top_p: Annotated[float, Option("--top-p", help="1: off.")] = 1.0,
    min_p: Annotated[float, Option("--min-p", help="0: off.")] = 0.0,
    batch: Annotated[int, Option("--batch", "-b", min=1, help="Prompts decoded at a time.")] = 1,
    seed: Annotated[int, Option("--seed", min=0, max=2**32 - 1, help="Of sampling.")] = 0,
    verifier: Annotated[
        Verifier,
        Option("--verifier", help="How sampled drafts are verified; match: samples are compared, too."),
    ] = "auto",
    trace: Annotated[
        bool, Option("--trace", help="Write DIR/trace.jsonl.gz too, for paceline replay: it takes another pass or two.")
    ] = False,
    verbose: Annotated[bool, Option("--verbose", "-v", help="A table for each task, too.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure methods on the same prompts, interleaved, and check that they give plain decoding's output."""
    from paceline.bench import BenchConfig, print_summary, run
    from paceline.bench.methods import AR

    if endpoint and source.model != ModelOptions.model:
        raise OptionError("model is no option of endpoints, whose servers choose it")
    config = BenchConfig(
        suite=suite,
        out=out,
        methods=methods,
        endpoints=endpoint,
        tasks=tasks,
        limit=limit,
        turns=turns,
        max_new_tokens=max_new_tokens,
        temperatures=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        batch=batch,
        seed=seed,
        verifier=verifier,
        trace=trace,
        **asdict(source),
    )
    if not config.endpoints and AR not in config.methods:
        print(f"without '{AR}' among the methods nothing is compared with plain decoding", file=sys.stderr)
    try:
        summary = run(config)
    except KeyboardInterrupt:
        print(f"stopped: the same command goes on with what is in {out}", file=sys.stderr)
        raise
    if as_json:
        print_json({"out": str(summary.out), "rows": summary.rows})
    else:
        print_summary(summary, Console(), verbose)
