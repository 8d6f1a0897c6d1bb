from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import paceline
from paceline import LLM
from paceline.bench.methods import Method, build_method, check_method
from paceline.decoding.sampling import SamplingParams
from paceline.errors import OptionError, UnsupportedModel
from tiny import EOS, LETTERS, byte_tokenizer, pair_tokenizer, small_llama, with_tokens

PROMPTS = [[10, 20, 30, 10, 20, 30, 10, 20], [7, 8, 9]]
GREEDY = SamplingParams(max_new_tokens=24)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return paceline.load(small_llama(), tokenizer=byte_tokenizer())


def build(name: str, llm: LLM) -> Method:
    return build_method(name, llm, lambda: llm.target.model)


@pytest.mark.parametrize("name", ["hf", "hf-lookup", "hf-lookup:tokens=3", "hf-early-exit:layers=1", "prompt-lookup"])
def test_greedy_ids_are_plain_decodings(llm: LLM, name: str) -> None:
    for prompt in PROMPTS:
        plain = build("ar", llm).generate([prompt], GREEDY, 0)
        made = build(name, llm).generate([prompt], GREEDY, 0)
        assert made.outputs == plain.outputs
        assert made.seconds > 0


def test_assisted_by_another_model(llm: LLM, tiny_model_dir: Path) -> None:
    method = build(f"hf-assisted:model={tiny_model_dir}", llm)
    made, plain = method.generate(PROMPTS[:1], GREEDY, 0), build("ar", llm).generate(PROMPTS[:1], GREEDY, 0)
    assert made.outputs == plain.outputs
    assert made.passes is not None
    assert made.passes < 24  # the assistant is the target in float32: drafts are accepted, its passes not counted


def test_passes_are_the_whole_models(llm: LLM) -> None:
    assert build("hf", llm).generate(PROMPTS[:1], GREEDY, 0).passes == 24
    early = build("hf-early-exit:layers=2", llm).generate(PROMPTS[:1], GREEDY, 0)
    assert early.passes is not None
    assert early.passes <= 24
    assert llm.target.model.config.num_hidden_layers == 3


def test_batch_is_padded_and_cut(llm: LLM) -> None:
    together = build("hf", llm).generate(PROMPTS, GREEDY, 0)
    assert together.outputs == build("ar", llm).generate(PROMPTS, GREEDY, 0).outputs
    model = llm.target.model
    stop = together.outputs[0][2]
    model.generation_config.eos_token_id = stop
    try:
        cut = build("hf", llm).generate(PROMPTS, GREEDY, 0).outputs
        assert cut == build("ar", llm).generate(PROMPTS, GREEDY, 0).outputs
        assert cut[0][-1] == stop
        assert stop not in cut[0][:-1]
    finally:
        model.generation_config.eos_token_id = 256


def test_the_models_generation_defaults_do_not_count(llm: LLM) -> None:
    config = llm.target.model.generation_config
    config.repetition_penalty, config.do_sample, config.top_k = 5.0, True, 3
    try:
        assert build("hf", llm).generate(PROMPTS[:1], GREEDY, 0).outputs == (
            build("ar", llm).generate(PROMPTS[:1], GREEDY, 0).outputs
        )
        assert llm.target.model.generation_config is config
    finally:
        config.repetition_penalty, config.do_sample, config.top_k = 1.0, False, None


def test_sampling_follows_the_seed(llm: LLM) -> None:
    hot = SamplingParams(max_new_tokens=24, temperature=1.5, top_p=0.95, min_p=0.01, top_k=100)
    for name in ("hf", "hf-lookup"):
        first, again, other = (build(name, llm).generate(PROMPTS[:1], hot, seed).outputs for seed in (1, 1, 2))
        assert first == again != other


def test_split_of_a_batch_adds_up_to_its_seconds(llm: LLM) -> None:
    made = build("prompt-lookup+fixed:k=3", llm).generate(PROMPTS, GREEDY, 0)
    assert made.split is not None
    assert sum(made.split.values()) == pytest.approx(made.seconds)
    assert min(made.split.values()) >= 0
    assert made.rounds is not None
    assert [sum(r[3] for r in rounds) for rounds in made.rounds] == [24, 24]
    assert made.passes == sum(map(len, made.rounds))


def test_refused_before_a_model_is_loaded() -> None:
    for name in ("ar", "hf", "hf-lookup:tokens=5", "prompt-lookup:ngram=2+fixed:k=2", "none"):
        check_method(name)
    for name, message in [
        ("hff", "unknown method 'hff'; there are ar, hf, hf-lookup"),
        ("hf-lookup:tokens=x", "must be int"),
        ("hf-lookup:k=3", "has no option"),
        ("hf+fixed", "has no option|unknown method"),
        ("prompt-lookup+fixd", "unknown policy 'fixd'"),
        ("prompt-lookup+fixed:k=-1", "k must be >= 0"),
        ("prompt-lookup:n=1", "has no option"),
        ("ar:k=1", "unknown method"),
    ]:
        with pytest.raises(OptionError, match=message):
            check_method(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hf-early-exit", "say how many layers draft"),
        ("hf-early-exit:layers=3", "1 <= N < 3"),
        ("hf-lookup:tokens=0", "tokens must be at least 1"),
        ("hf-assisted", "say which model drafts"),
    ],
)
def test_refused_for_this_model(llm: LLM, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        build(name, llm)


def test_early_exit_is_refused_where_the_model_ignores_it() -> None:
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    with pytest.raises(UnsupportedModel, match="gpt_neox models always run all their layers"):
        build("hf-early-exit:layers=1", paceline.load(GPTNeoXForCausalLM(config)))


def test_transformers_refusals_are_one_line(llm: LLM) -> None:
    with pytest.raises(UnsupportedModel, match=r"^hf-lookup: transformers' generate failed: .*batch_size = 1"):
        build("hf-lookup", llm).generate(PROMPTS, GREEDY, 0)


def test_assistant_with_another_tokenizer(llm: LLM, tmp_path: Path) -> None:
    """transformers' universal assisted generation, greedily and, by another way, sampled."""
    with_tokens(small_llama(), [*range(255, -1, -1), 66, 256]).float().save_pretrained(tmp_path)
    pair_tokenizer(LETTERS[::-1], [(LETTERS[65], LETTERS[66])], EOS).save_pretrained(tmp_path)
    method, prompts = build(f"hf-assisted:model={tmp_path}", llm), PROMPTS[:1]
    assert method.generate(prompts, GREEDY, 0).outputs == build("ar", llm).generate(prompts, GREEDY, 0).outputs
    sampled = SamplingParams(max_new_tokens=5, temperature=0.7)
    assert 0 < len(method.generate(prompts, sampled, 0).outputs[0]) <= 5
