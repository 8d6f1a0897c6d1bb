"""Self-distillation: the target itself writes the text that drafters learn from (EESD, section 3.2).

Its hybrid strategy: the first tokens of an answer are the likeliest ones, the rest is sampled, so that texts are sound
and varied. What the target thought at every token (its most likely tokens and their probabilities) is kept: it comes
free while generating, and makes distillation possible later without running the target again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from paceline.decoding.request import Request
from paceline.errors import require
from paceline.training.data.samples import GENERATED, PROMPT, Sample

if TYPE_CHECKING:
    from paceline.api import LLM
    from paceline.training.data.prompts import Conversation


@dataclass(frozen=True)
class DistillConfig:
    """How text is made. Samples depend on this and the prompts, not on batches nor on how processes share the work.

    Args:
        greedy_tokens: first tokens of each answer that are the likeliest ones (paper: 3 to 5).
        temperature: of the rest; 0: all greedy.
        max_new_tokens: longest answer.
        max_length: longest sample; a turn that might not fit is left out, and those after it.
        top: most likely tokens to keep at each position.
        text_share: share of open text among the tokens to be learnt.
        group: conversations a shard, the unit of work.
        seed: of order, sampling and choice of text.
    """

    greedy_tokens: int = 4
    temperature: float = 0.7
    max_new_tokens: int = 256
    max_length: int = 1024
    top: int = 8
    text_share: float = 0.0
    group: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        require(self.greedy_tokens >= 0, f"greedy_tokens must be >= 0, not {self.greedy_tokens}")
        require(self.temperature >= 0, f"temperature must be >= 0, not {self.temperature}")
        require(self.max_new_tokens >= 1, f"max_new_tokens must be >= 1, not {self.max_new_tokens}")
        require(self.max_length > self.max_new_tokens, "max_length must exceed max_new_tokens, as prompts count too")
        require(self.top >= 0, f"top must be >= 0, not {self.top}")
        require(0 <= self.text_share < 1, f"the share of open text must lie in [0, 1), not {self.text_share}")
        require(self.group >= 1, f"group must be >= 1, not {self.group}")


class HybridSampling(LogitsProcessor):
    """Greedy for the first tokens, then sampled at a temperature; notes the model's own distribution on the way.

    For requests without drafts, whose every call is one output token.
    """

    def __init__(self, prompt_length: int, config: DistillConfig) -> None:
        self.prompt_length, self.config = prompt_length, config
        self.top: list[tuple[list[int], list[float]]] = []

    def __call__(
        self, input_ids: Int[Tensor, "1 tokens"], scores: Float[Tensor, "1 vocab"]
    ) -> Float[Tensor, "1 vocab"]:
        if self.config.top:
            best = scores.topk(self.config.top)
            logp = best.values - scores.logsumexp(-1, keepdim=True)
            self.top.append((best.indices[0].tolist(), logp[0].tolist()))
        if input_ids.shape[1] - self.prompt_length < self.config.greedy_tokens:
            return torch.full_like(scores, -torch.inf).scatter(1, scores.argmax(1, keepdim=True), 0.0)
        return scores / self.config.temperature if self.config.temperature else scores


class Draft:
    """A conversation while its answers are written.

    Attributes:
        samples: normally one. Where the chat template writes an answer another way than the model did (other tokens for
            the same text), the tokens that the model saw and wrote stay as a sample, and the rest becomes another.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.turns, self.raw = list(conversation.turns), conversation.raw
        self.messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        self.samples: list[Sample] = []

    def next_prompt(self, llm: LLM) -> list[int]:
        """Token ids of all that was said, up to the next turn."""
        self.messages.append({"role": "user", "content": self.turns.pop(0)})
        if not self.raw and llm.tokenizer.chat_template:
            return llm.encode(self.messages)
        return llm.encode("\n\n".join(message["content"] for message in self.messages), chat=False)

    def answered(self, request: Request, top: list[tuple[list[int], list[float]]], text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})
        length = request.prompt_length
        if not self.samples or request.ids[: len(self.samples[-1].ids)] != self.samples[-1].ids:
            self.samples.append(Sample([], []))
        sample = self.samples[-1]
        sample.mask += [PROMPT] * (length - len(sample.ids)) + [GENERATED] * (len(request.ids) - length)
        sample.ids = request.ids
        sample.top |= {length + index: best for index, best in enumerate(top)}


class SelfDistillation:
    """Generates with an `LLM` without drafter.

    Args:
        batch: answers written at a time.
    """

    def __init__(self, llm: LLM, config: DistillConfig, batch: int = 8) -> None:
        require(batch >= 1, f"batch must be >= 1, not {batch}")
        require(config.top <= llm.target.vocab_size, f"top must not exceed the vocabulary of {llm.target.vocab_size}")
        self.llm, self.config, self.batch = llm, config, batch
        self.room = min(config.max_length, llm.target.context) - config.max_new_tokens

    def run(self, conversations: Sequence[Conversation], count: Callable[[int], None]) -> list[Sample]:
        """The samples of some conversations, in their order; `count` is told of every new token."""
        drafts = [Draft(conversation) for conversation in conversations]
        going = drafts
        while going:
            asked = [(draft.next_prompt(self.llm), draft) for draft in going]
            pairs = [(self._request(ids), draft) for ids, draft in asked if len(ids) <= self.room]
            pairs.sort(key=lambda pair: pair[0].prompt_length)  # rows of one length read the same part of the cache
            for _ in self.llm.engine.run([request for request, _ in pairs], self.batch):
                count(1)
            for request, draft in pairs:
                noted: Any = request.processors.processors[0]
                text = self.llm.tokenizer.decode(request.output, skip_special_tokens=True)
                draft.answered(request, noted.top, str(text))
            going = [draft for _, draft in pairs if draft.turns]
        return [sample for draft in drafts for sample in draft.samples]

    def _request(self, ids: list[int]) -> Request:
        self.llm.target.check_ids(ids)
        return Request(
            ids,
            limit=self.config.max_new_tokens,
            policy=self.llm.new_policy(),
            processors=LogitsProcessorList([HybridSampling(len(ids), self.config)]),
            sampling=self.config.temperature > 0,
            eos=self.llm.target.eos,
            seed=_seed(self.config.seed, ids),
        )


def _seed(seed: int, ids: list[int]) -> int:
    """A seed of the prompt's own: what stands beside it, and in which process, makes no difference."""
    return int.from_bytes(hashlib.sha256(f"{seed} {ids}".encode()).digest()[:6])
