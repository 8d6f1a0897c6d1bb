"""transformers' `generate`: plain, and its assisted modes that need no other model."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Asked, Build, Generate, Told, serve
from transformers import AutoModelForCausalLM, GenerationConfig


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])
    model: Any = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    model.generation_config = GenerationConfig()  # its defaults (a repetition penalty, say) are not what is asked
    layers, passes = model.config.num_hidden_layers, [0]

    def count(*_: object) -> None:  # early exit drafts with the same module and fewer layers
        passes[0] += model.config.num_hidden_layers == layers

    model.register_forward_pre_hook(count)

    def build(_: str, options: dict[str, Any]) -> Generate:
        def generate(asked: Asked) -> Told:
            torch.manual_seed(asked.seed)
            passes[0] = 0
            ids = torch.tensor([asked.ids])
            sampling: dict[str, Any] = {"do_sample": asked.temperature > 0}
            if asked.temperature > 0:
                sampling |= {"temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
            try:
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=asked.max_new_tokens,
                    eos_token_id=settings["eos"],
                    pad_token_id=settings["eos"][0],
                    **sampling,
                    **options,
                )
            finally:
                model.config.num_hidden_layers = layers  # early exit leaves it changed when it fails
            return Told(out[0, len(asked.ids) :].tolist(), passes[0])

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["transformers", "torch"])
