"""What users call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from helpers import Oracle, hf_greedy, one_thread, small_neox  # noqa: F401
from paceline import LLM, Output
from paceline.drafters.auto import Auto
from paceline.drafters.layer_skip.drafter import LayerSkip
from paceline.drafters.none import NoDrafter
from paceline.drafters.prompt_lookup import PromptLookup
from paceline.errors import ContextOverflow, OptionError, PacelineError, UnknownModel, UnsupportedModel
from paceline.policies.adaedl import AdaEDL
from paceline.policies.fixed import Fixed
from paceline.policies.pace import Pace
from paceline.targets.linear import can_pack
from tiny import byte_tokenizer, small_llama


@pytest.fixture(scope="module")
def llm() -> LLM:
    return paceline.load(small_llama(), tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def bare() -> LLM:
    """Without a tokenizer."""
    return paceline.load(small_llama(), drafter="none")


class TestLoad:
    def test_folder(self, tiny_model_dir: Path) -> None:
        llm = paceline.load(str(tiny_model_dir), drafter="layer-skip+adaedl:gamma=0.5")
        assert isinstance(llm.drafter, LayerSkip)
        assert llm.policy.build().gamma == 0.5
        assert llm.tokenizer.chat_template
        assert llm.target.dtype == torch.float32

    @pytest.mark.parametrize("method", [{"drafter": "none+fixed:k=0"}, {"drafter": "none", "policy": "fixed:k=0"}])
    def test_method(self, method: dict[str, str]) -> None:
        llm = paceline.load(small_llama(), **method)
        assert type(llm.drafter) is NoDrafter
        assert llm.policy.build().limit == 0

    def test_defaults(self, llm: LLM) -> None:
        assert isinstance(llm.drafter, Auto)
        assert (llm.policy.cls, llm.policy.options) == (Fixed, {"k": 10})
        assert llm.method("layer-skip").policy.cls is Pace

    def test_drafter_as_a_function(self, llm: LLM) -> None:
        made = llm.method(lambda target: PromptLookup(target, ngram=2), "adaedl")
        assert made.drafter.lookup.longest == 2
        assert made.policy.cls is AdaEDL
        assert made.target is llm.target
        assert llm.method(PromptLookup).policy.text == "fixed:k=10"

    @pytest.mark.parametrize(
        ("drafter", "policy", "message"),
        [
            ("prompt-lookp", None, "unknown drafter 'prompt-lookp'; did you mean 'prompt-lookup'"),
            ("prompt-lookup", "fixd", "unknown policy 'fixd'; did you mean 'fixed'"),
            ("prompt-lookup+fixd", None, "unknown policy 'fixd'"),
            ("prompt-lookup:n=3", None, "no option 'n'"),
            ("prompt-lookup:ngram=x", None, "must be int"),
            ("none", "fixed:k=-1", "k must be >= 0"),
            ("trigram+fixed", "fixed:k=2", "the policy is given twice, as fixed and as fixed:k=2"),
            ("trigram+", None, "unknown policy ''"),
            ("trigram", 5, "a policy is its name, not 5"),
            ("eagle:head=/nowhere", None, "eagle: head: there is no /nowhere"),
            ("trigram:guide=/nowhere", None, "trigram: guide: there is no /nowhere"),
        ],
    )
    def test_bad_methods_are_refused_before_a_model_is_loaded(
        self, drafter: str, policy: str | None, message: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("paceline.api.load_target", lambda *_, **__: pytest.fail("loaded"))
        with pytest.raises(OptionError, match=message):
            paceline.load("smollm2-135m", drafter=drafter, policy=policy)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"verifier": "x"}, "unknown verifier 'x'"),
            ({"exact": "no"}, "exact must be True, False or None, not 'no'"),
            ({"drafter": lambda target: 5}, "a function of the target gives a drafter, not 5"),
            ({"tokenizer": 5}, "a tokenizer is one of transformers', not 5"),
        ],
    )
    def test_bad_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(OptionError, match=message):
            paceline.load(small_llama(), **{"drafter": "none", **options})

    def test_exact(self, tiny_model_dir: Path) -> None:
        assert not paceline.load(str(tiny_model_dir), exact=False).target.exact
        assert paceline.load(small_llama().float(), tier="torch", exact=can_pack() or None).target.exact is can_pack()
        with pytest.raises(OptionError, match="the reference tier cannot be exact here"):
            paceline.load(small_llama(), exact=True)  # an object, which stays on the reference tier

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": torch.float16}, "dtype float16: a loaded model keeps its own, float64"),
            ({"dtype": "int8"}, "dtype int8: a loaded model keeps its own, float64"),
            ({"device": "cuda"}, "device cuda: a loaded model stays where it is, on cpu"),
            ({"device": torch.device("meta")}, "device meta: a loaded model stays where it is"),
        ],
    )
    def test_a_loaded_model_is_not_changed(self, options: dict[str, object], message: str) -> None:
        """Nor is it ignored that somebody wants it so."""
        with pytest.raises(OptionError, match=message):
            paceline.load(small_llama(), drafter="none", **options)

    def test_a_loaded_model_may_be_asked_for_as_it_is(self) -> None:
        for dtype in ("float64", torch.float64):
            llm = paceline.load(small_llama(), drafter="none", dtype=dtype, device=torch.device("cpu"))
            assert llm.target.dtype == torch.float64

    def test_a_model_with_a_name_has_a_tokenizer(self, tiny_model_dir: Path) -> None:
        with pytest.raises(OptionError, match="tokenizer: only of a loaded model"):
            paceline.load(str(tiny_model_dir), tokenizer=byte_tokenizer())

    def test_bad_models(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownModel):
            paceline.load("no/such/folder/here")
        with pytest.raises(UnsupportedModel):
            paceline.load(small_llama().model)


class TestGenerate:
    def test_text(self, llm: LLM) -> None:
        output = llm.generate("Hello", chat=False, max_new_tokens=12)
        assert isinstance(output, Output)
        prompt = llm.tokenizer.encode("Hello")
        assert output.tokens == hf_greedy(llm.target.model, prompt, 12, eos_token_id=256)
        assert output.text == llm.tokenizer.decode(output.tokens, skip_special_tokens=True)
        assert output.finish_reason == ("eos" if output.tokens[-1] == 256 else "length")
        assert output.stats.prompt_tokens == len(prompt)

    def test_chat(self, llm: LLM) -> None:
        """A text goes through the chat template, if there is one and unless told otherwise."""
        text, message = "Hi", [{"role": "user", "content": "Hi"}]
        templated = llm.tokenizer.encode("user: Hi\nassistant: ")
        assert llm.encode(text) == llm.encode(text, chat=True) == llm.encode(message) == templated
        assert llm.encode(text, chat=False) == llm.tokenizer.encode("Hi")
        plain = paceline.load(small_llama(), tokenizer=byte_tokenizer(chat=False))
        assert plain.encode(text) == plain.tokenizer.encode("Hi")
        for prompt, chat in ((text, True), (message, None)):
            with pytest.raises(OptionError, match="no chat template"):
                plain.encode(prompt, chat)

    def test_kinds_of_prompts(self, bare: LLM) -> None:
        want = bare.generate([1, 2, 3], max_new_tokens=4).tokens
        for prompt in ((1, 2, 3), np.array([1, 2, 3]), list(np.array([1, 2, 3])), torch.tensor([1, 2, 3])):
            assert bare.generate(prompt, max_new_tokens=4).tokens == want
        several = bare.generate([[1, 2, 3], (1, 2, 3)], max_new_tokens=4)
        assert [output.tokens for output in several] == [want, want]
        assert [output.tokens for output in bare.generate([[1, 2, 3]], max_new_tokens=4)] == [want]

    def test_batch_of_texts_and_chats(self, llm: LLM) -> None:
        prompts = ["one", [{"role": "user", "content": "two, longer"}], [5, 6]]
        together = llm.generate(prompts, batch=2, max_new_tokens=6)
        assert [o.tokens for o in together] == [llm.generate(p, max_new_tokens=6).tokens for p in prompts]

    def test_seeds(self, bare: LLM) -> None:
        """Request i of a batch has seed + i."""
        options = {"temperature": 1.0, "max_new_tokens": 8, "eos": ()}
        first, second = bare.generate([[1, 2], [1, 2]], seed=5, **options)
        assert first.tokens == bare.generate([1, 2], seed=5, **options).tokens
        assert second.tokens == bare.generate([1, 2], seed=6, **options).tokens
        assert first.tokens != second.tokens
        unseeded = {tuple(bare.generate([1, 2], **options).tokens) for _ in range(3)}
        assert len(unseeded) == 3

    def test_eos_is_the_models_unless_given(self, bare: LLM) -> None:
        truth = hf_greedy(bare.target.model, [1, 2], 8)
        assert bare.generate([1, 2], max_new_tokens=8, eos=(truth[2],)).tokens == truth[: truth.index(truth[2]) + 1]
        assert bare.requests([[1]])[0].eos == {256}
        assert bare.requests([[1]], eos=())[0].eos == set()

    def test_without_a_tokenizer(self, bare: LLM) -> None:
        assert bare.generate([1, 2], max_new_tokens=3).text == ""
        for call in (lambda: bare.generate("Hello"), lambda: bare.tokenizer):
            with pytest.raises(OptionError, match="without a tokenizer: give prompts as token ids"):
                call()
        with pytest.raises(OptionError, match="stop strings need a model with a tokenizer"):
            bare.generate([1, 2], stop="x")

    @pytest.mark.parametrize(
        ("prompt", "options", "error", "message"),
        [
            ("", {}, OptionError, "the prompt is empty"),
            (" \n", {}, OptionError, "the prompt is empty"),
            ([], {}, OptionError, "the prompt is empty"),
            ([[]], {}, OptionError, "the prompt is empty"),
            (["good", ""], {}, OptionError, "the prompt is empty"),
            ([1, 257], {}, OptionError, r"token id \[257\] is outside the vocabulary of 257"),
            ([-1], {}, OptionError, "outside the vocabulary"),
            (None, {}, OptionError, "a prompt is text, token ids or chat messages, not NoneType"),
            ({"role": "user", "content": "x"}, {}, OptionError, "not dict"),
            (b"x", {}, OptionError, "not bytes"),
            ((1, "a"), {}, OptionError, "must be token ids"),
            (torch.ones(1, 3, dtype=torch.long), {}, OptionError, "must be token ids"),
            ([torch.tensor(1)], {}, OptionError, "not Tensor"),
            ([True], {}, OptionError, "must be token ids, not True or False"),
            ([{"role": "user"}], {}, OptionError, "a message has a role and a content"),
            ([{"role": "user", "content": "x"}, 5], {}, OptionError, "a message has a role and a content"),
            ("\ud800", {}, OptionError, "the prompt is not valid UTF-8"),
            ("x", {"ignore_eos": "false"}, OptionError, "ignore_eos must be True or False, not 'false'"),
            ("x", {"chat": "no"}, OptionError, "chat must be True, False or None, not 'no'"),
            ("x", {"prediction": ["x"]}, OptionError, "a prediction that is no text must be token ids"),
            ("x", {"batch": 1.5}, OptionError, "batch must be a whole number"),
            ("x", {"eos": [999]}, OptionError, r"token id \[999\] is outside"),
            ("x", {"json_schema": {"const": {1}}}, OptionError, "json_schema is no JSON"),
            ("x", {"max_new_tokens": 0}, OptionError, "max_new_tokens must be at least 1, not 0"),
            ("x", {"max_new_tokens": -3}, OptionError, "not -3"),
            ("x", {"temperature": -1.0}, OptionError, "temperature must lie in 0"),
            ("x", {"temprature": 1.0}, OptionError, "unknown sampling option: temprature"),
            ("x", {"drafter": "suffix"}, OptionError, "a request has no drafter of its own: llm.method"),
            ("x", {"batch": 0}, OptionError, "batch must be at least 1"),
            ("x", {"max_new_tokens": 257}, ContextOverflow, "exceed the model's context of 256 tokens"),
            ([1] * 250, {"max_new_tokens": 7}, ContextOverflow, "prompt of 250 tokens [+] 7 new tokens"),
        ],
    )
    def test_bad_input_is_one_clear_line(
        self, llm: LLM, prompt: object, options: dict[str, object], error: type[PacelineError], message: str
    ) -> None:
        with pytest.raises(error, match=message) as raised:
            llm.generate(prompt, **options)
        assert "\n" not in str(raised.value)


class TestStream:
    def test_takes_one_prompt(self, llm: LLM) -> None:
        with pytest.raises(OptionError, match="generate takes a list"):
            next(llm.stream(["one", "two"], max_new_tokens=4))

    @pytest.mark.parametrize("drafter", ["none", "oracle"])
    def test_pieces_are_the_text(self, llm: LLM, drafter: str) -> None:
        prompt = llm.encode("Tell me")
        want = llm.generate(prompt, max_new_tokens=40)
        if drafter == "oracle":
            llm = llm.method(lambda target: Oracle(target, {tuple(prompt): want.tokens}), "fixed:k=5")
        pieces = list(llm.stream(prompt, max_new_tokens=40))
        assert "".join(pieces) == want.text
        assert len(pieces) > 1
        assert all(pieces)

    def test_text_comes_as_it_is_made(self, llm: LLM) -> None:
        """Not at the end: nothing more is computed than has been asked for."""
        llm = llm.method("none")
        [request] = llm.requests(["Tell me"], max_new_tokens=200, eos=())
        run = llm.engine.run([request])
        next(run)
        assert len(request.output) == 1

    def test_stop_string_is_never_sent(self, llm: LLM) -> None:
        whole = llm.generate("Tell me", max_new_tokens=60, eos=()).text
        stop = next(whole[n : n + 2] for n in range(3, len(whole)) if "\ufffd" not in whole[n : n + 2])
        assert "".join(llm.stream("Tell me", max_new_tokens=60, eos=(), stop=stop)) == whole[: whole.index(stop)]
