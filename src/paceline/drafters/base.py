"""What a drafter is, and what it may know of the requests it drafts for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.decoding.verify import argmax
from paceline.drafters.skip_set import model_key
from paceline.drafters.tree import TokenTree
from paceline.policies.base import StoppingPolicy
from paceline.targets import store
from paceline.targets.cache import KVCache
from paceline.targets.span import Span
from paceline.targets.target import PassOutput, Target


class Row(Protocol):
    """A request as a drafter sees it."""

    slot: int  # its row in the target's KV cache, and in the list given to `draft`
    ids: list[int]  # prompt and output so far; the last is the root of the next tree
    policy: StoppingPolicy
    state: Any  # the drafter's own, per request
    sampling: bool  # False: greedy decoding, where a drafter proposes its argmax

    @property
    def room(self) -> int:
        """Most tokens worth drafting now: depth of the tree."""
        ...

    @property
    def plain(self) -> bool:
        """Greedy decoding of raw logits: an argmax is all it takes."""
        ...

    def distribution(self, logits: Float[Tensor, " vocab"], drafted: list[int]) -> Float[Tensor, " vocab"]:
        """Draft distribution q from the drafter's logits after `drafted`, under the request's own processors."""
        ...

    def draw(self, q: Float[Tensor, " vocab"]) -> int:
        """A token from `q`: its argmax when greedy, else a sample."""
        ...


class Drafter:
    """Proposes a `TokenTree` a round for every running request.

    Options are keyword-only constructor arguments after the target. Per-request state belongs in `row.state`; per-run
    buffers are made in `start`. `rows[i].slot == i` always, and the target's KV cache holds `row.ids[:-1]`.
    """

    #: The policy a user gets who names none.
    default_policy = "fixed"
    #: Hidden states the drafter wants of every committed token (see `Target.forward`).
    taps: tuple[int, ...] = ()
    #: What it calls itself in the statistics.
    source = ""
    #: Width of the hidden states it shows to policies that read them; None: it has none.
    hidden_width: int | None = None
    #: Where the trained head lies that it drafts with; None: it has none, or one that was made in Python.
    folder: Path | None = None

    def __init__(self, target: Target) -> None:
        self.target = target

    @property
    def predictors(self) -> tuple[Path, ...]:
        """Folders where stop predictors trained for it may lie: where training puts them, then what comes with it."""
        trained = store.root() / "stop-predictors" / model_key(self.target) / self.source
        return (trained,) if self.folder is None else (trained, self.folder)

    def max_nodes(self, depth: int) -> int:
        """Most nodes a tree may have, root aside, when policies allow `depth`: sizes the KV cache."""
        return depth

    def start(self, cache: KVCache) -> None:
        """A run begins over this (target) cache; allocate what needs its batch and capacity."""

    def begin(self, row: Row, hidden: dict[int, Float[Tensor, "tokens hidden"]]) -> None:
        """A request joins: its prompt but the last token is in the cache; `hidden` are the prompt's `taps`."""

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        """One tree a row, no deeper than `row.room` and no longer than the row's policy wants."""
        raise NotImplementedError

    def enter(
        self, rows: Sequence[Row], trees: Sequence[TokenTree], span: Span, cache: KVCache
    ) -> tuple[int, Float[Tensor, "batch width hidden"] | None]:
        """Where the verification pass over the drafted trees begins: `start` and `hidden` of `Target.forward`.

        A drafter that has run the target's first layers over the trees, into `cache`, lets the pass go on from there.
        The trees may have nodes of others behind its own.
        """
        return 0, None

    def observe(self, row: Row, tree: TokenTree, path: list[int], out: PassOutput) -> None:
        """A round's outcome: the accepted nodes, root first. `row.ids` already ends with the target's own token.

        Args:
            out: the target's pass at this tree: logits `[nodes, vocab]`, and the drafter's taps `[nodes, hidden]`.
        """

    def move(self, source: int, target: int) -> None:
        """The request in row `source` moves to row `target`."""


class Step(NamedTuple):
    """What a drafter's forward gives."""

    logits: Float[Tensor, "batch tokens"]  # of all tokens of the vocabulary, or of the drafter's `tokens`
    hidden: Float[Tensor, "batch hidden"] | None = None  # which these came of: the input of its final norm


class AutoregressiveDrafter(Drafter):
    """A drafter that proposes a chain, one forward a token. Subclasses say what a forward is."""

    source = "draft"
    #: Ids of the only tokens it can propose; None: all.
    tokens: Int[Tensor, " tokens"] | None = None
    #: Most tokens it can propose in a round.
    longest = sys.maxsize

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        """Draft logits behind each tree's last node, with hidden states where there is a `hidden_width` and a row's
        policy reads them. Rows that stopped drafting are passed too, for shape only."""
        raise NotImplementedError

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = [TokenTree.root(row.ids[-1]) for row in rows]
        active = [row for row in rows if row.room > 0 and row.policy.more(0)]
        depth = 0
        while active:
            step = self.step(rows, trees, depth)
            active = [row for row in active if self._extend(row, trees[row.slot], step, depth)]
            depth += 1
        return trees

    def _extend(self, row: Row, tree: TokenTree, step: Step, depth: int) -> bool:
        """Append the next token unless the policy stops; True if the row wants yet another."""
        logits, hidden = step.logits[row.slot], None if step.hidden is None else step.hidden[row.slot]
        q = self.distribution(row, logits, tree.tokens[1:]) if row.sampling or row.policy.reads_q else None
        if not self.keeps(row, q, depth, hidden):  # before the draw: it must not depend on the token
            return False
        token = self.best(logits) if q is None or row.plain else row.draw(q)
        tree.add(token, depth, self.source, q if row.sampling else None)
        return depth + 1 < min(row.room, self.longest) and row.policy.more(depth + 1)

    def best(self, logits: Float[Tensor, " tokens"]) -> int:
        at: int = argmax(logits)
        return at if self.tokens is None else int(self.tokens[at])

    def distribution(self, row: Row, logits: Float[Tensor, " tokens"], drafted: list[int]) -> Float[Tensor, " _"]:
        """What the row's next token is drawn from behind those that are `drafted`. Where none is drawn, and nothing is
        processed, it is over `tokens` alone: a policy sees the same."""
        if row.plain:
            return logits.float().softmax(-1)
        if self.tokens is not None:
            every = logits.new_full((self.target.vocab_size,), -torch.inf)
            logits = every.index_copy_(0, self.tokens, logits)
        return row.distribution(logits, drafted)

    def keeps(self, row: Row, q: Float[Tensor, " _"] | None, depth: int, hidden: Tensor | None) -> bool:
        """Whether the row's policy keeps the token at `depth`; not if nothing of `tokens` is allowed there."""
        return not (q is not None and q[0].isnan()) and row.policy.keep(q, depth, hidden)
