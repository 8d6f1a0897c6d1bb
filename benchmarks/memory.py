"""Peak resident memory of loading a model and of decoding with it, tier by tier, against its weights and KV cache.

    python benchmarks/memory.py [--tiers reference,torch,native] [--out FILE.json]

Every figure is a process of its own: the most it ever had in memory, as the kernel counts it for its parent (what
`/usr/bin/time -v` prints as maximum resident set size). Pages of a mapped checkpoint count while they are resident.
`toy` is the same process with a model of the same family, tokenizer and vocabulary that weighs next to nothing:
interpreter, torch, transformers, the tier's own code. Ratios are given with it and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Nothing large here: a child's peak counts from its parent's memory at the start.

PROMPT, NEW = 1024, 64
STEPS = ("load", "decode")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tiers", default="reference,torch,native", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, help="write the numbers here, as JSON")
    parser.add_argument("--child", nargs=3, metavar=("STEP", "MODEL", "TIER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    with tempfile.TemporaryDirectory() as folder:
        spawn("toy", options.model, folder)
        rows = [measure(options.model, folder, tier, step) for tier in options.tiers for step in STEPS]
    show(rows)
    if options.out:
        about = {"model": options.model, "prompt": PROMPT, "new": NEW, "machine": spawn("machine", "", "")[0]}
        about["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def measure(model: str, toy: str, tier: str, step: str) -> dict[str, Any]:
    _, nothing = spawn(step, toy, tier)
    told, peak = spawn(step, model, tier)
    if told["tier"] != tier:
        raise SystemExit(f"the {tier} tier does not run here")
    needed = told["weights"] + (told["cache"] if step == "decode" else 0)
    return {"tier": tier, "step": step, **told, "toy": nothing, "peak": peak,
            "ratio": peak / needed, "ratio_without_toy": (peak - nothing) / needed}  # fmt: skip


def spawn(*words: str, program: str = __file__) -> tuple[dict[str, Any], int]:
    """What a child of the program tells, and its peak in bytes."""
    process = subprocess.Popen([sys.executable, program, "--child", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as pipe:
        told = pipe.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would warn of a child that still runs
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return json.loads(told), usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def show(rows: list[dict[str, Any]]) -> None:
    """In MB."""
    titles = ("weights", "cache", "toy", "peak")
    print(f"{'':18}" + "".join(f"{title:>9}" for title in titles) + f"{'ratio':>9}{'without toy':>14}")
    for row in rows:
        sizes = "".join(f"{row[title] / 1e6:9.1f}" for title in titles)
        print(f"{row['tier']:10}{row['step']:8}{sizes}{row['ratio']:9.2f}{row['ratio_without_toy']:14.2f}")


# -- in the child ------------------------------------------------------------------------------------------------------
def child(step: str, model: str, tier: str) -> dict[str, Any]:
    if step == "machine":
        from paceline.bench.machine import machine

        return machine()
    if step == "toy":
        make_toy(model, Path(tier))
        return {}
    import paceline

    llm = paceline.load(model, drafter="none", tier=tier)
    target, shape = llm.target, llm.target.cache_shape()
    if step == "decode":
        ids = [7 + token % 100 for token in range(PROMPT)]
        llm.generate(ids, max_new_tokens=NEW, eos=())
    table = 0 if target.config.tie_word_embeddings else target.vocab_size * target.config.hidden_size
    return {
        "tier": target.tier,
        "weights": _as_stored(target) + table * target.dtype.itemsize,
        "cache": 2 * shape.layers * shape.kv_heads * shape.head_dim * (PROMPT + NEW) * target.dtype.itemsize,
    }


def _as_stored(target: Any) -> int:
    """Of matrices; the torch tier has a copy in fewer bits beside those that wide passes read."""
    if target.tier != "torch":
        return int(target.weight_bytes)
    wide = target.weight_count * target.dtype.itemsize
    return int(wide + (target.weight_bytes if target.weight_bytes < wide else 0))


def make_toy(model: str, folder: Path) -> None:
    """The model with one layer and narrow heads, and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from paceline.targets.sources import resolve

    location = resolve(model).location
    config = AutoConfig.from_pretrained(location)
    config.num_hidden_layers, config.head_dim, config.intermediate_size = 1, 8, 64
    config.hidden_size = 8 * config.num_attention_heads
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(location).save_pretrained(folder)


if __name__ == "__main__":
    main()
