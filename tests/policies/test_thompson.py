"""Beta-TS and Cali-TS against the paper's Algorithms 2 and 3, and their posteriors against Bayes' theorem."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers import SIGNIFICANCE, p_value
from paceline.errors import OptionError
from paceline.policies import POLICIES
from paceline.policies.base import Setting, StoppingPolicy
from paceline.policies.beta_ts import LEAST, BetaTS
from paceline.policies.cali_ts import CaliTS
from paceline.policies.online import OnlineLogistic, sigmoid
from paceline.policies.predictors import BUILT_IN

BOTH = pytest.mark.parametrize("policy", [BetaTS, CaliTS])
SHARP, FLAT = torch.tensor([1.0, 0.0, 0.0]), torch.full((3,), 1 / 3)
rounds = st.lists(st.integers(0, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=40)


def draft(policy: StoppingPolicy, q: torch.Tensor | None = None) -> int:
    """How many tokens it drafts in a round."""
    depth = 0
    while policy.more(depth):
        assert policy.keep(q, depth)
        depth += 1
    return depth


def play(policy: StoppingPolicy, p: float, count: int, seed: int = 0) -> list[int]:
    """Rounds of drafts whose every token is accepted with probability `p`; the lengths the policy chose."""
    accepts = random.Random(seed)
    policy.seed(seed)
    lengths = []
    for _ in range(count):
        lengths.append(draft(policy))
        accepted = 0
        while accepted < lengths[-1] and accepts.random() < p:
            accepted += 1
        policy.observe(lengths[-1], accepted)
    return lengths


def judged(drafted: int, accepted: int) -> list[bool]:
    """The target's verdicts on a chain: it ends with the first that is rejected."""
    return [True] * accepted + [False] * (accepted < drafted)


