"""EAGLE-3 heads in the public layouts: by key set, and by numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from drafters.test_eagle3 import noisy
from drafters.test_eagle_formats import CONFIG, IDS, SIZE, VOCAB, written
from helpers import one_thread, small_neox  # noqa: F401
from paceline.cli import main
from paceline.drafters.eagle.eagle3_formats import read_eagle3, write_eagle3
from paceline.drafters.eagle.eagle3_head import Eagle3Head
from paceline.drafters.eagle.kinds import take_eagle
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, PacelineError, UnsupportedModel
from paceline.targets import load_target
from paceline.targets.reference import as_target
from paceline.targets.target import Target
from tiny import small_llama
from told import told

TOKENS = torch.arange(3, 253, 5)  # 50
STATES = torch.randn(1, 5, 3 * SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
TAPS = [0, 1, 3]
LAYER = {
    "self_attn.q_proj.weight": (32, 64),
    "self_attn.k_proj.weight": (16, 64),
    "self_attn.v_proj.weight": (16, 64),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "hidden_norm.weight": (32,),
    "input_layernorm.weight": (32,),
    "post_attention_layernorm.weight": (32,),
}
ORIGINAL = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 50, "eagle_config": None}
ORIGINAL["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}  # what leaves a layer


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama())


def speculators(**config: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 50,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": TAPS,
        "transformer_layer_config": CONFIG,
        **config,
    }


def public(first: str = "midlayer.") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {f"{first}{name}": random(*shape) for name, shape in LAYER.items()}
    tensors |= {"fc.weight": random(SIZE, 3 * SIZE), "norm.weight": random(SIZE), "lm_head.weight": random(50, SIZE)}
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[TOKENS] = True
    return {**tensors, "d2t": TOKENS - torch.arange(50), "t2d": mask}


def folder_of(path: Path, tensors: dict[str, Tensor], config: dict[str, Any], name: str = "model.safetensors") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    save = save_file if name.endswith(".safetensors") else torch.save
    save(tensors, path / name)
    return path


@torch.no_grad()
def by_hand(tensors: dict[str, Tensor], norm_first: bool) -> Tensor:
    """Logits as the layouts' programs compute them: the token's embedding comes first."""
    config = LlamaConfig(**CONFIG, attn_implementation="eager")
    norms = {name: LlamaRMSNorm(SIZE, 1e-4).double() for name in ("norm", *(n[:-7] for n in LAYER if "norm" in n))}
    tensors = {name.removeprefix("midlayer.").removeprefix("layers.0."): t for name, t in tensors.items()}
    for name, norm in norms.items():
        norm.weight.data = tensors[f"{name}.weight"]
    layer = LlamaDecoderLayer(config, 0).double()
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(layer.self_attn, name).weight.data = tensors[f"self_attn.{name}.weight"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.data = tensors[f"mlp.{name}.weight"]
    embedded = norms["input_layernorm"](small_llama().get_input_embeddings().weight[IDS])
    state = STATES @ tensors["fc.weight"].T
    normed = norms["hidden_norm"](state)
    causal = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(state, torch.arange(5)[None])
    attended = layer.self_attn(torch.cat([embedded, normed], -1), position_embeddings=angles, attention_mask=causal)[0]
    state = (normed if norm_first else state) + attended
    state = state + layer.mlp(norms["post_attention_layernorm"](state))
    return norms["norm"](state) @ tensors["lm_head.weight"].T


@torch.no_grad()
def told_by(head: Eagle3Head) -> Tensor:
    head.know(*(small_llama().get_input_embeddings().weight,) * 2)
    return head.outputs(head(STATES, IDS))


class TestReading:
    def test_original(self, target: Target, tmp_path: Path) -> None:
        head, _ = take_eagle(folder_of(tmp_path / "head", public(), ORIGINAL, "pytorch_model.bin"), target)
        assert (head.config.output, head.config.taps, head.tokens.tolist()) == ("own", TAPS, TOKENS.tolist())
        torch.testing.assert_close(told_by(head), by_hand(public(), norm_first=False), rtol=0, atol=1e-5)

    def test_speculators(self, target: Target, tmp_path: Path) -> None:
        """Word embeddings are the target's; so are the rows of this output matrix, which need not be kept."""
        tensors, matrix = public("layers.0."), small_llama().get_input_embeddings().weight.detach()
        tensors |= {"embed_tokens.weight": matrix.clone(), "lm_head.weight": matrix[TOKENS]}
        head, _ = take_eagle(folder_of(tmp_path / "head", tensors, speculators()), target)
        assert (head.config.output, head.config.norm_first) == ("target", True)
        torch.testing.assert_close(told_by(head), by_hand(tensors, norm_first=True), rtol=0, atol=1e-5)

    def test_tokens_in_another_order(self, target: Target, tmp_path: Path) -> None:
        tensors = public()
        tensors["d2t"] = TOKENS.flip(0) - torch.arange(50)
        head = read_eagle3(folder_of(tmp_path / "head", tensors, ORIGINAL), target)
        torch.testing.assert_close(told_by(head), by_hand(tensors, norm_first=False).flip(-1), rtol=0, atol=1e-5)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"midlayer.mlp.up_proj.weight": None}, "missing: layers.0.mlp.up_proj.weight"),
            ({"fc.bias": torch.ones(SIZE)}, "unknown: fc.bias"),
            ({"fc.weight": torch.ones(SIZE, 2 * SIZE)}, r"misshaped: fc.weight \[32, 64\] instead of \[32, 96\]"),
            ({"lm_head.weight": torch.ones(49, SIZE)}, "misshaped: d2t"),
            ({"lm_head.weight": torch.full((50, SIZE), torch.nan)}, "weights that are no numbers"),
            ({"norm.weight": torch.full((SIZE,), torch.inf)}, "weights that are no numbers"),
            ({"d2t": None}, "missing: d2t"),
            ({"d2t": torch.zeros(50)}, "another type: d2t"),
            ({"d2t": torch.arange(50) * 9}, r"not some of 0 .. 256"),
            ({"d2t": -torch.arange(50)}, r"not some of 0 .. 256"),
            ({"t2d": torch.ones(VOCAB, dtype=torch.bool)}, "contradicts itself"),
            ({"embed_tokens.weight": torch.ones(VOCAB, SIZE)}, "embed_tokens.weight differs"),
            ({name: None for name in public() if name.startswith("midlayer")}, "no EAGLE-3 head in"),
        ],
    )
    def test_tensors_that_do_not_belong(
        self, change: dict[str, Tensor | None], says: str, target: Target, tmp_path: Path
    ) -> None:
        tensors = {name: tensor for name, tensor in (public() | change).items() if tensor is not None}
        with told(CheckpointError if "differs" not in says else CheckpointMismatch, says):
            read_eagle3(folder_of(tmp_path / "head", tensors, ORIGINAL), target)

    @pytest.mark.parametrize(
        ("config", "error", "says"),
        [
            (speculators(speculators_model_type="dflash"), UnsupportedModel, "of the kind dflash"),
            (speculators(fc_norm=True), UnsupportedModel, "fc_norm"),
            ({**ORIGINAL, "eagle_config": {"norm_before_fc": True}}, UnsupportedModel, "norm_before_fc"),
            ({**ORIGINAL, "eagle_config": 3}, CheckpointError, "misshaped: fc.weight"),
            (speculators(transformer_layer_config=3), CheckpointError, "does not make layers"),
            (speculators(transformer_layer_config={**CONFIG, "hidden_act": "no"}), CheckpointError, "not make layers"),
            (speculators(transformer_layer_config={**CONFIG, "model_type": "mamba"}), UnsupportedModel, "of mamba"),
            (speculators(transformer_layer_config={**CONFIG, "model_type": [1]}), CheckpointError, r"type \[1\]"),
            (speculators(transformer_layer_config={**CONFIG, "dtype": []}), CheckpointError, "does not make layers"),
            (speculators(transformer_layer_config={**CONFIG, "head_dim": "x"}), CheckpointError, "not make layers"),
            (speculators(transformer_layer_config={**CONFIG, "hidden_size": 64}), CheckpointMismatch, "states of 64"),
            (speculators(eagle_aux_hidden_state_layer_ids=["a"]), CheckpointError, "not numbers of layers"),
            (speculators(eagle_aux_hidden_state_layer_ids=[0, 1, 9]), CheckpointMismatch, "was made for"),
        ],
    )
    def test_configurations(
        self, config: dict[str, Any], error: type[PacelineError], says: str, target: Target, tmp_path: Path
    ) -> None:
        with told(error, says):
            take_eagle(folder_of(tmp_path / "head", public(), config), target)


