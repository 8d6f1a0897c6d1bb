"""AdaEDL and max-confidence against the paper: the stopping rules, and Algorithm 1 written out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import OptionError
from paceline.policies.adaedl import AdaEDL
from paceline.policies.max_confidence import MaxConfidence

BOTH = pytest.mark.parametrize("policy", [AdaEDL, MaxConfidence])


def algorithm_1(rounds, l, rate, limit, alpha, epsilon, beta1, beta2):  # noqa: E741
    """Dynamic updates for the stopping threshold lambda, as printed; lambda after each round."""
    history = []
    for n_drafted, n_acc in rounds:
        rate_i = n_acc / n_drafted
        rate = beta1 * rate + (1 - beta1) * rate_i
        if rate < alpha:
            new = l + epsilon
        elif n_acc != limit:
            new = l - epsilon
        else:
            new = l
        l = beta2 * l + (1 - beta2) * new  # noqa: E741
        history.append(l)
    return history


rounds_of_seven = st.lists(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), max_size=30)


@BOTH
@given(rounds_of_seven, st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_lambda_follows_algorithm_1(policy, rounds, alpha, beta1, beta2, epsilon) -> None:
    options = {"alpha": alpha, "beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    made = policy(k_max=7, threshold=0.3, **options)
    want = algorithm_1(rounds, 0.3, alpha, 7, **options)
    got = []
    for drafted, accepted in rounds:
        made.observe(drafted, accepted)
        got.append(made.threshold)
    assert got == pytest.approx(want, abs=1e-12)


@BOTH
def test_lambda_by_hand(policy) -> None:
    """The paper's settings: alpha .9, epsilon .01, beta1 .5, beta2 .9."""
    made = policy(threshold=0.4)
    made.observe(7, 7)  # the rate rises to .95, everything was accepted: lambda stays
    assert made.threshold == pytest.approx(0.4)
    made.observe(5, 5)  # .975, but less than the most: a little lower
    assert made.threshold == pytest.approx(0.399)
    made.observe(4, 0)  # .4875: higher
    assert made.threshold == pytest.approx(0.4)


@BOTH
def test_drafting_resumes(policy) -> None:
    """Rounds without a draft lower lambda, however bad those before them were."""
    made = policy(threshold=0.4)
    for _ in range(5):
        made.observe(5, 0)
    before = made.threshold
    for _ in range(100):
        made.observe(0, 0)
    assert made.threshold < before - 0.05


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(lambda w: sum(w) > 1e-3), st.floats(0.01, 2))
def test_adaedl_score(weights: list[float], gamma: float) -> None:
    """1 - sqrt(gamma H(q)), H in nats."""
    q = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    entropy = -sum(p * math.log(p) for p in q.tolist() if p > 0)
    assert AdaEDL(gamma=gamma).score(q) == pytest.approx(1 - math.sqrt(gamma * max(entropy, 0)), abs=1e-6)


def test_stopping_rules() -> None:
    flat, sharp = torch.full((4,), 0.25), torch.tensor([0.97, 0.01, 0.01, 0.01])
    # H(flat) = ln 4 = 1.386: the bound is 1 - sqrt(.2 * 1.386) = .473
    assert AdaEDL(threshold=0.473).keep(flat, 0)
    assert not AdaEDL(threshold=0.474).keep(flat, 0)
    assert AdaEDL(threshold=0.8).keep(torch.tensor([1.0, 0.0]), 0)
    assert MaxConfidence(threshold=0.25).keep(flat, 0)
    assert not MaxConfidence(threshold=0.26).keep(flat, 0)
    assert MaxConfidence(threshold=0.9).keep(sharp, 0)


@BOTH
def test_a_deterministic_proposal_is_certain(policy) -> None:
    assert policy(threshold=0.999).keep(None, 0)


@BOTH
def test_after_a_stop(policy) -> None:
    """The token is dropped, or kept as the last; the next round starts afresh."""
    flat = torch.full((100,), 0.01)
    for keep_last in (False, True):
        made = policy(k_max=3, threshold=0.9, keep_last=keep_last)
        assert made.more(0)
        assert made.keep(flat, 0) == keep_last
        assert not made.more(1)
        assert made.more(0)
        assert made.keep(torch.tensor([1.0, 0.0]), 0)
        assert made.more(1)
        assert made.more(2)
        assert not made.more(3)


@BOTH
def test_reads_q(policy) -> None:
    assert policy.reads_q
    assert policy(k_max=5).limit == 5
    assert not policy(k_max=0).more(0)


@BOTH
@pytest.mark.parametrize(
    "bad",
    [
        {"k_max": -1},
        {"alpha": 1.5},
        {"alpha": -0.1},
        {"beta1": 2.0},
        {"beta2": -1.0},
        {"epsilon": -0.01},
    ],
)
def test_out_of_range(policy, bad) -> None:
    with pytest.raises(OptionError, match=next(iter(bad))):
        policy(**bad)


def test_gamma_is_positive() -> None:
    with pytest.raises(OptionError, match="gamma"):
        AdaEDL(gamma=0.0)