class TestBeta:
    @given(rounds, st.floats(0.1, 20), st.floats(0.1, 20))
    def test_posterior_is_prior_times_likelihood(self, rounds, a0: float, b0: float) -> None:
        policy = BetaTS(a0=a0, b0=b0)
        verdicts = []
        for drafted, accepted in rounds:
            policy.observe(drafted, accepted)
            verdicts += judged(drafted, accepted)
        grid = np.linspace(0.0005, 0.9995, 1000)
        successes = sum(verdicts)
        log = stats.beta(a0, b0).logpdf(grid) + stats.binom(len(verdicts), grid).logpmf(successes)
        density = np.exp(log - log.max())
        want = stats.beta(policy.a, policy.b).pdf(grid)
        np.testing.assert_allclose(density / density.sum(), want / want.sum(), atol=1e-9)

    def test_draws_come_from_the_posterior(self) -> None:
        policy = BetaTS()
        play(policy, 0.6, 40)
        draws = [policy.theta(0) for _ in range(2000)]
        assert stats.kstest(draws, stats.beta(policy.a, policy.b).cdf).pvalue > SIGNIFICANCE
        assert stats.kstest(draws, stats.beta(policy.a + 20, policy.b).cdf).pvalue < SIGNIFICANCE

    def test_goes_on_with_probability_theta(self) -> None:
        """With theta drawn anew at each step, the length is geometric with the posterior's mean."""
        policy = BetaTS(a0=3.0, b0=2.0, k_max=6)
        policy.seed(1)
        counts = np.bincount([draft(policy) for _ in range(4000)], minlength=7)[1:]
        chances = np.array([0.6**k * (0.4 if k < 5 else 1) for k in range(6)])
        assert p_value(counts, chances) > SIGNIFICANCE

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_converges_to_the_acceptance_rate(self, p: float) -> None:
        """Whatever lengths it chooses meanwhile; and its 99.9 % interval, by then narrow, holds the truth."""
        policy = BetaTS()
        play(policy, p, 2000)
        low, high = stats.beta(policy.a, policy.b).interval(0.999)
        assert low < p < high
        assert high - low < 0.11

    def test_literal_by_hand(self) -> None:
        policy = BetaTS(a0=2.0, b0=1.0, literal=True)
        for outcome, want in [
            ((5, 3), (4, 3)),  # r = 2, n = 4
            ((4, 4), (7, 4)),  # r = 3, n = 4
            ((3, 0), (6, 6)),  # r = -1, n = 1
            ((1, 1), (6, 7)),  # r = 0, n = 1
        ]:
            policy.observe(*outcome)
            assert (policy.a, policy.b) == want

    @given(rounds)
    def test_literal_is_algorithm_2(self, rounds) -> None:
        policy, alpha, beta = BetaTS(a0=50.0, b0=50.0, literal=True), 50.0, 50.0
        for q_d, q_v in rounds:
            policy.observe(q_d, q_v)
            if q_d:
                r = q_v - 1
                n = min(q_v + 1, q_d)
                alpha, beta = alpha + r, beta + (n - r)
        assert (policy.a, policy.b) == pytest.approx((alpha, beta))

    def test_literal_forgets_how_good_the_drafts_are(self) -> None:
        """Why it is not the default: nine tokens of ten are accepted, and it drafts one or two."""
        literal, ours = BetaTS(literal=True), BetaTS()
        assert np.mean(play(literal, 0.9, 1000)[-200:]) < 2.5
        assert np.mean(play(ours, 0.9, 1000)[-200:]) > 5

    @given(rounds, st.booleans())
    def test_parameters_stay_positive(self, rounds, literal: bool) -> None:
        policy = BetaTS(a0=0.5, b0=0.5, literal=literal)
        for outcome in rounds:
            policy.observe(*outcome)
            assert policy.a >= LEAST
            assert policy.b >= LEAST
            assert 0 <= policy.theta(0) <= 1

    def test_a_round_without_a_draft_says_nothing(self) -> None:
        policy = BetaTS()
        policy.observe(0, 0)
        assert (policy.a, policy.b) == (1, 1)

    def test_a_small_prior_stays_small(self) -> None:
        policy = BetaTS(a0=1e-4, b0=1.0)
        policy.observe(1, 0)
        assert (policy.a, policy.b) == (1e-4, 2.0)

    @pytest.mark.parametrize("bad", [{"a0": 0.0}, {"b0": -1.0}, {"k_max": -1}])
    def test_out_of_range(self, bad) -> None:
        with pytest.raises(OptionError, match=next(iter(bad))):
            BetaTS(**bad)


