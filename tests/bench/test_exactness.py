from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.bench.exactness import diverge, measure_noise, next_logits
from paceline.targets import Target, as_target
from tiny import small_llama

PROMPT = [5, 9, 2, 7, 7, 1]


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama().float())


def test_noise_is_rounding_not_error(target: Target, tiny_llama: LlamaForCausalLM) -> None:
    prompts = [PROMPT, list(range(40))]
    exact = as_target(tiny_llama)
    assert 0 < measure_noise(target, prompts) < 1e-4
    assert measure_noise(exact, prompts) < 1e-12
    assert measure_noise(exact, prompts, tiny_llama) < 1e-12


def test_noise_shows_another_model(target: Target) -> None:
    assert measure_noise(target, [PROMPT], small_llama(seed=1).float()) > 0.1


def test_next_logits_are_the_models(target: Target) -> None:
    with torch.inference_mode():
        want = target.model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(next_logits(target, PROMPT), want, rtol=0, atol=1e-4)


def test_a_gap_decides_between_tie_and_wrong(target: Target) -> None:
    logits = next_logits(target, [*PROMPT, 3])
    first, second = logits.topk(2).indices.tolist()
    gap = float(logits[first] - logits[second])
    plain, output = [3, first, 8], [3, second, 9]
    found = diverge(target, PROMPT, plain, output, allowed=gap * 1.01)
    assert (found.position, found.tokens, found.verdict) == (1, [first, second], "tie")
    assert found.gap == pytest.approx(gap)
    assert diverge(target, PROMPT, plain, output, allowed=gap * 0.99).verdict == "wrong"


def test_without_noise_not_even_equal_logits_are_a_tie() -> None:
    target = as_target(small_llama(tie_word_embeddings=False).float())
    best = int(next_logits(target, PROMPT).argmax())
    with torch.no_grad():
        weight = target.model.get_output_embeddings().weight
        weight[best - 1] = weight[best]  # two tokens with the same logits, bit for bit
    for allowed, verdict in ((0.0, "wrong"), (1e-6, "tie")):
        found = diverge(target, PROMPT, [best - 1], [best], allowed)
        assert (found.gap, found.verdict) == (0.0, verdict)


def test_two_bad_tokens_are_no_tie(target: Target) -> None:
    """Candidates close to each other but far below the best: not even plain decoding's token is the argmax."""
    worst, second_worst = next_logits(target, PROMPT).topk(2, largest=False).indices.tolist()
    assert diverge(target, PROMPT, [worst], [second_worst], allowed=0.05).verdict == "wrong"


@pytest.mark.parametrize(("plain", "output", "ends"), [([1, 2, 3], [1, 2], [3, None]), ([1], [1, 4], [None, 4])])
def test_stopping_elsewhere_is_wrong(target: Target, plain: list[int], output: list[int], ends: list) -> None:
    found = diverge(target, PROMPT, plain, output, allowed=1e9)
    assert (found.position, found.tokens, found.gap, found.verdict) == (
        min(len(plain), len(output)),
        ends,
        None,
        "wrong",
    )
