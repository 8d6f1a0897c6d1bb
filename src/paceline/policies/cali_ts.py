"""Cali-TS: Thompson sampling that begins with a predictor and trusts outcomes more and more (EESD, Algorithm 3)."""

from __future__ import annotations

from math import sqrt

from jaxtyping import Float
from torch import Tensor

from paceline.errors import require
from paceline.policies.base import Setting
from paceline.policies.beta_ts import LEAST, MOST
from paceline.policies.online import OnlineLogistic
from paceline.policies.predictor_file import Trained, find, load, need_hidden
from paceline.policies.predictors import FeaturePredictor, Predictor
from paceline.policies.sureness import Sureness
from paceline.policies.thompson import ThompsonSampling
from paceline.registry import AUTO


class CaliTS(ThompsonSampling):
    """theta ~ N(mu, sigma^2), clipped to [0, 1]: the predictor's theta_M of this token and the acceptance rate
    theta_hat of the request so far, weighed by how many rounds were verified (eq. 6).

    theta_hat is the mean over the tokens that the target has judged: A successes in min(A + 1, K) trials a round,
    after one of worth `theta0`. As printed (eq. 8) it counts accepted tokens only, and rises to 1 whatever is rejected.

    Args:
        predictor: its file, from `paceline train stop-predictor`; "auto": the one trained on this machine, else the
            one that comes with the drafter, else a logistic regression over the draft distribution's features, with
            coefficients that come with paceline.
        learn: let such a regression go on learning from each request's outcomes.
        sigma_m: standard deviation of the predictor's error; the smaller, the longer it is trusted.
        sigma_s: standard deviation of a round's acceptance rate.
        theta0: acceptance rate expected before any outcome.
        k_max: most tokens a round.
        cost: of one more token, in target passes; "auto": as measured; none: the paper's rule. See `ThompsonSampling`.
        predict: False: without the model's prediction, `theta0` in its place.
        calibrate: False: without the sampling prediction, theta ~ N(theta_M, sigma_m^2) throughout.
        literal: theta_hat as printed.
    """

    name = "cali-ts"
    reads_q = True

    def __init__(
        self,
        *,
        predictor: str = AUTO,
        learn: bool = True,
        sigma_m: float = 0.1,
        sigma_s: float = 1.0,
        theta0: float = 0.5,
        k_max: int = 16,
        cost: float | str | None = None,
        predict: bool = True,
        calibrate: bool = True,
        literal: bool = False,
    ) -> None:
        valid = 1 / MOST <= sigma_m <= MOST and 1 / MOST <= sigma_s <= MOST
        told = f"lie in {1 / MOST:g} .. {MOST:g}, not {sigma_m} and {sigma_s}"
        require(valid, f"cali-ts: sigma_m and sigma_s must {told}")
        require(0 <= theta0 <= 1, f"cali-ts: theta0 must lie in [0, 1], not {theta0}")
        super().__init__(k_max, cost)
        self.learn, self.theta0, self.literal = learn, theta0, literal
        self.variance_m, self.variance_s = sigma_m**2, sigma_s**2
        self.predict, self.calibrate = predict, calibrate
        self.rounds = self.trials = self.successes = 0
        self.theta_hat = theta0
        self._verified: Tensor | None = None  # the target's last hidden state there
        self._predictions: list[float] = []  # theta_M of this round's tokens
        self._features: list[list[float] | None] = []
        self._trained: Trained | None = None if predictor == AUTO else load(predictor, self.name)
        self._use(self._trained.predictor if self._trained else FeaturePredictor())

    def _use(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.reads_q, self.reads_hidden = predictor.reads_q, predictor.reads_hidden
        self.online: OnlineLogistic | None = None
        if self.learn and isinstance(predictor, FeaturePredictor):
            self.online = OnlineLogistic(predictor.weights.tolist())

    def check(self, setting: Setting) -> None:
        super().check(setting)
        trained = self._trained or find(setting, self.name)
        if trained is None:
            return
        if trained.predictor.reads_hidden:
            need_hidden(setting, self.name, of_target=True)
        trained.check(setting)
        if trained.predictor is not self.predictor:
            self._use(trained.predictor)

    def begin_round(self, hidden: Float[Tensor, " width"]) -> None:
        self._verified = hidden

    def more(self, depth: int) -> bool:
        if depth == 0:
            self._predictions.clear()
            self._features.clear()
        return super().more(depth)

    def keep(self, q: Float[Tensor, " vocab"] | None, depth: int, hidden: Tensor | None = None) -> bool:
        """Always True: Algorithm 3 stops after a token, not before it. theta_M is that of what is seen here."""
        if self.predict:
            seen = self.predictor.see(q, depth, self._verified, hidden)
            if self.online:
                features = FeaturePredictor.features(seen)[0].tolist()
                self._features.append(features)
                self._predictions.append(self.online.probability(features))
            else:
                self._predictions.append(self.predictor.probability(seen))
        else:
            self._predictions.append(self.theta0)
        return True

    def keep_copy(self, sure: Sureness, depth: int) -> bool:
        """Of a copy its source says how likely it is, and the predictor learns nothing from it."""
        self._predictions.append(sure.top if self.predict else self.theta0)
        self._features.append(None)
        return True

    def theta(self, depth: int) -> float:
        mean, variance = self.posterior(self._prediction(depth))
        return min(max(self.random.gauss(mean, sqrt(variance)), 0.0), 1.0)  # step 11

    def first_theta(self) -> float:
        # Nothing is predicted yet. Of this Beta distribution theta_hat, as it is not printed, is the mean.
        right, wrong = self.theta0 + self.successes, 1 - self.theta0 + self.trials - self.successes
        return self.random.betavariate(max(right, LEAST), max(wrong, LEAST))

    def chance(self, depth: int | None) -> float:
        return self.theta_hat if depth is None else self.posterior(self._prediction(depth))[0]

    def _prediction(self, depth: int) -> float:
        if depth == len(self._predictions):  # a drafter that asks how deep only: its tokens are deterministic
            self.keep(None, depth)
        return self._predictions[depth]

    def posterior(self, theta_m: float) -> tuple[float, float]:
        """Mean and variance of theta (steps 9 and 10)."""
        n = self.rounds if self.calibrate else 0
        weight = n * self.variance_m / (n * self.variance_m + self.variance_s)
        return (1 - weight) * theta_m + weight * self.theta_hat, self.variance_m * (1 - weight)

    def observe(self, drafted: int, accepted: int) -> None:
        super().observe(drafted, accepted)
        if drafted == 0:
            return
        trials = min(accepted + 1, drafted)
        self.rounds += 1  # step 21
        self.trials += trials
        self.successes += accepted
        if self.literal:  # step 22, with t = all accepted tokens
            t = self.successes
            self.theta_hat = (self.theta_hat * (t - accepted + 1) + accepted) / (t + 1)
        else:
            self.theta_hat = (self.theta0 + self.successes) / (1 + self.trials)
        if self.online:
            for depth, features in enumerate(self._features[:trials]):
                if features is not None:
                    self.online.learn(features, depth < accepted)
