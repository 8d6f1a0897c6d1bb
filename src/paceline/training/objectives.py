"""What a drafter learns."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.training.data.dataset import IGNORE
from paceline.training.data.samples import UNKNOWN

TEXT = "text"
WHOLE = "whole"  # all that the target says, from its features: of heads that read these
AT_A_TIME = 1 << 18  # numbers: a MiB in float32
OBJECTIVES = (TEXT, "argmax", "distil", WHOLE)


def soft_labels(
    objective: str, labels: Int[Tensor, " n"], top_ids: Int[Tensor, "n k"], top_logp: Float[Tensor, "n k"]
) -> tuple[Int[Tensor, "n m"], Float[Tensor, "n m"]]:
    """Tokens to predict at each position, and their weights, which sum to 1.

    Args:
        objective: "text": the token that follows (EESD); "argmax": the target's likeliest token; "distil": its
            likeliest tokens by their probabilities. The latter two take the text where the target was not asked. For
            WHOLE see `whole_cross_entropy`.
    """
    known = (top_ids[:, :1] != UNKNOWN) if top_ids.shape[1] else torch.zeros_like(labels[:, None], dtype=torch.bool)
    if objective == "text" or not top_ids.shape[1]:
        return labels[:, None], torch.ones_like(labels[:, None], dtype=torch.float)
    if objective == "argmax":
        return torch.where(known, top_ids[:, :1], labels[:, None]), torch.ones_like(top_logp[:, :1])
    p = top_logp.softmax(-1).where(known, 0.0)
    return torch.cat([labels[:, None], top_ids], 1), torch.cat([(~known).float(), p], 1)


def whole_cross_entropy(
    logits: Float[Tensor, "n vocab"],
    said: Float[Tensor, "m vocab"],
    weights: Float[Tensor, " n"],
    rows: Int[Tensor, " n"] | None = None,
) -> Float[Tensor, ""]:
    """Sum of the cross-entropies against the target's distributions, with weights.

    Args:
        said: the target's logits.
        rows: which of `said` each of `logits` is to be like; None: the same one.
    """
    loss: Tensor = _WholeCrossEntropy.apply(logits, said, weights, rows)  # type: ignore[no-untyped-call]
    return loss


class _WholeCrossEntropy(torch.autograd.Function):
    """Loss and gradient of some rows at a time, which the caches hold: nothing else as large as the logits is made."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, said: Tensor, weights: Tensor, rows: Tensor | None) -> Tensor:
        gradient, total = torch.empty_like(logits), torch.zeros((), device=logits.device)
        some = max(1, AT_A_TIME // logits.shape[1])
        for at in range(0, len(logits), some):
            part = slice(at, at + some)
            target = said[part if rows is None else rows[part]].float().softmax(1)
            found, weight = logits[part].float().log_softmax(1), weights[part, None]
            total -= (weight * target * found).sum()
            gradient[part] = found.exp_().sub_(target).mul_(weight)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * of_loss, None, None, None


def soft_cross_entropy(
    logits: Float[Tensor, "n vocab"], outputs: Int[Tensor, "n m"], weights: Float[Tensor, "n m"]
) -> Float[Tensor, ""]:
    """Sum of the cross-entropies against labels with weights; outputs of IGNORE do not count."""
    logits = logits.float()
    weights = weights.where(outputs != IGNORE, 0.0)
    chosen = logits.gather(1, outputs.clamp(min=0))
    return (weights.sum(1) * logits.logsumexp(1)).sum() - (weights * chosen).sum()
