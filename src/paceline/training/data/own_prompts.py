"""Prompts that a chat model makes up itself (Magpie, Xu et al., 2024): after all that its chat template writes before
a user's message, it writes one, of the kind that it was tuned on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import DataError, OptionError, require

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from paceline.api import LLM, Output, Prompt

MARK = "A message"  # stands where the user's will
TRIES = 4  # for every prompt that is wanted
GROUP = 8  # batches at a time: where one message ends another begins


class Place(NamedTuple):
    """Where a chat template puts a user's message.

    Attributes:
        before: token ids of all that comes first.
        end: the token after it; None: it is none that stands for itself whatever comes before.
        after: the text after it.
    """

    before: list[int]
    end: int | None
    after: str


def own_prompts(
    llm: LLM, count: int, *, temperature: float = 1.0, max_new_tokens: int = 256, batch: int = 16, seed: int = 0
) -> Iterator[str]:
    """Different prompts; on exact tiers they depend on the model and the seed alone. Messages without an end are left
    out, so what comes may be fewer than `count`.

    Args:
        temperature: above 0; the paper takes 1.
        max_new_tokens: longest prompt.
        batch: prompts written at a time.

    Raises:
        OptionError: the model has no chat template, or its template shows no end of a message.
        DataError: nothing that it wrote was a message.
    """
    require(temperature > 0, f"the temperature must be > 0, not {temperature}: else all prompts are the same")
    place = user_place(llm.tokenizer)
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    if place.end is None:
        how["stop"] = (place.after.rstrip() or place.after,)
    else:
        how["eos"] = (place.end, *llm.target.eos)
    first = int.from_bytes(hashlib.sha256(f"own prompts {seed}".encode()).digest()[:6])  # no seed repeats another's
    found: dict[str, None] = {}
    tried, most = 0, TRIES * count
    while tried < most:
        starts: list[Prompt] = [place.before] * min(GROUP * batch, max(batch, count), most - tried)
        made = llm.generate(starts, batch=batch, seed=first + tried, **how)
        assert isinstance(made, list)
        tried += len(made)
        for text in (output.text.strip() for output in made if _ended(output, place)):
            if text and text not in found:
                found[text] = None
                yield text
                if len(found) == count:
                    return
    if not found:
        why = f"it may be no chat model, or {max_new_tokens} tokens are too few"
        raise DataError(f"in {most} attempts the model wrote no message that ended: {why}")


def _ended(output: Output, place: Place) -> bool:
    return output.finish_reason == "stop" if place.end is None else output.tokens[-1] == place.end


def user_place(tokenizer: PreTrainedTokenizerBase) -> Place:
    require(bool(tokenizer.chat_template), "this model's tokenizer has no chat template: it makes up no prompts")
    message = [{"role": "user", "content": MARK}]
    for answering in (False, True):  # some templates end a message only where an answer begins
        text = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=answering))
        before, _, after = text.partition(MARK)
        if before and after:
            end = tokenizer.encode(after, add_special_tokens=False)[0]
            added = end in tokenizer.added_tokens_decoder
            return Place(tokenizer.encode(before, add_special_tokens=False), end if added else None, after)
    raise OptionError("this model's chat template does not show where a user's message begins and ends")
