"""Proof that a target gives what its model gives: made whenever a model is loaded, by a few tokens in a few passes.

Layers that are called one by one, or kernels that read weights, leave out whatever else a model does: a forward of its
own, a hook around the decoder, positions that it works out by itself. So the model itself reads three short texts, the
target reads them in the ways the engine does, and the logits are compared. What may differ is judged by the model's own
noise: the same texts, read by the model in two passes instead of one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.errors import ModelError, UnsupportedModel, first_line
from paceline.targets.layout import cache_argument, takes_positions
from paceline.targets.placing import device_of, rounds_activations
from paceline.targets.span import Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from paceline.targets.cache import KVCache
    from paceline.targets.target import Target

LEAD = 40  # tokens before each text where there are windows: more than a window's ring of slots has
LENGTH = 12  # tokens of a text
SHARED = 5  # with which the first two texts begin: what is in the cache, and the root of the tree
SECOND = 7  # tokens of the third text that are in the cache
FILLERS = 16  # siblings that put the last branch's slots far from its positions
PATH = 3  # nodes below the root of the branch that is accepted
SPLIT = 6  # where the model's own second reading is cut in two

FACTOR = 8.0  # a target may differ by this many times the model's own noise
FLOOR = 8.0  # and by this many units of rounding of its type, or float32's: sums over keys in other slots are others
TOO_NOISY = 0.3  # a model that far from itself has no output to keep to
KERNELS = 1e-3  # what other kernels may differ by, in float32
#: And in half precision, where they round elsewhere, in units of what rounding explains: most nodes, and any of them.
#: Of 30 layers in bfloat16 seen 0.8 and 2.7, and 2.7 and 6.0 where scores are scaled by 1.25 or angles by 1.2.
TYPICAL, WORST = 2.0, 8.0
DRAWS = 3  # of other tokens, before a difference counts: a near tie between experts looks like one

log = logging.getLogger("paceline")


@dataclass(frozen=True)
class Witness:
    """What the model itself makes of the texts.

    Attributes:
        noise: relative difference between its reading them in one pass and in two; 0 where that was not asked for.
    """

    ids: Int[Tensor, "three lead+length"]
    logits: Float[Tensor, "three length vocab"]
    noise: float = 0.0


@torch.inference_mode()
def witness(
    model: PreTrainedModel, draw: int = 0, *, lead: int = 0, steps: bool = False, noise: bool = True
) -> Witness:
    """Three texts through the model itself; before a tier takes its weights over.

    Args:
        draw: of which tokens.
        lead: tokens before each text.
        steps: the second reading goes on token by token, as `generate` does.

    Raises:
        UnsupportedModel: it fails on them.
        ModelError: its logits are no numbers.
    """
    ids, at, cache = _texts(model, lead + LENGTH, draw), lead + SPLIT, cache_argument(model)
    try:
        # Of a large vocabulary many logits are much: what stands before the texts is not kept.
        logits = model(**_inputs(model, ids), use_cache=False).logits[:, lead:].clone()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(f"{_kind(model)} models do not run, in transformers: {first_line(error)}") from error
    if logits.isnan().any(-1).all():  # no tier is to blame
        name, kind = model.config.name_or_path or _kind(model), str(model.dtype).removeprefix("torch.")
        raise ModelError(f"{name} gives logits that are no numbers: its weights are damaged, or too large for {kind}")
    if not noise:
        return Witness(ids, logits)
    try:
        first = model(**_inputs(model, ids[:, :at]), use_cache=True)
        kept, step = {cache: getattr(first, cache)}, 1 if steps else LENGTH
        rest = (_inputs(model, ids[:, i : i + step], i) for i in range(at, ids.shape[1], step))
        again = [first.logits[:, lead:], *(model(**piece, use_cache=True, **kept).logits for piece in rest)]
        differences = _differences(torch.cat(again, 1), logits)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"{_kind(model)} models do not go on from a cache by several tokens, in transformers: {first_line(error)}"
        ) from error
    parts = differences.tensor_split([SPLIT], 1)
    return Witness(ids, logits, max(part.median(1).values.max().item() for part in parts))


def _inputs(model: PreTrainedModel, ids: Int[Tensor, "three width"], start: int = 0) -> dict[str, Tensor]:
    """Tokens from position `start` on, as `generate` gives them: RoBERTa's kin count otherwise if they are not told."""
    if not takes_positions(model):
        return {"input_ids": ids}
    return {"input_ids": ids, "position_ids": torch.arange(start, start + ids.shape[1], device=ids.device)[None]}