class TestCali:
    @given(st.floats(0, 1), st.integers(0, 200), st.floats(0.05, 1), st.floats(0.05, 1), st.integers(0, 3))
    def test_posterior_is_that_of_a_gaussian_mean(
        self, theta_m: float, n: int, sigma_m: float, sigma_s: float, seed: int
    ) -> None:
        """Prior N(theta_M, sigma_M), n observations of N(mu, sigma_S) with mean theta_hat: by numbers on a grid."""
        policy = CaliTS(sigma_m=sigma_m, sigma_s=sigma_s)
        policy.rounds, policy.theta_hat = n, random.Random(seed).random()
        mean, variance = policy.posterior(theta_m)
        grid = np.linspace(mean - 12 * variance**0.5, mean + 12 * variance**0.5, 4001)
        log = stats.norm(theta_m, sigma_m).logpdf(grid)
        if n:
            log += stats.norm(grid, sigma_s / n**0.5).logpdf(policy.theta_hat)
        weights = np.exp(log - log.max())
        weights /= weights.sum()
        assert mean == pytest.approx((weights * grid).sum(), abs=1e-6)
        assert variance == pytest.approx((weights * (grid - mean) ** 2).sum(), rel=1e-3)

    def test_as_printed(self) -> None:
        """Steps 9 and 10 with numbers: sigma_M = .2, sigma_S = .4, n = 3."""
        policy = CaliTS(sigma_m=0.2, sigma_s=0.4)
        policy.rounds, policy.theta_hat = 3, 0.9
        # .16 / (3 * .04 + .16) * .3 + 3 * .04 / (3 * .04 + .16) * .9;  .04 * .16 / (.16 + 3 * .04)
        assert policy.posterior(0.3) == pytest.approx((0.16 / 0.28 * 0.3 + 0.12 / 0.28 * 0.9, 0.0064 / 0.28))

    def test_draws_are_clipped_gaussians(self) -> None:
        policy = CaliTS(predict=False, theta0=0.5, sigma_m=0.1)
        policy.more(0)
        draws = [policy.theta(0) for _ in range(2000)]
        assert stats.kstest(draws, stats.norm(0.5, 0.1).cdf).pvalue > SIGNIFICANCE
        wide = CaliTS(predict=False, theta0=0.9, sigma_m=0.5)
        wide.more(0)
        draws = [wide.theta(0) for _ in range(2000)]
        assert min(draws) == 0
        assert max(draws) == 1
        assert np.mean(np.array(draws) == 1) == pytest.approx(stats.norm(0.9, 0.5).sf(1), abs=0.04)

    def test_literal_by_hand(self) -> None:
        policy = CaliTS(theta0=0.5, literal=True)
        for outcome, want in [
            ((5, 3), 0.875),  # t = 3: (.5 * 1 + 3) / 4
            ((4, 0), 0.875),  # t = 3: (.875 * 4 + 0) / 4: a rejection changes nothing
            ((4, 2), 5.5 / 6),  # t = 5: (.875 * 4 + 2) / 6
        ]:
            policy.observe(*outcome)
            assert policy.theta_hat == pytest.approx(want)
        assert policy.rounds == 3

    @given(rounds)
    def test_literal_only_rises(self, rounds) -> None:
        policy = CaliTS(literal=True)
        for outcome in rounds:
            before = policy.theta_hat
            policy.observe(*outcome)
            assert before - 1e-12 <= policy.theta_hat <= 1

    @given(rounds, st.floats(0, 1))
    def test_theta_hat_is_the_mean_of_what_was_judged(self, rounds, theta0: float) -> None:
        policy = CaliTS(theta0=theta0)
        verdicts = [theta0]
        for drafted, accepted in rounds:
            policy.observe(drafted, accepted)
            verdicts += judged(drafted, accepted)
        assert policy.theta_hat == pytest.approx(np.mean(verdicts))

    @pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
    def test_converges_to_the_acceptance_rate(self, p: float) -> None:
        policy = CaliTS(sigma_s=0.5)
        play(policy, p, 2000)
        assert policy.theta_hat == pytest.approx(p, abs=0.05)
        mean, variance = policy.posterior(0.0)  # even if the predictor insists
        assert mean == pytest.approx(p, abs=0.06)
        assert variance**0.5 < 0.02

    def test_the_ablations(self) -> None:
        alone, without = CaliTS(calibrate=False), CaliTS(predict=False, theta0=0.25, sigma_s=0.5)
        for policy in (alone, without):
            for _ in range(1000):
                policy.observe(4, 4)
        assert alone.posterior(0.3) == pytest.approx((0.3, 0.1**2))
        without.more(0)
        without.keep(FLAT, 0)
        without.keep(SHARP, 1)
        assert without._predictions == [0.25, 0.25]
        assert without.posterior(0.25)[0] > 0.95

    def test_sharp_distributions_are_followed_longer(self) -> None:
        lengths = {}
        for name, q in (("sharp", SHARP), ("flat", torch.full((1000,), 0.001))):
            policy = CaliTS(learn=False)
            policy.seed(0)
            lengths[name] = np.mean([draft(policy, q) for _ in range(200)])
        assert lengths["sharp"] > 2 * lengths["flat"]

    def test_learns_which_signs_to_trust(self) -> None:
        """Flat drafts are always accepted and sharp ones never: not what the coefficients say at first."""
        policy = CaliTS(k_max=1)
        for _ in range(100):
            for q, accepted in ((FLAT, 1), (SHARP, 0)):
                policy.more(0)
                policy.keep(q, 0)
                policy.observe(1, accepted)
        policy.more(0)
        policy.keep(FLAT, 0)
        policy.keep(SHARP, 1)
        flat, sharp = policy._predictions
        assert flat > 0.9
        assert sharp < 0.1

    def test_learns_nothing_from_what_was_not_judged(self) -> None:
        """Tokens behind a rejection, and tokens it asked about that were not drafted after all."""
        behind, short = CaliTS(), CaliTS()
        for policy, outcome in ((behind, (4, 0)), (short, (1, 0))):
            policy.more(0)
            for depth in range(4):
                policy.keep(FLAT, depth)
            policy.observe(*outcome)
        assert np.array_equal(behind.online.mean, short.online.mean)

    @pytest.mark.parametrize(
        "bad",
        [{"sigma_m": 0.0}, {"sigma_m": 1e-200}, {"sigma_s": -0.1}, {"theta0": 1.5}, {"k_max": -1}],
    )
    def test_out_of_range(self, bad) -> None:
        with pytest.raises(OptionError, match=next(iter(bad))):
            CaliTS(**bad)


