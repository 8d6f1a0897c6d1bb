"""Processors on the nodes of a tree, against transformers' own on one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as hf

from paceline.decoding.penalties import LogitBias
from paceline.decoding.processors import HISTORY_FREE
from paceline.decoding.sampling import NodeProcessors, Noise, SamplingParams
from paceline.errors import OptionError
from tiny import small_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return small_llama(vocab_size=16, eos_token_id=3)


def processors_of_generate(model, prompt: list[int], **options: object) -> LogitsProcessorList:
    """The list that transformers makes of the same settings."""
    got = []

    def capture(model, input_ids, logits_processor, **_):
        got.append(logits_processor)
        return input_ids

    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, eos_token_id=3, **options)
    model.generate(torch.tensor([prompt]), generation_config=config, custom_generate=capture)
    return got[0]


SETTINGS = [
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "repetition_penalty": 0.8, "min_new_tokens": 3},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.5, "repetition_penalty": 1.2, "no_repeat_ngram_size": 1, "min_new_tokens": 2},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_as_in_generate(model, settings: dict[str, object]) -> None:
    """The same processors in the same order: the same scores, at every length."""
    prompt = [1, 2, 3, 1, 2]
    params = SamplingParams(**settings, max_new_tokens=4)
    ours = LogitsProcessorList(params.processors(len(prompt), (3,), CPU))
    sampling = {"do_sample": True, "top_k": 0} if params.temperature else {}
    theirs = processors_of_generate(model, prompt, **{**sampling, **settings})
    redundant = hf.MinLengthLogitsProcessor  # transformers makes one of min_new_tokens too
    assert [type(one) for one in ours] == [type(one) for one in theirs if not isinstance(one, redundant)]
    generator = torch.Generator().manual_seed(0)
    for length in range(5, 9):
        ids = torch.randint(0, 16, (3, length), generator=generator)
        scores = 3 * torch.randn(3, 16, generator=generator)
        assert torch.equal(ours(ids, scores.clone()), theirs(ids, scores.clone()))


@given(
    st.sampled_from(SETTINGS),
    st.lists(st.integers(0, 15), min_size=1, max_size=8),
    st.lists(st.lists(st.integers(0, 15), max_size=4), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_each_node_has_its_own_history(settings, history, paths, seed) -> None:
    """A node of a tree is scored as if its path were the output so far."""
    processors = LogitsProcessorList(SamplingParams(**settings).processors(2, (3,), CPU))
    logits = 3 * torch.randn(len(paths), 16, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    got = NodeProcessors(processors)(logits, history, paths)
    assert torch.equal(logits, before)
    for node, path in enumerate(paths):
        want = processors(torch.tensor([history + path]), before[node : node + 1].clone())
        assert torch.equal(got[node], want[0])


def test_history_free_processors_need_no_history() -> None:
    made = [
        hf.TemperatureLogitsWarper(0.5),
        hf.TopKLogitsWarper(3),
        hf.TopPLogitsWarper(0.7),
        hf.MinPLogitsWarper(0.1),
        hf.TypicalLogitsWarper(0.7),
        hf.EpsilonLogitsWarper(0.05),
        hf.EtaLogitsWarper(0.05, device="cpu"),
        hf.LogitNormalization(),
        hf.InfNanRemoveLogitsProcessor(),
        hf.SuppressTokensLogitsProcessor([1, 2]),
        LogitBias({1: 2.0}, torch.device("cpu")),
    ]
    assert {type(one) for one in made} == set(HISTORY_FREE)
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for one in made:
        assert torch.equal(one(None, scores.clone()), one(torch.tensor([[1], [2], [3]]), scores.clone()))


def test_what_is_derived_from_one_of_these_gets_the_history() -> None:
    class Watching(hf.TopKLogitsWarper):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids.tolist())
            return super().__call__(input_ids, scores)

    seen = list[list[list[int]]]()
    NodeProcessors(LogitsProcessorList([Watching(3)]))(torch.randn(2, 8), [1, 2], [[], [5]])
    assert sorted(seen) == [[[1, 2]], [[1, 2, 5]]]


def test_scores_are_float32() -> None:
    """As transformers makes them, whatever the model computes in."""
    for dtype in (torch.bfloat16, torch.float64):
        assert NodeProcessors(LogitsProcessorList())(torch.ones(1, 4, dtype=dtype), [1], [[]]).dtype == torch.float32


def test_stateful_processors_are_refused(model) -> None:
    guidance = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model)
    with pytest.raises(OptionError, match="UnbatchedClassifierFreeGuidance"):
        NodeProcessors(LogitsProcessorList([guidance]))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"no_repeat_ngram_size": -1},
        {"max_new_tokens": 2.0},
        {"max_new_tokens": True},
        {"top_k": "2"},
        {"logprobs": True},
        {"seed": 1.5},
        {"seed": 2**63},
        {"temperature": None},
        {"temperature": float("inf")},
        {"top_p": "1"},
        {"repetition_penalty": 1e-300},
        {"logit_bias": {5: 1e300}},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {5: "a"}},
        {"logit_bias": {5: None}},
        {"logit_bias": {5: 10**400}},
        {"temperature": 10**400},
        {"presence_penalty": True},
        {"eos": ["a"]},
        {"eos": "a"},
        {"stop": [5]},
        {"stop": ("a", "")},
        {"stop": ""},
    ],
)
def test_out_of_range(bad: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(bad)) if "stop" not in bad else "stop"):
        SamplingParams(**bad)


def test_one_token_ends_as_a_list_of_them_does() -> None:
    assert SamplingParams(eos=2).eos == (2,)
    assert SamplingParams(stop=None).stop == ()


def test_the_least_temperatures_choose_the_likeliest() -> None:
    scores = torch.tensor([[10.0, 30.0, 29.9]])
    for temperature in (1e-5, 1e-40, 1e-300):
        [warper] = SamplingParams(temperature=temperature).processors(0, (), scores.device)
        assert warper(None, scores).softmax(-1).tolist() == [[0, 1, 0]]


def test_a_single_stop_string() -> None:
    """Not the tuple of its characters."""
    assert SamplingParams(stop="end").stop == ("end",)


class TestNoise:
    def test_positions_are_the_seeds_own(self) -> None:
        """Whatever was drawn before, in whatever pieces."""
        one, other = Noise(5), Noise(5)
        want = one.positions(0, 600)
        for _ in range(7):
            other.draft(), other.verify()
        assert other.positions(590, 10) == want[590:]
        assert other.positions(3, 4) == want[3:7]
        assert Noise(6).positions(0, 5) != want[:5]

    def test_streams_differ(self) -> None:
        noise = Noise(0)
        streams = [[noise.draft() for _ in range(20)], [noise.verify() for _ in range(20)], noise.positions(0, 20)]
        streams += [[Noise(seed).draft()] for seed in (1, 2)]
        numbers = [number for stream in streams for number in stream]
        assert len(set(numbers)) == len(numbers)
        assert all(0 <= number < 1 for number in numbers)

    def test_without_a_seed(self) -> None:
        assert Noise(None).positions(0, 4) != Noise(None).positions(0, 4)
