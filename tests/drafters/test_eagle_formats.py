"""EAGLE heads in the public layouts: by key set, and by numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from helpers import one_thread, small_neox  # noqa: F401
from paceline.cli import main
from paceline.drafters.eagle.formats import read_eagle, write_eagle
from paceline.drafters.eagle.head import EagleHead
from paceline.errors import CheckpointError, CheckpointMismatch, OptionError, UnsupportedModel
from paceline.targets import load_target
from paceline.targets.reference import as_target
from paceline.targets.target import Target
from tiny import small_llama
from told import told

SIZE, VOCAB = 32, 257
IDS = torch.tensor([[5, 100, 3, 256, 8]])
FEATURES = torch.randn(1, 5, SIZE, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
LAYER = {
    "self_attn.q_proj.weight": (32, 32),
    "self_attn.k_proj.weight": (16, 32),
    "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32),
    "mlp.gate_proj.weight": (48, 32),
    "mlp.up_proj.weight": (48, 32),
    "mlp.down_proj.weight": (32, 48),
    "post_attention_layernorm.weight": (32,),
}
#: As the first public heads have it: keys of older versions of transformers, another MLP and context than the target's.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-4,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return as_target(small_llama())


def public(layers: int, bias: bool = True) -> dict[str, Tensor]:
    """As SafeAILab's `Model` names its tensors."""
    generator = torch.Generator().manual_seed(layers)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {"embed_tokens.weight": small_llama().get_input_embeddings().weight.detach().clone()}
    tensors |= {"fc.weight": random(SIZE, 2 * SIZE), **({"fc.bias": random(SIZE)} if bias else {})}
    for layer in range(layers):
        tensors |= {f"layers.{layer}.{name}": random(*shape) for name, shape in LAYER.items()}
        if layer:
            tensors[f"layers.{layer}.input_layernorm.weight"] = random(SIZE)
    return tensors


def folder_of(path: Path, tensors: dict[str, Tensor], name: str = "model.safetensors", **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if name.endswith(".safetensors"):
        save_file(tensors, path / name)
    else:
        torch.save(tensors, path / name)
    return path


def written(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    [file] = (entry for entry in path.iterdir() if entry.name != "config.json")
    tensors = load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)
    return json.loads((path / "config.json").read_text()), tensors


@torch.no_grad()
def by_hand(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    """What EAGLE's paper says, by a Llama whose first layer does not norm its input and which has no final norm."""
    layers = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("layers."))
    model = LlamaModel(LlamaConfig(**{**config, "num_hidden_layers": layers})).double().eval()
    model.layers[0].input_layernorm = model.norm = nn.Identity()
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith("fc.")}
    model.load_state_dict(own)
    embedded = tensors["embed_tokens.weight"][IDS]
    entered = torch.cat([embedded, FEATURES], -1) @ tensors["fc.weight"].T + tensors.get("fc.bias", torch.zeros(SIZE))
    return model(inputs_embeds=entered, use_cache=False).last_hidden_state


def guessed(head: EagleHead) -> Tensor:
    head.embedding = small_llama().get_input_embeddings().weight
    return head(FEATURES, IDS)


def made(model: PreTrainedModel | None = None, **options: Any) -> EagleHead:
    head = EagleHead.from_target(model or small_llama(), **{"layers": 2, **options})
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return head


