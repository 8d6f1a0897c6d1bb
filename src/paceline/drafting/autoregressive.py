"""Drafters that propose a chain, one forward a token."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.drafting.base import Drafter, Row
from paceline.drafting.copies import Copies, Copy, Rates
from paceline.drafting.tree import TokenTree
from paceline.errors import require
from paceline.policies.sureness import Sureness
from paceline.registry import AUTO
from paceline.targets.logits import argmax
from paceline.targets.target import Target


class Told(NamedTuple):
    """What a greedy request needs to know of a step's logits."""

    token: int  # the likeliest
    sureness: Sureness


class Step(NamedTuple):
    """What a drafter's forward gives."""

    logits: Float[Tensor, "batch tokens"]  # of all tokens of the vocabulary, or of the drafter's `tokens`
    hidden: Float[Tensor, "batch hidden"] | None = None  # which these came of: the input of its final norm
    told: Sequence[Told] | None = None  # of each row, where the forward itself tells


COPY = "copy"  # who proposed it, in the statistics
SURE, EVEN = 0.8, 0.5  # chances of a copy: for which no forward is worth its time; below which copying ends


class AutoregressiveDrafter(Drafter):
    """A drafter that proposes a chain, one forward a token. Subclasses say what a forward is.

    It may copy from the request's text as well (see `Copies`). A copy takes the place of the drafter's own token where
    it is likelier to be accepted. Which of the two it is depends on the text and on q, never on what is drawn from q:
    a copy is a deterministic proposal, and sampled output keeps its distribution.

    Args:
        copy: whether it copies; "auto": where the policy `copies`.
        chain: whether it drafts chains; in trees nothing is copied.
    """

    source = "draft"
    #: Ids of the only tokens it can propose, whatever the row; None: all.
    tokens: Int[Tensor, " tokens"] | None = None
    #: Most tokens it can propose in a round, copies aside.
    longest = sys.maxsize

    def __init__(self, target: Target, *, copy: bool | str = False, chain: bool = True) -> None:
        super().__init__(target)
        require(copy in (True, False, AUTO), f"{self.source}: copy is true, false or auto, not '{copy}'")
        require(chain or copy in (False, AUTO), f"{self.source}: chains copy, trees do not: leave copy or tree out")
        self.copy = copy if chain else False
        self._texts = WeakKeyDictionary[Row, Copies]()
        self._rates = Rates()  # what greedy requests have taught

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
        active = [row for row in rows if row.room > 0 and self.ready(row)]
        self._read_texts([row for row in active if self.copies(row)])
        active = [row for row in active if self._goes_on(row, trees[row.slot])]
        depth = 0
        while active:
            step = self.step(rows, trees, depth)
            active = [row for row in active if self._extend(row, trees[row.slot], step)]
            depth += 1
        self.forwards = depth
        return trees

    def copies(self, row: Row) -> bool:
        """Whether it copies for a row. What must match something may forbid a copy."""
        wanted = row.policy.copies if self.copy == AUTO else bool(self.copy)
        return wanted and not row.constraint

    def _read_texts(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row not in self._texts:
                # A seed's sample must not depend on other requests.
                self._texts[row] = Copies(row.ids, Rates() if row.sampling else self._rates)
            self._texts[row].read(row.ids)

    def _copy(self, row: Row, tree: TokenTree) -> Copy | None:
        """What the row's text says comes after its tree's last node."""
        text = self._texts.get(row)
        return text.after(row.ids, tree.tokens[1:]) if text else None

    def _goes_on(self, row: Row, tree: TokenTree) -> bool:
        """Whether a row wants a forward for its next token. Where its text surely repeats itself the rest of the chain
        is copied instead, and the drafter, which has not run over that, cannot go on.
        """
        depth, least = tree.depth, SURE
        while depth < row.room and (copy := self._copy(row, tree)) and copy.chance >= least:
            if not row.policy.takes(copy.sureness, depth):
                return False
            tree.add(copy.token, depth, COPY)
            depth, least = depth + 1, EVEN
        return least == SURE and depth < min(row.room, self.longest) and row.policy.more(depth)

    def _extend(self, row: Row, tree: TokenTree, step: Step) -> bool:
        """Append the next token unless the policy stops; True if the row wants yet another."""
        depth, copy = tree.depth, self._copy(row, tree)
        if told := self._told_of(row, step):
            if copy and self._beats(copy, row, told.sureness.top):
                return self._extend_by_copy(row, tree, copy)
            if not row.policy.keep(told.sureness, depth):  # type: ignore[arg-type]  # it takes that, or looks at nothing
                return False
            return self._add(row, tree, told.token, None, told.sureness.top)
        logits = self.own(row, step.logits[row.slot])
        hidden = None if step.hidden is None else step.hidden[row.slot]
        reads_q = row.sampling or row.policy.reads_q or row.constraint or row in self._texts
        q = self.distribution(row, logits, tree.tokens[1:]) if reads_q else None
        top = 0.0 if q is None or row not in self._texts else float(q.max())
        if copy and self._beats(copy, row, top):
            return self._extend_by_copy(row, tree, copy)
        if not self.keeps(row, q, depth, hidden):  # before the draw: it must not depend on the token
            return False
        token = self.best(row, logits) if q is None or row.plain else row.draw(q)
        return self._add(row, tree, token, q if row.sampling else None, top)

    def _beats(self, copy: Copy, row: Row, top: float) -> bool:
        """Whether a copy is likelier to be right than the drafter's own token.

        Args:
            top: probability of the likeliest of these.
        """
        return copy.chance > self._texts[row].rates.of_own(top)

    def _add(self, row: Row, tree: TokenTree, token: int, q: Float[Tensor, " vocab"] | None, top: float) -> bool:
        """A token of the drafter's own; True if the row wants yet another."""
        if text := self._texts.get(row):
            text.drafted(len(row.ids) + tree.depth, token, top)
        tree.add(token, tree.depth, self.source, q)
        return self._goes_on(row, tree)

    def _extend_by_copy(self, row: Row, tree: TokenTree, copy: Copy) -> bool:
        """`_extend` by what is copied in place of what was drafted."""
        if not row.policy.keep_copy(copy.sureness, tree.depth):
            return False
        tree.add(copy.token, tree.depth, COPY)
        return self._goes_on(row, tree)

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
