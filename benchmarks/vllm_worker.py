"""vLLM in a process of its own, for vllm_throughput.py: one speculative configuration, groups of prompts as they come.

Started with `{"model": folder, "threads": n, "context": tokens, "rows": n, "eos": ids, "speculative": config or null,
"additional": config}`, it prints `{"version": v}` when it has loaded, and then a line a question:

    {"prompts": [ids, ...], "level": n, "tokens": n}
        ->  {"ids": [...], "seconds": s, "drafts": [rounds, drafted, accepted]}

`level` requests are in work at a time: as soon as one is answered the next begins.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

NAMES = ("drafts", "draft_tokens", "accepted_tokens")


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log is no answer
    settings: dict[str, Any] = json.loads(sys.argv[1])
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings['threads'] - 1}",  # unbound threads starve each other by spinning
    }
    import vllm

    llm = vllm.LLM(
        settings["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=settings["context"],
        max_num_batched_tokens=max(settings["context"], 2048),
        max_num_seqs=settings["rows"],
        enable_prefix_caching=False,
        speculative_config=settings["speculative"],
        additional_config=settings["additional"],
        disable_log_stats=False,
    )
    print(json.dumps({"version": vllm.__version__}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = vllm.SamplingParams(
            temperature=0.0, max_tokens=asked["tokens"], stop_token_ids=settings["eos"], detokenize=False
        )
        before, started = counted(llm), time.perf_counter()
        ids = answered(llm.llm_engine, asked["prompts"], asked["level"], sampling)
        seconds = time.perf_counter() - started
        answer = {
            "ids": ids,
            "seconds": seconds,
            "drafts": [after - earlier for after, earlier in zip(counted(llm), before, strict=True)],
        }
        print(json.dumps(answer), file=out, flush=True)


def answered(engine: Any, prompts: list[list[int]], level: int, sampling: Any) -> list[list[int]]:
    """The answers to all prompts, `level` of them in work at a time."""
    found: dict[str, list[int]] = {}
    begun = 0
    while len(found) < len(prompts):
        while begun < min(len(found) + level, len(prompts)):
            engine.add_request(str(begun), {"prompt_token_ids": prompts[begun]}, sampling)
            begun += 1
        found |= {done.request_id: list(done.outputs[0].token_ids) for done in engine.step() if done.finished}
    return [found[str(at)] for at in range(len(prompts))]


def counted(llm: Any) -> list[int]:
    """`NAMES` since the start."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return [int(values.get(f"vllm:spec_decode_num_{name}", 0)) for name in NAMES]


if __name__ == "__main__":
    main()
