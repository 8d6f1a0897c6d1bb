"""What a stopping policy is. Policies know nothing of models: they see draft distributions, depths and outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from paceline.policies.sureness import Sureness


@dataclass(frozen=True)
class Setting:
    """Where a policy is about to run: what a trained one was, or was not, made for.

    Attributes:
        target: name of the target.
        drafter: what the drafter calls itself (its `source`).
        width: of the target's hidden states; None: it cannot show its last ones.
        draft_width: of the drafter's; None: it has none to show.
        predictors: folders where trained predictors may lie, as `POLICY.safetensors`; the first counts.
        cost: of a round by how many tokens it drafts and verifies, in rounds without a draft; as measured where the
            policy `reads_costs`, else any.
        pass_cost: likewise without the drafting: of verifying so many tokens that are drafted already.
        before: by kind, the policy that began last there: the next may begin with what that one has learned.
    """

    target: str
    drafter: str
    width: int | None
    draft_width: int | None
    predictors: tuple[Path, ...] = ()
    cost: Callable[[int], float] = lambda drafted: 1.0
    pass_cost: Callable[[int], float] = lambda drafted: 1.0
    before: dict[type, StoppingPolicy] = field(default_factory=dict)


class StoppingPolicy:
    """How far one request drafts. One object per request; options are keyword-only constructor arguments.

    A rule may look at the draft distribution q, at hidden states and at past outcomes, never at which token was then
    drawn from q: that would bias sampled output. The drafter therefore asks `keep` before it draws. A rule that draws
    lots has random numbers of its own.
    """

    #: Most tokens this policy ever drafts in a round, by depth; sizes the KV cache.
    limit: int
    #: Whether `keep` looks at q; drafters then compute it even where greedy decoding needs no distribution.
    reads_q = False
    #: Whether it looks at no more of q than its `Sureness`, which may then be given in its place.
    reads_sureness = False
    #: Whether `begin_round` and `keep` look at hidden states; see `check`.
    reads_hidden = False
    #: Whether drafters that may copy from the text do, unless they were told not to.
    copies = False
    #: Whether `check` wants to be told what rounds cost here, which somebody must have measured.
    reads_costs = False
    #: Of one that does, with a drafter that merges others: where it would run with each of these alone.
    alone: Sequence[Setting] = ()

    def check(self, setting: Setting) -> None:
        """The policy is about to run there, and may remember what it needs of it; asked once, before anything else.

        Raises:
            OptionError, CheckpointMismatch: it cannot run there.
        """

    def for_part(self, part: int) -> StoppingPolicy:
        """A copy for one of the drafters that are merged here, told what rounds of that one cost."""
        copied = deepcopy(self, {id(self.alone): self.alone})
        if self.alone:
            copied.check(self.alone[part])
        return copied

    def seed(self, seed: int) -> None:
        """Make its random choices repeatable; called once, before the first round, with the request's seed."""

    def begin_round(self, hidden: Float[Tensor, " width"]) -> None:
        """A round begins. Only called where `reads_hidden`, and not before the target has read anything.

        Args:
            hidden: the target's last hidden state (the input of its final norm) at the last verified position: the
                token before the root.
        """

    def more(self, depth: int) -> bool:
        """Draft one more token after `depth` drafted ones? Asked before the drafter spends a forward."""
        return depth < self.limit

    def keep(
        self, q: Float[Tensor, " vocab"] | None, depth: int, hidden: Float[Tensor, " draft_width"] | None = None
    ) -> bool:
        """Draw and keep the token at `depth` (0-based), whose distribution is `q`? If not, drafting stops.

        Args:
            q: None for a deterministic proposal, a point mass: entropy 0, confidence 1. May be None for a rule that
                does not read it, and a `Sureness` for one that `reads_sureness`.
            hidden: the drafter's last hidden state, which q came of, where `reads_hidden`; None where there is none.
        """
        return True

    def takes(self, sure: Sureness, depth: int) -> bool:
        """Keep a deterministic proposal for `depth` that cost no forward? Asked in place of `more` and `keep`.

        Args:
            sure: how likely it is, as of a distribution.
        """
        return self.more(depth) and self.keep_copy(sure, depth)

    def keep_copy(self, sure: Sureness, depth: int) -> bool:
        """`keep`, for a deterministic proposal of which its source says how likely it is."""
        return self.keep(sure if self.reads_sureness else None, depth)  # type: ignore[arg-type]

    def reach(self, most: int) -> int:
        """How many tokens it drafts, of at most so many, where each is a deterministic proposal."""
        depth = 0
        while depth < most and self.more(depth) and self.keep(None, depth):
            depth += 1
        return depth

    def observe(self, drafted: int, accepted: int) -> None:
        """The outcome of a round: depth that was drafted and how much of it the target accepted."""
