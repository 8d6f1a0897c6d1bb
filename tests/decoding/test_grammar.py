"""Grammars: the mask is a function of the output alone, and any drafter gives what plain decoding under it gives."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from typing import Any

import pytest
import torch

import paceline
from decoding.test_options import Watched
from helpers import perturbed
from paceline import LLM
from paceline.decoding import grammar
from paceline.decoding.grammar import GrammarState, json_grammar, lark_grammar, new_matcher
from paceline.decoding.sampling import SamplingParams
from paceline.drafters.dispatch import GRAMMAR, Dispatch
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.eagle.drafter import Eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.drafter import EarlyExit
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.targets.linear import can_pack
from paceline.targets.target import Target
from tiny import byte_tokenizer, small_llama

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "<" /[a-c]{1,9}/ ">" | "ab" start?'
PROMPT = [65, 66, 65]
EOS = 256
TOKENIZER = byte_tokenizer()

DRAFTERS: dict[str, Any] = {
    "none": "none+fixed:k=6",
    "prompt-lookup": "prompt-lookup",
    "suffix": "suffix:budget=6",
    "recycling": "recycling:budget=6",
    "lookahead": "lookahead",
    "merge": "merge:drafters=suffix|recycling:budget=6",
    "draft-model": lambda target: DraftModel(target, model=exact(perturbed(small_llama().float(), 0.05)).target),
    "early-exit": lambda target: EarlyExit(
        target, head=perturbed(ExitHead.from_target(small_llama().float(), 1, exit_layers=2), 0.05)
    ),
    "eagle": lambda target: Eagle(target, head=perturbed(EagleHead.from_target(small_llama().float(), 1), 0.05)),
}


def exact(model: Any, drafter: Any = "none") -> LLM:
    return paceline.load(
        model, tokenizer=TOKENIZER, tier="torch" if can_pack() else "reference", exact=can_pack(), drafter=drafter
    )


@cache
def plain() -> LLM:
    return exact(small_llama(max_position_embeddings=1024).float()).method("none", "fixed:k=0")


@cache
def loaded(name: str) -> LLM:
    return plain().method(DRAFTERS[name])


def state(grammar: str) -> GrammarState:
    return GrammarState(new_matcher(grammar, TOKENIZER, 257, (EOS,)), 257, (EOS,), len(PROMPT))


def allowed(of: GrammarState, ids: list[int], path: list[int]) -> list[int]:
    scores = of.mask(torch.zeros(1, 257), ids, [path])[0]
    return (scores == 0).nonzero().flatten().tolist()


class TestState:
    @pytest.mark.parametrize("grammar", [json_grammar(SCHEMA), lark_grammar(LARK)])
    def test_what_is_allowed_depends_on_the_path_alone(self, grammar: str) -> None:
        """However the parser came there: each path is judged as by one that has read nothing else."""
        pick = random.Random(0)
        used, ids = state(grammar), list(PROMPT)
        while True:
            fresh, paths = state(grammar), [list[int]()]
            for _ in range(5):
                path = pick.choice(paths)
                known = allowed(fresh, ids, path)
                paths.append([*path, pick.choice(known) if pick.random() < 0.8 else pick.randrange(257)])
            masked = used.mask(torch.zeros(len(paths), 257), ids, paths)
            for path, scores in zip(paths, masked, strict=True):
                assert allowed(state(grammar), ids, path) == (scores == 0).nonzero().flatten().tolist()
            may = allowed(used, ids, [])
            assert (used.forced(ids, 1) == may) == (len(may) == 1)
            ids.append(pick.choice(may))
            if ids[-1] == EOS:
                break
        assert state(grammar).refused(PROMPT, _chain(ids[len(PROMPT) :])) == set()

    def test_refused_candidates(self) -> None:
        tree = TokenTree.root(PROMPT[-1])
        good = tree.add_path([*_ids("<a>"), EOS], "x")
        after_the_end = tree.add(_ids("a")[0], good, "x")
        too_early = tree.add(EOS, 1, "x")
        wrong = tree.add_path(_ids("xa"), "x")
        assert state(lark_grammar(LARK)).refused(PROMPT, tree) == {after_the_end, too_early, wrong - 1, wrong}

    def test_an_error_lets_all_pass(self) -> None:
        broken = state(lark_grammar(LARK))
        broken._matcher.consume_tokens(_ids("x"))
        assert len(allowed(broken, PROMPT, [])) == 257
        assert broken.error
        assert broken.forced(PROMPT, 4) == []

    def test_vocabularies_are_not_kept_for_ever(self) -> None:
        for end in range(200, 208):
            new_matcher(lark_grammar(LARK), TOKENIZER, 257, (end,))
        assert list(grammar._tokenizers[TOKENIZER]) == [(257, end) for end in range(208 - grammar.ENDS, 208)]

    def test_what_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for wrong in (json_grammar({"type": "nonsense"}), lark_grammar("start: x"), json_grammar({"enum": []})):
            with pytest.raises(OptionError, match="the grammar cannot be used"):
                new_matcher(wrong, TOKENIZER, 257, (EOS,))
        with pytest.raises(OptionError, match="no token for that"):
            new_matcher(lark_grammar(LARK), TOKENIZER, 257, ())
        with pytest.raises(OptionError, match="tokenizer"):
            new_matcher(lark_grammar(LARK), type("Slow", (), {})(), 257, (EOS,))
        with pytest.raises(OptionError, match="must be an object"):
            SamplingParams(json_schema=[1])  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "llguidance.hf", None)
        with pytest.raises(OptionError, match=r"paceline\[serve\]"):
            new_matcher(lark_grammar(LARK), TOKENIZER, 257, (EOS,))
        for options in ({"min_new_tokens": 2}, {"ignore_eos": True}, {"json_schema": {}}):
            with pytest.raises(OptionError, match="grammar"):
                SamplingParams(grammar=LARK, **options)


class TestOutput:
    @pytest.mark.parametrize("drafter", list(DRAFTERS))
    def test_any_drafter_gives_what_plain_decoding_gives(self, drafter: str) -> None:
        llm = loaded(drafter)
        llm.verifier = "match"
        sampled: dict[str, Any] = {"temperature": 1.2, "seed": 3, "top_p": 0.9}
        for asked in ({"json_schema": SCHEMA}, {"json_schema": SCHEMA} | sampled, {"grammar": LARK} | sampled):
            want, got = (
                one.generate(["ab", "xyzxyz"], chat=False, max_new_tokens=60, **asked) for one in (plain(), llm)
            )
            assert [output.tokens for output in got] == [output.tokens for output in want]
            if "json_schema" in asked:
                assert all(_fits(output.text) for output in want)
                assert all(len(g.stats.rounds) < len(w.stats.rounds) - 9 for g, w in zip(got, want, strict=True))
            else:
                assert all(re.fullmatch(r"(ab)*(<[abc]{1,9}>)?", output.text) for output in want)

    @pytest.mark.parametrize("drafter", ["early-exit", "eagle", "draft-model"])
    def test_rejections_keep_to_it_too(self, drafter: str) -> None:
        llm = loaded(drafter)
        llm.verifier = "rejection"
        outputs = llm.generate(["ab"] * 4, chat=False, json_schema=SCHEMA, max_new_tokens=60, temperature=1.2, seed=0)
        assert all(_fits(output.text) for output in outputs)

    def test_a_grammar_that_fails_ends_its_request(self, monkeypatch: pytest.MonkeyPatch) -> None:
        [request, other] = loaded("suffix").requests(["ab", "ab"], chat=False, grammar=LARK, max_new_tokens=9)
        request.constraint.error = OptionError("the grammar cannot be followed")
        with pytest.raises(OptionError, match="cannot be followed"):
            list(loaded("suffix").run([request, other]))
        assert request.finish_reason == "error"

    def test_forced_tokens_are_no_merit_of_the_policy(self) -> None:
        llm = loaded("prompt-lookup")
        [request] = llm.requests(["ab"], chat=False, json_schema=SCHEMA, max_new_tokens=60)
        request.policy = policy = Watched(k=4)
        [*_] = llm.run([request])
        sources = request.stats.sources
        assert sources.count(GRAMMAR) > 9
        assert (policy.told, policy.accepted) == (len(request.stats.rounds), sources.count("prompt-lookup"))

    def test_no_speculation_no_forced_tokens(self) -> None:
        output = plain().generate("ab", chat=False, json_schema=SCHEMA, max_new_tokens=60)
        assert len(output.stats.rounds) == len(output.tokens)
        assert output.finish_reason == "eos"

    def test_chains_only(self) -> None:
        """A target that reads no trees is given what is forced where nothing else was drafted."""
        llm = exact(small_llama().float())
        llm.target.chains_only = True
        for drafter in ("none+fixed:k=6", "suffix"):
            got = llm.method(drafter).generate("ab", chat=False, json_schema=SCHEMA, max_new_tokens=60)
            assert got.tokens == plain().generate("ab", chat=False, json_schema=SCHEMA, max_new_tokens=60).tokens
            assert GRAMMAR in got.stats.sources


def test_candidates_that_must_stay() -> None:
    tree = TokenTree.root(0)
    scored = tree.add(1, 0, "x", score=0.5)
    unscored = tree.add(2, scored, "x")
    tree.add(3, 0, "x", score=0.5)
    left = tree.without({scored, unscored, 3})
    assert left.tokens == [0, 1, 2]
    assert tree.without(set()) is tree


def test_slots_for_what_is_forced() -> None:
    target: Target = plain().target
    assert Dispatch(target, {"none": plain().drafter}).max_nodes(5) == 10


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def _chain(tokens: list[int]) -> TokenTree:
    tree = TokenTree.root(PROMPT[-1])
    tree.add_path(tokens, "x")
    return tree


def _fits(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "tags"] and len(value["name"]) <= 3 and set(value["tags"]) <= {"a", "ab", "b"}
