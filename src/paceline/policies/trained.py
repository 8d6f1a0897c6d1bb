"""What policies with a trained stop rule share: the predictor, and what becomes of the token they stop at."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from paceline.errors import OptionError, require
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.predictor_file import Trained, find, load, need_hidden
from paceline.policies.sureness import Sureness
from paceline.registry import AUTO


class TrainedStop(StoppingPolicy):
    """Stops by a predictor of acceptance.

    Args:
        predictor: its file, from `paceline train stop-predictor`; "auto": the one trained on this machine, else
            the one that comes with the drafter.
        k_max: most tokens a round.
        keep_last: draft the token whose forward is already paid for, then stop, instead of dropping it.
    """

    name: str

    def __init__(self, predictor: str, k_max: int, keep_last: bool) -> None:
        require(k_max >= 0, f"{self.name}: k_max must be >= 0, not {k_max}")
        self.limit, self.keep_last = k_max, keep_last
        self._stopped = False
        self.trained: Trained | None = None
        if predictor != AUTO:
            self._use(load(predictor, self.name))

    def _use(self, trained: Trained) -> None:
        self.trained = trained
        self.reads_q, self.reads_hidden = trained.predictor.reads_q, trained.predictor.reads_hidden

    def check(self, setting: Setting) -> None:
        if self.reads_hidden:  # with any predictor
            need_hidden(setting, self.name, of_target=False)
        trained = self.trained or find(setting, self.name)
        if trained is None:
            raise OptionError(
                f"{self.name} needs a predictor trained for this model and drafter: make one with 'paceline train "
                f"stop-predictor', and name it as in {self.name}:predictor=FILE"
            )
        if trained.predictor.reads_hidden:
            need_hidden(setting, self.name, of_target=False)
        trained.check(setting)
        self._use(trained)

    def stops(self, acceptance: float) -> bool:
        """Whether to stop after a token that will be accepted with this probability."""
        raise NotImplementedError

    def more(self, depth: int) -> bool:
        if depth == 0:
            self._stopped = False
        return depth < self.limit and not self._stopped

    def keep(self, q: Float[Tensor, " vocab"] | None, depth: int, hidden: Tensor | None = None) -> bool:
        assert self.trained is not None, "check() comes first"
        predictor = self.trained.predictor
        return self._keeps(predictor.probability(predictor.see(q, depth, None, hidden)))

    def keep_copy(self, sure: Sureness, depth: int) -> bool:
        return self._keeps(sure.top)  # the predictor knows what the drafter drafts

    def _keeps(self, acceptance: float) -> bool:
        self._stopped = self.stops(acceptance)
        return not self._stopped or self.keep_last
