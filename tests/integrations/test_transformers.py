"""Output through custom_generate must be model.generate's own, whatever generate is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    EpsilonLogitsWarper,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

import paceline
from paceline.api import LLM
from paceline.drafters.none import NoDrafter
from paceline.errors import ContextOverflow, OptionError, PacelineError, UnsupportedModel
from paceline.integrations.transformers import CustomGenerate, _says_nothing
from paceline.targets.sources import load_model
from tiny import byte_tokenizer, small_llama

METHODS = ["prompt-lookup:branches=2+fixed:k=4", "layer-skip+adaedl:threshold=0:k_max=3"]
PROMPTS = ["one two one two one", "abcabcabcab", "x", "the cat, the dog, the c"]
HUB_REPO = Path(__file__).parents[2] / "docs" / "hub-repo"

Batch = dict[str, Tensor]


@pytest.fixture(params=METHODS)
def fast(request: pytest.FixtureRequest) -> CustomGenerate:
    return paceline.custom_generate(request.param, tokenizer=byte_tokenizer())


def batch(prompts: list[str]) -> Batch:
    """Left-padded inputs, padded with a token that also is a letter of a prompt."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "x", "left"
    return dict(tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False))


def same(model: LlamaForCausalLM, fast: Any, inputs: Batch, **asked: Any) -> Tensor:
    """What both loops give, asserted to be the same."""
    asked = {"pad_token_id": 0, "max_new_tokens": 24} | asked
    want = model.generate(**inputs, **asked, do_sample=False)
    got = model.generate(**inputs, **asked, do_sample=False, custom_generate=fast)
    assert got.tolist() == want.tolist()
    assert (got.dtype, got.device) == (want.dtype, want.device)
    return got


class EndsWith(StoppingCriteria):
    """Stops each row at a token of its own time."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = torch.tensor(sorted(tokens))

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


class NoMultiples(LogitsProcessor):
    """Depends on the whole history, its length and the padding included."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = input_ids.sum(1, keepdim=True) % 7 == torch.arange(scores.shape[1]) % 7
        return scores.masked_fill(banned, -torch.inf)


