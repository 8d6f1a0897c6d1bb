"""What a pass of the target costs: T(k), seconds for k new tokens, by tier, context and batch, against transformers.

All tiers run in one process, interleaved pass by pass, so that a machine whose speed drifts is unfair to none. `hf` is
transformers' own forward in eager mode (not compiled) with its own cache. The KV caches hold random numbers: what is
in them does not change what a pass costs. Besides the tiers there are their variants: `native-fp32` and `native-bf16`
store all weights so (`native` takes a GGUF file's own blocks), `torch-inexact` is the torch tier with `--no-exact`.

    python benchmarks/target_pass.py                          # default model, 256 tokens of context, widths 1 to 64
    python benchmarks/target_pass.py --contexts 256,1024,8184 --widths 1,8 --tiers hf,torch,native,native-fp32
    python benchmarks/target_pass.py --shape 1b --device cuda --dtype bfloat16 --tiers hf,torch
    python benchmarks/target_pass.py --against OTHER.so       # this build of the native tier and another one, by turns

A library to compare with is what another checkout's `paceline.targets.native.build.library()._name` says. It must have
the same structures and packed layout: both builds then run on the same weights and caches, and the logits' bits are
compared. PACELINE_ISA chooses an instruction set of this build.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from paceline.bench.machine import machine
from paceline.errors import PacelineError
from paceline.profiling import pass_cost
from paceline.targets import TIERS, make_target
from paceline.targets.native import NativeTarget
from paceline.targets.native.build import instruction_set, library
from paceline.targets.sources import load_model
from paceline.targets.span import Span
from paceline.targets.target import Target

SHAPES = {  # random weights: TinyLlama 1.1B and Llama 2 7B
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
           "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 8192},
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 8192},
}  # fmt: skip

VARIANTS: dict[str, Callable[[PreTrainedModel], Target]] = {
    "native-fp32": lambda model: NativeTarget(model, storage="fp32"),
    "native-bf16": lambda model: NativeTarget(model, storage="bf16"),
    "torch-inexact": lambda model: make_target(model, tier="torch", exact=False),
}

Pass = Callable[[int], None]  # runs one pass of a width


def main() -> None:
    options = parse()
    if options.check:
        return
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.against:
        compare(options)
        return
    runners = {tier: load(tier, options) for tier in options.tiers}
    rows = []
    for batch in options.batches:
        for context in options.contexts:
            passes = {tier: prepare(runner, batch, context, options) for tier, runner in runners.items()}
            rows += measure(passes, batch, context, options)
            passes.clear()
            gc.collect()
    report(rows, options.tiers)
    if options.out:
        about = {"model": options.shape or options.model, "device": options.device, "dtype": options.dtype}
        about |= {"machine": machine(options.device), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "passes": rows}, indent=1) + "\n")


def tiers(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in {"hf", *TIERS, *VARIANTS}:
            raise argparse.ArgumentTypeError(f"no tier {name}")
    return names


def parse() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of a Llama of this size instead of a model")
    parser.add_argument("--tiers", type=tiers, default=["hf", *TIERS], help=", ".join(["hf", *TIERS, *VARIANTS]))
    parser.add_argument("--widths", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[256], help="tokens in the cache")
    parser.add_argument("--batches", type=numbers, default=[1])
    parser.add_argument("--rounds", type=int, default=15, help="passes of each kind")
    parser.add_argument("--seconds", type=float, default=120, help="stop a row's rounds early after this time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--against", metavar="LIBRARY", help="the native tier and this build of it, by turns")
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    parser.add_argument("--check", action="store_true", help="read the options and stop")
    return parser.parse_args()


def load(tier: str, options: argparse.Namespace) -> PreTrainedModel | Target:
    """Each tier has weights of its own: all but the reference take a model's over."""
    dtype = getattr(torch, options.dtype)
    if options.shape:
        torch.manual_seed(0)
        with torch.device(options.device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            model: Any = LlamaForCausalLM(LlamaConfig(**SHAPES[options.shape])).eval()
            torch.set_default_dtype(before)
    else:
        model = load_model(options.model, dtype=dtype, device=options.device)[0]
    try:
        if tier == "hf":
            return model
        return VARIANTS[tier](model) if tier in VARIANTS else make_target(model, None, tier)
    except PacelineError as error:
        raise SystemExit(f"{tier}: {error}") from error


def prepare(runner: PreTrainedModel | Target, batch: int, context: int, options: argparse.Namespace) -> Pass:
    ids = torch.randint(0, 1000, (batch, max(options.widths)), device=options.device)
    if isinstance(runner, Target):
        return ours(runner, ids, context)
    return theirs(runner, ids, context)


def ours(target: Target, ids: torch.Tensor, context: int) -> Pass:
    cache = target.new_cache(ids.shape[0], context + ids.shape[1])
    cache.store.normal_()
    cache.lengths[:] = context

    def run(width: int) -> None:
        target.forward(Span(ids[:, :width], cache.lengths.copy()), cache)

    return run


def theirs(model: PreTrainedModel, ids: torch.Tensor, context: int) -> Pass:
    cache, call = DynamicCache(config=model.config), model.__call__
    config = model.config.get_text_config()
    size = config.hidden_size // config.num_attention_heads
    shape = (ids.shape[0], config.num_key_value_heads, context, size)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn(2, *shape, dtype=model.dtype, device=model.device).unbind(), layer)

    def run(width: int) -> None:
        call(input_ids=ids[:, :width], past_key_values=cache, use_cache=True)
        cache.crop(-width)

    return run


