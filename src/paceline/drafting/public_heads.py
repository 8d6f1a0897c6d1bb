"""What heads in public layouts have in common: how to tell whether they fit a target, and which tokens they draft.

`lm_head` is the output matrix. Where the vocabulary is trimmed, `d2t` has what is added to an output's number to get
its token, and `t2d` which tokens have an output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.drafting.layouts import require_shapes
from paceline.drafting.output_rows import output_rows
from paceline.errors import CheckpointError, CheckpointMismatch
from paceline.targets.target import Target

EMBEDDING, OUTPUT, OFFSETS, MASK = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
COMPARED = 64  # tokens whose embeddings are compared
VERSION = "0.9.0"  # of the speculators format
TOLERANCE = 0.1  # relative error: what quantisation explains, and no more
SAME = 0.01  # relative error up to which an output matrix is the target's: what half precision explains


def require_fit(config: dict[str, Any], tensors: dict[str, Tensor], target: Target, title: str) -> None:
    """Raises CheckpointMismatch where hidden size or vocabulary are not the target's."""
    size, vocab = target.config.hidden_size, target.vocab_size
    fc = next((len(tensor) for name, tensor in tensors.items() if name == "fc.weight" and tensor.dim() == 2), size)
    for seen, wanted, what in (
        (config.get("hidden_size", fc), size, "hidden states of"),
        (fc, size, "hidden states of"),
        (config.get("vocab_size", vocab), vocab, "a vocabulary of"),
    ):
        if seen != wanted:
            raise CheckpointMismatch(f"the {title} is for {what} {seen}, {target.name} has {wanted}")


def require_same(
    name: str, tensor: Tensor, rows: Callable[[Target, Int[Tensor, " tokens"]], Tensor], target: Target, title: str
) -> None:
    """Raises CheckpointError or CheckpointMismatch unless a head's copy of a matrix is the target's, which `rows`
    gives.
    """
    require_shapes({name: tensor}, {name: (target.vocab_size, target.config.hidden_size)}, f"the {title}")
    ids = torch.linspace(0, target.vocab_size - 1, COMPARED).long()
    theirs, ours = tensor[ids].double(), rows(target, ids).double().cpu()
    if not (theirs - ours).norm() <= TOLERANCE * ours.norm():
        raise CheckpointMismatch(f"the {title} was made for another model than {target.name}: {name} differs")


def take_vocabulary(
    tensors: dict[str, Tensor], target: Target, title: str
) -> tuple[Int[Tensor, " vocab"] | None, Float[Tensor, "vocab hidden"] | None]:
    """Ids of the tokens that can be drafted (None: all), ascending, and the head's own output matrix (None: it is the
    target's). Takes their tensors out.

    Raises:
        CheckpointError: they are misshaped, or contradict one another.
    """
    output, offsets, mask = (tensors.pop(name, None) for name in (OUTPUT, OFFSETS, MASK))
    every, of_head = target.vocab_size, offsets if output is None else output
    count = every if of_head is None or not of_head.dim() else len(of_head)
    shapes = {OUTPUT: (count, target.config.hidden_size), OFFSETS: (count,), MASK: (every,)}
    given = {OUTPUT: output, OFFSETS: offsets, MASK: mask}
    found = {name: tensor for name, tensor in given.items() if tensor is not None}
    wanted = {name: shapes[name] for name in (*found, *([OFFSETS] if count != every else []))}
    require_shapes(found, wanted, f"the {title}", ids=(OFFSETS, MASK))
    tokens = torch.arange(count) if offsets is None else torch.arange(count) + offsets.long()
    tokens, order = tokens.sort()
    repeated = bool((tokens.diff() <= 0).any())
    if repeated or not count or int(tokens[0]) < 0 or int(tokens[-1]) >= every:
        raise CheckpointError(f"the {title} drafts tokens that are not some of 0 .. {every - 1}, each once")
    if mask is not None and not torch.equal(mask.bool().nonzero()[:, 0], tokens):
        raise CheckpointError(f"the {title} contradicts itself: {MASK} marks other tokens than those of {OFFSETS}")
    if output is not None:
        output, theirs = output[order], output_rows(target, tokens).float().cpu()
        if (output.float() - theirs).norm() <= SAME * theirs.norm():
            output = None
        elif not output.isfinite().all():
            raise CheckpointError(f"the {title} has weights that are no numbers")
    return (None if output is None and count == every else tokens), output


def vocabulary_tensors(
    tokens: Int[Tensor, " vocab"] | None,
    matrix: Float[Tensor, "vocab hidden"] | None,
    target: Target,
    *,
    shared: bool,
) -> dict[str, Tensor]:
    """What `take_vocabulary` reads.

    Args:
        tokens: that can be drafted; None: all.
        matrix: the head's own output matrix; None: it is the target's.
        shared: the program that reads it takes the target's matrix, where that is all of it.
    """
    if tokens is None and matrix is None and shared:
        return {}
    matrix = output_rows(target, tokens) if matrix is None else matrix
    if tokens is None or len(tokens) == target.vocab_size:
        return {OUTPUT: matrix}
    ids = tokens.cpu()
    mask = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {OUTPUT: matrix, OFFSETS: ids - torch.arange(len(ids)), MASK: mask}


def speculators_config(
    kind: str, architecture: str, layers: dict[str, Any], target: Target, drafted: int
) -> dict[str, Any]:
    """What every configuration in the speculators format has.

    Args:
        layers: the configuration of the head's layers.
        drafted: tokens a round that it recommends.
    """
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafted,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "dtype": layers["dtype"],
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {
                "name_or_path": target.name,
                "architectures": getattr(target.config, "architectures", None) or [],
            },
        },
    }