class NoMultiplesOfLength(EpsilonLogitsWarper):
    """Made from one that looks at scores alone."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        banned = torch.arange(scores.shape[1]) % (2 + input_ids.shape[1] % 3) == 0
        return super().__call__(input_ids, scores.masked_fill(banned, -torch.inf))


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["single", "padded"])
@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 50},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 20, "renormalize_logits": True},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"bad_words_ids": [[1], [2, 3]], "sequence_bias": [[[65], 3.0]]},
        {"exponential_decay_length_penalty": (5, 1.5), "forced_eos_token_id": 7},
        {"suppress_tokens": [3, 5], "begin_suppress_tokens": [9]},
        {"prefix_allowed_tokens_fn": lambda row, ids: list(range(20 * row, 20 * row + 60 + len(ids) % 3))},
        {"logits_processor": LogitsProcessorList([NoMultiples()])},
        {"use_cache": False},
        {"cache_implementation": "static"},
    ],
    ids=lambda asked: "-".join(asked) or "plain",
)
def test_greedy_output_is_generates_own(
    tiny_llama: LlamaForCausalLM, fast: Any, prompts: list[str], asked: dict[str, Any]
) -> None:
    same(tiny_llama, fast, batch(prompts), **asked)
    assert len(fast.stats) == len(prompts)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["single", "padded"])
def test_rows_end_at_different_times(tiny_llama: LlamaForCausalLM, fast: Any, prompts: list[str]) -> None:
    inputs = batch(prompts)
    plain = tiny_llama.generate(**inputs, max_new_tokens=24, pad_token_id=0)[:, inputs["input_ids"].shape[1] :]
    ends = sorted({int(row[length]) for row, length in zip(plain, (3, 8, 13, 20), strict=False)})
    got = same(tiny_llama, fast, inputs, eos_token_id=ends)
    same(tiny_llama, fast, inputs, eos_token_id=ends, min_new_tokens=16)
    same(tiny_llama, fast, inputs, eos_token_id=ends[0], stopping_criteria=StoppingCriteriaList([EndsWith({*ends})]))
    if len(prompts) > 1:
        assert (got[:, -1] == 0).any()  # some row did end early, and was padded


def test_without_eos_rows_go_on_together(fast: Any) -> None:
    """transformers pads only if there is an end-of-sequence token; else rows wait for the slowest."""
    model, inputs = small_llama(eos_token_id=None), batch(PROMPTS)
    width = inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, max_new_tokens=24)[:, width:]
    ends = {int(row[length]) for row, length in zip(plain, (3, 8, 13, 20), strict=True)}
    got = same(model, fast, inputs, pad_token_id=None, stopping_criteria=StoppingCriteriaList([EndsWith(ends)]))
    assert 4 < got.shape[1] - width < 24
    same(model, fast, inputs, pad_token_id=None, stopping_criteria=StoppingCriteriaList([EndsWith(set())]))


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["single", "padded"])
def test_stop_strings(tiny_llama: LlamaForCausalLM, fast: Any, prompts: list[str]) -> None:
    inputs = batch(prompts)
    tokenizer = fast.tokenizer
    plain = tiny_llama.generate(**inputs, max_new_tokens=24, pad_token_id=0)[:, inputs["input_ids"].shape[1] :]
    ascii_ = [[t for t in row.tolist() if tokenizer.decode([t]).isascii()] for row in plain]
    stop = [tokenizer.decode(row[len(row) // 2]) for row in ascii_ if row]
    want = tiny_llama.generate(**inputs, max_new_tokens=24, pad_token_id=0, stop_strings=stop, tokenizer=tokenizer)
    got = tiny_llama.generate(**inputs, max_new_tokens=24, pad_token_id=0, stop_strings=stop, custom_generate=fast)
    assert got.tolist() == want.tolist()
    assert want.shape[1] < plain.shape[1] + inputs["input_ids"].shape[1] or (want[:, -1] == 0).any()
    with pytest.raises(OptionError, match="tokenizer"):
        tiny_llama.generate(**inputs, stop_strings=stop, custom_generate=paceline.custom_generate())


def test_your_own_length_below_the_prompts(tiny_llama: LlamaForCausalLM, fast: Any) -> None:
    """generate asks criteria after each token, so there is always one."""
    for inputs in (batch(PROMPTS[:1]), batch(PROMPTS)):
        prompt = inputs["input_ids"].shape[1]
        for length in (1, prompt - 1, prompt, prompt + 1, prompt + 2):
            criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
            got = same(tiny_llama, fast, inputs, stopping_criteria=criteria)
            assert got.shape[1] == max(length, prompt + 1)


def test_a_warper_of_yours_sees_the_history(tiny_llama: LlamaForCausalLM, fast: Any) -> None:
    """Though the one that it is made from looks at scores alone."""
    inputs = {name: tensor[:3] for name, tensor in batch(PROMPTS).items()}  # each is padded
    same(tiny_llama, fast, inputs, logits_processor=LogitsProcessorList([NoMultiplesOfLength(1e-9)]))


def test_sampling_follows_the_global_seed(tiny_llama: LlamaForCausalLM, fast: Any) -> None:
    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        asked = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "num_return_sequences": 2}
        return tiny_llama.generate(
            **batch(PROMPTS[:2]), max_new_tokens=12, pad_token_id=0, **asked, custom_generate=fast
        ).tolist()

    assert len(sample(1)) == 4
    assert sample(1) == sample(1) != sample(2)
    first, second = sample(1)[:2]
    assert first != second  # sequences of one prompt draw on their own
    state = torch.get_rng_state()
    tiny_llama.generate(**batch(PROMPTS[:1]), max_new_tokens=4, custom_generate=fast)
    assert torch.equal(torch.get_rng_state(), state)  # greedy decoding draws nothing


def test_policies_are_told_what_takes_longer(
    tiny_llama: LlamaForCausalLM, fast: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling, and processors of logits."""
    asked, new_policy = [], LLM.new_policy
    monkeypatch.setattr(LLM, "new_policy", lambda self, *, plain=True: (asked.append(plain), new_policy(self))[1])
    for how in ({"do_sample": True}, {"repetition_penalty": 1.3}, {}):
        tiny_llama.generate(**batch(PROMPTS[:1]), max_new_tokens=2, pad_token_id=0, custom_generate=fast, **how)
    assert asked[-3:] == [False, False, True]  # before these the method is tried