@torch.inference_mode()
def measure(passes: dict[str, Pass], batch: int, context: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    def timed(run: Pass, width: int) -> float:
        started = time.perf_counter()
        run(width)
        if options.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    seconds: dict[tuple[str, int], list[float]] = {(tier, width): [] for tier in passes for width in options.widths}
    for tier, width in seconds:
        for _ in range(2):  # first passes allocate, compile and capture
            timed(passes[tier], width)
    started = time.perf_counter()
    for _ in range(options.rounds):
        for (tier, width), times in seconds.items():
            times.append(timed(passes[tier], width))
        if time.perf_counter() - started > options.seconds:
            break
    return [
        {"tier": tier, "batch": batch, "context": context, "width": width, "rounds": len(times),
         "median_ms": 1e3 * median(times), "least_ms": 1e3 * min(times)}
        for (tier, width), times in seconds.items()
    ]  # fmt: skip


@torch.inference_mode()
def compare(options: argparse.Namespace) -> None:
    """Minima and medians of both builds, and whether they give the same bits."""
    target: Any = load("native-fp32" if options.tiers == ["native-fp32"] else "native", options)
    builds = {"other": other_build(options.against, target), "this": target.native._library}
    threads = torch.get_num_threads()
    peak = 0.0
    print(f"{instruction_set()}, {threads} threads; milliseconds a pass")
    for context in options.contexts:
        print(f"\n{context} tokens of context, least (median)")
        print(f"{'k':>4} {'other':>17} {'this':>17} {'ratio':>13} {'GFLOPS':>7} {'of peak':>7}")
        for width in options.widths:
            seconds, logits = turns(target, builds, context, width, options)
            peak = max(peak, *(library().paceline_peak(threads, 0) for _ in range(20)))
            least = {name: 1e3 * min(times) for name, times in seconds.items()}
            middle = {name: 1e3 * median(times) for name, times in seconds.items()}
            rate = pass_cost(target, width, context).flops / least["this"] * 1e3
            print(
                f"{width:4} " + " ".join(f"{least[name]:8.2f} ({middle[name]:6.2f})" for name in builds),
                f"{least['this'] / least['other']:5.2f} ({middle['this'] / middle['other']:5.2f})",
                f"{rate / 1e9:7.0f} {rate / peak:7.0%}",
                "" if torch.equal(logits["this"], logits["other"]) else "other BITS",
                flush=True,
            )
    print(f"\npeak: {peak / 1e9:.0f} GFLOPS, of independent multiply-adds")


def other_build(path: str, target: Any) -> ctypes.CDLL:
    try:
        build = ctypes.CDLL(path)
        for name in ("paceline_packed_bytes", "paceline_pass", "paceline_head"):
            ours = getattr(library(), name)
            getattr(build, name).restype, getattr(build, name).argtypes = ours.restype, ours.argtypes
    except (OSError, AttributeError) as error:
        raise SystemExit(f"{path} is no library of this kind: {error}") from error
    for matrix in target.native.matrices:
        if build.paceline_packed_bytes(ctypes.byref(matrix.c)) != matrix.bytes:
            raise SystemExit(f"{path} packs matrices in another layout")
    return build


def turns(
    target: Any, builds: dict[str, ctypes.CDLL], context: int, width: int, options: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Seconds of each pass, and the logits, as integers."""
    draw = torch.Generator().manual_seed(0)
    span = Span(torch.randint(0, 1000, (1, width), generator=draw), np.full(1, context))
    cache = target.new_cache(1, context + width)
    cache.store.normal_(generator=draw)
    seconds: dict[str, list[float]] = {name: [] for name in builds}
    logits = {}
    started = time.perf_counter()
    for turn in range(options.rounds + 1):
        for name, build in builds.items():
            target.native._library = build
            before = time.perf_counter()
            out = target.forward(span, cache).logits
            if turn:  # the first allocates
                seconds[name].append(time.perf_counter() - before)
            else:
                logits[name] = out.view(torch.int32)
        if turn and time.perf_counter() - started > options.seconds:
            break
    return seconds, logits


def report(rows: list[dict[str, Any]], tiers: list[str]) -> None:
    """Medians (least in brackets); then T(k)/T(1) and, where hf ran, T(k) against its T(k)."""
    cost = {(row["tier"], row["batch"], row["context"], row["width"]): row for row in rows}
    for batch, context in dict.fromkeys((row["batch"], row["context"]) for row in rows):
        widths = list(dict.fromkeys(row["width"] for row in rows))
        print(f"\nbatch {batch}, {context} tokens of context: milliseconds a pass, median (least)")
        print(f"{'':12}" + "".join(f"{width:>17}" for width in widths))
        for tier in tiers:
            cells = [cost[tier, batch, context, width] for width in widths]
            print(f"{tier:12}" + "".join(f"{cell['median_ms']:9.1f} ({cell['least_ms']:5.1f})" for cell in cells))
            for name, base in (
                ("/ narrowest", [cells[0]] * len(widths)),
                ("/ hf", hf_row(cost, batch, context, widths)),
            ):
                if base:
                    print(f"  {name:10}" + "".join(
                        f"{cell['median_ms'] / other['median_ms']:9.2f} ({cell['least_ms'] / other['least_ms']:5.2f})"
                        for cell, other in zip(cells, base, strict=True)
                    ))  # fmt: skip


def hf_row(cost: dict[Any, Any], batch: int, context: int, widths: list[int]) -> list[dict[str, Any]]:
    return [cost["hf", batch, context, width] for width in widths if ("hf", batch, context, width) in cost]


if __name__ == "__main__":
    main()
