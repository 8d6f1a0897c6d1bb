"""Tokens of a request's own text beside a head's trimmed vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafters.test_eagle3 import Told
from drafters.test_eagle3 import noisy as fused_head
from drafters.test_eagle_head import noisy
from helpers import hf_greedy, one_thread, small_neox  # noqa: F401
from paceline.decoding.engine import Engine
from paceline.decoding.request import Request
from paceline.drafting.text_vocabulary import TextVocabulary
from paceline.policies.fixed import Fixed
from paceline.targets.reference import as_target
from paceline.targets.target import Target
from tiny import small_llama

OWN = torch.arange(100, 110)
EXTRA = 4


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama())


@given(pieces=st.lists(st.lists(st.integers(90, 115), max_size=7), min_size=1, max_size=6))
def test_follows_the_text(pieces: list[list[int]], target: Target) -> None:
    """The head's own tokens, then the newest others of the text, each once; their logits are the target's."""
    words = TextVocabulary(target, OWN, EXTRA)
    words.start(2)
    words.begin(1)
    row = SimpleNamespace(slot=1, ids=[])
    for piece in pieces:
        row.ids += piece
        words.read([row])
        found, seen = words.of(1).tolist(), {token for token in row.ids if token not in OWN}
        assert found[: len(OWN)] == OWN.tolist()
        assert len(set(found)) == len(found) == len(OWN) + min(len(seen), EXTRA)
        assert set(found[len(OWN) :]) <= seen
        if piece and piece[-1] not in row.ids[:-1]:  # the newest is always there
            assert piece[-1] in found
    assert words.of(0).tolist() == OWN.tolist()
    features = torch.randn(2, 3, 32, dtype=torch.float64)
    logits = words.logits(features, target.logits(features)[..., OWN])
    for slot in (0, 1):
        tokens = words.of(slot)
        torch.testing.assert_close(logits[slot, :, : len(tokens)], target.logits(features[slot])[:, tokens])
    words.move(1, 0)
    assert torch.equal(words.of(0), words.of(1))
    words.begin(1)
    assert words.of(1).tolist() == OWN.tolist()


def test_only_where_rows_are_free() -> None:
    """A model whose output matrix is not its embeddings gives no rows away."""
    words = TextVocabulary(as_target(small_neox()), OWN, EXTRA)
    words.start(1)
    words.begin(0)
    words.read([SimpleNamespace(slot=0, ids=[1, 2, 3])])
    assert words.of(0).tolist() == OWN.tolist()


@pytest.mark.parametrize("make", [noisy, fused_head])
@pytest.mark.parametrize("options", [{}, {"tree": 3, "budget": 6}])
def test_drafts_what_the_text_has(make: object, options: dict[str, object], target: Target) -> None:
    """A head that knows one token drafts those of the prompt besides; output stays what it is, sampled ones too."""
    model = small_llama()
    prompts = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5]
    for extra in (8, 0):
        drafter = Told(target, head=make(model, tokens=[250]), extra=extra, **options)
        requests = [Request(prompt, limit=10, policy=Fixed(k=3)) for prompt in prompts]
        requests += [Request(prompts[0], limit=10, policy=Fixed(k=3), sampling=True, seed=1)]
        [*_] = Engine(target, drafter).run(requests, batch=2)
        for request, prompt in zip(requests[:3], prompts, strict=True):
            assert request.output == hf_greedy(model, prompt, 10)
        drafted = {token for _, tree in drafter.told for token in tree.tokens[1:]}
        assert drafted == {250} if not extra else {250} < drafted
        assert drafted <= {250}.union(*(request.ids for request in requests))
