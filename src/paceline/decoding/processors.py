"""Logits processors: which of them a request has, and which can score the nodes of a tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from paceline.decoding.penalties import LogitBias, OutputPenalty

if TYPE_CHECKING:
    import torch

LEAST = 1e-6  # temperature: scores over less might be infinite

#: Processors that look at scores alone run once over all nodes; every other one gets each node's own history.
HISTORY_FREE = (
    hf.TemperatureLogitsWarper,
    hf.TopKLogitsWarper,
    hf.TopPLogitsWarper,
    hf.MinPLogitsWarper,
    hf.TypicalLogitsWarper,
    hf.EpsilonLogitsWarper,
    hf.EtaLogitsWarper,
    hf.LogitNormalization,
    hf.InfNanRemoveLogitsProcessor,
    hf.SuppressTokensLogitsProcessor,
    LogitBias,
)

#: Processors with state of their own, or a second model run, advance by one token a call: no tree can honour them.
REFUSED = (hf.UnbatchedClassifierFreeGuidanceLogitsProcessor, hf.SynthIDTextWatermarkLogitsProcessor)


def temperature_of(processors: Sequence[Any]) -> float | None:
    """What logits are divided by, where these do nothing else."""
    warmer = processors[0] if len(processors) == 1 else None
    return warmer.temperature if type(warmer) is hf.TemperatureLogitsWarper else None


def make_processors(params: Any, prompt_length: int, eos: Sequence[int], device: torch.device) -> LogitsProcessorList:
    """Those of `SamplingParams`, in the order in which transformers' `generate` applies them; others come
    first.
    """
    chosen = LogitsProcessorList()
    if params.logit_bias:
        chosen.append(LogitBias(params.logit_bias, device))
    if params.presence_penalty or params.frequency_penalty:
        chosen.append(OutputPenalty(prompt_length, params.presence_penalty, params.frequency_penalty))
    if params.repetition_penalty != 1:
        chosen.append(hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
    if params.no_repeat_ngram_size:
        chosen.append(hf.NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.min_new_tokens and eos:
        chosen.append(
            hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_new_tokens, list(eos), device=str(device))
        )
    if params.temperature not in (0, 1):  # below the least one nothing but the likeliest token is left anyway
        chosen.append(hf.TemperatureLogitsWarper(max(params.temperature, LEAST)))
    if params.temperature and params.top_k:
        chosen.append(hf.TopKLogitsWarper(params.top_k))
    if params.temperature and params.top_p < 1:
        chosen.append(hf.TopPLogitsWarper(params.top_p))
    if params.temperature and params.min_p:
        chosen.append(hf.MinPLogitsWarper(params.min_p))
    return chosen
