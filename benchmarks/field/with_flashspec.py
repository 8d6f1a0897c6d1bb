"""flashspec with its prompt lookup: its other strategies need a smaller model of the same tokenizer."""

from __future__ import annotations

from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine import NgramDrafter, TargetModel
from protocol import Asked, Build, Generate, Told, serve
from transformers import AutoModelForCausalLM


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
    target = TargetModel(settings["model"], torch.device("cpu"), torch.float32, model=model)
    passes = [0]

    def count(*_: object) -> None:
        passes[0] += 1

    model.register_forward_pre_hook(count)

    def build(_: str, options: dict[str, Any]) -> Generate:
        def generate(asked: Asked) -> Told:
            passes[0] = 0
            config = FlashSpecConfig(
                device="cpu",
                dtype="float32",
                eos_token_ids=tuple(settings["eos"]),
                drafter_strategy="bandit",  # one arm: its name for the only drafter, alone
                bandit=BanditConfig(n_arms=1),
                sampling=SamplingConfig(temperature=asked.temperature, seed=asked.seed, gamma=options["gamma"]),
            )
            engine = SpeculativeEngine(config, [NgramDrafter()], target)
            found = engine.generate(torch.tensor([asked.ids]), max_new_tokens=asked.max_new_tokens)
            return Told(found.output_ids[0, : found.n_tokens_generated].tolist(), passes[0])

        return generate

    return build


if __name__ == "__main__":
    serve(load, ["flashspec", "torch", "transformers"])
