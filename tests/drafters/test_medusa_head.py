"""Medusa's heads: what they compute, how they start, and their files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedModel

from helpers import one_thread, perturbed, small_neox  # noqa: F401
from paceline.drafters.medusa.head import VOCABULARIES, MedusaHead
from paceline.drafting.heads import config_name, weights_name
from paceline.drafting.output_rows import output_rows
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, UnsupportedModel
from paceline.targets import make_target
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.store import sha256
from paceline.targets.target import Target
from paceline.targets.whole import WholeTarget
from tiny import small_llama
from told import told

MODELS = [small_llama, small_neox]
CONFIG, WEIGHTS = config_name(MedusaHead.kind), weights_name(MedusaHead.kind)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [100, 3, 200, 4, 50, 0]])


@torch.no_grad()
def features(target: Target) -> torch.Tensor:
    """Of IDS."""
    span = Span(IDS, np.zeros(len(IDS), dtype=np.int64))
    return target.features(target.layers(target.embed(span), span, target.new_cache(*IDS.shape), 0, target.num_layers))


def noisy(model: PreTrainedModel, **options: object) -> MedusaHead:
    """Heads whose blocks do something."""
    head = MedusaHead.from_target(model, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


class TestComputation:
    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("vocabulary", VOCABULARIES)
    @torch.no_grad()
    def test_starts_as_the_target(self, make: Callable[[], PreTrainedModel], vocabulary: str) -> None:
        model, tokens = make(), [200, 3, 77]
        hidden, logits = features(as_target(model)), model(IDS).logits
        whole = MedusaHead.from_target(model, heads=3, layers=2, vocabulary=vocabulary)
        torch.testing.assert_close(whole(hidden), logits[:, :, None].expand(-1, -1, 3, -1))
        trimmed = MedusaHead.from_target(model, heads=2, vocabulary=vocabulary, tokens=tokens)
        assert trimmed.tokens.tolist() == sorted(tokens)
        torch.testing.assert_close(trimmed(hidden), logits[:, :, None, sorted(tokens)].expand(-1, -1, 2, -1))

    @pytest.mark.parametrize("vocabulary", VOCABULARIES)
    @torch.no_grad()
    def test_is_what_the_paper_says(self, vocabulary: str) -> None:
        """Blocks that have weights of their own, in each head and each layer."""
        model = small_llama()
        head = noisy(model, heads=3, layers=2, vocabulary=vocabulary)
        hidden = features(as_target(model))[1]
        for i in range(3):
            x = hidden
            for weight, bias in zip(head.weight[:, i], head.bias[:, i], strict=True):
                x = x + functional.silu(x @ weight.T + bias)
            matrix = head.matrix[i] if vocabulary == "own" else head.matrix[0]
            torch.testing.assert_close(head(hidden)[:, i], x @ matrix.T)

    def test_blocks_are_not_tied(self) -> None:
        """Each block's gradient is its own, and a step moves them apart."""
        model = small_llama()
        head = noisy(model, heads=2, layers=2).train()
        assert head.weight.shape == (2, 2, 32, 32)
        before = head.weight.detach().clone()
        logits = head(features(as_target(model)))
        labels = head.labels(IDS)[:, :, None].expand(-1, -1, 2)
        functional.cross_entropy(logits.flatten(0, 2), labels.flatten()).backward()
        assert [name for name, weight in head.named_parameters() if weight.grad is None] == []
        torch.optim.SGD(head.parameters(), lr=0.1).step()
        moved = (head.weight - before).detach().flatten(0, 1)
        assert all(not torch.allclose(moved[i], moved[j]) for i in range(4) for j in range(i))

    def test_counts(self) -> None:
        model, block = small_llama(), 32 * 32 + 32
        for vocabulary, output in (("own", 3 * 40 * 32), ("shared", 40 * 32), ("target", 0)):
            head = MedusaHead.from_target(model, heads=3, layers=2, vocabulary=vocabulary, tokens=range(40))
            assert head.parameter_counts() == {"blocks": 6 * block, "output": output, "total": 6 * block + output}


