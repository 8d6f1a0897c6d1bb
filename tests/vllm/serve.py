"""vLLM, alone in its process, continuing prompts: the other end of check.py and drafters.py.

One JSON object in on stdin, `{"model": folder, "speculative": config or null, "prompts": ids, "tokens": n}`, and one
out on stdout: `{"ids": of every prompt's continuation, "vllm": version, "drafts": rounds, "accepted": draft tokens by
position, "drafted": draft tokens, "seconds": s}`. With `"concurrency": [1, 16]` it is a list of such answers, the
prompts continued so many at a time. `"temperature"` and `"seed"` sample, `"engine"` has more arguments of `vllm.LLM`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

# One process and one thread: vLLM binds threads to cores, where they starve on a machine that is shared.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
for name, value in {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}.items():
    os.environ.setdefault(name, value)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log is not the answer
    asked: dict[str, Any] = json.load(sys.stdin)

    import vllm

    if under_ray := asked.get("engine", {}).get("distributed_executor_backend") == "ray":
        import ray

        # A "GPU" is a worker: see ray_on_cpu.
        ray.init(num_gpus=asked["engine"]["tensor_parallel_size"], include_dashboard=False, logging_level="warning")
    levels: list[int] = asked.get("concurrency", [1])
    length = max(map(len, asked["prompts"])) + asked["tokens"] + 16  # of a context: drafts may reach beyond the end
    engine = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": length,
        "max_num_batched_tokens": max(length, 512),
        "max_num_seqs": max(levels),
        "enable_prefix_caching": False,
        "speculative_config": asked["speculative"],
        "disable_log_stats": False,
        **asked.get("engine", {}),
    }
    llm = vllm.LLM(asked["model"], **engine)
    sampling = vllm.SamplingParams(
        temperature=asked.get("temperature", 0.0), seed=asked.get("seed"), max_tokens=asked["tokens"], ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
    before, answers = counted(llm), []
    for level in levels:
        started = time.perf_counter()
        # vLLM fills a batch as requests end; groups of one size keep the number that run equal.
        groups = [prompts[at : at + level] for at in range(0, len(prompts), level)]
        outputs = [one for group in groups for one in llm.generate(group, sampling, use_tqdm=False)]
        seconds, after = time.perf_counter() - started, counted(llm)
        answer: dict[str, Any] = {
            "ids": [list(output.outputs[0].token_ids) for output in outputs],
            "vllm": vllm.__version__,
            "seconds": seconds,
        }
        if asked["speculative"]:
            answer["drafts"], answer["drafted"], *answer["accepted"] = (
                a - b for a, b in zip(after, before, strict=True)
            )
        before = after
        answers.append(answer)
    print(json.dumps(answers if "concurrency" in asked else answers[0]), file=out, flush=True)
    if under_ray:  # its workers end before Ray does
        llm.llm_engine.engine_core.shutdown()
        ray.shutdown()


def counted(llm: Any) -> list[float]:
    """So far: rounds that drafted, draft tokens, and those accepted, by position; nothing where nothing drafts."""
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    if "vllm:spec_decode_num_drafts" not in metrics:
        return []
    counts = [metrics[f"vllm:spec_decode_num_{what}"].value for what in ("drafts", "draft_tokens")]
    return [*counts, *metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values]


if __name__ == "__main__":
    main()
