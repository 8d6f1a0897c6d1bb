"""paceline inside transformers: `model.generate(**inputs, custom_generate=paceline.custom_generate(...))`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Int
from torch import LongTensor, Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode

from paceline.api import LLM, check_tokenizer, load, parse_method
from paceline.decoding.request import Request, check_verifier
from paceline.errors import OptionError, require
from paceline.integrations.caller import asked_of_generate, refuse_assistants
from paceline.integrations.padded import BatchRow, Stopping

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

    from paceline.decoding.stats import Stats
    from paceline.drafting.base import Drafter
    from paceline.targets import Target

#: What generate hands over besides the ids; paceline keeps a cache of its own and needs no `logits_to_keep`.
CACHES = ("past_key_values", "cache_params")  # the second of state-space models
UNDERSTOOD = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES}
TYPES = {"token_type_ids", "mm_token_type_ids"}  # 0 is text
#: Parts of a `GenerateDecoderOnlyOutput` that would need the model's plain, token-by-token passes.
NOT_RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class CustomGenerate:
    """A decoding loop for `model.generate(..., custom_generate=...)`: the same output, drafted and verified.

    generate prepares everything as ever - inputs, generation config, processors, stopping criteria - and this object
    decodes. It keeps what it built for the model it last ran on, so make it once and pass it to every call.

    Args:
        drafter, policy, verifier: as for `paceline.load`.
        tokenizer: for `generate(stop_strings=...)`, and for drafters that compare it with another.
        streamer: gets prompt and tokens of every call; so does the `streamer` that generate is given.

    Attributes:
        stats: of the last call, one a row.

    Raises:
        OptionError: here, for an unknown drafter, policy or option; from generate, for what cannot be honoured.
        UnsupportedModel: from generate, for a model that cannot verify drafts.
    """

    def __init__(
        self,
        drafter: str | Callable[[Target], Drafter] = "auto",
        policy: str | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: BaseStreamer | None = None,
        verifier: str = "auto",
    ) -> None:
        require(isinstance(drafter, str) or callable(drafter), f"a drafter is its name or a function, not {drafter!r}")
        if isinstance(drafter, str):
            parse_method(drafter, policy)
        check_verifier(verifier)
        check_tokenizer(tokenizer)
        self.drafter, self.policy, self.verifier = drafter, policy, verifier
        self.tokenizer, self.streamer = tokenizer, streamer
        self.stats: list[Stats] = []
        self._llm: LLM | None = None
        self._looked_at: object = None  # what of the model there was when it was loaded

    # generate takes parameters named here (other than `_sample`'s) from its own keywords before it prepares anything:
    # wanted for stop_strings, which it refuses without a tokenizer; attention_mask and the like must not be named.
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch length"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Int[Tensor, "batch longest"]:
        asked = asked_of_generate()
        refuse_assistants(asked, generation_config)
        own = None if self.streamer is asked.streamer else self.streamer
        streamers = [streamer for streamer in (own, asked.streamer) if streamer is not None]
        with _evaluating(model):
            llm = self._loaded(model)
            _refuse(model, input_ids, generation_config, model_kwargs)
            require(not streamers or len(input_ids) == 1, "a streamer takes one row, not a batch")
            criteria = StoppingCriteriaList([*stopping_criteria, *self._stop_strings(stop_strings)])
            stopping = Stopping(criteria, *input_ids.shape)
            pad = getattr(generation_config, "_pad_token_tensor", None)
            require(
                len(input_ids) == 1 or not stopping.pads or pad is not None,
                "rows that end early need a padding token: set pad_token_id",
            )
            requests = [
                self._request(llm, row, ids, logits_processor, stopping, bool(generation_config.do_sample))
                for row, ids in _rows(input_ids, model_kwargs.get("attention_mask"))
            ]
            if own is not None:  # generate has put the prompt into its own
                own.put(input_ids.cpu())
            _run(llm, requests, streamers)
        self.stats = [request.stats for request in requests]
        new = stopping.length() - input_ids.shape[1]
        outputs = [torch.tensor(request.output[:new]) for request in requests]
        padded = pad_sequence(outputs, batch_first=True, padding_value=0 if pad is None else int(pad))
        sequences = cast("LongTensor", torch.cat([input_ids, padded.to(input_ids)], dim=1))
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)
        return sequences

    def _loaded(self, model: PreTrainedModel) -> LLM:
        seen = _parts(model)
        if self._llm is None or self._llm.target.model is not model or self._looked_at != seen:
            self._llm = load(
                model, drafter=self.drafter, policy=self.policy, tokenizer=self.tokenizer, verifier=self.verifier
            )
            self._looked_at = seen
        return self._llm

    def _request(
        self,
        llm: LLM,
        row: BatchRow,
        ids: list[int],
        processors: LogitsProcessorList,
        stopping: Stopping,
        sampling: bool,
    ) -> Request:
        own = row.processors(processors)
        return Request(
            ids,
            limit=stopping.max_length - len(row.padding) - len(ids),
            policy=llm.new_policy(plain=not (sampling or own)),
            processors=own,
            sampling=sampling,
            eos=tuple(stopping.eos),
            stop_when=stopping.row(row),
            seed=None if sampling else 0,  # None: drawn from torch's generator, so torch.manual_seed decides
            verifier=llm.verifier,
        )

    def _stop_strings(self, stop_strings: str | Sequence[str] | None) -> list[StopStringCriteria]:
        if not stop_strings:
            return []
        if self.tokenizer is None:
            raise OptionError("stop_strings need a tokenizer: custom_generate(tokenizer=...)")
        strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
        return [StopStringCriteria(self.tokenizer, strings)]


def _run(llm: LLM, requests: list[Request], streamers: Sequence[BaseStreamer]) -> None:
    sent = 0
    for request in llm.engine.run(requests):
        output = request.output
        for streamer in streamers:  # then there is one request
            for token in output[sent:]:
                streamer.put(torch.tensor([token]))
        sent = len(output)
    for streamer in streamers:
        streamer.end()


custom_generate = CustomGenerate  # lower case as generate's argument is


def _refuse(model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raise OptionError for what generate was asked for and this loop would not do."""
    require(
        "prepare_inputs_for_generation" not in vars(model),
        "custom_generate cannot decode a model whose inputs something else prepares, such as PEFT's prompt learning",
    )
    mode = config.get_generation_mode()
    require(
        mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        f"custom_generate decodes greedily or by sampling, not by {mode.value.replace('_', ' ')}",
    )
    asked = [name for name in NOT_RETURNED if config.return_dict_in_generate and getattr(config, name)]
    require(not asked, f"custom_generate cannot return what {', '.join(asked)} asks for")
    for name in CACHES:
        require(not _filled(model_kwargs.get(name)), f"custom_generate cannot go on from filled {name}")
    require(
        config.cache_implementation in (None, "dynamic", "dynamic_full", "static"),
        f"custom_generate keeps a cache of its own; it has no cache_implementation '{config.cache_implementation}'",
    )
    unknown = [
        name for name, value in model_kwargs.items() if name not in UNDERSTOOD and not _says_nothing(name, value)
    ]
    require(not unknown, f"custom_generate cannot pass {', '.join(unknown)} to the model")
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    require(
        seen.shape == input_ids.shape and bool((seen[:, 1:] >= seen[:, :-1]).all() and seen[:, -1].all()),
        "custom_generate needs prompts padded on the left: tokenizer.padding_side = 'left'",
    )
    own = seen.long().cumsum(1) - 1
    require(
        positions is None or bool((positions.expand_as(own) == own)[seen].all()),
        "custom_generate numbers positions from the first token; it cannot take other position_ids",
    )


