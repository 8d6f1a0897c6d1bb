"""vLLM, alone in its process, continuing prompts greedily: the other end of check.py.

One JSON object in on stdin, `{"model": folder, "speculative": config or null, "prompts": ids, "tokens": n}`, and one
out on stdout: `{"ids": of every prompt's continuation, "vllm": version, "drafts": rounds, "accepted": draft tokens by
position}`.
"""

from __future__ import annotations

import json
import os
import sys
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

    length = max(map(len, asked["prompts"])) + asked["tokens"] + 16  # of a context: drafts may reach beyond the end
    llm = vllm.LLM(
        asked["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=length,
        max_num_batched_tokens=length,
        max_num_seqs=1,
        enable_prefix_caching=False,
        speculative_config=asked["speculative"],
        disable_log_stats=False,
    )
    greedy = vllm.SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], greedy, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    answer: dict[str, Any] = {
        "ids": [list(output.outputs[0].token_ids) for output in outputs],
        "vllm": vllm.__version__,
    }
    if asked["speculative"]:
        answer["drafts"] = metrics["vllm:spec_decode_num_drafts"].value
        answer["accepted"] = metrics["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    main()