class TestWriting:
    @pytest.mark.parametrize(("layout", "norm_first", "layers"), [("vllm", True, 2), ("original", False, 1)])
    @pytest.mark.parametrize("tokens", [None, range(40, 90)])
    @torch.no_grad()
    def test_round_trip(
        self, layout: Any, norm_first: bool, layers: int, tokens: range | None, target: Target, tmp_path: Path
    ) -> None:
        taps = (2, 1) if layout == "original" else (1, 2, 3)
        head = noisy(small_llama(), layers, norm_first, tokens=tokens, taps=sorted(taps))
        write_eagle3(head, target, tmp_path / "out", layout)
        read, _ = take_eagle(tmp_path / "out", target)
        kept, again = head.state_dict(), read.state_dict()
        assert kept.keys() == again.keys()
        assert all(torch.equal(again[name], kept[name]) for name in kept)
        config, tensors = written(tmp_path / "out")
        assert ("lm_head.weight" in tensors) == (layout == "original" or tokens is not None)
        assert ("d2t" in tensors) == ("t2d" in tensors) == (tokens is not None)
        assert config["draft_vocab_size"] == (50 if tokens else VOCAB)

    def test_keys_and_numbers(self, target: Target, tmp_path: Path) -> None:
        """The layouts' keys; an output matrix of its own goes along."""
        read = read_eagle3(folder_of(tmp_path / "head", public("layers.0."), speculators()), target)
        write_eagle3(read, target, tmp_path / "out", "vllm", torch.bfloat16)
        config, tensors = written(tmp_path / "out")
        assert tensors.keys() == public("layers.0.").keys()
        assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}
        assert (config["norm_before_residual"], config["eagle_aux_hidden_state_layer_ids"]) == (True, TAPS)
        assert config["transformer_layer_config"]["num_hidden_layers"] == 1
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
        assert torch.equal(tensors["d2t"], public()["d2t"])
        with told(OptionError, "the original EAGLE-3 has one layer"):
            write_eagle3(read, target, tmp_path / "original", "original")
        assert not (tmp_path / "original").exists()

    def test_a_token_that_is_added_has_no_layout(self, target: Target, tmp_path: Path) -> None:
        with told(
            OptionError, "no public layout has a place .* --token added or --shallow, .* name another with --head"
        ):
            write_eagle3(Eagle3Head.from_target(target.model, token="added"), target, tmp_path / "out", "vllm")


@pytest.mark.parametrize("layout", ["vllm", "original"])
def test_command(layout: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported, and exported again from there."""
    target = load_target(str(tiny_model_dir), tier="reference")
    Eagle3Head.from_target(target.model, 1, tokens=range(99)).save(tmp_path / "head")
    command = ["export", "eagle", "--model", str(tiny_model_dir), "--format", layout, "--json", "--head"]
    assert main([*command, str(tmp_path / "head"), "--out", str(tmp_path / "one")]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 1
    assert main([*command, str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 0
    assert written(tmp_path / "one")[1].keys() == written(tmp_path / "two")[1].keys()