@pytest.mark.parametrize(
    "processor", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 1}, {"repetition_penalty": 1.4}]
)
def test_several_sequences_of_one_prompt_share_its_processors(
    tiny_llama: LlamaForCausalLM, fast: Any, processor: dict[str, Any]
) -> None:
    """top_k = 1 makes sampling deterministic, so that rows can be compared."""
    asked = processor | {"do_sample": True, "top_k": 1, "num_return_sequences": 3, "pad_token_id": 0}
    want = tiny_llama.generate(**batch(PROMPTS[:3]), max_new_tokens=20, **asked)
    got = tiny_llama.generate(**batch(PROMPTS[:3]), max_new_tokens=20, **asked, custom_generate=fast)
    assert got.tolist() == want.tolist()


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamer_sees_what_generate_would_put(tiny_llama: LlamaForCausalLM) -> None:
    inputs, theirs, ours = batch(PROMPTS[:1]), Recorder(), Recorder()
    asked = {"max_new_tokens": 15, "pad_token_id": 0}
    tiny_llama.generate(**inputs, **asked, streamer=theirs)
    tiny_llama.generate(**inputs, **asked, custom_generate=paceline.custom_generate(METHODS[0], streamer=ours))
    assert ours.puts == theirs.puts
    assert ours.ended == 1


def test_generates_own_streamer(tiny_llama: LlamaForCausalLM) -> None:
    """transformers does not hand it on, but has put the prompt."""
    inputs, theirs, ours, another = batch(PROMPTS[:1]), Recorder(), Recorder(), Recorder()
    asked = {"max_new_tokens": 15, "pad_token_id": 0}
    tiny_llama.generate(**inputs, **asked, streamer=theirs)
    fast = paceline.custom_generate(METHODS[0], streamer=another)
    tiny_llama.generate(**inputs, **asked, streamer=ours, custom_generate=fast)
    assert ours.puts == another.puts == theirs.puts
    assert ours.ended == another.ended == 1
    once = Recorder()
    same = paceline.custom_generate(METHODS[0], streamer=once)
    tiny_llama.generate(**inputs, **asked, streamer=once, custom_generate=same)
    assert (once.puts, once.ended) == (theirs.puts, 1)
    with pytest.raises(OptionError, match="streamer takes one row"):
        tiny_llama.generate(**batch(PROMPTS), **asked, streamer=Recorder(), custom_generate=paceline.custom_generate())


def test_text_streamer(tiny_llama: LlamaForCausalLM) -> None:
    streamer = TextIteratorStreamer(byte_tokenizer(), skip_prompt=True)
    fast = paceline.custom_generate(METHODS[0], streamer=streamer)
    ids = tiny_llama.generate(**(inputs := batch(PROMPTS[:1])), max_new_tokens=15, custom_generate=fast)
    assert "".join(streamer) == byte_tokenizer().decode(ids[0, inputs["input_ids"].shape[1] :])
    with pytest.raises(OptionError, match="streamer takes one row"):
        tiny_llama.generate(**batch(PROMPTS), custom_generate=fast)


def test_returns_a_dict_when_asked(tiny_llama: LlamaForCausalLM, fast: Any) -> None:
    inputs = batch(PROMPTS)
    asked = {"max_new_tokens": 10, "pad_token_id": 0}
    out = tiny_llama.generate(**inputs, **asked, return_dict_in_generate=True, custom_generate=fast)
    assert out.sequences.tolist() == tiny_llama.generate(**inputs, **asked).tolist()


