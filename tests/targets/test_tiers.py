"""Which tier a model gets."""

from __future__ import annotations

import logging

import pytest
import transformers as hf

from paceline.errors import NativeUnavailable, OptionError, UnsupportedModel
from paceline.targets import load_target, make_target, sources
from paceline.targets.native import target as native
from tiny import small_llama


def gpt2() -> hf.PreTrainedModel:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=64)).eval()


def named(monkeypatch: pytest.MonkeyPatch, model: hf.PreTrainedModel) -> None:
    monkeypatch.setattr(sources, "load_model", lambda name, **options: (model, None))


def test_models_load_on_the_torch_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, small_llama())
    assert load_target("any").tier == "torch"


def test_models_that_the_torch_tier_does_not_run_load_on_the_reference_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, gpt2())
    assert load_target("any").tier == "reference"


def test_a_tier_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, gpt2())
    with pytest.raises(UnsupportedModel):
        load_target("any", tier="torch")


def test_native_falls_back_to_torch_where_it_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "library", refuse)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert make_target(small_llama(), tier="native").tier == "torch"
    assert caplog.messages == ["no compiler; going on with the torch tier"]


def test_an_unknown_tier_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown tier 'fast'"):
        make_target(small_llama(), tier="fast")
