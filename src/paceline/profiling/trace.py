"""A trace: known texts, what every source of drafts would draft at each of their positions, and what all of it costs.

A JSON Lines file, gzip-compressed: first a `Header`, then a `TracedText` a line.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import DataError
from paceline.files import fits, read_json, whole
from paceline.targets.costs import read_passes

if TYPE_CHECKING:
    from paceline.drafting.tree import TokenTree

FORMAT = 1
PLAIN = "ar"
FREE, SCORED, WHOLE = "free", "scored", "whole"  # kinds of sources
TOP = 4  # probabilities kept of a draft distribution, beside its entropy


@dataclass
class TracedDraft:
    """What a source drafts after the output's first `n` tokens, at its largest.

    Attributes:
        tokens, parents, scores: of the nodes after the root, whose index is 0; a chain of a sampling drafter has no
            scores.
        beliefs: by depth, where the source asks its policy step by step: the largest probabilities of the draft
            distribution, and last its entropy in nats.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float | None] = field(default_factory=list)
    beliefs: list[list[float]] = field(default_factory=list)

    @classmethod
    def of(cls, tree: TokenTree, beliefs: Sequence[Sequence[float]] = ()) -> TracedDraft:
        scores = [None if score is None else round(score, 5) for score in tree.scores[1:]]
        return cls(tree.tokens[1:], tree.parents[1:], scores, [list(belief) for belief in beliefs])


@dataclass
class Source:
    """A source of drafts, and what it takes.

    Attributes:
        name: what it calls itself in statistics.
        kind: "free" drafts a tree at once; "scored" and "whole" go on level by level, as their policy wants. Of a
            "whole" draft nothing is left out.
        nodes: most that it proposes.
        policy: its default.
        levels: seconds of each level of a draft; of a free source of the whole draft.
        observe: seconds to learn from a round.
        pass_share: seconds of the target's pass after its drafts, as a share of those of a whole one.
        predictors: folders where stop predictors for it may lie.
    """

    name: str
    kind: str
    nodes: int
    policy: str
    levels: list[float]
    observe: float
    pass_share: float = 1.0
    predictors: list[str] = field(default_factory=list)


@dataclass
class TracedText:
    """A prompt, its output, and by source the `TracedDraft` at each position of the output."""

    task: str
    id: str
    seed: int
    prompt: list[int]
    output: list[int]
    drafts: dict[str, list[TracedDraft]] = field(default_factory=dict)


@dataclass
class Measured:
    """What a method took for the texts of a task: tokens, rounds, and seconds of all its rounds."""

    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0


@dataclass
class Header:
    """What a trace is of.

    Attributes:
        model, vocab, context: the target as the run named it, and sizes.
        machine: hardware and versions.
        profile: costs of passes as `targets.costs.read_passes` takes them, from the passes of the run itself.
        overhead: seconds of a plain round beside its pass.
        choosing: by method, seconds of a round that its policy, gates and budgets take.
        sources: by drafter as it was written; the parts of a merged one as `METHOD/PART`, a second one of
            the same kind as `METHOD/PART-2`, and so on.
        parts: of each merged drafter its sources, in their order.
        measured: by method and task.
        target: the name that heads and predictors know it by; "" in traces of earlier versions.
    """

    model: str
    vocab: int
    context: int
    tier: str
    machine: dict[str, Any]
    profile: dict[str, Any]
    overhead: float
    choosing: dict[str, float]
    sources: dict[str, Source]
    parts: dict[str, list[str]]
    measured: dict[str, dict[str, Measured]]
    target: str = ""
    format: int = FORMAT


@dataclass
class Trace:
    """A header and its texts."""

    header: Header
    texts: list[TracedText]

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        with whole(path) as partial, gzip.open(partial, "wt", encoding="utf-8", compresslevel=5) as file:
            for line in (asdict(self.header), *map(asdict, self.texts)):
                file.write(json.dumps(line, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Trace:
    """Raises DataError for what is no trace, an incomplete one, or one of another version."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            first, *others = map(read_json, file)
        if first["format"] != FORMAT:
            raise DataError(f"{path} is a trace of format {first['format']}, this version reads {FORMAT}: make it anew")
        trace = Trace(_header(first), [_text(line) for line in others])
        _check(trace)
        return trace
    except FileNotFoundError as error:
        raise DataError(f"cannot read {path}: no such file") from error
    except (OSError, EOFError, zlib.error) as error:
        told = getattr(error, "strerror", None) or error
        raise DataError(f"{path} is not a trace of paceline bench --trace: {told}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a trace of paceline bench --trace, or it is damaged") from error


def _header(values: Mapping[str, Any]) -> Header:
    sources = {name: Source(**source) for name, source in values["sources"].items()}
    measured = {
        method: {task: Measured(**sums) for task, sums in tasks.items()} for method, tasks in values["measured"].items()
    }
    return Header(**{**values, "sources": sources, "measured": measured})


def _text(values: Mapping[str, Any]) -> TracedText:
    drafts = {name: [TracedDraft(**draft) for draft in found] for name, found in values["drafts"].items()}
    return TracedText(**{**values, "drafts": drafts})


def _check(trace: Trace) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError for what a replay could not do without."""
    header, texts = trace.header, trace.texts
    read_passes(header.profile)
    sums = [
        sum(getattr(one, name) for one in tasks.values())
        for tasks in header.measured.values()
        for name in ("tokens", "rounds", "seconds")
    ]
    good = fits(header, Header) and PLAIN in header.measured and min(sums) > 0 and bool(texts)
    good &= all(source.levels for source in header.sources.values() if source.kind == FREE)
    good &= all(part in header.sources for parts in header.parts.values() for part in parts)
    for text in texts:
        good &= fits([text.prompt, text.output, [text.seed]], list[list[int]]) and bool(text.prompt and text.output)
        good &= isinstance(text.task, str)
        good &= all(len(text.drafts[name]) >= len(text.output) for name in header.sources)
        good &= all(_is_whole(draft) for drafts in text.drafts.values() for draft in drafts)
    if not good:
        raise ValueError("it is incomplete")


def _is_whole(draft: TracedDraft) -> bool:
    """Whether its nodes have all that they need, each after its parent."""
    scores = [score for score in draft.scores if score is not None]  # `fits` is quick with lists of one kind
    known = fits([draft.tokens, draft.parents], list[list[int]]) and fits([scores, *draft.beliefs], list[list[float]])
    return (
        known
        and len(draft.tokens) == len(draft.parents) == len(draft.scores)
        and all(0 <= parent <= at for at, parent in enumerate(draft.parents))
        and all(draft.beliefs)
    )