def _texts(model: PreTrainedModel, length: int, draw: int) -> Int[Tensor, "three length"]:
    """Tokens from all over the vocabulary, but none that means something of its own, such as an image's place."""
    config: Any = model.config
    named = {
        token
        for part in (config, config.get_text_config())
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index"))
        for token in (value if isinstance(value, list | tuple) else [value])
        if isinstance(token, int)
    }
    numbers = np.random.default_rng(draw)
    every = np.arange(min(config.get_text_config().vocab_size, 1 << 16))
    plain = np.setdiff1d(every, list(named))
    ids = torch.from_numpy(numbers.choice(plain if len(plain) else every, (3, length))).to(device_of(model))
    shared = length - LENGTH + SHARED
    ids[1, :shared] = ids[0, :shared]
    return ids


def _differences(got: Float[Tensor, "*nodes vocab"], want: Float[Tensor, "*nodes vocab"]) -> Float[Tensor, "*nodes"]:
    """By node, relative to how far its logits lie apart."""
    got, want = got.double(), want.double()
    ranges = (want - want.mean(-1, keepdim=True)).norm(dim=-1)
    relative: Tensor = (got - want).norm(dim=-1) / ranges.clamp(min=torch.finfo(torch.float32).tiny)
    return relative.nan_to_num(torch.inf)


def prove(target: Target) -> None:
    """Compare a target that runs its model's own modules with the model itself.

    Logs one line where the model's own passes differ by more than rounding, as those of LLM.int8 do.

    Raises:
        UnsupportedModel: the target gives other logits than the model, or the model's own passes differ widely.
    """
    if target.context < LENGTH:
        return  # the texts do not fit
    rounded = rounds_activations(target.model)
    floor = _rounding(torch.bfloat16 if rounded else target.dtype)
    lead = min(LEAD, target.context - LENGTH) if target.layout else 0
    for draw in range(DRAWS):
        seen = witness(target.model, draw, lead=lead, steps=target.chains_only)
        if seen.noise > TOO_NOISY:
            raise UnsupportedModel(
                f"{_kind(target.model)} models read a text in two passes otherwise than in one, in transformers "
                f"(logits differ by {seen.noise:.0%}): there is no output that drafts could be verified by"
            )
        differs = float(differences(target, seen).max())
        if differs <= max(floor, FACTOR * seen.noise):
            break
    else:
        raise UnsupportedModel(
            f"{_kind(target.model)} models do not honour paceline's cache, mask and positions (logits differ by "
            f"{differs:.1%}): drafts cannot be verified"
        )
    if rounded or seen.noise > floor:
        log.warning(
            "passes of %s differ from each other by more than its weights' rounding (%s): greedy text may differ from "
            "generate's, even without drafts",
            target.name,
            "activations are quantised" if rounded else f"logits by {seen.noise:.1%}",
        )


def check_agrees(target: Target, seen: Witness) -> None:
    """Compare a target that took the model's weights over with what the model made of the texts before.

    Raises:
        ModelError: it gives other logits. (The model is of no use any more, so no other tier can take its place.)
    """
    try:
        differs = differences(target, seen)
    except UnsupportedModel as error:
        raise ModelError(f"the {target.tier} tier cannot run {target.name}: {error}; use the reference tier") from error
    rounding, typical, worst = _rounding(seen.logits.dtype), float(differs.median()), float(differs.max())
    if not (typical <= max(TYPICAL * rounding, KERNELS) and worst <= max(WORST * rounding, KERNELS)):
        raise ModelError(
            f"the {target.tier} tier gives other logits than {target.name} itself (by {worst:.1%}): use the "
            "reference tier, and tell paceline's authors of this model"
        )


