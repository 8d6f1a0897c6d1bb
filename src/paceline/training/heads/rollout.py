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
    from paceline.drafters.eagle.stepping_head import SteppingHead


def rollout(
    head: SteppingHead,
    read: Float[Tensor, "batch tokens read"],
    ids: Int[Tensor, "batch tokens"],
    steps: int,
) -> Iterator[Float[Tensor, "batch tokens hidden"]]:
    """The states that drafts of `steps` tokens make, from every position on, while their tokens are the text's.

    The n-th item holds at position t the state for t + 1 in a draft that began n - 1 positions before: in its n-th
    step the head reads its own state for t, not the target's, and attends to what it read of the target up to where the
    draft began and to its own states from there (training-time test, EAGLE-3, section 3.2). So it costs one pass over
    the text a step.

    Args:
        read: what the head reads of the target. Texts are padded at their ends.
        ids: of the same positions.
    """
    followed, state = ahead(head.tokens_in(read, ids), 1, 0.0), head.fused(read)
    cache, size = DynamicCache(), ids.shape[1]
    at = torch.arange(size, device=ids.device)
    seen = [at <= at[:, None]]  # by the query's position, of the keys that each step has added
    for step in range(steps):
        entered = head.entered(state, followed)
        out = head.decoder(
            inputs_embeds=entered,
            position_ids=at[None],
            attention_mask=_additive(torch.cat(seen, 1), entered.dtype).expand(len(ids), 1, -1, -1),
            past_key_values=cache,
            use_cache=True,
        )
        yield out.last_hidden_state
        state = torch.cat([state[:, :1], out.last_hidden_state[:, :-1]], 1)
        # One step on, a query stands one position further from where its draft began, and sees itself as a new key.
        seen = [at + step + 1 <= at[:, None], *(at + step - n == at[:, None] for n in range(step)), at == at[:, None]]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