class TestReading:
    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
    @pytest.mark.parametrize(("layers", "bias"), [(1, True), (3, False)])
    @torch.no_grad()
    def test_original(self, name: str, layers: int, bias: bool, target: Target, tmp_path: Path) -> None:
        """Number of layers and bias are what the tensors say."""
        tensors = public(layers, bias)
        head, _ = EagleHead.take(folder_of(tmp_path / "head", tensors, name), target, read_eagle)
        assert (head.config.layers, head.config.bias) == (layers, bias)
        torch.testing.assert_close(guessed(head), by_hand(tensors, CONFIG), rtol=0, atol=1e-5)

    @torch.no_grad()
    def test_vllm(self, target: Target, tmp_path: Path) -> None:
        """Without embeddings, or in its older form with a configuration in the configuration."""
        tensors = public(2, bias=False)
        bare = {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
        wanted = by_hand(tensors, CONFIG)
        head = read_eagle(folder_of(tmp_path / "new", bare), target)
        torch.testing.assert_close(guessed(head), wanted, rtol=0, atol=1e-5)
        nested = {f"model.{name}": tensor for name, tensor in bare.items()}
        nested["lm_head.weight"] = tensors["embed_tokens.weight"].clone()  # which the target's is tied to
        path = folder_of(tmp_path / "old", nested)
        (path / "config.json").write_text(json.dumps({"model_type": "eagle", "model": CONFIG}))
        torch.testing.assert_close(guessed(read_eagle(path, target)), wanted, rtol=0, atol=1e-5)

    def test_positions_reach_as_far_as_the_target(self, target: Target, tmp_path: Path) -> None:
        head = read_eagle(folder_of(tmp_path / "head", public(1)), target)
        assert head.lm.config.max_position_embeddings == target.context == 256
        assert head.lm.config.rope_parameters["rope_theta"] == 500.0

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"layers.1.mlp.up_proj.weight": None}, "missing: layers.1.mlp.up_proj.weight"),
            ({"layers.1.input_layernorm.weight": None}, "missing: layers.1.input_layernorm.weight"),
            ({"fc.weight": None}, "missing: fc.weight"),
            ({"layers.0.input_layernorm.weight": torch.ones(SIZE)}, "unknown: layers.0.input_layernorm.weight"),
            ({"norm.weight": torch.ones(SIZE)}, "unknown: norm.weight"),
            ({"fc.weight": torch.ones(SIZE, 3)}, r"misshaped: fc.weight \[32, 3\] instead of \[32, 64\]"),
            ({"embed_tokens.weight": torch.ones(9, SIZE)}, "misshaped: embed_tokens.weight"),
            ({"fc.weight": torch.ones(SIZE, 2 * SIZE, dtype=torch.int8)}, "another type: fc.weight of torch.int8"),
            ({"fc.weight": torch.full([SIZE, 2 * SIZE], torch.inf)}, "weights that are no numbers"),
        ],
    )
    def test_tensors_that_do_not_belong(
        self, change: dict[str, Tensor | None], says: str, target: Target, tmp_path: Path
    ) -> None:
        tensors = {name: tensor for name, tensor in (public(2) | change).items() if tensor is not None}
        with told(CheckpointError, says):
            read_eagle(folder_of(tmp_path / "head", tensors), target)

    def test_of_another_model(self, target: Target, tmp_path: Path) -> None:
        path = folder_of(tmp_path / "head", public(1))
        with told(CheckpointMismatch, "is for hidden states of 32, .* has 64"):
            read_eagle(path, as_target(small_llama(hidden_size=64)))
        with told(CheckpointMismatch, "is for a vocabulary of 257, .* has 300"):
            read_eagle(path, as_target(small_llama(vocab_size=300)))
        with told(CheckpointMismatch, "another model than .*: embed_tokens.weight differs"):
            read_eagle(path, as_target(small_llama(seed=1)))
        other = {**public(1), "lm_head.weight": torch.ones(VOCAB, SIZE)}
        with told(CheckpointMismatch, "lm_head.weight differs"):
            read_eagle(folder_of(tmp_path / "other", other), target)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"hidden_act": "nothing"},
            {"rope_scaling": {"rope_type": "wavy"}},
            {"model_type": []},
            {"model_type": {}},
            {"dtype": []},
            {"dtype": "x"},
            {"intermediate_size": "x"},  # of which transformers says several lines
            {"head_dim": [1]},
            {"rope_parameters": 3.5},
            {"max_position_embeddings": None},
        ],
        ids=str,
    )
    def test_layers_that_cannot_be_made(self, wrong: dict[str, Any], target: Target, tmp_path: Path) -> None:
        with told(CheckpointError, "does not make layers"):
            read_eagle(folder_of(tmp_path / "head", public(1), **wrong), target)

    def test_nothing_to_read(self, target: Target, tmp_path: Path) -> None:
        with told(CheckpointError, "no EAGLE head in"):
            read_eagle(folder_of(tmp_path / "medusa", {"0.0.linear.weight": torch.ones(3)}), target)
        with told(UnsupportedModel, "layers of mamba"):
            read_eagle(folder_of(tmp_path / "mamba", public(1), model_type="mamba"), target)
        path = folder_of(tmp_path / "odd", public(1), num_attention_heads=0)
        with told(CheckpointError, "does not make layers"):
            EagleHead.take(path, target, read_eagle)
        (path / "model.safetensors").unlink()
        (path / "pytorch_model.bin").write_bytes(b"not a pickle")
        with told(CheckpointError, "pytorch_model.bin is damaged"):
            EagleHead.take(path, target, read_eagle)


