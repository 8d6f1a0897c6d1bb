"""Drafters without the model: a request that goes on as a known text does, so that what it costs to draft, and how much
of it is accepted, can be seen in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.decoding.request import Request
from paceline.decoding.stats import Clock, Round, Stats
from paceline.decoding.verify import Outcome, walk
from paceline.drafters.base import Drafter
from paceline.drafters.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.base import StoppingPolicy


class Replay(Request):
    """Continues `prompt` with `output`, whatever a target thinks of it."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], policy: StoppingPolicy) -> None:
        super().__init__(prompt, limit=len(output), policy=policy)
        self.whole = [*prompt, *output]

    @property
    def plain(self) -> bool:
        return False

    def verify(self, tree: TokenTree, logits: object) -> Outcome:
        return walk(tree, [self.whole[len(self.ids) + depth] for depth in tree.depths])


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], policy: StoppingPolicy) -> Stats:
    """The rounds that `drafter` goes through while a target says `output`, without the target.

    Raises:
        OptionError: the drafter needs more of the target than its tokens.
    """
    row = Replay(prompt, output, policy)
    row.slot = 0
    drafter.begin(row, {})
    while not row.finish_reason:
        clock = Clock()
        [tree] = drafter.draft([row])
        clock.lap("draft")
        outcome = row.verify(tree, None)
        emitted = row.accept(tree, outcome)
        accepted = len(outcome.path) - 1
        policy.observe(tree.depth, accepted)
        drafter.observe(row, tree, outcome.path, _NO_PASS)
        clock.lap("other")
        row.stats.rounds.append(
            Round(tree.drafted, tree.depth, min(accepted, len(emitted)), len(emitted), clock.seconds)
        )
    return row.stats


class _NoPass:
    """Stands for the target's pass, which there was none."""

    def __getattr__(self, name: str) -> Any:
        raise OptionError(f"this drafter learns from the target's {name}: it cannot be replayed without the target")


_NO_PASS: Any = _NoPass()
