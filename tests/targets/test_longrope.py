"""Phi-3's long models beyond the length that their short factors are for: as `generate`, which reads the text again."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.drafters.draft_model import DraftModel
from paceline.errors import ContextOverflow, OptionError
from paceline.targets import as_target
from paceline.targets.longrope import LongRopeTarget
from paceline.targets.span import Span
from told import told

SHORT, CONTEXT, NEW = 32, 96, 12
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 8.0, 16.0, 40.0]}
# Prompts that stay short, end on the way, end just before, at and behind the length, and cross it while drafts go on.
PROMPTS = [list(range(3, 3 + n)) for n in (5, 31, 32, 33, 50)] + [[7, 11, 13] * 8 + [7]]


def make(model_type: str = "phi3", **fields: object) -> hf.PreTrainedModel:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "max_position_embeddings": CONTEXT,
        "original_max_position_embeddings": SHORT,
        "eos_token_id": None,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT} | FACTORS
    if model_type == "phimoe":
        rope |= {"short_mscale": 1.1, "long_mscale": 1.3}
        sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = hf.AutoConfig.for_model(model_type, **(sizes | {"rope_parameters": rope} | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()


@pytest.fixture(scope="module")
def model() -> hf.PreTrainedModel:
    return make()


@pytest.fixture(scope="module")
def wanted(model: hf.PreTrainedModel) -> list[list[int]]:
    return [hf_greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", ["prompt-lookup:branches=2+fixed:k=4", "recycling+fixed:k=4"])
def test_across_the_length(model: hf.PreTrainedModel, wanted: list[list[int]], drafter: str) -> None:
    llm = paceline.load(model, drafter=drafter)
    assert isinstance(llm.target, LongRopeTarget)
    assert llm.target.context == CONTEXT
    options = {"max_new_tokens": NEW, "eos": ()}
    assert [output.tokens for output in llm.generate(PROMPTS, **options)] == wanted
    pairs = [
        output.tokens for at in range(0, len(PROMPTS), 2) for output in llm.generate(PROMPTS[at : at + 2], **options)
    ]
    assert pairs == wanted  # rows that a request left are used again


def test_the_factors_matter(model: hf.PreTrainedModel, wanted: list[list[int]]) -> None:
    model_like = make(original_max_position_embeddings=CONTEXT)
    model_like.config.rope_parameters["original_max_position_embeddings"] = CONTEXT
    assert [hf_greedy(model_like, prompt, NEW) for prompt in PROMPTS] != wanted


@torch.inference_mode()
def test_logits_of_every_length(model: hf.PreTrainedModel) -> None:
    """Behind each token those of one pass over the text up to there, with what enters the layers."""
    target, ids = as_target(model), torch.randint(3, 60, (1, 50), generator=torch.manual_seed(0))
    for chunk in (3, 64):
        for prompt in (1, 31, 32, 33):
            cache = target.new_cache(2, CONTEXT)
            target.prefill(ids[0, :prompt].tolist(), cache.rows(1, 2), chunk=chunk)
            cache.move(1, 0)
            row = cache.rows(0, 1)
            for start in range(prompt, 44, 5):
                span = Span(ids[:, start : start + 5], row.lengths.copy())
                out = target.forward(span, row, taps=(1,))
                row.commit([list(range(span.width))])
                for node in range(span.width):
                    own = model(ids[:, : start + node + 1], output_hidden_states=True)
                    torch.testing.assert_close(out.logits[0, node], own.logits[0, -1])
                    torch.testing.assert_close(out.taps[1][0, node], own.hidden_states[1][0, -1])


def test_phimoe() -> None:
    """Whose factors of scale change at the length as well."""
    model = make("phimoe")
    llm = paceline.load(model, drafter="prompt-lookup+fixed:k=3")
    assert isinstance(llm.target, LongRopeTarget)
    got = [llm.generate(prompt, max_new_tokens=NEW, eos=()).tokens for prompt in PROMPTS[-2:]]
    assert got == [hf_greedy(model, prompt, NEW) for prompt in PROMPTS[-2:]]


def test_what_is_refused(model: hf.PreTrainedModel) -> None:
    target = as_target(model)
    with told(OptionError, "no rejected token can be taken back"):
        DraftModel(target, model=target)  # type: ignore[arg-type]
    with told(ContextOverflow, f"context of {CONTEXT} tokens"):
        target.check_fits(CONTEXT, 1)


def test_those_that_end_at_the_length() -> None:
    """A window between the two lengths; another model type, of which `generate` reads nothing again."""
    assert as_target(make(sliding_window=64)).context == SHORT
    rope = {"rope_type": "longrope", "original_max_position_embeddings": SHORT, "rope_theta": 1e4} | FACTORS
    llama = hf.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=1, vocab_size=64, intermediate_size=32
    )
    llama.max_position_embeddings, llama.rope_parameters = CONTEXT, rope
    assert as_target(hf.LlamaForCausalLM(llama)).context == SHORT
