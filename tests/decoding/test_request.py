"""A request's output: where it ends, and what is recorded of it."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as hf

from paceline.decoding.request import Request
from paceline.decoding.text import Piece, TextStream
from paceline.decoding.verify import Outcome, verify
from paceline.drafting.tree import TokenTree
from paceline.errors import OptionError
from paceline.policies.fixed import Fixed
from paceline.targets.target import PassOutput
from tiny import byte_tokenizer


def request(**options: object) -> Request:
    return Request(**{"ids": [1, 2], "limit": 8, "policy": Fixed(), **options})


def tree(*tokens: int) -> TokenTree:
    made = TokenTree.root(2)
    made.add_path(tokens, "ngram")
    return made


def test_accept() -> None:
    made = request()
    assert made.room == 7
    assert made.accept(tree(5, 6, 7), Outcome([0, 1, 2], 9)) == [5, 6, 9]
    assert made.ids == [1, 2, 5, 6, 9]
    assert made.output == [5, 6, 9]
    assert made.stats.sources == ["ngram", "ngram", "target"]
    assert made.finish_reason is None
    assert made.room == 4


def test_end_of_sequence_inside_a_draft() -> None:
    made = request(eos=[6, 99])
    assert made.accept(tree(5, 6, 7), Outcome([0, 1, 2, 3], 9)) == [5, 6]
    assert made.output == [5, 6]
    assert made.finish_reason == "eos"
    assert made.stats.sources == ["ngram", "ngram"]


def test_length_inside_a_draft() -> None:
    made = request(limit=2)
    assert made.accept(tree(5, 6, 7), Outcome([0, 1, 2, 3], 9)) == [5, 6]
    assert made.finish_reason == "length"
    made = request(limit=2, eos=[6])
    made.accept(tree(5, 6, 7), Outcome([0, 1, 2, 3], 9))
    assert made.finish_reason == "eos"


def test_criterion_inside_a_draft() -> None:
    """In transformers' form, asked after every token."""
    asked = []

    def stop_when(ids: torch.Tensor, scores: object) -> torch.Tensor:
        asked.append(ids.tolist())
        return torch.tensor([ids[0, -1] == 6])

    made = request(stop_when=stop_when)
    assert made.accept(tree(5, 6, 7), Outcome([0, 1, 2, 3], 9)) == [5, 6]
    assert made.finish_reason == "stop"
    assert asked == [[[1, 2, 5]], [[1, 2, 5, 6]]]


def test_text() -> None:
    tokenizer = byte_tokenizer()
    a, b, c, d = tokenizer.encode("abcd", add_special_tokens=False)
    made = request(text=TextStream(tokenizer, ("bc",)))
    assert made.accept(tree(a, b), Outcome([0, 1, 2], c)) == [a, b, c]
    assert made.finish_reason == "stop"
    assert made.read() == [Piece("a", "ngram")]
    assert made.read() == []
    made = request(text=TextStream(tokenizer, ("bc",)))
    made.accept(tree(a), Outcome([0, 1], b))
    assert made.read() == [Piece("a", "ngram")]  # b may begin a stop string
    made.accept(tree(), Outcome([0], d))
    assert made.read() == [Piece("bd", "target")]
    made = request(text=TextStream(tokenizer, ("bc",)), limit=2)
    made.accept(tree(a), Outcome([0, 1], b))
    assert made.read() == [Piece("a", "ngram"), Piece("b", "target")]  # nothing comes any more


def test_greedy_with_processors_is_not_plain() -> None:
    penalty = LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(2.0)])
    assert request().plain
    assert not request(sampling=True).plain
    assert not request(processors=penalty).plain
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]]).repeat(3, 1)
    # The second node's history holds 3 as well: its score is halved too, to 1, and 2's to 1.5.
    made = request(processors=penalty)
    made.slot = 0
    assert verify([made], [tree(3, 2)], PassOutput(logits[None], {})) == [Outcome([0, 1, 2], 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": []}, "the prompt is empty"),
        ({"limit": 0}, "at least 1 new token"),
        ({"verifier": "hope"}, "unknown verifier 'hope'; there are auto, match, rejection"),
    ],
)
def test_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        request(**options)


def test_drafters_draw_their_argmax_when_greedy() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    greedy, sampling = request(), request(sampling=True, seed=0)
    q = greedy.distribution(logits, [])
    torch.testing.assert_close(q, logits.softmax(-1))
    assert greedy.draw(q) == 1
    assert len({sampling.draw(q) for _ in range(200)}) == 4


def test_draft_distribution_is_processed() -> None:
    """By the request's processors, with the drafted tokens in the history."""
    penalty = LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(2.0), hf.TopKLogitsWarper(2)])
    made = request(ids=[0], processors=penalty, sampling=True)
    q = made.distribution(torch.tensor([4.0, 3.0, 5.0, 1.0]), [2])
    assert q.nonzero()[:, 0].tolist() == [1, 2]  # 2 is halved to 2.5, and 0 to 2
    torch.testing.assert_close(q[1] / q[2], torch.tensor(0.5).exp())
