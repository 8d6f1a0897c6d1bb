"""Makes the head that this package offers: an untrained one, for a tiny model of random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.drafters.early_exit.head import ExitHead

HEADS = Path(__file__).parent / "paceline_example" / "heads"


def tiny_model() -> LlamaForCausalLM:
    """The same weights each time; its name is what the entry point's key is made of."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=256,
    )
    config.name_or_path = "paceline-example/tiny-llama"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


if __name__ == "__main__":
    ExitHead.from_target(tiny_model(), 1, tokens=range(240)).save(HEADS)
    print(f"made {HEADS}")
