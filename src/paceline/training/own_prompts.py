"""Prompts that a chat model makes up itself (Magpie, Xu et al., 2024): behind all that its chat template writes before
a user's message, it writes one, of the kind that it was tuned on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from paceline.api import LLM, Output, Prompt
from paceline.errors import DataError, OptionError
from paceline.registry import require

MARK = "A message"  # stands where the user's will
TRIES = 4  # for every prompt that is wanted
GROUP = 8  # batches at a time: where one message ends another begins


def own_prompts(
    llm: LLM, count: int, *, temperature: float = 1.0, max_new_tokens: int = 256, batch: int = 16, seed: int = 0
) -> Iterator[str]:
    """Different prompts, which depend on the model and the seed alone. Messages without an end are left out, so what
    comes may be fewer than `count`.

    Args:
        temperature: above 0; the paper takes 1.
        max_new_tokens: longest prompt.
        batch: prompts written at a time.

    Raises:
        OptionError: the model has no chat template, or its template shows no end of a message.
        DataError: nothing that it wrote was a message.
    """
    require(temperature > 0, f"the temperature must be > 0, not {temperature}: else all prompts are the same")
    before, end = around_user(llm.tokenizer)
    starts: list[Prompt] = [before] * min(GROUP * batch, TRIES * count)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "eos": (end,)}
    found: dict[str, None] = {}
    for tried in range(0, TRIES * count, len(starts)):
        made = llm.generate(starts, batch=batch, seed=seed + tried, **how)
        assert isinstance(made, list)
        for text in filter(None, map(_message, made)):
            if text not in found:
                found[text] = None
                yield text
                if len(found) == count:
                    return
    if not found:
        raise DataError(f"in {TRIES * count} attempts the model wrote no message that ended: it may be no chat model")


def _message(output: Output) -> str:
    return output.text.strip() if output.finish_reason == "eos" else ""


def around_user(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """What the chat template writes before a user's message, and the first token behind it."""
    require(bool(tokenizer.chat_template), "this model's tokenizer has no chat template: it makes up no prompts")
    text = str(tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False))
    before, _, after = text.partition(MARK)
    behind = tokenizer.encode(after, add_special_tokens=False)
    if not before or not behind:
        raise OptionError("this model's chat template does not show where a user's message begins and ends")
    return tokenizer.encode(before, add_special_tokens=False), behind[0]
