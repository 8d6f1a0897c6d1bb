"""The exit head: what it computes, how it starts, and its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from helpers import one_thread, perturbed, small_neox  # noqa: F401
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafting.heads import config_name, weights_name
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError
from paceline.targets.reference import as_target
from paceline.targets.span import Span
from tiny import small_llama
from told import told

CONFIG, WEIGHTS = config_name(ExitHead.kind), weights_name(ExitHead.kind)
MODELS = [small_llama, small_neox]
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [100, 3, 200, 4, 50, 0]])


@torch.no_grad()
def tap(model: PreTrainedModel, layer: int) -> torch.Tensor:
    """The hidden states of IDS that enter a layer."""
    target = as_target(model)
    span = Span(IDS, np.zeros(len(IDS), dtype=np.int64))
    return target.layers(target.embed(span), span, target.new_cache(*IDS.shape), 0, layer)


@pytest.mark.parametrize("make", MODELS)
class TestInitialisation:
    @torch.no_grad()
    def test_all_remaining_layers_are_the_target_itself(self, make: Callable[[], PreTrainedModel]) -> None:
        model = make()
        head = ExitHead.from_target(model, 1, exit_layers=2)
        torch.testing.assert_close(head(tap(model, 1)), model(IDS).logits)

    @torch.no_grad()
    def test_tokens_are_rows_of_the_matrix(self, make: Callable[[], PreTrainedModel]) -> None:
        model, tokens = make(), [200, 3, 77]
        hidden = tap(model, 1)
        full, trimmed = (ExitHead.from_target(model, 1, tokens=chosen) for chosen in (None, tokens))
        assert trimmed.tokens.tolist() == sorted(tokens)
        torch.testing.assert_close(trimmed(hidden), full(hidden)[..., sorted(tokens)])

    @torch.no_grad()
    def test_low_rank(self, make: Callable[[], PreTrainedModel]) -> None:
        """Rank `hidden` is the matrix itself; a smaller one is the best of its rank."""
        model = make()
        hidden, matrix = tap(model, 1), model.get_output_embeddings().weight
        full = ExitHead.from_target(model, 1)
        torch.testing.assert_close(ExitHead.from_target(model, 1, rank=32)(hidden), full(hidden))
        low = ExitHead.from_target(model, 1, rank=8)
        product = low.lift.weight @ low.lm.get_output_embeddings().weight
        best = torch.linalg.svdvals(matrix)[8:].square().sum()
        torch.testing.assert_close((matrix - product).square().sum(), best)

    @torch.no_grad()
    def test_padding_is_not_seen(self, make: Callable[[], PreTrainedModel]) -> None:
        head, hidden = ExitHead.from_target(make(), 1), tap(make(), 1)
        mask = torch.ones_like(IDS)
        mask[1, 4:] = 0
        alone = head(hidden[1:, :4])
        torch.testing.assert_close(head(hidden, mask=mask)[1:, :4], alone)

    def test_counts(self, make: Callable[[], PreTrainedModel]) -> None:
        model = make()
        counts = ExitHead.from_target(model, 1, exit_layers=2, tokens=range(40), rank=4).parameter_counts()
        layer = sum(weight.numel() for weight in as_target(model).decoder.layers[0].parameters())
        assert counts["layers"] == 2 * layer
        assert counts["output"] == 4 * (32 + 40)
        assert counts["norm"] in (32, 64)
        assert counts["total"] == counts["layers"] + counts["norm"] + counts["output"]

    def test_every_parameter_is_trained(self, make: Callable[[], PreTrainedModel]) -> None:
        model = make()
        head = ExitHead.from_target(model, 1, tokens=range(40), rank=4).train()
        logits = head(tap(model, 1))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), head.labels(IDS).flatten()).backward()
        assert [name for name, weight in head.named_parameters() if weight.grad is None] == []


def test_labels() -> None:
    head = ExitHead.from_target(small_llama(), 1, tokens=[7, 3, 250])
    assert head.labels(torch.tensor([[3, 7], [250, 8], [0, 256]])).tolist() == [[0, 1], [2, -100], [-100, -100]]
    assert ExitHead.from_target(small_llama(), 1).labels(IDS) is IDS


@pytest.mark.parametrize(
    ("start", "options", "says"),
    [
        (0, {}, "starts at layer 1 .. 2"),
        (3, {}, "starts at layer 1 .. 2"),
        (1, {"exit_layers": 4}, "0 .. 3 layers"),
        (1, {"rank": 0}, "rank 0"),
        (1, {"tokens": []}, "0 .. 256"),
        (1, {"tokens": [257]}, "0 .. 256"),
    ],
)
def test_out_of_range(start: int, options: dict[str, object], says: str) -> None:
    with told(OptionError, says):
        ExitHead.from_target(small_llama(), start, **options)


class TestFiles:
    @pytest.mark.parametrize("make", MODELS)
    @pytest.mark.parametrize("options", [{}, {"exit_layers": 0}, {"exit_layers": 2, "tokens": range(9), "rank": 3}])
    @torch.no_grad()
    def test_round_trip(self, make: Callable[[], PreTrainedModel], options: dict[str, object], tmp_path: Path) -> None:
        model = make()
        head = ExitHead.from_target(model, 1, **options)
        head.config = replace(head.config, trained={"steps": 3})
        head.save(tmp_path / "new" / "folder")
        read = ExitHead.load(tmp_path / "new" / "folder", as_target(model))
        assert read.config == head.config
        assert all(torch.equal(read.state_dict()[name], tensor) for name, tensor in head.state_dict().items())
        torch.testing.assert_close(read(tap(model, 1)), head(tap(model, 1)))
        files = sorted((tmp_path / "new" / "folder").iterdir())
        assert [path.name for path in files] == [CONFIG, WEIGHTS]
        assert len({path.stat().st_mode for path in files}) == 1

    @torch.no_grad()
    def test_half_precision_on_disk(self, tmp_path: Path) -> None:
        model = small_llama()
        head = ExitHead.from_target(model, 1, tokens=range(9))
        for dtype in (torch.float64, torch.float16):
            head.save(tmp_path / str(dtype), dtype)
        sizes = [(tmp_path / str(dtype) / WEIGHTS).stat().st_size for dtype in (torch.float64, torch.float16)]
        assert sizes[1] < sizes[0] / 2.5
        read = ExitHead.load(tmp_path / "torch.float16", as_target(model))
        assert {weight.dtype for weight in read.parameters()} == {torch.float64}
        torch.testing.assert_close(read(tap(model, 1)), head(tap(model, 1)), rtol=0.02, atol=0.02)

    def test_of_another_model(self, tmp_path: Path) -> None:
        ExitHead.from_target(small_llama(), 1, name="mine").save(tmp_path)
        others = [small_llama(seed=1), small_llama(hidden_size=64), small_llama(num_hidden_layers=1), small_neox()]
        for other in [*others, perturbed(small_llama(), noise=0.01)]:
            with told(CheckpointMismatch, "made for mine: .* another model"):
                ExitHead.load(tmp_path, as_target(other))

    def test_fingerprints_in_other_precisions(self, tmp_path: Path) -> None:
        """The same weights in another dtype are the same model, whichever of the two the head was made with."""
        for made in (torch.float64, torch.float32, torch.bfloat16):
            ExitHead.from_target(small_llama().to(made), 1).save(tmp_path)
            for used in (torch.float32, torch.bfloat16, torch.float16):
                read = ExitHead.load(tmp_path, as_target(small_llama().to(used)))
                assert {weight.dtype for weight in read.parameters()} == {used}

    def test_damaged(self, tmp_path: Path) -> None:
        with told(CheckpointError, "no exit head in"):
            ExitHead.load(tmp_path / "nowhere")
        head = ExitHead.from_target(small_llama(), 1)
        head.save(tmp_path)
        text, weights = (tmp_path / CONFIG).read_text(), (tmp_path / WEIGHTS).read_bytes()
        for content in ("{", "[]", "{}", json.dumps(json.loads(text) | {"format": 99})):
            (tmp_path / CONFIG).write_text(content)
            with told(CheckpointError):
                ExitHead.load(tmp_path)
        for change in ({"exit_layers": 2, "model": {"model_type": "nonsense"}}, {"unknown": 1}, {"vocab": 5}):
            (tmp_path / CONFIG).write_text(json.dumps(json.loads(text) | change))
            with told(CheckpointError, "no complete exit head"):
                ExitHead.load(tmp_path)
        (tmp_path / CONFIG).write_text(text)
        (tmp_path / WEIGHTS).write_bytes(weights[:-8] + bytes(8))
        with told(CheckpointError, "is damaged"):
            ExitHead.load(tmp_path)
        (tmp_path / WEIGHTS).unlink()
        with told(CheckpointError, "cannot read"):
            ExitHead.load(tmp_path)
