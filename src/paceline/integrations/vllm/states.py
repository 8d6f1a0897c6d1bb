"""Hidden states of vLLM's model, and the guide of `trigram` that reads them.

vLLM gives a proposer its model once, and no states. What its output layer is given are those of the tokens that are
verified and no others, request by request: a hook of torch's on that layer keeps them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from paceline.drafters.trigram.drafter import Trigram
from paceline.errors import CheckpointMismatch, OptionError, first_line, require
from paceline.files import at_home
from paceline.registry import AUTO

if TYPE_CHECKING:
    from paceline.drafters.trigram.guide import Guide
    from paceline.drafters.trigram.guided import LibraryGuide, TokenRows
    from paceline.drafting.base import Drafter

LEAST = 1e-6  # weights of a norm below this leave nothing of a state's dimension

log = logging.getLogger("paceline")


class States:
    """The states of one engine's requests, as guides read them: what leaves the last layer, of root mean square 1.

    Args:
        model: vLLM's. Its final norm must be one by the root mean square.

    Raises:
        OptionError: it has none, or no output layer that can be watched.
    """

    def __init__(self, model: Any) -> None:
        norm, layer, weight = _part(model, "model.norm"), _part(model, "logits_processor"), _matrix(model, "lm_head")
        with torch.no_grad():
            ones = norm(torch.ones(1, weight.shape[1], dtype=weight.dtype, device=weight.device))[0].float()
        require(bool(ones.abs().max() > LEAST), "it reads states before a norm by the root mean square")
        self._scale = torch.where(ones.abs() > LEAST, 1 / ones, 0.0)
        self._kept: Float[Tensor, "tokens hidden"] | None = None
        layer.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, _layer: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._kept = named["hidden_states"] if "hidden_states" in named else given[1]

    def of(self, widths: Sequence[int], accepted: Sequence[int]) -> Float[Tensor, "rows hidden"] | None:
        """Of each row the state that its last new token was told by; None where these are not the states of this step.

        Args:
            widths: tokens that vLLM read the output of, row by row: the last one, and its draft.
            accepted: how many of each row's draft were right.
        """
        kept, self._kept = self._kept, None
        if kept is None or len(kept) != sum(widths):  # vLLM left out drafts, or has read a prompt's output meanwhile
            return None
        ends = np.cumsum([0, *widths[:-1]]) + accepted
        return (kept[torch.from_numpy(ends).to(kept.device)].float() * self._scale).cpu()


def guided(drafter: Drafter, name: str, vocab: int, model: Any) -> States | None:
    """Give the guides that a method's drafters wait for what they need of vLLM's model; None where there are none.

    Args:
        name: of the model, which a guide of "auto" was made for.
        vocab: tokens.

    Raises:
        PacelineError: the guide that is named is not there, or is for another model, or cannot read this one. Where
            one of "auto" cannot, a warning says why.
    """
    states = None
    for part in drafter.parts or [drafter]:
        if not isinstance(part, Trigram) or part.awaits is None:
            continue
        try:
            guide = _guide(part.awaits, part.lookup.native, name, vocab, model)
            states = states or States(model)
            part.lookup.guide = guide
        except Exception as error:  # also of a model's module that is none of those that are known
            if part.awaits != AUTO:
                raise
            log.warning("vLLM: trigram goes without its guide: %s", first_line(error))
    return states


def _guide(wanted: str, native: bool, name: str, vocab: int, model: Any) -> LibraryGuide:
    try:
        from paceline.drafters.trigram.guided import LibraryGuide
    except ModuleNotFoundError as error:
        raise OptionError(f"it needs a package that is not there: pip install {error.name}") from None
    rows = _rows(model, vocab)
    require(native, "it runs in the native tier's library, which cannot be built here")
    made, hidden = _found(wanted, name), _matrix(model, "lm_head").shape[1]
    if made.config.hidden != hidden:
        raise CheckpointMismatch(
            f"it was made for {made.config.target}, whose states have {made.config.hidden} numbers, not {hidden}"
        )
    return LibraryGuide(made, rows)


def _found(guide: str, name: str) -> Guide:
    """Which guide: by its folder, or by the name of the model. Its fingerprint is not compared: that takes a pass."""
    from types import SimpleNamespace

    from paceline.drafters.trigram.guide import Guide

    folder = Guide.find(SimpleNamespace(name=name)) if guide == AUTO else at_home(guide)  # type: ignore[arg-type]
    return Guide.load(folder)


def _rows(model: Any, vocab: int) -> TokenRows:
    """All of them: where several processes have parts of a matrix, they exchange these, all processes at once."""
    from paceline.drafters.trigram.guided import Rows, TokenRows

    output, embedding = _matrix(model, "lm_head"), _matrix(model, "model.embed_tokens")
    scale, tied = float(getattr(model.logits_processor, "scale", 1.0)), output is embedding

    def rows_of(matrix: Float[Tensor, "rows hidden"], scale: float = 1.0) -> Rows:
        if len(matrix) < vocab:
            from vllm.distributed import tensor_model_parallel_all_gather

            matrix = tensor_model_parallel_all_gather(matrix, dim=0)
        return lambda ids: matrix[ids.to(matrix.device)].detach().float().cpu() * scale

    # How long a row of the embeddings is does not count.
    return TokenRows(vocab, rows_of(output, scale), None if tied and scale == 1 else rows_of(embedding))


def _matrix(model: Any, path: str) -> Float[Tensor, "rows hidden"]:
    """The weights of a module that has a row a token. Raises OptionError where vLLM does not keep these as they are."""
    weight = getattr(_part(model, path), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise OptionError(f"it needs the rows of '{path}', and vLLM has them packed, or in another process")
    return weight


def _part(model: Any, path: str) -> Any:
    """A module by its name. Raises OptionError where the model has none."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        raise OptionError(f"it cannot read {type(model).__name__}, which has no '{path}'") from None
