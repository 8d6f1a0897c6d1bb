"""What a stopping policy is. Policies know nothing of models: they see draft distributions, depths and outcomes."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


class StoppingPolicy:
    """How far one request drafts. One object per request; options are keyword-only constructor arguments.

    A rule may look at the draft distribution q and at past outcomes, never at which token was then drawn from q:
    that would bias sampled output. The drafter therefore asks `keep` before it draws.
    """

    #: Most tokens this policy ever drafts in a round, by depth; sizes the KV cache.
    limit: int
    #: Whether `keep` looks at q; drafters then compute it even where greedy decoding needs no distribution.
    reads_q = False

    def more(self, depth: int) -> bool:
        """Draft one more token after `depth` drafted ones? Asked before the drafter spends a forward."""
        return depth < self.limit

    def keep(self, q: Float[Tensor, " vocab"] | None, depth: int) -> bool:
        """Draw and keep the token at `depth` (0-based), whose distribution is `q`? If not, drafting stops.

        `q` is None for a deterministic proposal, a point mass: entropy 0, confidence 1.
        """
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        """The outcome of a round: depth that was drafted and how much of it the target accepted."""