@torch.inference_mode()
def differences(target: Target, seen: Witness) -> Float[Tensor, " nodes"]:
    """Relative differences between what the model made of the texts and what the target makes of them, by node.

    The first two texts are branches of one tree, with many siblings between them; the third is another row of the
    batch, further on in its text. Then both rows go on after what was accepted. A target of chains reads the first
    text with a wrong token after it instead.

    Raises:
        UnsupportedModel: a pass fails.
    """
    lead = seen.ids.shape[1] - LENGTH
    before, ids, want = seen.ids[:, :lead].tolist(), seen.ids[:, lead:], seen.logits
    fillers = 0 if target.chains_only else FILLERS
    accepted, other = [0, *range(fillers + 1, fillers + PATH + 1)], [1, fillers + PATH + 1]
    done, behind = SHARED + PATH, SECOND + 2  # what of the first and third text is in the cache then
    cache = target.new_cache(2, lead + SECOND + FILLERS + PATH + 2)
    try:
        target.prefill(before[0] + ids[0, : SHARED - 1].tolist(), cache.rows(0, 1))
        target.prefill(before[2] + ids[2, :SECOND].tolist(), cache.rows(1, 2), chunk=SHARED)
        tree = _tree(ids, cache, accepted, other)
        if target.chains_only:
            tree = Span(tree.ids, tree.starts)
        # A model that asks for the cache's length gets one number for all rows and nodes: no position may come of it.
        tree.seen = max(min(target.context, 1 << 20) - tree.width, 0)
        drafted = target.forward(tree, cache).logits
        cache.commit([accepted, [0, 1]])
        rest = torch.stack([ids[0, done:], torch.cat([ids[2, behind:], ids[2, : behind - done]])])
        last = target.forward(Span(rest, cache.lengths.copy()), cache).logits
    except (UnsupportedModel, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(f"{_kind(target.model)} models cannot run token trees: {first_line(error)}") from error
    pairs = [
        (drafted[0, accepted], want[0, SHARED - 1 : done]),
        (drafted[0, other], want[1, SHARED : SHARED + 2]),
        (drafted[1, :2], want[2, SECOND:behind]),
        (last[0], want[0, done:]),
        (last[1, : LENGTH - behind], want[2, behind:]),
    ]
    if target.chains_only:
        del pairs[1]
    return torch.cat([_differences(got, truth) for got, truth in pairs])


def _tree(ids: Tensor, cache: KVCache, accepted: list[int], other: list[int]) -> Span:
    """The first text's tokens at the nodes `accepted`, the second's at `other`, siblings between; and the third's
    root with one node, padded.
    """
    width = other[1] + 1
    parents = [0] * width
    parents[other[1]] = other[0]
    for parent, node in pairwise(accepted):
        parents[node] = parent
    nodes = torch.stack([ids.flatten()[:width], ids[2, SECOND - 1 :].repeat(width)[1 : width + 1]])
    nodes[0, other], nodes[0, accepted] = ids[1, SHARED : SHARED + 2], ids[0, SHARED - 1 : SHARED + PATH]
    seen, depths = torch.zeros(2, width, width, dtype=torch.bool), torch.zeros(2, width, dtype=torch.long)
    for row, above in enumerate((parents, [0] * width)):
        for node in range(width):
            if node:
                seen[row, node], depths[row, node] = seen[row, above[node]], depths[row, above[node]] + 1
            seen[row, node, node] = True
    return Span(nodes, cache.lengths.copy(), 0, depths.to(ids.device), seen.to(ids.device))


def _rounding(dtype: torch.dtype) -> float:
    """What a type's rounding explains: 5e-5 for float32, 0.06 for bfloat16. Norms and angles are float32 everywhere."""
    return max(FLOOR * torch.finfo(dtype).eps, 5e-5)


def _kind(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config().model_type)
