"""DFlash heads in the public layouts: by key set, and by numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafters.test_dflash import BLOCK, logits, noisy, with_changes
from helpers import one_thread, small_neox  # noqa: F401
from paceline.cli import main
from paceline.drafters.dflash.formats import read_dflash, write_dflash
from paceline.drafters.dflash.head import DFlashHead
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, PacelineError, UnsupportedModel
from paceline.targets import load_target
from paceline.targets.reference import as_target
from paceline.targets.target import Target
from tiny import small_llama
from told import told

IDS = [3, 4, 5, 6, 7, 8, 9]
TOKENS = range(3, 253, 5)  # 50
LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *("input_layernorm.weight", "post_attention_layernorm.weight"),
}
PUBLIC = {
    "fc.weight",
    "hidden_norm.weight",
    "norm.weight",
    *(f"layers.{at}.{name}" for at in range(2) for name in LAYER),
}


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama())


def said(head: DFlashHead, target: Target) -> Tensor:
    """Logits of all tokens, whichever way the head has its output matrix."""
    if head.matrix is None:
        head.know(*(target.model.get_input_embeddings().weight.detach(),) * 2)
    elif head.embedding is None:
        head.embedding = target.model.get_input_embeddings().weight.detach()
    return logits(target, head, IDS, head.config.block).detach()


def saved(path: Path, target: Target, layout: Any = "original", **options: Any) -> tuple[DFlashHead, Path]:
    head = noisy(small_llama(), **options)
    write_dflash(head, target, path, layout)
    return head, path


def changed(
    folder: Path,
    config: Callable[[dict[str, Any]], object] = lambda facts: None,
    tensors: Callable[[dict[str, Tensor]], object] = lambda tensors: None,
) -> Path:
    facts, weights = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config(facts)
    tensors(weights)
    (folder / "config.json").write_text(json.dumps(facts))
    save_file(weights, folder / "model.safetensors")
    return folder


def numbers(**changed: Any) -> dict[str, Any]:
    return {"mask_token_id": 1, "target_layer_ids": [0, 2], **changed}


class TestWriting:
    def test_original(self, target: Target, tmp_path: Path) -> None:
        head, folder = saved(tmp_path / "head", target)
        assert load_file(folder / "model.safetensors").keys() == PUBLIC
        facts = json.loads((folder / "config.json").read_text())
        assert facts["architectures"] == ["DFlashDraftModel"]
        assert facts["model_type"] == "qwen3"
        assert facts["block_size"] == BLOCK
        assert facts["num_target_layers"] == 3
        assert facts["dflash_config"] == {"mask_token_id": 256, "target_layer_ids": [0, 2]}
        torch.testing.assert_close(said(read_dflash(folder, target), target), said(head, target))

    def test_speculators(self, target: Target, tmp_path: Path) -> None:
        """With a trimmed vocabulary, which this layout has a place for."""
        head, folder = saved(tmp_path / "head", target, "vllm", tokens=TOKENS)
        assert load_file(folder / "model.safetensors").keys() == PUBLIC | {"lm_head.weight", "d2t", "t2d"}
        facts = json.loads((folder / "config.json").read_text())
        assert facts["speculators_model_type"] == "dflash"
        assert facts["aux_hidden_state_layer_ids"] == [1, 3]
        assert facts["mask_token_id"] == 256
        assert facts["draft_vocab_size"] == 50
        assert facts["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK - 1
        again = read_dflash(folder, target)
        assert (again.tokens.tolist(), again.config.output) == (list(TOKENS), "target")
        torch.testing.assert_close(said(again, target), said(head, target))

    @pytest.mark.parametrize("causal", [True, False])
    @pytest.mark.parametrize("window", [0, 4])
    @pytest.mark.parametrize("layout", ["original", "vllm"])
    def test_what_a_head_is_comes_back(
        self, layout: str, window: int, causal: bool, target: Target, tmp_path: Path
    ) -> None:
        head = noisy(small_llama(), block=3, taps=(1, 2), mask=9)
        head.config = replace(head.config, causal=[causal] * 2, windows=[window] * 2)
        write_dflash(head, target, tmp_path / "head", layout)
        again = read_dflash(tmp_path / "head", target)
        for name in ("layers", "taps", "block", "mask", "causal", "windows", "output"):
            assert getattr(again.config, name) == getattr(head.config, name), name
        assert (
            again.config.shape.items()
            >= {**head.config.shape, "rope_parameters": again.config.shape["rope_parameters"]}.items()
        )
        torch.testing.assert_close(said(again, target), said(head, target))

    def test_an_output_matrix_of_its_own(self, target: Target, tmp_path: Path) -> None:
        _, folder = saved(tmp_path / "head", target, "vllm", tokens=TOKENS)
        changed(folder, tensors=lambda found: found.update({"lm_head.weight": -found["lm_head.weight"]}))
        head = read_dflash(folder, target)
        assert head.config.output == "own"
        head.save(tmp_path / "ours")
        again = DFlashHead.load(tmp_path / "ours", target)
        assert torch.equal(again.matrix, head.matrix)
        write_dflash(again, target, tmp_path / "again", "vllm")
        assert torch.equal(read_dflash(tmp_path / "again", target).matrix, head.matrix)
        with pytest.raises(OptionError, match="not one of its own"):
            write_dflash(again, target, tmp_path / "original", "original")

    @pytest.mark.parametrize("change", [{"causal": [True, False]}, {"from_known": True}])
    def test_heads_that_others_read_otherwise(self, change: dict[str, Any], target: Target, tmp_path: Path) -> None:
        head = noisy(small_llama())
        head.config = replace(head.config, **change)
        with told(OptionError, "read"):
            write_dflash(head, target, tmp_path / "head", "vllm")
        assert not (tmp_path / "head").exists()

    def test_windows_of_several_sizes(self, target: Target, tmp_path: Path) -> None:
        head = noisy(small_llama())
        head.config = replace(head.config, windows=[4, 9])
        for layout in ("vllm", "original"):
            with told(OptionError, r"one size for the windows of all layers; this head's are \[4, 9\]"):
                write_dflash(head, target, tmp_path / "head", layout)
        assert not (tmp_path / "head").exists()
        head.config = replace(head.config, windows=[0, 9])
        write_dflash(head, target, tmp_path / "head", "vllm")
        assert read_dflash(tmp_path / "head", target).config.windows == [0, 9]

    def test_biases(self, target: Target, tmp_path: Path) -> None:
        head = with_changes(noisy(small_llama()), target.model, bias=True)
        write_dflash(head, target, tmp_path / "head", "vllm")
        assert json.loads((tmp_path / "head" / "config.json").read_text())["transformer_layer_config"]["attention_bias"]
        assert read_dflash(tmp_path / "head", target).config.bias

    def test_no_place_for_the_embeddings(self, target: Target, tmp_path: Path) -> None:
        with pytest.raises(OptionError, match="tap 0"):
            saved(tmp_path / "head", target, taps=(0, 2))
        assert not (tmp_path / "head").exists()


class TestReading:
    def test_transformers(self, target: Target, tmp_path: Path) -> None:
        """Its assistants: names of their own, and all in the configuration's first level."""
        head, folder = saved(tmp_path / "head", target)
        names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}

        def renamed(tensors: dict[str, Tensor]) -> None:
            for old, new in names.items():
                tensors[new] = tensors.pop(old)

        changed(folder, lambda facts: facts.update(facts.pop("dflash_config")), renamed)
        torch.testing.assert_close(said(read_dflash(folder, target), target), said(head, target))
        windows = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
        changed(folder, lambda facts: facts.update(windows) or facts.pop("is_causal"))
        config = read_dflash(folder, target).config
        assert (config.causal, config.windows) == ([False, False], [6, 6])

    def test_embeddings_that_are_the_targets(self, target: Target, tmp_path: Path) -> None:
        head, folder = saved(tmp_path / "head", target)
        rows = small_llama().get_input_embeddings().weight.detach().clone()
        changed(folder, tensors=lambda found: found.update({"embed_tokens.weight": rows}))
        torch.testing.assert_close(said(read_dflash(folder, target), target), said(head, target))
        changed(folder, tensors=lambda found: found.update({"embed_tokens.weight": rows.flip(0).contiguous()}))
        with pytest.raises(CheckpointMismatch, match="made for another model"):
            read_dflash(folder, target)

    def test_windows(self, target: Target, tmp_path: Path) -> None:
        """A layer with a window sees no later tokens of a block, unless told otherwise."""
        _, folder = saved(tmp_path / "head", target)
        changed(folder, lambda facts: facts.pop("is_causal"))
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
        changed(folder, lambda facts: facts.update(kinds))
        config = read_dflash(folder, target).config
        assert (config.causal, config.windows) == ([True, False], [5, 0])
        changed(folder, lambda facts: facts.update(is_causal=False))
        assert read_dflash(folder, target).config.causal == [False, False]
        kinds = {"layer_types": None, "dflash_config": numbers(use_swa=True, swa_window_size=7)}
        changed(folder, lambda facts: facts.update(kinds) or facts.pop("is_causal"))
        config = read_dflash(folder, target).config
        assert (config.causal, config.windows) == ([False, False], [7, 7])

    def test_numbers_of_layers_that_are_not_told(self, target: Target, tmp_path: Path) -> None:
        """As many hidden states as there are layers, evenly spread."""
        _, folder = saved(tmp_path / "head", target)
        changed(folder, lambda facts: facts["dflash_config"].pop("target_layer_ids"))
        with told(CheckpointError, "misshaped: fc.weight"):  # a model of three layers has one in reach
            read_dflash(folder, target)
        write_dflash(noisy(small_llama(), layers=1, taps=(2,)), target, tmp_path / "one", "original")
        changed(tmp_path / "one", lambda facts: facts["dflash_config"].pop("target_layer_ids"))
        assert read_dflash(tmp_path / "one", target).config.taps == [2]

    def test_a_vector_for_masks(self, target: Target, tmp_path: Path) -> None:
        _, folder = saved(tmp_path / "head", target)
        torch.save(torch.ones(32), folder / "mask_embedding.pt")
        with told(UnsupportedModel, "it has a mask_embedding.pt"):
            read_dflash(folder, target)

    def test_positions_in_older_words(self, target: Target, tmp_path: Path) -> None:
        """As z-lab's configurations have them."""
        head, folder = saved(tmp_path / "head", target)
        older = {"rope_theta": 10000.0, "rope_scaling": None}
        changed(folder, lambda facts: facts.pop("rope_parameters") and facts.update(older))
        torch.testing.assert_close(said(read_dflash(folder, target), target), said(head, target))

    def test_scaled_positions(self, target: Target, tmp_path: Path) -> None:
        head, folder = saved(tmp_path / "head", target)
        scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
        changed(folder, lambda facts: facts.update(rope_parameters=scaling))
        again = read_dflash(folder, target)
        torch.testing.assert_close(again.rotary.inv_freq * 4, head.rotary.inv_freq)
        assert not torch.allclose(said(again, target), said(head, target))

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"layers.1.mlp.up_proj.weight": None}, "missing: layers.1.mlp.up_proj.weight"),
            ({"fc.bias": torch.ones(32)}, "unknown: fc.bias"),
            ({"norm.weight": torch.ones(31)}, "misshaped: norm.weight"),
            ({"norm.weight": torch.full((32,), torch.nan)}, "no numbers"),
            ({"lm_head.weight": torch.ones(50, 32)}, "missing: d2t"),
        ],
    )
    def test_other_tensors(self, change: dict[str, Any], says: str, target: Target, tmp_path: Path) -> None:
        _, folder = saved(tmp_path / "head", target)

        def apply(tensors: dict[str, Tensor]) -> None:
            for name, tensor in change.items():
                tensors.pop(name, None)
                if tensor is not None:
                    tensors[name] = tensor

        with pytest.raises(CheckpointError, match=says):
            read_dflash(changed(folder, tensors=apply), target)

    @pytest.mark.parametrize(
        ("change", "error", "says"),
        [
            ({"hidden_size": 48}, CheckpointMismatch, "hidden states of 48"),
            ({"vocab_size": 300}, CheckpointMismatch, "a vocabulary of 300"),
            ({"num_attention_heads": 2}, CheckpointError, "misshaped"),
            ({"block_size": 1}, CheckpointError, "a block has 2 .. 64 tokens"),
            ({"block_size": "x"}, CheckpointError, "does not make a head"),
            ({"dflash_config": {"target_layer_ids": [0, 2]}}, CheckpointError, "names no mask_token_id"),
            ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 3]}}, CheckpointMismatch, "another model"),
            (
                {"dflash_config": {"mask_token_id": 257, "target_layer_ids": [0, 2]}},
                CheckpointMismatch,
                "another model",
            ),
            ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": "x"}}, CheckpointError, "does not make a head"),
            ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 1]}}, CheckpointError, "each once"),
            ({"dflash_config": [1]}, CheckpointError, "does not make a head"),
            ({"dflash_config": numbers(mask_token_id=-1)}, CheckpointError, "the mask is a token"),
            ({"dflash_config": numbers(use_swa=True), "sliding_window": None}, CheckpointError, "does not tell"),
            ({"head_dim": "8"}, CheckpointError, "does not make a head"),
            ({"rms_norm_eps": "x"}, CheckpointError, "does not make a head"),
            ({"intermediate_size": -1}, CheckpointError, "does not make a head"),
            (
                {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
                UnsupportedModel,
                "a part of a head is rotated",
            ),
            ({"projector_type": "domino"}, UnsupportedModel, "projector_type = domino"),
            ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act = gelu"),
            ({"speculators_model_type": "dspark"}, UnsupportedModel, "the kind dspark"),
        ],
    )
    def test_other_configurations(
        self, change: dict[str, Any], error: type[PacelineError], says: str, target: Target, tmp_path: Path
    ) -> None:
        _, folder = saved(tmp_path / "head", target)
        with told(error, says):
            read_dflash(changed(folder, lambda facts: facts.update(change)), target)

    def test_folders_without_a_head(self, target: Target, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="cannot read"):
            read_dflash(tmp_path, target)
        _, folder = saved(tmp_path / "head", target)
        (folder / "model.safetensors").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="is damaged"):
            read_dflash(folder, target)
        (folder / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match="there are no weights"):
            read_dflash(folder, target)
        save_file({"x": torch.ones(1)}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match="there is no DFlash head"):
            read_dflash(folder, target)


@pytest.mark.parametrize("layout", ["vllm", "original"])
def test_command(layout: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was exported drafts as what it was made of."""
    noisy(small_llama().float()).save(tmp_path / "head")
    words = ["--model", str(tiny_model_dir), "--head", str(tmp_path / "head"), "--out", str(tmp_path / "out")]
    assert main(["export", "dflash", *words, "--format", layout, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["block"] == BLOCK
    target = load_target(str(tiny_model_dir), tier="reference")
    ours, theirs = DFlashHead.load(tmp_path / "head", target), read_dflash(tmp_path / "out", target)
    torch.testing.assert_close(said(theirs, target), said(ours, target))
    assert main(["export", "dflash", *words]) == 1
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "out" in error[0]
