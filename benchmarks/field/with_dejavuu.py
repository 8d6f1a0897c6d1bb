"""dejavuu over transformers (its `hf` backend), without its ONNX export: chains verified, a drafter a mode."""

from __future__ import annotations

from typing import Any

import torch
from dejavuu.core.engine import generate as run
from dejavuu.core.sampling import Sampler
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from protocol import Asked, Build, Generate, Told, serve


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])
    model = HFBackend(settings["model"], device="cpu", dtype="float32", attn_implementation="sdpa")

    def build(_: str, options: dict[str, Any]) -> Generate:
        def generate(asked: Asked) -> Told:
            sampler = Sampler(asked.temperature, 1.0, asked.seed) if asked.temperature > 0 else None
            drafter = make_drafter(options["method"]) if options else None
            [eos, *_] = settings["eos"]
            found = run(model, asked.ids, asked.max_new_tokens, drafter, options.get("budget", 0), eos, sampler=sampler)
            return Told(found.tokens, found.steps)

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["dejavuu", "torch", "transformers"])
