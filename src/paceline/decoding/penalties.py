"""Logits processors of the OpenAI API that transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens, whatever came before."""

    def __init__(self, bias: Mapping[int, float], device: torch.device) -> None:
        self.tokens = torch.tensor(list(bias), device=device)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32, device=device)

    def __call__(self, input_ids: object, scores: Float[Tensor, "nodes vocab"]) -> Float[Tensor, "nodes vocab"]:
        return scores.index_add(1, self.tokens, self.bias.expand(len(scores), -1))


class OutputPenalty(LogitsProcessor):
    """Presence and frequency penalty: `presence` off the logit of each token of the output, `frequency` for each time.

    The prompt does not count, as in the OpenAI API.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(
        self, input_ids: Int[Tensor, "nodes length"], scores: Float[Tensor, "nodes vocab"]
    ) -> Float[Tensor, "nodes vocab"]:
        output = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, output, torch.ones_like(output, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)
