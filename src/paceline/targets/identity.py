"""Which model this is: the name its files are stored under, and its fingerprint, what a few tokens become in it.

A trained head carries the fingerprint of the model it is for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.targets import store
from paceline.targets.span import Span

if TYPE_CHECKING:
    from paceline.targets.target import Target

TOKENS = 8
TOLERANCE = 2e-3  # relative error: what orders of summation explain, and no more
HALF_TOLERANCE = 0.1  # where one of the two computed in bfloat16, float16 or int8


def model_key(target: Target) -> str:
    """The model's name as a file name; for a named model its entry in the cache, which pins the weights."""
    return store.entry_name(target.name)


@torch.inference_mode()
def probe(target: Target, start: int) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of fixed tokens after the first `start` layers and the last one run right after these, with
    the precision that the products were computed in.

    Training has no other layers at hand, so a model cut down to these gives the same.
    """
    cache, span = target.new_cache(1, TOKENS), _fixed_tokens(target)
    hidden = target.layers(target.embed(span), span, cache, 0, start)
    last = target.num_layers - 1
    return target.layers(hidden, span, cache, last, last + 1)[0].to(_precision(target)).cpu()


@torch.inference_mode()
def probe_features(target: Target) -> Float[Tensor, "tokens hidden"]:
    """What the final norm makes of fixed tokens after all layers, with the precision of the products."""
    cache, span = target.new_cache(1, TOKENS), _fixed_tokens(target)
    features = target.features(target.layers(target.embed(span), span, cache, 0, target.num_layers))
    return features[0].to(_precision(target)).cpu()


def _precision(target: Target) -> torch.dtype:
    """Of a probe: what its products have, about."""
    return torch.bfloat16 if target.compute_dtype == torch.int8 else target.compute_dtype


def _fixed_tokens(target: Target) -> Span:
    ids = torch.arange(1, TOKENS + 1, device=target.device)[None] * target.vocab_size // (TOKENS + 1)
    return Span(ids, np.zeros(1, dtype=np.int64))


def is_same(seen: Tensor, wanted: Tensor) -> bool:
    """Whether two probes are of the same weights."""
    if seen.shape != wanted.shape:
        return False
    tolerance = TOLERANCE if min(seen.itemsize, wanted.itemsize) >= 4 else HALF_TOLERANCE
    seen, wanted = seen.double(), wanted.double()
    return bool(((seen - wanted).norm(dim=-1) < tolerance * wanted.norm(dim=-1)).all())