class TestWriting:
    @pytest.mark.parametrize(("layout", "bias"), [("vllm", False), ("original", False), ("original", True)])
    @torch.no_grad()
    def test_round_trip(self, layout: Any, bias: bool, target: Target, tmp_path: Path) -> None:
        head = made(bias=bias)
        write_eagle(head, target, tmp_path / "out", layout)
        read, _ = EagleHead.take(tmp_path / "out", target, read_eagle)
        kept, again = head.state_dict(), read.state_dict()
        assert all(torch.equal(again[name], kept[name]) for name in kept)
        torch.testing.assert_close(guessed(read), guessed(head))
        assert read.config.bias == bias
        assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1

    @torch.no_grad()
    def test_keys_and_numbers(self, target: Target, tmp_path: Path) -> None:
        """The layouts' keys, and with them what the paper says of their tensors."""
        head = made(bias=True)
        write_eagle(head, target, tmp_path / "out", "original")
        config, tensors = written(tmp_path / "out")
        assert tensors.keys() == public(2).keys()
        assert (config["num_hidden_layers"], config["bias"]) == (2, True)
        assert (config["rope_theta"], config["rope_scaling"]) == (10000.0, None)
        torch.testing.assert_close(by_hand(tensors, config), guessed(head), rtol=0, atol=1e-5)
        write_eagle(made(), target, tmp_path / "vllm", "vllm", torch.bfloat16)
        config, tensors = written(tmp_path / "vllm")
        assert tensors.keys() == public(2, bias=False).keys() - {"embed_tokens.weight"}
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        assert config["dtype"] == "bfloat16"
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert (config["vocab_size"], config["hidden_size"]) == (VOCAB, SIZE)
        assert "bias" not in config  # of attention, to vLLM

    @pytest.mark.parametrize("kind", ["linear", "llama3"])
    def test_scaled_positions(
        self, kind: str, target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In the original's words; what it does not know is told."""
        more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        head = made()
        rope = {"rope_theta": 10000.0, "rope_type": kind, "factor": 2.0, **(more if kind == "llama3" else {})}
        head.config.model["rope_parameters"] = rope
        write_eagle(head, target, tmp_path / "out", "original")
        scaling = written(tmp_path / "out")[0]["rope_scaling"]
        assert (scaling["type"], scaling["factor"]) == (kind, 2.0)
        assert ("cannot run this head" in caplog.text) == (kind == "llama3")

    def test_no_place_for_it(self, target: Target, tmp_path: Path) -> None:
        with told(OptionError, "no place for the bias"):
            write_eagle(made(bias=True), target, tmp_path / "out", "vllm")
        with told(UnsupportedModel, "have Llama's layers; these are of gpt_neox"):
            write_eagle(made(small_neox()), as_target(small_neox()), tmp_path / "out", "vllm")
        sizes = {"hidden_size": SIZE, "intermediate_size": SIZE, "num_attention_heads": 4, "num_key_value_heads": 4}
        qwen = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_hidden_layers=2, **sizes)).double()
        with told(UnsupportedModel, "these are of qwen2"):
            write_eagle(made(qwen), as_target(qwen), tmp_path / "out", "original")
        assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("layout", ["vllm", "original"])
def test_command(layout: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exported, and exported again from there."""
    target = load_target(str(tiny_model_dir), tier="reference")
    EagleHead.from_target(target.model, 2).save(tmp_path / "head")
    command = ["export", "eagle", "--model", str(tiny_model_dir), "--format", layout, "--json", "--head"]
    assert main([*command, str(tmp_path / "head"), "--out", str(tmp_path / "one")]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 2
    assert main([*command, str(tmp_path / "one"), "--out", str(tmp_path / "two")]) == 0
    assert written(tmp_path / "one")[1].keys() == written(tmp_path / "two")[1].keys()
