"""What a drafter learns, and how often its drafts would be accepted."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.training.dataset import IGNORE
from paceline.training.samples import UNKNOWN

OBJECTIVES = ("text", "argmax", "distil")
CHAIN = 5  # positions of a draft whose acceptance is reported


def soft_labels(
    objective: str, labels: Int[Tensor, " n"], top_ids: Int[Tensor, "n k"], top_logp: Float[Tensor, "n k"]
) -> tuple[Int[Tensor, "n m"], Float[Tensor, "n m"]]:
    """Tokens to predict at each position, and their weights, which sum to 1.

    Args:
        objective: "text": the token that follows (EESD); "argmax": the target's likeliest token; "distil": its
            likeliest tokens by their probabilities. The latter two take the text where the target was not asked.
    """
    known = (top_ids[:, :1] != UNKNOWN) if top_ids.shape[1] else torch.zeros_like(labels[:, None], dtype=torch.bool)
    if objective == "text" or not top_ids.shape[1]:
        return labels[:, None], torch.ones_like(labels[:, None], dtype=torch.float)
    if objective == "argmax":
        return torch.where(known, top_ids[:, :1], labels[:, None]), torch.ones_like(top_logp[:, :1])
    p = top_logp.softmax(-1).where(known, 0.0)
    return torch.cat([labels[:, None], top_ids], 1), torch.cat([(~known).float(), p], 1)


def soft_cross_entropy(
    logits: Float[Tensor, "n vocab"], outputs: Int[Tensor, "n m"], weights: Float[Tensor, "n m"]
) -> Float[Tensor, ""]:
    """Sum of the cross-entropies against labels with weights; outputs of IGNORE do not count."""
    logits = logits.float()
    weights = weights.where(outputs != IGNORE, 0.0)
    chosen = logits.gather(1, outputs.clamp(min=0))
    return (weights.sum(1) * logits.logsumexp(1)).sum() - (weights * chosen).sum()


def chain_counts(right: Bool[Tensor, "batch tokens"], asked: Bool[Tensor, "batch tokens"]) -> Int[Tensor, "2 CHAIN"]:
    """Drafts simulated from every position of text that the target wrote: chains of n = 1 .. CHAIN tokens that are all
    right, and chains there are. While a greedy draft is right, its next token reads the text itself: one pass over the
    text tells all.

    Args:
        right: whether the drafter predicts the next token there.
        asked: whether the next token is one that the target wrote.
    """
    hits, starts = [], []
    good, there = torch.ones_like(right), torch.ones_like(asked)
    for n in range(CHAIN):
        good, there = good[:, : right.shape[1] - n], there[:, : right.shape[1] - n]
        good, there = good & right[:, n:], there & asked[:, n:]
        hits.append((good & there).sum())
        starts.append(there.sum())
    return torch.stack([torch.stack(hits), torch.stack(starts)])