@pytest.mark.parametrize("tier", ["reference", "torch", "native"])
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_output_matrix(tier: str, tied: bool) -> None:
    def make() -> PreTrainedModel:
        return small_llama(tie_word_embeddings=tied).float()

    want = make().get_output_embeddings().weight
    target = make_target(make(), tier=tier)
    torch.testing.assert_close(output_rows(target, None), want, rtol=1e-6, atol=1e-6)
    some = torch.tensor([3, 200, 7])
    torch.testing.assert_close(output_rows(target, some), want[some], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 0}, "K = 1 layer or more, not 0"),
        ({"heads": 0}, "1 Medusa head or more, not 0"),
        ({"vocabulary": "none"}, "own or shared or target, not 'none'"),
        ({"tokens": []}, "0 .. 256"),
        ({"tokens": [257]}, "0 .. 256"),
    ],
)
def test_out_of_range(options: dict[str, object], says: str) -> None:
    with told(OptionError, says):
        MedusaHead.from_target(small_llama(), **options)


class TestFiles:
    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("vocabulary", VOCABULARIES)
    @torch.no_grad()
    def test_round_trip(self, make: Callable[[], PreTrainedModel], vocabulary: str, tmp_path: Path) -> None:
        model = make()
        head = noisy(model, heads=2, layers=2, vocabulary=vocabulary, tokens=range(9))
        head.save(tmp_path)
        read = MedusaHead.load(tmp_path, as_target(model))
        assert read.config == head.config
        assert read.state_dict().keys() == load_file(tmp_path / WEIGHTS).keys() - {"fingerprint"}
        torch.testing.assert_close(read(features(as_target(model))), head(features(as_target(model))))

    def test_the_targets_vocabulary_needs_the_target(self, tmp_path: Path) -> None:
        MedusaHead.from_target(small_llama(), vocabulary="target").save(tmp_path)
        with pytest.raises(ValueError, match="load them with the target"):
            MedusaHead.load(tmp_path).outputs(torch.zeros(4, 32))

    def test_of_another_model(self, tmp_path: Path) -> None:
        MedusaHead.from_target(small_llama(), name="mine").save(tmp_path)
        others = [small_llama(seed=1), small_llama(hidden_size=64), small_llama(vocab_size=300), small_neox()]
        for other in [*others, perturbed(small_llama(), noise=0.01)]:
            with told(CheckpointMismatch, "Medusa head in .* made for mine: .* another model"):
                MedusaHead.load(tmp_path, as_target(other))
        with told(UnsupportedModel, "layers run one by one"):
            MedusaHead.load(tmp_path, WholeTarget(small_llama()))

    @pytest.mark.parametrize("what", ["missing", "extra", "misshaped"])
    def test_wrong_keys(self, what: str, tmp_path: Path) -> None:
        MedusaHead.from_target(small_llama(), tokens=range(9)).save(tmp_path)
        tensors = load_file(tmp_path / WEIGHTS)
        if what == "missing":
            del tensors["bias"]
        elif what == "extra":
            tensors["lm_head.weight"] = torch.zeros(3)
        else:
            tensors["bias"] = torch.zeros(1, 4, 31)
        save_file(tensors, tmp_path / WEIGHTS)
        facts = json.loads((tmp_path / CONFIG).read_text()) | {"sha256": sha256(tmp_path / WEIGHTS)}
        (tmp_path / CONFIG).write_text(json.dumps(facts))
        with told(CheckpointError, f"no complete Medusa head.*{'lm_head' if what == 'extra' else 'bias'}"):
            MedusaHead.load(tmp_path)

    def test_wrong_facts(self, tmp_path: Path) -> None:
        MedusaHead.from_target(small_llama()).save(tmp_path)
        text = (tmp_path / CONFIG).read_text()
        shapes = ({"layers": 0}, {"layers": 2}, {"heads": "four"}, {"vocabulary": "own"})
        for change in (*shapes, {"unknown": 1}, {"accuracies": None}, {"accuracies": [[0.5]]}):
            (tmp_path / CONFIG).write_text(json.dumps(json.loads(text) | change))
            with told(CheckpointError, "no complete Medusa head"):
                MedusaHead.load(tmp_path)
