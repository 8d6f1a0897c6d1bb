"""How often a drafter's drafts would be accepted: simulated on text that the target wrote, without running it again."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from paceline.training.data.samples import UNKNOWN

CHAIN = 5  # positions of a draft whose acceptance is reported
COUNTS = 2 * CHAIN + 4


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


def draft_counts(right: Bool[Tensor, "*rows n"], asked: Bool[Tensor, "*rows n"]) -> Int[Tensor, "2 CHAIN"]:
    """The same for drafts of n tokens that were made one by one, n at most CHAIN: a drafter that reads what it
    drafted itself is to be asked anew at every step.

    Args:
        right: whether the draft's token is that of the text.
        asked: whether the target wrote the token; False after the text's end.
    """
    there = asked.flatten(0, -2).cumprod(1)
    good = right.flatten(0, -2).cumprod(1) * there
    counts = there.new_zeros(2, CHAIN)
    counts[:, : right.shape[-1]] = torch.stack([good.sum(0), there.sum(0)])
    return counts


def tally(
    chains: Int[Tensor, "2 CHAIN"], best: Int[Tensor, " n"], top_ids: Int[Tensor, "n k"], loss: Float[Tensor, ""]
) -> Float[Tensor, " COUNTS"]:
    """What `figures` reads, and what adds up over batches: the chains, how many of a draft's first tokens (`best`) are
    the likeliest ones in the target's eyes (`top_ids`) and how many it was asked about, the loss and its labels.
    """
    wanted = top_ids[:, 0] if top_ids.shape[1] else torch.full_like(best, UNKNOWN)
    known = wanted != UNKNOWN
    rest = [((best == wanted) & known).sum(), known.sum(), loss, loss.new_tensor(len(best))]
    return torch.cat([chains.flatten().float(), torch.stack([number.float() for number in rest])])


def figures(counts: Float[Tensor, " COUNTS"], positions: int) -> dict[str, float]:
    """`accepted_n`, n = 1 .. `positions`: a greedy draft's first n tokens are all what the target wrote; `argmax`: the
    first one is what it found likeliest; `held_back_loss`.
    """
    hits, starts, (agreed, known, loss, labels) = counts[:CHAIN], counts[CHAIN : 2 * CHAIN], counts[2 * CHAIN : COUNTS]
    shares = hits / starts.clamp(min=1)
    found = {f"accepted_{n}": float(share) for n, share in enumerate(shares[:positions], start=1)}
    if known:
        found["argmax"] = float(agreed / known)
    if labels:
        found["held_back_loss"] = float(loss / labels)
    return found
