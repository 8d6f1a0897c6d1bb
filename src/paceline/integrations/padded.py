"""A row of transformers' padded batch on its own: what the batch's processors and stopping criteria mean for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as hf
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from paceline.decoding.processors import HISTORY_FREE, REFUSED


@dataclass(frozen=True)
class BatchRow:
    """Row `index` of `batch`, and the padding left of its prompt, which processors and criteria expect to see: they
    count lengths with it.
    """

    index: int
    batch: int
    padding: Int[Tensor, " pads"]

    def pad(self, ids: Int[Tensor, "nodes length"]) -> Int[Tensor, "nodes padded_length"]:
        return torch.cat([self.padding.to(ids).expand(len(ids), -1), ids], dim=1)

    def processors(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """The batch's processors for this row alone, taking histories without padding."""
        return LogitsProcessorList([self._processor(processor) for processor in processors])

    def _processor(self, processor: Any) -> Any:
        if type(processor) in HISTORY_FREE or isinstance(processor, REFUSED):  # a user's subclass may look at histories
            return processor
        own = self._own(processor)
        return partial(self._on_padded, own) if len(self.padding) else own

    def _on_padded(self, processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
        processed: Tensor = processor(self.pad(ids), scores)
        return processed

    def _own(self, processor: Any) -> Any:
        """Processors that hold something for each row of the batch keep this row's."""
        match processor:
            case hf.RepetitionPenaltyLogitsProcessor(prompt_ignore_length=Tensor() as lengths):
                return _with(processor, prompt_ignore_length=int(lengths[self._of(lengths)]))
            case hf.EncoderRepetitionPenaltyLogitsProcessor(encoder_input_ids=ids):
                return _with(processor, encoder_input_ids=ids[[self._of(ids)]])
            case hf.EncoderNoRepeatNGramLogitsProcessor(generated_ngrams=ngrams):
                return _with(processor, generated_ngrams=[ngrams[self._of(ngrams)]], batch_size=1)
            case hf.PrefixConstrainedLogitsProcessor(_prefix_allowed_tokens_fn=allowed):
                return hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(self.index, ids), 1)
        return processor

    def _of(self, entries: Any) -> int:
        """Which entry is this row's: of `num_return_sequences` rows of one prompt there may be one for all."""
        return self.index * len(entries) // self.batch


class Stopping:
    """The batch's stopping criteria, asked row by row after every token.

    As in transformers, a row that has stopped is padded while others go on if there is an end-of-sequence criterion;
    without one all rows go on together until each has met its criteria.

    Args:
        batch: rows.
        prompt: tokens of each, padding included.

    Attributes:
        max_length: of prompt (padding included) and output.
        eos: end-of-sequence ids.
        pads: whether rows stop on their own.
    """

    def __init__(self, criteria: StoppingCriteriaList, batch: int, prompt: int) -> None:
        longest = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        self.max_length = max(longest, prompt + 1)  # criteria are asked after a token, so there is always one
        self.eos = {int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id}
        self.pads = any(hasattr(c, "eos_token_id") for c in criteria)
        self.batch = batch
        others = [c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
        self._criteria = StoppingCriteriaList(others)
        self._met: dict[int, int] = {}  # row -> length at which it first met its criteria

    def row(self, row: BatchRow) -> Callable[[Tensor, Any], Tensor] | None:
        """For `Request(stop_when=...)`."""
        return partial(self._stop, row) if self._criteria else None

    def length(self) -> int:
        """How long the rows have become together; a row may have been drafted further."""
        return max(self._met.values()) if len(self._met) == self.batch else self.max_length

    def _stop(self, row: BatchRow, ids: Int[Tensor, "1 length"], scores: None) -> Tensor:
        ids = row.pad(ids.to(row.padding.device))
        if row.index not in self._met and _any(self._criteria(ids, scores)):
            self._met[row.index] = ids.shape[1]
        if self.pads:
            return torch.tensor(row.index in self._met)
        return torch.tensor(len(self._met) == self.batch and ids.shape[1] >= self.length())


def _any(met: bool | Iterable[bool]) -> bool:
    return bool(torch.as_tensor(met).any())


def _with(processor: Any, **attributes: Any) -> Any:
    own = copy.copy(processor)
    vars(own).update(attributes)
    return own
