"""The drafter: what it drafts for requests, what it remembers of them, and its options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import paceline
from helpers import one_thread  # noqa: F401
from paceline.drafters.trigram import drafter as module
from paceline.drafters.trigram.build import build
from paceline.drafters.trigram.drafter import Trigram
from paceline.drafters.trigram.matrix import matrix_folder
from paceline.drafting.tree import TokenTree
from paceline.errors import IntegrityError, OptionError, TokenizerMismatch
from paceline.policies.fixed import Fixed
from paceline.targets import Target, as_target
from tiny import byte_tokenizer

METHODS = [
    "trigram:budget=24",
    "trigram:search=mcts:budget=24:iterations=30",
    "trigram:search=topk:budget=12:candidates=5",
    "trigram:literal=true:budget=96",
    "trigram:shared=100:budget=12",
    "trigram:adapt=output:budget=8",
    "trigram:adapt=none",
]
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [100], [1, 2, 3, 4] * 9, [42, 43]]

Make = Callable[..., Trigram]


@pytest.fixture(autouse=True)
def no_matrices(cache_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only those that a test makes itself."""
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "shipped")


@pytest.fixture
def target(tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    return as_target(tiny_llama, tiny_tokenizer)


@pytest.fixture
def matrix(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """Of a text in which "a" always begins "abcdef"."""
    (tmp_path / "corpus.txt").write_text("abcdef " * 50)
    build(tiny_tokenizer, [tmp_path / "corpus.txt"], tmp_path / "matrix")
    return tmp_path / "matrix"


def request(ids: Sequence[int], k: int = 4, room: int = 100) -> SimpleNamespace:
    policy = Fixed(k=k)
    return SimpleNamespace(slot=0, ids=list(ids), policy=policy, state=None, sampling=False, plain=True, room=room)


def paths(tree: TokenTree) -> list[list[int]]:
    return [[tree.tokens[node] for node in tree.path(node)[1:]] for node in range(1, len(tree))]


def begun(drafter: Trigram, ids: Sequence[int], **options: int) -> SimpleNamespace:
    row = request(ids, **options)
    drafter.begin(row, {})
    return row


# -- generating --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_plain_decoding(
    method: str, tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    plain = paceline.load(tiny_llama, tokenizer=tiny_tokenizer, drafter="none")
    llm = plain.method(method)
    truth = [output.tokens for output in plain.generate(PROMPTS, max_new_tokens=40, eos=())]
    for batch in (1, 3):
        assert [out.tokens for out in llm.generate(PROMPTS, batch=batch, max_new_tokens=40, eos=())] == truth


@pytest.mark.parametrize(
    "method", ["trigram:budget=24", "trigram:search=mcts:iterations=30:budget=8", "trigram:literal=true:budget=8"]
)
def test_requests_do_not_meet(
    method: str, tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """Each request goes through the same rounds alone, in a batch, and after others."""
    llm = paceline.load(tiny_llama, tokenizer=tiny_tokenizer, drafter=method)

    def rounds(prompts: list[list[int]], batch: int) -> list[list[tuple[int, int]]]:
        outputs = llm.generate(prompts, batch=batch, max_new_tokens=40, eos=())
        return [[(r.drafted, r.accepted) for r in output.stats.rounds] for output in outputs]

    alone = [rounds([prompt], 1)[0] for prompt in PROMPTS]
    assert sum(accepted for output in alone for _, accepted in output) > 0
    assert rounds(PROMPTS, 4) == rounds(PROMPTS, 2) == rounds(PROMPTS, 1) == alone


def test_shared_layer_is_shared(target: Target) -> None:
    drafter = Trigram(target, matrix="none", shared=1000, budget=4)
    row = begun(drafter, [1, 2])
    assert drafter.draft([row])[0].drafted == 0
    row.ids += [3, 4, 5]
    drafter.observe(row, TokenTree.root(2), [0], None)
    assert paths(drafter.draft([begun(drafter, [9, 1, 2])])[0])[:2] == [[3], [3, 4]]
    other = Trigram(target, matrix="none", budget=4)
    row = begun(other, [1, 2])
    row.ids += [3, 4, 5]
    other.observe(row, TokenTree.root(2), [0], None)
    assert other.draft([begun(other, [9, 1, 2])])[0].drafted == 0


def test_prompts_are_not_shared(target: Target) -> None:
    drafter = Trigram(target, matrix="none", shared=1000)
    row = begun(drafter, [1, 2, 3, 4, 5])
    row.ids += [6]
    drafter.observe(row, TokenTree.root(5), [0], None)
    assert drafter.draft([begun(drafter, [9, 1, 2])])[0].drafted == 0


# -- drafting ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("adapt", "prompt", "output"), [("prompt", 4, 4), ("output", 0, 4), ("none", 0, 0)])
def test_what_is_learned_from(adapt: str, prompt: int, output: int, target: Target) -> None:
    """How deep a draft follows what stands in the prompt, and in the output."""
    for literal in (False, True):
        drafter = Trigram(target, matrix="none", adapt=adapt, literal=literal, budget=24)
        assert drafter.draft([begun(drafter, [1, 2, 3, 4, 5, 6, 1, 2])])[0].depth == prompt
        row = begun(drafter, [8])
        row.ids += [1, 2, 3, 4, 5, 6, 1, 2]
        drafter.observe(row, TokenTree.root(8), [0], None)
        assert drafter.draft([row])[0].depth == output


def test_literal_window(target: Target) -> None:
    """Algorithm 2 strengthens again what is in the window, and only that."""
    drafter = Trigram(target, matrix="none", literal=True, window=6, increment=0.25, max_prob=0.6, iterations=1)
    row = begun(drafter, [1, 2, 3])
    counts = []
    for token in (4, 5, 6, 7, 8):
        row.ids.append(token)
        drafter.observe(row, TokenTree.root(1), [0], None)
        counts.append(row.state.memory.overlay.counts.entries["count"][0])  # of the first trigram, 1 2 3
    assert counts == [2, 3, 4, 4, 4]


def test_depth(target: Target) -> None:
    """The least of the option, the policy and what the output has room for."""
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9] * 2
    for depth, k, room, expected in [(4, 9, 9, 4), (8, 3, 9, 3), (8, 9, 2, 2), (4, 0, 9, 0), (4, 9, 0, 0)]:
        drafter = Trigram(target, matrix="none", depth=depth, budget=30)
        assert drafter.draft([begun(drafter, ids, k=k, room=room)])[0].depth == expected


def test_most_nodes(target: Target) -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 3, 2, 1, 4, 3, 2, 2, 1, 1] * 4
    for options in ({"budget": 7}, {"budget": 50, "candidates": 3}, {"budget": 50, "depth": 2, "candidates": 4}):
        drafter = Trigram(target, matrix="none", **options)
        for k in (1, 2, 4, 7):
            tree = drafter.draft([begun(drafter, ids, k=k)])[0]
            assert 0 < tree.drafted <= drafter.max_nodes(k)
            assert not tree.sampled
            assert len({(parent, token) for parent, token in zip(tree.parents, tree.tokens, strict=True)}) == len(tree)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_short_prompts(order: int, target: Target) -> None:
    drafter = Trigram(target, matrix="none", order=order)
    for length in (1, 2, 3):
        row = begun(drafter, [7] * length)
        assert (drafter.draft([row])[0].drafted > 0) == (length > 1)


# -- the matrix --------------------------------------------------------------------------------------------------------
def test_matrix_option(matrix: Path, target: Target) -> None:
    drafter = Trigram(target, matrix=str(matrix))
    tokenizer = byte_tokenizer()
    tree = drafter.draft([begun(drafter, tokenizer.encode("xab"))])[0]
    assert tokenizer.decode(paths(tree)[-1]) == "cdef"


def test_matrix_is_found(
    matrix: Path, target: Target, tiny_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's own before a shipped one; neither, or one that does not fit, is no error."""

    def depth(**options: str) -> int:
        drafter = Trigram(target, **options)
        return drafter.draft([begun(drafter, tiny_tokenizer.encode("ab"))])[0].depth

    assert depth() == 0
    shipped = module.SHIPPED / "tiny"
    shipped.parent.mkdir()
    matrix.rename(shipped)
    assert depth() == 4
    assert depth(matrix="none") == 0
    own = matrix_folder(target.name)
    own.mkdir(parents=True)
    (own / "matrix.safetensors").write_text("damaged")
    assert depth() == 4
    (own.parent / "corpus.txt").write_text("abc " * 3)
    build(tiny_tokenizer, [own.parent / "corpus.txt"], own, order=2)
    assert Trigram(target).lookup.rule.order == 2


def test_matrix_that_cannot_be_used(matrix: Path, target: Target, tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(IntegrityError, match="cannot read"):
        Trigram(target, matrix="/nowhere")
    with pytest.raises(TokenizerMismatch):
        Trigram(as_target(tiny_llama), matrix=str(matrix))
    with pytest.raises(OptionError, match="up to 3, not 4"):
        Trigram(target, matrix=str(matrix), order=4)


def test_shorter_order_of_a_matrix(matrix: Path, target: Target) -> None:
    drafter = Trigram(target, matrix=str(matrix), order=2)
    assert [len(table.heads) for table in drafter.lookup.tables] == [258]


def test_model_without_tokenizer(tiny_llama: LlamaForCausalLM) -> None:
    drafter = Trigram(as_target(tiny_llama))
    assert drafter.draft([begun(drafter, [1, 2, 1, 2])])[0].depth == 4


# -- options -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "option",
    [
        "iterations=0",
        "iterations=-1",
        "depth=0",
        "depth=-3",
        "candidates=0",
        "budget=0",
        "window=0",
        "order=5",
        "search=best",
        "adapt=yes",
        "c1=-1",
        "c2=0",
        "increment=0",
        "max-prob=2",
        "shared=-1",
        "iterations=many",
    ],
)
def test_bad_options(option: str, tiny_llama: LlamaForCausalLM) -> None:
    with pytest.raises(OptionError, match=option.partition("=")[0].replace("-", ".")):
        paceline.load(tiny_llama, drafter=f"trigram:{option}")


def test_literal_and_shared(target: Target) -> None:
    with pytest.raises(OptionError, match="shared"):
        Trigram(target, literal=True, shared=5)


def test_default_budget(target: Target) -> None:
    assert Trigram(target).max_nodes(10) == 32
    target.device = torch.device("cuda")
    assert Trigram(target).max_nodes(10) == 64
