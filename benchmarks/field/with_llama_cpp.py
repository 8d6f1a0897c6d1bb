"""llama.cpp (the package xllamacpp): its own server, one mode a process, asked over HTTP on this machine."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import xllamacpp
from protocol import Asked, Build, Generate, Told, serve


def load(settings: dict[str, Any]) -> Build:
    def build(_: str, options: dict[str, Any]) -> Generate:
        params: Any = xllamacpp.CommonParams()
        params.model.path = settings["gguf"]
        params.n_parallel, params.n_ctx = 1, settings["context"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.port = 0
        if kind := options.get("type"):
            params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{kind}")]
        if static := options.get("static"):
            params.speculative.ngram_cache.lookup_cache_static = static
        server = xllamacpp.Server(params)

        def generate(asked: Asked) -> Told:
            question = {
                "prompt": asked.ids,
                "n_predict": asked.max_new_tokens,
                "temperature": asked.temperature,
                "seed": asked.seed,
                "samplers": ["temperature"] if asked.temperature > 0 else ["top_k"],
                "top_k": 1,
                "cache_prompt": False,
                "return_tokens": True,
            }
            request = urllib.request.Request(
                f"{server.listening_address}/completion",
                json.dumps(question).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:
                answer = json.load(response)
            accepted = answer["timings"].get("draft_n_accepted", 0)
            return Told(answer["tokens"], answer["timings"]["predicted_n"] - accepted)

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["xllamacpp"])