def value(k: int, p: float, cost: float) -> float:
    """Tokens per target pass's worth of time when k tokens are drafted each round."""
    return sum(p**i for i in range(k + 1)) / (1 + cost * k)


class TestCost:
    @pytest.mark.parametrize("cost", [0.0, 0.05, 0.15, 0.3, 0.6, 0.85])
    @pytest.mark.parametrize("p", [0.2, 0.5, 0.7, 0.9])
    def test_the_best_length_for_a_theta_that_is_known(self, p: float, cost: float) -> None:
        policy = BetaTS(a0=p * 1e9, b0=(1 - p) * 1e9, cost=cost, k_max=12)
        best = max(range(13), key=lambda k: (value(k, p, cost), k))
        assert draft(policy) == best
        assert (best == 0) == (cost > p)

    def test_a_dear_first_token_may_pay_with_those_behind_it(self) -> None:
        """At a theta of .45: 1.45 / 1.5 and 1.6525 / 1.6 tokens per cost, at .3 never more than 1."""
        for p, best in ((0.45, 2), (0.3, 0)):
            policy = BetaTS(a0=p * 1e9, b0=(1 - p) * 1e9, cost="auto", k_max=4)
            policy.check(Setting("model", "draft", 6, 4, cost=[1.0, 1.5, 1.6, 1.75, 1.9].__getitem__))
            assert draft(policy) == best

    def test_each_token_counts(self) -> None:
        """theta_M .9, .9, .2 and theta_hat .8, at a cost of .3; from the fourth token on none would pay."""
        policy = CaliTS(cost=0.3, theta0=0.8)
        policy.rounds, policy.theta_hat = 0, 0.8
        policy.trials, policy.successes = 1000, 800
        assert policy.more(0)
        for depth, (theta_m, goes_on) in enumerate([(0.9, True), (0.9, True), (0.2, False)]):
            # .9 * .8 / .3 > 1.9 / 1.3;  .81 * .8 / .3 > 2.71 / 1.6;  .162 * .8 / .3 < 2.872 / 1.9
            policy._predictions.append(theta_m)
            assert policy.more(depth + 1) == goes_on

    @BOTH
    @pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
    def test_nearly_as_good_as_the_best_fixed_length(self, policy, p: float) -> None:
        """Which nobody knows beforehand; the prior is found out to be wrong on the way."""
        made, accepts, tokens, spent = policy(cost=0.15), random.Random(0), 0, 0.0
        made.seed(0)
        for _ in range(1000):
            drafted = draft(made)
            accepted = 0
            while accepted < drafted and accepts.random() < p:
                accepted += 1
            made.observe(drafted, accepted)
            tokens, spent = tokens + accepted + 1, spent + 1 + 0.15 * drafted
        assert tokens / spent > 0.95 * max(value(k, p, 0.15) for k in range(17))

    @BOTH
    def test_drafting_that_does_not_pay_is_given_up_but_tried_again(self, policy) -> None:
        lengths = play(policy(cost=0.6), 0.3, 600)
        assert 0 < sum(length > 0 for length in lengths[100:]) < 0.2 * 500
        lengths = play(policy(cost=0.3), 0.9, 600)
        assert np.mean(lengths[-200:]) == pytest.approx(4, abs=1)

    @BOTH
    def test_auto_is_what_the_setting_measures(self, policy) -> None:
        made = policy(cost="auto")
        made.check(Setting("model", "draft", 6, 4, cost=[1, 1.3, 1.6, 9, *[20] * 20].__getitem__))
        assert max(play(made, 0.95, 200)) == 2
        made = policy(cost="auto")
        made.check(Setting("model", "draft", 6, 4, cost=lambda drafted: 1 + 0.1 * drafted))
        assert play(made, 0.8, 200, seed=1) == play(policy(cost=0.1), 0.8, 200, seed=1)

    @BOTH
    @pytest.mark.parametrize("bad", [-0.1, "cheap"])
    def test_out_of_range(self, policy, bad) -> None:
        with pytest.raises(OptionError, match="cost must be"):
            policy(cost=bad)

    @pytest.mark.parametrize("name", ["beta-ts", "cali-ts"])
    def test_from_the_command_line(self, name: str) -> None:
        assert POLICIES.parse(f"{name}:cost=auto").build().cost == "auto"
        assert POLICIES.parse(f"{name}:cost=0.2").build().cost == 0.2
        assert POLICIES.parse(f"{name}:cost=none").build().cost is None


