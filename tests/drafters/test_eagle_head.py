"""EAGLE's head: what it computes, how it starts, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from helpers import one_thread, perturbed, small_neox  # noqa: F401
from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.heads import config_name, weights_name
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, UnsupportedModel
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from paceline.targets.store import sha256
from paceline.targets.whole import WholeTarget
from tiny import small_llama
from told import told

MODELS = [small_llama, small_neox]
CONFIG, WEIGHTS = config_name(EagleHead.kind), weights_name(EagleHead.kind)
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [100, 3, 200, 4, 50, 0]])


@torch.no_grad()
def features(model: PreTrainedModel) -> torch.Tensor:
    """Of IDS but the last tokens."""
    target, span = as_target(model), Span(IDS[:, :-1], np.zeros(len(IDS), dtype=np.int64))
    return target.features(target.layers(target.embed(span), span, target.new_cache(2, 5), 0, target.num_layers))


def noisy(model: PreTrainedModel, layers: int = 1, noise: float = 0.1, **options: object) -> EagleHead:
    """A head that looks at embeddings, and whose layers do something."""
    head = EagleHead.from_target(model, layers, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


class TestComputation:
    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("layers", [1, 3])
    @torch.no_grad()
    def test_starts_as_what_it_reads(self, make: Callable[[], PreTrainedModel], layers: int) -> None:
        model, tokens = make(), [200, 3, 77]
        seen, logits = features(model), model(IDS).logits[:, :-1]
        torch.testing.assert_close(seen, model.base_model(IDS).last_hidden_state[:, :-1])
        head = EagleHead.from_target(model, layers)
        torch.testing.assert_close(head(seen, IDS[:, 1:]), seen)
        torch.testing.assert_close(head.outputs(seen), logits)
        trimmed = EagleHead.from_target(model, layers, tokens=tokens)
        assert trimmed.tokens.tolist() == sorted(tokens)
        torch.testing.assert_close(trimmed.outputs(seen), logits[..., sorted(tokens)])

    @torch.no_grad()
    def test_is_what_the_paper_says(self) -> None:
        """Next token's embedding, then feature; through Llama's own layers, whose first does not norm its input."""
        model = small_llama()
        head, seen = noisy(model, 2, bias=True), features(model)
        layers = [LlamaDecoderLayer(model.config, index).double() for index in range(2)]
        layers[0].input_layernorm = torch.nn.Identity()
        x = torch.cat([model.get_input_embeddings()(IDS[:, 1:]), seen], -1) @ head.fc.weight.T + head.fc.bias
        place = torch.arange(5)[None]
        angles = LlamaRotaryEmbedding(model.config)(x, place)
        causal = torch.full((5, 5), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        for mine, theirs in zip(layers, head.decoder.layers, strict=True):
            mine.load_state_dict(theirs.state_dict())
            x = mine(x, attention_mask=causal, position_embeddings=angles)
        torch.testing.assert_close(head(seen, IDS[:, 1:]), x)

    @pytest.mark.parametrize("make", MODELS)
    @torch.no_grad()
    def test_padding_is_not_seen_and_places_count(self, make: Callable[[], PreTrainedModel]) -> None:
        model = make()
        head, seen, following = noisy(model, 2), features(model), IDS[:, 1:]
        mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
        alone = head(seen[1:, :3], following[1:, :3])
        torch.testing.assert_close(head(seen, following, mask=mask)[1:, :3], alone)
        place = torch.arange(5)[None]
        torch.testing.assert_close(head(seen, following, place), head(seen, following))
        assert not torch.allclose(head(seen, following, place * 3), head(seen, following))

    def test_every_parameter_is_trained(self) -> None:
        for make in MODELS:
            model = make()
            head = noisy(model, 2, tokens=range(40), bias=True).train()
            logits = head.outputs(head(features(model), IDS[:, 1:]))
            functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), head.labels(IDS[:, 2:].contiguous()).flatten()
            ).backward()
            assert [name for name, weight in head.named_parameters() if weight.grad is None] == []

    def test_an_untrained_head_learns(self) -> None:
        """What adds nothing at first gets gradients nevertheless."""
        model = small_llama()
        head, seen = EagleHead.from_target(model, 1).train(), features(model)
        head(seen[:, :-1], IDS[:, 1:-1]).sub(seen[:, 1:]).square().sum().backward()
        moved = {name for name, weight in head.named_parameters() if weight.grad.abs().sum() > 0}
        assert {"fc.weight", *(n for n, _ in head.named_parameters() if "o_proj" in n or "down_proj" in n)} <= moved

    def test_counts(self) -> None:
        head = EagleHead.from_target(small_llama(), 2, tokens=range(40))
        layer = sum(weight.numel() for weight in small_llama().model.layers[0].parameters())
        assert head.parameter_counts() == {"fc": 2048, "layers": 2 * layer - 32, "total": 2048 + 2 * layer - 32}


def test_out_of_range() -> None:
    for layers, says in ((0, "K = 1 layer or more, not 0"), (4, "1 .. 3 layers")):
        with told(OptionError, says):
            EagleHead.from_target(small_llama(), layers)
    for tokens in ([], [257]):
        with told(OptionError, "0 .. 256"):
            EagleHead.from_target(small_llama(), tokens=tokens)


class TestFiles:
    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("options", [{}, {"layers": 2, "tokens": range(9), "bias": True}])
    @torch.no_grad()
    def test_round_trip(self, make: Callable[[], PreTrainedModel], options: dict[str, object], tmp_path: Path) -> None:
        model = make()
        head = noisy(model, **options)
        head.config = replace(head.config, trained={"steps": 3})
        head.save(tmp_path)
        read = EagleHead.load(tmp_path, as_target(model))
        assert read.config == head.config
        assert (read.tokens is None) == (head.tokens is None)
        for call in (lambda: read(features(model), IDS[:, 1:]), lambda: read.outputs(features(model))):
            with pytest.raises(ValueError, match="does not know yet"):
                call()
        read.embedding = head.embedding
        torch.testing.assert_close(*(made(features(model), IDS[:, 1:]) for made in (head, read)))
        assert not {"embedding", "matrix"} & load_file(tmp_path / WEIGHTS).keys()  # the target's stay the target's

    def test_of_another_model(self, tmp_path: Path) -> None:
        EagleHead.from_target(small_llama(), name="mine").save(tmp_path)
        others = [small_llama(seed=1), small_llama(hidden_size=64), small_llama(vocab_size=99), small_neox()]
        for other in [*others, perturbed(small_llama(), noise=0.01)]:
            with told(CheckpointMismatch, "EAGLE head in .* made for mine: .* another model"):
                EagleHead.load(tmp_path, as_target(other))
        with told(UnsupportedModel, "layers run one by one"):
            EagleHead.load(tmp_path, WholeTarget(small_llama()))

    def test_of_another_depth(self, tmp_path: Path) -> None:
        EagleHead.from_target(small_llama(), tokens=range(9)).save(tmp_path)
        facts = json.loads((tmp_path / CONFIG).read_text())
        odd = ({"num_attention_heads": 0}, {"hidden_size": "x"}, {"hidden_act": "nothing"})
        models = [None, [1], {}, {"model_type": "nonsense"}, *(facts["model"] | change for change in odd)]
        for change in ({"layers": 0}, {"layers": 2}, *({"model": model} for model in models), {"more": 1}):
            (tmp_path / CONFIG).write_text(json.dumps(facts | change))
            with told(CheckpointError, "no complete EAGLE head"):
                EagleHead.load(tmp_path)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            (lambda tensors: tensors.pop("fc.weight"), "Missing key.*fc.weight"),
            (lambda tensors: tensors.update(more=torch.zeros(3)), "Unexpected key.*more"),
            (lambda tensors: tensors.update({"fc.weight": torch.zeros(32, 32)}), "size mismatch for fc.weight"),
            (lambda tensors: tensors.pop("fingerprint"), "fingerprint"),
        ],
    )
    def test_of_other_keys(self, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], says: str) -> None:
        EagleHead.from_target(small_llama()).save(tmp_path)
        tensors = load_file(tmp_path / WEIGHTS)
        change(tensors)
        save_file(tensors, tmp_path / WEIGHTS)
        facts = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps(facts | {"sha256": sha256(tmp_path / WEIGHTS)}))
        with told(CheckpointError, f"no complete EAGLE head: .*{says}"):
            EagleHead.load(tmp_path)
