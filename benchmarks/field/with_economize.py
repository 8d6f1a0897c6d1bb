"""economize: its drafters that need neither training nor another model, each on a copy of the model."""

from __future__ import annotations

from typing import Any

import economize
import torch
from economize.techniques.early_exit import EarlyExitConfig
from economize.techniques.hybrid import HybridConfig
from economize.techniques.layer_skip import LayerSkipConfig
from economize.techniques.lookup import LookupConfig
from protocol import Asked, Build, Generate, Told, serve
from transformers import AutoModelForCausalLM

SKIPPING = LayerSkipConfig(num_skip=10, search="uniform")
TECHNIQUES = {
    "lookup": LookupConfig(),
    "layer-skip": SKIPPING,
    "early-exit": EarlyExitConfig(exit_layer=10, head="shared"),
    "hybrid": HybridConfig(fallback=SKIPPING),
}


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])

    def build(_: str, options: dict[str, Any]) -> Generate:
        base = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
        techniques = [TECHNIQUES[options["technique"]]] if "technique" in options else []
        model = economize.apply(base, *techniques)
        length = options.get("cycle_length", 1)

        @torch.inference_mode()
        def generate(asked: Asked) -> Told:
            decoding, selector = economize.DecodeConfig(cycle_length=length), None
            if asked.temperature > 0:
                decoding = economize.DecodeConfig(cycle_length=length, verifier="rejection" if length > 1 else None)
                selector = economize.TopPSampler(temperature=asked.temperature, top_p=1.0, seed=asked.seed)
            ids = torch.tensor(asked.ids)
            stop = settings["eos"]
            found = model.decode(ids, asked.max_new_tokens, decoding=decoding, selector=selector, stop=stop)
            new = found.tokens.tolist()
            accepted = sum(kept for _, kept in found.acceptance)
            return Told(new, len(new) - accepted)

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["economize", "torch", "transformers"])