def _filled(cache: Any) -> bool:
    """Whether a cache of transformers has read something; one of states alone counts no tokens."""
    layers, has_states = getattr(cache, "layers", ()), getattr(cache, "has_previous_state", None)
    if has_states and layers and all(hasattr(layer, "has_previous_state") for layer in layers):
        return bool(has_states())
    return cache is not None and cache.get_seq_length() > 0


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an input of the model is as good as none: what multimodal models get with a text."""
    if isinstance(value, Tensor) and name in TYPES:
        return not value.any()
    return value is None or (isinstance(value, Sized) and not isinstance(value, Tensor) and len(value) == 0)


def _parts(model: PreTrainedModel) -> object:
    """What a target or a drafter may have kept of a model, to see whether one was replaced: all its modules, and what a
    call of it passes through before its layers, and after: forwards that were replaced, and hooks. Modules are equal
    only to themselves; some are resized where they are.
    """
    vocab = getattr(model.config.get_text_config(), "vocab_size", None)
    facts = (model.dtype, model.device, model.config._attn_implementation, vocab)
    around = [
        (vars(part).get("forward"), type(part), [*part._forward_hooks], [*part._forward_pre_hooks])
        for part in (model, model.base_model)
    ]
    modules = [*model.named_modules(remove_duplicate=False)]
    return facts, around, modules, [weight.shape for weight in model.parameters()]


def _rows(input_ids: Tensor, mask: Tensor | None) -> Iterator[tuple[BatchRow, list[int]]]:
    for index, ids in enumerate(input_ids):
        pads = 0 if mask is None else int((mask[index] == 0).sum())
        yield BatchRow(index, len(input_ids), ids[:pads]), ids[pads:].tolist()


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model in evaluation mode, and afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


__all__ = ["CustomGenerate", "custom_generate"]
