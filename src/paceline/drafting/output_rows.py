"""Rows of the target's embeddings and of its output matrix, which trained heads share with it."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.targets.families import FAMILIES, LLAMA
from paceline.targets.span import Span
from paceline.targets.target import Target


def gathers_rows(target: Target) -> bool:
    """Whether a few rows of the output matrix are as good as free: they are the embeddings."""
    family = FAMILIES.get(target.config.model_type, LLAMA)
    plain = not (family.embedding_scale or family.scaled_embedding or family.logit_scale or family.logit_divisor)
    return plain and bool(getattr(target.config, "tie_word_embeddings", False))


@torch.no_grad()
def embedding_rows(target: Target, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
    """What enters the target's first layer of these tokens."""
    return target.embed(Span(tokens[None].to(target.device), np.zeros(1, dtype=np.int64)))[0]


@torch.no_grad()
def output_rows(target: Target, tokens: Int[Tensor, " tokens"] | None) -> Float[Tensor, "tokens hidden"]:
    """Rows of the target's output matrix, whatever form its tier keeps it in, times what makes logits of its products;
    None: all of them.
    """
    ids = torch.arange(target.vocab_size) if tokens is None else tokens
    ids = ids.to(target.device)
    if gathers_rows(target):
        return embedding_rows(target, ids)
    family = FAMILIES.get(target.config.model_type, LLAMA)
    size = 2.0**-10 if family.logit_cap else 1.0  # a cap leaves small numbers as they are
    columns = (torch.eye(target.config.hidden_size, dtype=target.dtype, device=target.device) * size).split(64)
    added = output_bias(target, ids)
    bias = 0.0 if added is None else added
    return torch.cat([(target.logits(unit)[:, ids] - bias) / size for unit in columns]).T.contiguous()


@torch.no_grad()
def output_bias(target: Target, tokens: Int[Tensor, " tokens"] | None) -> Float[Tensor, " tokens"] | None:
    """What the target adds to its products with `output_rows`, of these tokens; None: nothing, as most models."""
    nothing = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
    bias = target.logits(nothing)[0]
    if not bias.any():
        return None
    return bias if tokens is None else bias[tokens.to(bias.device)]