def test_model_is_left_as_it_was() -> None:
    model = small_llama(attention_dropout=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = set(vars(model))
    model.train()
    model.model.layers[0].eval()
    fast = paceline.custom_generate("layer-skip")
    out = model.generate(**batch(PROMPTS[:1]), max_new_tokens=20, custom_generate=fast)
    assert model.training
    assert not model.model.layers[0].training
    assert set(vars(model)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    assert out.tolist() == model.generate(**batch(PROMPTS[:1]), max_new_tokens=20).tolist()


def test_target_is_built_once_a_model(tiny_llama: LlamaForCausalLM) -> None:
    built = []

    def drafter(target: Any) -> NoDrafter:
        built.append(target.model)
        return NoDrafter(target)

    fast, other = paceline.custom_generate(drafter), small_llama(seed=1)
    for model in (tiny_llama, tiny_llama, other, other):
        same(model, fast, batch(PROMPTS[:2]), max_new_tokens=4)
    assert built == [tiny_llama, other]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"num_beams": 2}, "beam search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted"),
        ({"assistant_model": small_llama(seed=1)}, "draft-model:model="),
        ({"num_assistant_tokens": 3}, "knows no num_assistant_tokens: policies"),
        ({"generation_config": GenerationConfig(assistant_confidence_threshold=0.9)}, "assistant_confidence_threshold"),
        (
            {"return_dict_in_generate": True, "output_scores": True, "output_attentions": True},
            "output_scores, output_a",
        ),
        pytest.param(
            {"cache_implementation": "offloaded"},
            "offloaded",
            marks=pytest.mark.skipif(
                torch.version.cuda is not None and not torch.cuda.is_available(),
                reason="transformers asks the driver, which a CUDA build of torch misses here",
            ),
            id="cache_implementation-",
        ),
        ({"guidance_scale": 2.0}, "UnbatchedClassifierFreeGuidance"),
        ({"position_ids": torch.arange(3, 3 + len(PROMPTS[0]))[None]}, "position_ids"),
        ({"attention_mask": torch.ones(1, len(PROMPTS[0])).index_fill_(1, torch.tensor([4]), 0)}, "left"),
        ({"attention_mask": torch.ones(1, len(PROMPTS[0])).index_fill_(1, torch.tensor([-1 % 19]), 0)}, "left"),
        ({"inputs_embeds": torch.zeros(1, 4, 32, dtype=torch.float64), "input_ids": None}, "inputs_embeds"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_refuses_what_it_cannot_honour(tiny_llama: LlamaForCausalLM, asked: dict[str, Any], message: str) -> None:
    inputs = batch(PROMPTS[:1]) | asked
    if inputs["input_ids"] is None:
        inputs = asked | {"input_ids": None, "attention_mask": torch.ones(1, 4)}
    with pytest.raises(OptionError, match=message):
        tiny_llama.generate(**inputs, max_new_tokens=5, custom_generate=paceline.custom_generate("none"))


def test_refuses_a_filled_cache(tiny_llama: LlamaForCausalLM) -> None:
    inputs, cache = batch(PROMPTS[:1]), DynamicCache()
    tiny_llama(inputs["input_ids"][:, :4], past_key_values=cache)
    with pytest.raises(OptionError, match="past_key_values"):
        tiny_llama.generate(**inputs, past_key_values=cache, custom_generate=paceline.custom_generate())


def test_refuses_padding_without_a_pad_token() -> None:
    model = small_llama(eos_token_id=None)
    criteria = StoppingCriteriaList([EosTokenCriteria([5])])
    with pytest.raises(OptionError, match="pad_token_id"):
        model.generate(**batch(PROMPTS), stopping_criteria=criteria, custom_generate=paceline.custom_generate())


def test_refuses_models_and_methods(tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(OptionError, match="did you mean 'prompt-lookup'"):
        paceline.custom_generate("promt-lookup")
    with pytest.raises(OptionError, match="no option"):
        paceline.custom_generate("none", "fixed:n=2")
    with pytest.raises(ContextOverflow):
        tiny_llama.generate(**batch(PROMPTS), max_length=300, custom_generate=paceline.custom_generate())
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        t5.generate(torch.tensor([[1, 2]]), custom_generate=paceline.custom_generate())


def test_generation_config_of_the_users(tiny_llama: LlamaForCausalLM, fast: Any) -> None:
    config = GenerationConfig(max_new_tokens=12, pad_token_id=0, eos_token_id=[3, 256], repetition_penalty=1.1)
    inputs = batch(PROMPTS)
    want = tiny_llama.generate(**inputs, generation_config=config)
    assert tiny_llama.generate(**inputs, generation_config=config, custom_generate=fast).tolist() == want.tolist()


def test_hub_repo(tiny_llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder that makes a hub repository offer paceline, used from disk."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    streamer = Recorder()
    inputs = batch(PROMPTS[:1])
    asked = {"custom_generate": str(HUB_REPO), "trust_remote_code": True, "max_new_tokens": 10, "pad_token_id": 0}
    got = tiny_llama.generate(**inputs, **asked, drafter="prompt-lookup+fixed:k=2", streamer=streamer)
    assert got.tolist() == tiny_llama.generate(**inputs, max_new_tokens=10, pad_token_id=0).tolist()
    assert streamer.ended == 1
    with pytest.raises(OptionError, match="unknown drafter"):
        tiny_llama.generate(**inputs, **asked, drafter="nobody")
    with pytest.raises(PacelineError, match="assistant_model"):
        tiny_llama.generate(**inputs, **asked, assistant_model=tiny_llama)


@pytest.mark.parametrize("where", ["keyword", "config", "model"])
def test_stop_strings_of_a_configuration_in_the_hub_repo(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers keeps these to itself and drops the tokenizer that they need."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model, inputs, tokenizer = small_llama(), batch(PROMPTS), byte_tokenizer()
    width = inputs["input_ids"].shape[1]
    plain = model.generate(**inputs, max_new_tokens=24, pad_token_id=0)
    ends = [tokenizer.decode(row[width + 5 + at]) for at, row in enumerate(plain)]
    asked: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0, "tokenizer": tokenizer}
    if where == "model":
        model.generation_config.stop_strings = ends
    elif where == "config":
        asked["generation_config"] = GenerationConfig(stop_strings=ends)
        model.generation_config.stop_strings = ["nothing like this"]
    else:
        asked["stop_strings"] = ends
        model.generation_config.stop_strings = ["nothing like this"]
    want = model.generate(**inputs, **asked)
    got = model.generate(**inputs, **asked, custom_generate=str(HUB_REPO), trust_remote_code=True)
    assert got.tolist() == want.tolist() != plain.tolist()
    assert model.generation_config.stop_strings  # as it was


def test_model_repo_that_ships_the_folder(
    tiny_llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers then replaces the model's own generate, which must not call itself."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    repo = tmp_path / "repo"
    tiny_llama.save_pretrained(repo)
    (repo / "custom_generate").mkdir()
    for file in (HUB_REPO / "custom_generate").iterdir():
        if file.is_file():
            (repo / "custom_generate" / file.name).write_text(file.read_text())
    model = LlamaForCausalLM.from_pretrained(repo, trust_remote_code=True)
    got = model.generate(**batch(PROMPTS), max_new_tokens=10, pad_token_id=0)
    assert got.tolist() == tiny_llama.generate(**batch(PROMPTS), max_new_tokens=10, pad_token_id=0).tolist()


def test_a_model_that_changes_its_type() -> None:
    """In place, as `half` and `to` do: it is looked at anew."""
    model, fast = small_llama(), paceline.custom_generate("prompt-lookup")
    for kind in (torch.float64, torch.float32):
        model.to(kind)
        same(model, fast, batch(PROMPTS[:1]))


def replaced_layer(model: LlamaForCausalLM) -> None:
    model.model.layers[1] = small_llama(seed=3).model.layers[1]


def cut_layers(model: LlamaForCausalLM) -> None:
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2


def more_tokens(model: LlamaForCausalLM) -> None:
    """Likelier ones than those there were, in the same directions."""
    model.resize_token_embeddings(300, mean_resizing=False)
    for matrix in (model.get_input_embeddings(), model.get_output_embeddings()):
        matrix.weight.data[257:] = 2 * matrix.weight.data[:43]


CHANGES: dict[str, Callable[[LlamaForCausalLM], object]] = {
    "output": lambda model: setattr(model, "lm_head", small_llama(seed=3, tie_word_embeddings=False).lm_head),
    "decoder": lambda model: setattr(model, "model", small_llama(seed=3).model),
    "embeddings": lambda model: model.set_input_embeddings(small_llama(seed=3).get_input_embeddings()),
    "norm": lambda model: setattr(model.model, "norm", torch.nn.LayerNorm(32).double()),
    "layer": replaced_layer,
    "fewer-layers": cut_layers,
    "more-tokens": more_tokens,
    "fewer-tokens": lambda model: model.resize_token_embeddings(100, mean_resizing=False),
    "attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_whose_parts_are_replaced(change: str, tied: bool) -> None:
    """Between two calls: it is looked at anew."""
    model, fast = small_llama(tie_word_embeddings=tied), paceline.custom_generate(METHODS[0])
    inputs = batch(["abcabcabcab"])
    before = same(model, fast, inputs)
    was = fast._llm
    CHANGES[change](model)
    after = same(model, fast, inputs)
    assert fast._llm is not was
    assert change == "attention" or after.tolist() != before.tolist()
    now = fast._llm
    same(model, fast, inputs)
    assert fast._llm is now


def test_model_without_blocks() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    model = GPT2LMHeadModel(config).double().eval()
    same(model, paceline.custom_generate("prompt-lookup"), batch(PROMPTS), eos_token_id=[3, 4], no_repeat_ngram_size=4)


def test_what_multimodal_models_get_with_a_text() -> None:
    ids = torch.tensor([[1, 2, 3]])
    nothing = {"mm_token_type_ids": torch.zeros_like(ids), "pixel_values": None, "mm_encoder_outputs": {}}
    assert all(_says_nothing(name, value) for name, value in nothing.items())
    assert not _says_nothing("mm_token_type_ids", ids)
    assert not _says_nothing("pixel_values", torch.zeros(1))


def test_refuses_inputs_that_something_else_prepares() -> None:
    model = small_llama()
    model.prepare_inputs_for_generation = lambda *args, **kwargs: {}
    with pytest.raises(OptionError, match="PEFT's prompt learning"):
        model.generate(**batch(PROMPTS[:1]), custom_generate=paceline.custom_generate("none"))


def test_called_by_hand(tiny_llama: LlamaForCausalLM) -> None:
    ids, config = torch.tensor([[1, 2, 3]]), GenerationConfig(max_length=8)
    criteria = StoppingCriteriaList([MaxLengthCriteria(8)])
    out = paceline.custom_generate("none")(tiny_llama, ids, LogitsProcessorList(), criteria, config)
    assert out.tolist() == tiny_llama.generate(ids, max_length=8).tolist()


@pytest.mark.model
def test_default_model() -> None:
    model, tokenizer = load_model("smollm2-135m")
    chats = [[{"role": "user", "content": text}] for text in ("Say hello, hello, hello.", "Count from one to five.")]
    tokenizer.padding_side = "left"
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_dict=True, return_tensors="pt", padding=True
    )
    fast = paceline.custom_generate("prompt-lookup", tokenizer=tokenizer)
    same(model, fast, dict(inputs), pad_token_id=tokenizer.pad_token_id, repetition_penalty=1.05)
    assert sum(stats.accepted for stats in fast.stats) > 0
