"""Test doubles and references shared by the tests of the round."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedModel

from paceline.drafting.base import Drafter, Row
from paceline.drafting.tree import TokenTree
from paceline.targets.target import Target

#: p-value under which a distribution counts as wrong: false alarms are as good as impossible, and seeds are fixed.
SIGNIFICANCE = 1e-4

Model = TypeVar("Model", bound=nn.Module)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """For modules that import it: tiny models are fastest on one thread, above all when others want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_neox(seed: int = 0, **config: object) -> GPTNeoXForCausalLM:
    """A random GPT-NeoX over the byte tokenizer's vocabulary, float64."""
    fields: dict[str, object] = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**(fields | config)))
    return model.double().eval()


def perturbed(model: Model, noise: float, seed: int = 1) -> Model:
    """The model with noise on its weights, in place: a draft model that is right now and then."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            scale = noise * float(weight.std()) if weight.dim() > 1 else 0.0
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def hf_greedy(model: PreTrainedModel, prompt: Sequence[int], new: int, **options: object) -> list[int]:
    """The new tokens of transformers' own greedy `generate`; without an option for it, no token ends the output."""
    ids = torch.tensor([list(prompt)])
    options = {"eos_token_id": None, "pad_token_id": 0, **options}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


class Oracle(Drafter):
    """Knows what the target will say, and drafts truths, half truths and nonsense by turns: nothing at all, chains,
    and trees with repeated siblings, wrong branches and branches that cannot be reached.

    Args:
        truths: the continuation of each prompt.
        turns: kinds of draft it takes turns in (at random, but the same in every run); see `KINDS`.
    """

    KINDS = ("nothing", "truth", "half", "nonsense", "tree")
    source = "oracle"

    def __init__(
        self, target: Target, truths: dict[tuple[int, ...], list[int]], turns: Sequence[str] = KINDS, seed: int = 0
    ) -> None:
        super().__init__(target)
        self.truths, self.turns, self.random = truths, tuple(turns), random.Random(seed)

    def max_nodes(self, depth: int) -> int:
        return 5 * depth

    def begin(self, row: Row, hidden: object) -> None:
        row.state = (len(row.ids), self.truths[tuple(row.ids)])

    def draft(self, rows: Sequence[Row]) -> list[TokenTree]:
        return [self._draft(row) for row in rows]

    def _draft(self, row: Row) -> TokenTree:
        tree = TokenTree.root(row.ids[-1])
        depth = 0
        while depth < row.room and row.policy.more(depth):
            depth += 1
        prompt, truth = row.state
        told = truth[len(row.ids) - prompt :][:depth]
        kind = self.random.choice(self.turns)
        if kind == "truth":
            tree.add_path(told, self.source)
        elif kind == "half":
            tree.add_path(self._corrupt(told, self.random.randrange(depth + 1)), self.source)
        elif kind == "nonsense":
            tree.add_path([self._other(token) for token in told], self.source)
        elif kind == "tree":
            self._grow(tree, told)
        return tree

    def _grow(self, tree: TokenTree, told: list[int]) -> None:
        """Around the truth: a wrong branch that goes on truly, and at each node the true token twice - the first
        without, the second with a continuation that hence cannot be reached, then a way on from the first."""
        tree.add_path(self._corrupt(told, 0), self.source)
        at = 0
        for index, token in enumerate(told):
            if self.random.random() < 0.3:
                tree.add(self._other(token), at, self.source)
            child = tree.add(token, at, self.source)
            twin = tree.add(token, at, self.source)
            if index + 1 < len(told):
                tree.add(told[index + 1], twin, self.source)
            at = child

    def _corrupt(self, tokens: list[int], at: int) -> list[int]:
        return [self._other(token) if index == at else token for index, token in enumerate(tokens)]

    def _other(self, token: int) -> int:
        return (token + 1 + self.random.randrange(self.target.vocab_size - 1)) % self.target.vocab_size


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of a chi-square test of counts against probabilities; cells that expect less than 5 are put together."""
    counts, expected = counts.ravel(), probabilities.ravel() * counts.sum()
    assert np.isclose(expected.sum(), counts.sum())
    if counts[expected < 1e-9].any():
        return 0.0  # an impossible outcome came up
    order = np.argsort(expected)
    pooled = max(int((expected < 5).sum()), int(np.searchsorted(np.cumsum(expected[order]), 5)) + 1)
    small, large = order[:pooled], order[pooled:]
    observed = np.append(counts[large], counts[small].sum())
    wanted = np.append(expected[large], expected[small].sum())
    return float(chi2.sf(((observed - wanted) ** 2 / wanted).sum(), len(wanted) - 1))
