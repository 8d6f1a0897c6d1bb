"""`paceline train data`: self-generated text and open text, shard by shard, by one process or several."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.drafting.corpus.texts import chat_format, texts
from paceline.errors import DataError, require
from paceline.targets import store
from paceline.targets.identity import model_key
from paceline.targets.tokenizers import fingerprint
from paceline.training.data.prompts import Conversation, read_prompts
from paceline.training.data.samples import (
    OPEN,
    PROMPT,
    Manifest,
    Sample,
    Shard,
    computed_by,
    shard_counts,
    shard_name,
    write_shard,
)
from paceline.training.data.self_distill import DistillConfig, SelfDistillation

if TYPE_CHECKING:
    from paceline.api import LLM


class DataProgress(NamedTuple):
    """Where this process stands with its share of the work."""

    done: int  # conversations
    of: int
    tokens: int  # generated now, not in earlier runs
    seconds: float
    shard: str | None = None  # the one just written or found


class OpenText:
    """Text that nobody generated, in pieces; all of it is learnt."""

    def __init__(self, paths: Sequence[Path], llm: LLM, config: DistillConfig) -> None:
        chat = chat_format(llm.tokenizer)
        self.pieces = [piece for path in paths for piece in texts(path, chat)]
        self.encode, self.check, self.config = llm.tokenizer.encode, llm.target.check_ids, config
        self.longest = min(config.max_length, llm.target.context)

    def samples(self, group: int, tokens: int) -> list[Sample]:
        """About `tokens` tokens, drawn at random without repetition, the same for every call with this group."""
        drawn = random.Random(f"{self.config.seed} {group}")
        left = list(range(len(self.pieces)))
        samples: list[Sample] = []
        while tokens > 0 and left:
            at = drawn.randrange(len(left))
            left[at], left[-1] = left[-1], left[at]
            ids = self.encode(self.pieces[left.pop()], add_special_tokens=False)[: min(tokens, self.longest)]
            self.check(ids)
            if len(ids) > 1:
                samples.append(Sample(ids, [PROMPT] + [OPEN] * (len(ids) - 1)))  # nothing predicts the first
            tokens -= len(ids)
        return samples


def make_data(
    llm: LLM,
    prompts: Sequence[Path],
    out: Path,
    config: DistillConfig,
    *,
    text: Sequence[Path] = (),
    limit: int | None = None,
    max_tokens: int | None = None,
    batch: int = 8,
    share: tuple[int, int] = (0, 1),
    facts: dict[str, Any] | None = None,
    progress: Callable[[DataProgress], None] = lambda _: None,
) -> dict[str, Any]:
    """Write training data into `out`, going on where an earlier run of the same settings stopped.

    Args:
        prompts: see `read_prompts`.
        text: open text for `config.text_share`; see `texts`.
        limit: first rows of each file of prompts.
        max_tokens: to generate, by all processes together; the run ends with the shard that gets there.
        batch: answers written at a time.
        share: (i, n): this process makes every n-th shard, starting with i.
        facts: for the manifest, beside what the samples depend on.

    Returns:
        The manifest.

    Raises:
        CorpusError: prompts or text that cannot be used.
        DataError: `out` holds data made otherwise.
        DiskFull: what was written so far stays, and the same command goes on.
    """
    require(0 <= share[0] < share[1], f"the share must be i/n with 0 <= i < n, not {share[0]}/{share[1]}")
    require(bool(text) == bool(config.text_share), "open text needs files and a share of the tokens, or neither")
    conversations = read_prompts(prompts, limit)
    random.Random(config.seed).shuffle(conversations)  # whatever part is made of them is a fair mixture
    made = asdict(config) | {
        "model": model_key(llm.target),
        **computed_by(llm.target),
        "tokenizer": fingerprint(llm.tokenizer),
        "prompts": [[path.name, store.sha256(path)] for path in prompts],
        "text": [[path.name, store.sha256(path)] for path in text],
        "limit": limit,
    }
    writer = SelfDistillation(llm, config, batch)
    open_text = OpenText(text, llm, config) if text else None
    budget = None if max_tokens is None else -(-max_tokens // share[1])
    groups = list(enumerate(_groups(conversations, config.group)))[share[0] :: share[1]]
    manifest = Manifest(out)
    manifest.open(made, **(facts or {}))
    with manifest.filled(alone=share[1] == 1):
        _generate(writer, open_text, groups, out, manifest, budget, progress)
        found = manifest.read()
        if groups and not found["totals"].get("samples"):  # a process may have nothing to do
            longest = writer.room + config.max_new_tokens
            raise DataError(f"no prompt leaves room for {config.max_new_tokens} new tokens in {longest} tokens")
    return found


def _generate(
    writer: SelfDistillation,
    open_text: OpenText | None,
    groups: Sequence[tuple[int, list[Conversation]]],
    out: Path,
    manifest: Manifest,
    budget: int | None,
    progress: Callable[[DataProgress], None],
) -> None:
    config, started = writer.config, time.perf_counter()
    of, done, tokens, generated = sum(len(group) for _, group in groups), 0, 0, 0

    def count_tokens(count: int) -> None:
        nonlocal tokens
        tokens += count
        progress(DataProgress(done, of, tokens, time.perf_counter() - started))

    for number, group in groups:
        if budget is not None and generated >= budget:
            break
        counts = shard_counts(out / shard_name(number))
        if counts is None:
            samples = writer.run(group, count_tokens)
            if not samples:  # no prompt of these leaves room for an answer
                done += len(group)
                progress(DataProgress(done, of, tokens, time.perf_counter() - started))
                continue
            written = sum(map(_learnt, samples))
            if open_text:
                samples += open_text.samples(number, round(written * config.text_share / (1 - config.text_share)))
            counts = {
                "conversations": len(group),
                "samples": len(samples),
                "tokens": sum(len(sample.ids) for sample in samples),
                "generated": written,
                "trained": sum(map(_learnt, samples)),
            }
            write_shard(out, number, samples, config.top, counts)
        manifest.add(shard_name(number), counts, Shard.load(out / shard_name(number)).digest)
        done, generated = done + len(group), generated + counts["generated"]
        progress(DataProgress(done, of, tokens, time.perf_counter() - started, shard_name(number)))


def _learnt(sample: Sample) -> int:
    return len(sample.mask) - sample.mask.count(PROMPT)


def _groups(conversations: list[Conversation], size: int) -> Iterator[list[Conversation]]:
    for at in range(0, len(conversations), size):
        yield conversations[at : at + size]
