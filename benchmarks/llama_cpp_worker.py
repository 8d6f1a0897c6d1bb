"""llama.cpp, alone in its process, continuing prompts on request: the other end of llama_cpp.py.

Started with the GGUF file, the number of threads and of context tokens. Then a JSON object a line:
`{"prompt": ids, "tokens": n}` in, `{"tokens": n, "seconds": wall clock, "prompt_seconds": s, "text": ...}` out; before
the first, one that tells the build. Greedy, through the end-of-sequence token. Imports nothing but xllamacpp: other
OpenMP runtimes would be in its way.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import xllamacpp


def main() -> None:
    path, threads, context = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may log to either

    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = int(context), 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    server = xllamacpp.Server(params)

    def tell(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=out, flush=True)

    tell({"xllamacpp": version("xllamacpp"), "system": xllamacpp.get_system_info()})
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        answer = server.handle_completions(
            {
                "prompt": asked["prompt"],
                "n_predict": asked["tokens"],
                "ignore_eos": True,
                "temperature": 0.0,
                "samplers": ["top_k"],  # the least work there is for a greedy choice
                "top_k": 1,
                "cache_prompt": False,
            }
        )
        seconds = time.perf_counter() - started
        if "choices" not in answer:
            raise SystemExit(f"llama.cpp: {answer}")
        tell(
            {
                "tokens": answer["usage"]["completion_tokens"],
                "seconds": seconds,
                "prompt_seconds": answer["timings"]["prompt_ms"] / 1e3,
                "text": answer["choices"][0]["text"],
            }
        )


if __name__ == "__main__":
    main()