@BOTH
def test_a_seed_repeats_its_choices(policy) -> None:
    assert play(policy(), 0.7, 100, seed=3) == play(policy(), 0.7, 100, seed=3)
    assert play(policy(), 0.7, 100, seed=3) != play(policy(), 0.7, 100, seed=4)


@BOTH
def test_without_a_seed_choices_vary(policy) -> None:
    assert len({tuple(draft(made) for made in [policy()] for _ in range(50)) for _ in range(5)}) == 5


@BOTH
def test_drafts_at_least_one_and_at_most_k_max(policy) -> None:
    made = policy(k_max=3)
    lengths = {draft(made) for _ in range(300)}
    assert lengths == {1, 2, 3}
    assert draft(policy(k_max=0)) == 0


@BOTH
def test_a_drafter_may_ask_how_deep_only(policy) -> None:
    """Trees: nobody asks `keep`."""
    made = policy(k_max=5)
    for _ in range(50):
        depth = 0
        while made.more(depth):
            depth += 1
        assert 1 <= depth <= 5
        made.observe(depth, depth)


class TestOnlineLogistic:
    def test_finds_the_weights(self) -> None:
        rng = np.random.default_rng(0)
        truth = np.array([-0.5, 1.5, -2.0])
        model = OnlineLogistic(np.zeros(3), variance=4.0)
        for _ in range(4000):
            features = np.array([1.0, *rng.uniform(-1, 1, 2)])
            model.learn(features, rng.random() < sigmoid(truth @ features))
        error = np.array(model.mean) - truth
        assert error @ np.linalg.inv(model.covariance) @ error < stats.chi2(3).isf(1e-3)
        assert np.diag(model.covariance).max() < 0.02

    def test_without_data_it_says_what_it_was_told(self) -> None:
        model = OnlineLogistic(np.array(BUILT_IN), variance=1e-9)
        features = np.array([1.0, 0.5, 0.8, 0.6, 0.1])
        assert model.probability(features) == pytest.approx(sigmoid(features @ np.array(BUILT_IN)))
        assert OnlineLogistic(np.array([2.0]), 9.0).probability(np.ones(1)) < sigmoid(2.0)  # less sure, nearer to 1/2


@pytest.mark.parametrize(
    "policy", ["beta-ts:a0=inf", "beta-ts:b0=nan", "beta-ts:a0=1e308", "cali-ts:sigma_m=1e200", "cali-ts:sigma_s=inf"]
)
def test_priors_are_numbers_that_one_can_draw_with(policy: str) -> None:
    """With others, Python's generator of random numbers never returns."""
    with pytest.raises(OptionError):
        POLICIES.parse(policy).build()
