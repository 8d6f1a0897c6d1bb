"""Drafters on a known text: a request goes on as the text does, so that what it costs to draft, and how much of it is
accepted, can be seen without waiting for a target, and one text judges all drafters and policies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.decoding.stats import Clock, Round, Stats
from paceline.decoding.verify import Outcome, walk
from paceline.drafting.base import Drafter
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.base import Setting, StoppingPolicy
from paceline.targets.identity import model_key
from paceline.targets.target import Target


class Replay(Request):
    """Continues `prompt` with `output`, whatever a target thinks of it."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int], policy: StoppingPolicy, seed: int = 0) -> None:
        super().__init__(prompt, limit=len(output), policy=policy, seed=seed)
        self.whole = [*prompt, *output]

    @property
    def plain(self) -> bool:
        return False

    def verify(self, tree: TokenTree, logits: object) -> Outcome:
        return walk(tree, [self.whole[len(self.ids) + depth] for depth in tree.depths])


def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    output: Sequence[int],
    policy: StoppingPolicy,
    *,
    target: Target | None = None,
    seed: int = 0,
) -> Stats:
    """The rounds that `drafter` goes through while a target says `output`.

    Args:
        target: reads the text along, for drafters and policies that need more of it than tokens; None: there is no
            target, and nothing is computed but the drafts.
        seed: of the policy's random choices.

    Raises:
        OptionError: there is no target, and the drafter or the policy needs more of it than its tokens.
    """
    row = Replay(prompt, output, policy, seed)
    if target is not None:
        for _ in Engine(target, drafter).run([row]):
            pass
        return row.stats
    policy.check(_setting(drafter))
    row.slot = 0
    drafter.start(_NOTHING)
    drafter.begin(row, _NOTHING)
    while not row.finish_reason:
        clock = Clock()
        [tree] = drafter.draft([row])
        clock.lap("draft")
        outcome = row.verify(tree, None)
        emitted = row.accept(tree, outcome)
        accepted = len(outcome.path) - 1
        policy.observe(tree.depth, accepted)
        drafter.observe(row, tree, outcome.path, _NOTHING)
        clock.lap("other")
        row.stats.rounds.append(
            Round(tree.drafted, tree.depth, min(accepted, len(emitted)), len(emitted), clock.seconds)
        )
    return row.stats


def _setting(drafter: Drafter) -> Setting:
    """Without a target there are no hidden states, neither its own nor the drafter's."""
    from paceline.profiling.rounds import round_cost

    return Setting(
        model_key(drafter.target), drafter.source, None, None, drafter.predictors, partial(round_cost, drafter)
    )


class _Nothing:
    """Stands for the target's cache, hidden states and passes, of which there are none."""

    def __getattr__(self, name: str) -> Any:
        raise OptionError(f"this drafter reads the target's {name}: it can be replayed with the target only")

    def __getitem__(self, tap: int) -> Any:
        raise OptionError(
            f"this drafter reads what enters the target's layer {tap}: it can be replayed with the target only"
        )


_NOTHING: Any = _Nothing()
