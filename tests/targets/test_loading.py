"""Loading a model folder, and every way it can be unusable."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, GPTNeoXConfig, LlamaConfig, T5Config

from paceline.errors import DiskFull, IntegrityError, ModelError, OptionError, UnsupportedModel
from paceline.targets import loading
from paceline.targets.loading import require_causal
from paceline.targets.sources import load_model, resolve
from told import told


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def test_local_folder(model_dir, cache_dir):
    source = resolve(str(model_dir))
    assert (source.location, source.gguf) == (str(model_dir), None)
    model, tokenizer = load_model(model_dir, progress=False)
    assert model.dtype == torch.float32
    assert load_model(model_dir, dtype="bfloat16", progress=False)[0].dtype == torch.bfloat16
    assert len(tokenizer) == 257
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("missing", "error", "says"),
    [
        ("tokenizer*", ModelError, "no tokenizer"),
        ("*.safetensors", UnsupportedModel, "safetensors"),
        ("config.json", UnsupportedModel, "config.json"),
    ],
)
def test_incomplete_folder(model_dir, missing, error, says):
    for path in model_dir.glob(missing):
        path.unlink()
    with told(error, says):
        load_model(model_dir, progress=False)


def test_damaged_folder(model_dir):
    os.truncate(model_dir / "model.safetensors", 1000)
    with told(IntegrityError, "damaged"):
        load_model(model_dir, progress=False)
    (model_dir / "config.json").write_text('{"model_type": "not-a-model"}')
    with told(ModelError, "cannot load the config"):
        load_model(model_dir, progress=False)


def test_missing_weights_are_not_made_up(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with told(IntegrityError, r"lacks weights.*layers\.3"):
        load_model(model_dir, progress=False)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("vocab_size", 300, "other sizes.*embed_tokens.weight is 257 x 32, not 300 x 32"),
        ("num_key_value_heads", 4, "layers.0.self_attn.k_proj.weight is 16 x 32, not 32 x 32"),
        ("hidden_size", 33, r"cannot load the config.*hidden size \(33\) is not a multiple"),
    ],
)
def test_a_configuration_of_another_model(model_dir, field, value, says):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, field: value}))
    with told(ModelError, says):
        load_model(model_dir, progress=False)


@pytest.mark.parametrize(
    ("config", "architectures"),
    [
        (BertConfig(), ["BertForMaskedLM"]),
        (BertConfig(), None),
        (T5Config(), ["T5ForConditionalGeneration"]),
        (LlamaConfig(), ["LlamaModel"]),
        (LlamaConfig(), ["LlamaForSequenceClassification"]),
    ],
)
def test_not_a_causal_model(config, architectures, model_dir):
    config.architectures = architectures
    config.save_pretrained(model_dir)
    with told(UnsupportedModel, "not a causal language model"):
        load_model(model_dir, progress=False)


@pytest.mark.parametrize("layers", [0, -1])
def test_no_layers(layers, model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    with told(UnsupportedModel, f"has {layers} layers"):
        load_model(model_dir, progress=False)


def test_causal_models_are_let_through():
    for config in (LlamaConfig(), GPTNeoXConfig(architectures=["GPTNeoXForCausalLM"]), BertConfig(is_decoder=True)):
        require_causal(config, "x")


def test_full_disk_while_the_hub_is_read(model_dir, monkeypatch):
    def full(name, **where):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(loading, "read_weights", full)
    with told(DiskFull):
        load_model(model_dir, progress=False)


@pytest.mark.parametrize("options", [{"dtype": "float99"}, {"dtype": "int8"}, {"device": "abacus"}])
def test_bad_options_are_told_before_any_download(options, cache_dir):
    with told(OptionError):
        load_model("smollm2-135m", progress=False, **options)
    assert not cache_dir.exists()


def test_revision_is_for_the_hub(model_dir):
    for name in ("smollm2-135m", model_dir):
        with told(OptionError, "revision"):
            resolve(name, revision="main")
