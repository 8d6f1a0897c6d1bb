"""EAGLE's drafts from every position of a text at once, on what the head itself drafted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from paceline.training.heads.head_task import ahead

if TYPE_CHECKING:
    from paceline.drafters.eagle.head import EagleHead


def rollout(
    head: EagleHead, features: Float[Tensor, "batch tokens hidden"], ids: Int[Tensor, "batch tokens"], steps: int
) -> Iterator[Float[Tensor, "batch tokens hidden"]]:
    """The features that drafts of `steps` tokens guess, from every position on, while their tokens are the text's.

    The n-th item holds at position t the guess of the feature at t + 1 in a draft that began n - 1 positions before: in
    its n-th step the head reads its guess of the feature at t, not the target's, and attends to the target's features
    up to where the draft began and to its own guesses from there (as training-time test does in EAGLE-3). So it costs
    one pass over the text a step.

    Args:
        features: of the target. Texts are padded at their ends.
        ids: of the same positions.
    """
    assert head.embedding is not None  # heads to train know their target
    followed = torch.nn.functional.embedding(ahead(ids, 1, 0), head.embedding).to(features.dtype)
    cache, size = DynamicCache(), ids.shape[1]
    at = torch.arange(size, device=ids.device)
    seen = [at <= at[:, None]]  # by the query's position, of the keys that each step has added
    for step in range(steps):
        entered = head.fc(torch.cat([followed, features], -1))
        out = head.decoder(
            inputs_embeds=entered,
            position_ids=at[None],
            attention_mask=_additive(torch.cat(seen, 1), entered.dtype).expand(len(ids), 1, -1, -1),
            past_key_values=cache,
            use_cache=True,
        )
        yield out.last_hidden_state
        features = torch.cat([features[:, :1], out.last_hidden_state[:, :-1]], 1)
        # One step on, a query stands one position further from where its draft began, and sees itself as a new key.
        seen = [at + step + 1 <= at[:, None], *(at + step - n == at[:, None] for n in range(step)), at == at[:, None]]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
