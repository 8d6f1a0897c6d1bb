"""Drafters that propose a chain, one forward a token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.policies.sureness import Sureness
from paceline.targets.logits import argmax


class Told(NamedTuple):
    """What a greedy request needs to know of a step's logits."""

    token: int  # the likeliest
    sureness: Sureness


class Step(NamedTuple):
    """What a drafter's forward gives."""

    logits: Float[Tensor, "batch tokens"]  # of all tokens of the vocabulary, or of the drafter's `tokens`
    hidden: Float[Tensor, "batch hidden"] | None = None  # which these came of: the input of its final norm
    told: Sequence[Told] | None = None  # of each row, where the forward itself tells


class AutoregressiveDrafter(Drafter):
    """A drafter that proposes a chain, one forward a token. Subclasses say what a forward is."""

    source = "draft"
    #: Ids of the only tokens it can propose, whatever the row; None: all.
    tokens: Int[Tensor, " tokens"] | None = None
    #: Most tokens it can propose in a round.
    longest = sys.maxsize

    def step(self, rows: Sequence[Row], trees: Sequence[TokenTree], depth: int) -> Step:
        """Draft logits after each tree's last node, with hidden states where there is a `hidden_width` and a row's
        policy reads them. Rows that stopped drafting are passed too, for shape only.
        """
        raise NotImplementedError

    def ready(self, row: Row) -> bool:
        """Whether it can draft for a row in this round; asked once."""
        return True

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        trees = [TokenTree.root(row.ids[-1]) for row in rows]
        self.sharing = len(rows) + self.others
        active = [row for row in rows if row.room > 0 and self.ready(row) and row.policy.more(0)]
        depth = 0
        while active:
            step = self.step(rows, trees, depth)
            active = [row for row in active if self._extend(row, trees[row.slot], step, depth)]
            depth += 1
        self.forwards = depth
        return trees

    def _extend(self, row: Row, tree: TokenTree, step: Step, depth: int) -> bool:
        """Append the next token unless the policy stops; True if the row wants yet another."""
        q, told = None, self._told_of(row, step)
        if told:
            if not row.policy.keep(told.sureness, depth):  # type: ignore[arg-type]  # it takes that, or looks at nothing
                return False
            token = told.token
        else:
            logits = self.own(row, step.logits[row.slot])
            hidden = None if step.hidden is None else step.hidden[row.slot]
            reads_q = row.sampling or row.policy.reads_q or row.constraint
            q = self.distribution(row, logits, tree.tokens[1:]) if reads_q else None
            if not self.keeps(row, q, depth, hidden):  # before the draw: it must not depend on the token
                return False
            token = self.best(row, logits) if q is None or row.plain else row.draw(q)
        tree.add(token, depth, self.source, q if row.sampling else None)
        return depth + 1 < min(row.room, self.longest) and row.policy.more(depth + 1)

    def _told_of(self, row: Row, step: Step) -> Told | None:
        """What a greedy request whose policy looks at no more needs to know; None: the logits have to tell."""
        policy = row.policy
        looks_closer = (policy.reads_q or policy.reads_hidden) and not policy.reads_sureness
        if not row.plain or looks_closer:
            return None
        if step.told:
            return step.told[row.slot]
        if not policy.reads_sureness:
            return None
        found, tokens = self.target.judge(self.own(row, step.logits[row.slot])), self.vocabulary(row)
        if found is None:
            return None
        at, *sure = found
        return Told(at if tokens is None else int(tokens[at]), Sureness(*sure))

    def vocabulary(self, row: Row) -> Int[Tensor, " tokens"] | None:
        """Ids of the tokens that the row's logits are of, in their order; None: all."""
        return self.tokens

    def own(self, row: Row, logits: Float[Tensor, "*nodes tokens"]) -> Float[Tensor, "*nodes tokens"]:
        """A row's logits without the padding that those of a batch have, where vocabularies are the rows' own."""
        tokens = self.vocabulary(row)
        return logits if tokens is None else logits[..., : len(tokens)]

    def best(self, row: Row, logits: Float[Tensor, " tokens"]) -> int:
        at, tokens = argmax(logits), self.vocabulary(row)
        return at if tokens is None else int(tokens[at])

    def distribution(self, row: Row, logits: Float[Tensor, " tokens"], drafted: list[int]) -> Float[Tensor, " _"]:
        """What the row's next token is drawn from after those that are `drafted`. Where none is drawn, and nothing is
        processed, it is over the row's `vocabulary` alone: a policy sees the same.
        """
        if row.plain:
            return logits.float().softmax(-1)
        if (tokens := self.vocabulary(row)) is not None:
            every = logits.new_full((self.target.vocab_size,), -torch.inf)
            logits = every.index_copy_(0, tokens, logits)
        return row.distribution(logits, drafted)

    def keeps(self, row: Row, q: Float[Tensor, " _"] | None, depth: int, hidden: Tensor | None) -> bool:
        """Whether the row's policy keeps the token at `depth`; not if nothing of the vocabulary is allowed there."""
        forbidden = q is not None and not row.plain and bool(q[0].isnan())
        return not forbidden and row.policy.keep(q, depth, hidden)
