"""paceline: a method a mode, on the tier that the mode names; weights are shared by the modes of one tier."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Asked, Build, Generate, Told, serve

import paceline


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])
    loaded: dict[str, paceline.LLM] = {}

    def build(_: str, options: dict[str, Any]) -> Generate:
        tier = options["tier"]
        if tier not in loaded:
            loaded[tier] = paceline.load(settings["name"], drafter="none", tier=tier, dtype=options.get("dtype"))
        if loaded[tier].target.tier != tier:
            raise RuntimeError(f"the {tier} tier cannot be had here")
        llm = loaded[tier].method(options["drafter"])

        def generate(asked: Asked) -> Told:
            sampling = {"temperature": asked.temperature, "seed": asked.seed, "max_new_tokens": asked.max_new_tokens}
            [request] = llm.requests([asked.ids], **sampling)
            request.text = None  # nobody else writes text
            for _ in llm.engine.run([request]):
                pass
            return Told(request.output, len(request.stats.rounds))

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["paceline", "torch"])
