"""Weights spread over devices, quantised while they load, adapted: with the output of the model as it then is."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf

import paceline
from helpers import hf_greedy, one_thread  # noqa: F401
from paceline.cli import main
from paceline.errors import ModelError, OptionError, UnknownModel, UnsupportedModel
from paceline.targets import adapters, as_target
from paceline.targets.placing import check_readable, device_of, how_to_load, rounds_activations
from tiny import byte_tokenizer, small_llama
from told import told

METHOD = "prompt-lookup:branches=2+fixed:k=4"
PROMPTS = [[7, 11, 13, 7, 11], [5, 9, 17, 21, 5, 9, 17, 30, 5]]
SPREAD = {
    "model.embed_tokens": "cpu",
    "lm_head": "cpu",
    "model.rotary_emb": "cpu",
    "model.norm": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.layers.2": "disk",
}


def same_as_generate(llm: paceline.LLM) -> None:
    got = [output.tokens for output in llm.generate(PROMPTS, max_new_tokens=12, eos=())]
    assert got == [hf_greedy(llm.target.model, prompt, 12) for prompt in PROMPTS]


# -- where weights lie -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("spread", [SPREAD, json.dumps(SPREAD)], ids=["dict", "json"])
def test_layers_on_the_disk(tiny_model_dir: Path, spread: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        llm = paceline.load(tiny_model_dir, drafter=METHOD, device_map=spread)
    assert next(llm.target.model.model.layers[1].parameters()).is_meta
    assert llm.target.device == torch.device("cpu")
    assert "use the reference tier" in caplog.text
    same_as_generate(llm)


def test_a_map_of_one_device_is_none(tiny_model_dir: Path) -> None:
    assert paceline.load(str(tiny_model_dir), device_map="cpu", tier="torch", exact=False).target.tier == "torch"


def test_layers_on_several_accelerators_are_refused() -> None:
    model = small_llama()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1, "lm_head": "cpu"}
    with told(UnsupportedModel, "the layers lie on cuda:0, cuda:1: paceline runs models on one accelerator"):
        as_target(model)
    model.hf_device_map = {"model.layers.0": "cuda:0", "lm_head": "cpu"}
    assert device_of(model) == torch.device("cuda:0")


# -- how they are held -------------------------------------------------------------------------------------------------
def test_attention(tiny_model_dir: Path) -> None:
    llm = paceline.load(str(tiny_model_dir), drafter=METHOD, tier="reference", attn_implementation="eager")
    assert llm.target.model.config._attn_implementation == "eager"
    same_as_generate(llm)
    with told(OptionError, "'flash_attention_2' takes no tree mask: use sdpa or eager"):
        paceline.load(str(tiny_model_dir), attn_implementation="flash_attention_2")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"device_map": "{oops"}, "the device map is not JSON"),
        ({"quantization_config": "{oops"}, "the quantization is not JSON"),
        ({"quantization_config": "int3"}, "unknown quantization 'int3': use JSON or bnb-8bit"),
        ({"quantization_config": {"quant_method": "none"}}, "cannot use this quantization: Unknown quantization type"),
    ],
)
def test_what_cannot_be_read(asked: dict[str, Any], says: str) -> None:
    given = {"device_map": None, "quantization_config": None, "attn_implementation": None} | asked
    with told(OptionError, says):
        how_to_load(**given)


def test_quantizations_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.targets.placing.find_spec", lambda name: None)
    with told(OptionError, "needs bitsandbytes: pip install bitsandbytes"):
        how_to_load(None, "bnb-8bit", None)
    with told(OptionError, "needs optimum: pip install optimum-quanto"):
        how_to_load(None, "quanto-int8", None)
    monkeypatch.setattr("paceline.targets.placing.find_spec", lambda name: name)
    config = how_to_load(None, "quanto-int8", None)["quantization_config"]
    assert isinstance(config, hf.QuantoConfig)
    assert how_to_load(None, config, None)["quantization_config"] is config


@pytest.mark.parametrize(
    ("method", "needs"),
    [("gptq", "optimum gptqmodel"), ("awq", "gptqmodel"), ("compressed-tensors", "compressed-tensors"), ("fp8", "")],
)
def test_packages_of_a_quantised_checkpoint(
    tmp_path: Path, method: str, needs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("paceline.targets.placing.find_spec", lambda name: None)
    if needs:
        with told(UnsupportedModel, f"are quantised, and need pip install {needs}$"):
            paceline.load(tmp_path)
    else:
        check_readable(SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method)), "it")  # type: ignore[arg-type]
        check_readable(SimpleNamespace(), "it")  # type: ignore[arg-type]


class Int8DynamicActivationInt8WeightConfig:
    """As torchao names it."""


@pytest.mark.parametrize(
    ("config", "rounds"),
    [
        ({"load_in_8bit": True}, True),
        ({"load_in_8bit": False, "activations": None}, False),
        ({"activations": "int8"}, True),
        ({"quant_type": Int8DynamicActivationInt8WeightConfig()}, True),
        ({"quant_method": "fp8"}, True),
        ({"quant_method": "gptq"}, False),
        ({"quantization_config": SimpleNamespace(config_groups={"a": SimpleNamespace(input_activations="8")})}, True),
        ({"config_groups": {"a": SimpleNamespace(input_activations=None)}}, False),
    ],
)
def test_quantised_activations_are_told(config: dict[str, Any], rounds: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = small_llama()
    model.hf_quantizer = SimpleNamespace(quantization_config=SimpleNamespace(**config))
    assert rounds_activations(model) == rounds
    with caplog.at_level(logging.WARNING, "paceline"):
        as_target(model)
    assert len(caplog.messages) == rounds
    assert all("greedy text may differ from generate's, even without drafts" in line for line in caplog.messages)


@pytest.mark.parametrize("name", ["bnb-4bit", "quanto-int8"])
def test_quantised_models(tmp_path: Path, name: str) -> None:
    pytest.importorskip({"bnb-4bit": "bitsandbytes", "quanto-int8": "optimum.quanto"}[name])
    small_llama(hidden_size=128, intermediate_size=256).float().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    same_as_generate(paceline.load(tmp_path, drafter=METHOD, quantization_config=name))


# -- adapters ----------------------------------------------------------------------------------------------------------
class Wrapped:
    """A PEFT model, as far as paceline looks at one."""

    peft_config: Any = None

    def __init__(self, model: Any, prompts: bool = False) -> None:
        self.model, self.merged = model, False
        self.active_peft_config = SimpleNamespace(is_prompt_learning=prompts, peft_type="PROMPT_TUNING")

    @classmethod
    def from_pretrained(cls, model: Any, folder: str) -> Wrapped:
        if "other" in folder:
            raise RuntimeError("size mismatch\nin many lines")
        return cls(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    @property
    def config(self) -> Any:
        return self.model.config

    def get_base_model(self) -> Any:
        return self.model

    def merge_and_unload(self) -> Any:
        self.model.merged = True
        return self.model


@pytest.fixture
def peft(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("peft")
    module.PeftModel = Wrapped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", module)


def adapter(folder: Path) -> str:
    folder.mkdir()
    for name in adapters.FILES:
        (folder / name).touch()
    return str(folder)


def test_peft_models_are_what_is_in_them() -> None:
    model = small_llama(eos_token_id=None)
    llm = paceline.load(Wrapped(model), drafter=METHOD)  # type: ignore[arg-type]
    assert llm.target.model is model
    same_as_generate(llm)
    for tier in ("reference", "auto"):
        with told(UnsupportedModel, "PEFT's prompt tuning puts inputs of its own before a text"):
            paceline.load(Wrapped(model, prompts=True), tier=tier)  # type: ignore[arg-type]
    with told(UnsupportedModel, "PEFT's prompt tuning"):
        as_target(Wrapped(model, prompts=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("peft")
def test_adapters_by_path(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "lora")
    options = {"adapter": folder, "tier": "reference"}
    assert paceline.load(str(tiny_model_dir), **options).target.model.merged
    assert not hasattr(paceline.load(str(tiny_model_dir), **options, merge_adapter=False).target.model, "merged")
    quantised = small_llama()
    quantised.hf_quantizer = object()
    assert not hasattr(adapters.load_adapter(quantised, folder), "merged")


@pytest.mark.usefixtures("peft")
def test_adapters_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with told(ModelError, "does not fit this model: size mismatch"):
        adapters.load_adapter(small_llama(), adapter(tmp_path / "other"))
    (tmp_path / "empty").mkdir()
    with told(ModelError, "has no adapter_config.json and no adapter_model.safetensors"):
        adapters.load_adapter(small_llama(), str(tmp_path / "empty"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: adapter(tmp_path / "hub"))
    assert adapters.load_adapter(small_llama(), "me/lora").merged


@pytest.mark.usefixtures("peft")
def test_an_adapter_that_is_not_there() -> None:
    with told(UnknownModel, "there is no adapter '/nowhere/x', as a folder or on the hub"):
        adapters.load_adapter(small_llama(), "/nowhere/x")


def test_adapters_need_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with told(OptionError, "adapters need peft: pip install peft"):
        adapters.load_adapter(small_llama(), adapter(tmp_path / "lora"))


def test_a_real_adapter(tiny_model_dir: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(hf.LlamaForCausalLM.from_pretrained(tiny_model_dir), config).eval()
    adapted.save_pretrained(tmp_path / "lora")
    want = [hf_greedy(adapted.get_base_model(), prompt, 12) for prompt in PROMPTS]
    for merge in (True, False):
        llm = paceline.load(str(tiny_model_dir), drafter=METHOD, adapter=str(tmp_path / "lora"), merge_adapter=merge)
        assert [output.tokens for output in llm.generate(PROMPTS, max_new_tokens=12, eos=())] == want


# -- what load says ----------------------------------------------------------------------------------------------------
def test_what_load_cannot_take(tiny_model_dir: Path) -> None:
    for nothing in (None, 5, ["smollm2-135m"]):
        with told(OptionError, "a model is its name or a loaded model, not"):
            paceline.load(nothing)  # type: ignore[arg-type]
    with told(OptionError, "load has no option devise, quantize; there are adapter, attn_implementation, device_map"):
        paceline.load(str(tiny_model_dir), devise="cpu", quantize=True)
    with told(OptionError, "device_map: only of models that are loaded by name"):
        paceline.load(small_llama(), device_map="cpu")


def test_models_without_an_end_of_sequence() -> None:
    model = small_llama()
    model.generation_config = None
    model.config.eos_token_id = None
    assert as_target(model).eos == ()


def test_from_the_command_line(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> Any:
        command = ["generate", "abcabcabc", "--model", str(tiny_model_dir), "--json", "-n", "4", "--raw", *options]
        code = main(command)
        said = capsys.readouterr()
        return json.loads(said.out) if not code else said.err

    told_so = run("--device-map", json.dumps(SPREAD), "--attn-implementation", "eager", "--tier", "reference")
    assert told_so["tier"] == "reference"
    assert "unknown quantization 'int3'" in run("--quantization", "int3")
    assert "adapter" in run("--adapter", str(tiny_model_dir))  # no peft, or not the files of one


# -- models of texts and images, used for texts ------------------------------------------------------------------------
def seeing() -> hf.PreTrainedModel:
    text = {
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "eos_token_id": None,
    }
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text),
        vision_config=hf.CLIPVisionConfig(**image, image_size=28, patch_size=14),
        image_token_index=256,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.LlavaForConditionalGeneration(config).eval()


def test_texts_of_a_model_that_sees(tmp_path: Path) -> None:
    model = seeing()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    llm = paceline.load(tmp_path, drafter=METHOD)
    assert isinstance(llm.target.model, hf.LlavaForConditionalGeneration)
    assert llm.target.tier == "reference"
    same_as_generate(llm)
    asked = {"max_new_tokens": 12, "pad_token_id": 0}
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        fast = model.generate(ids, **asked, custom_generate=paceline.custom_generate(METHOD))
        assert fast.tolist() == model.generate(ids, **asked).tolist()
    with pytest.raises(OptionError, match="cannot pass"):
        model.generate(
            ids, pixel_values=torch.zeros(1, 3, 28, 28), **asked, custom_generate=paceline.custom_generate(METHOD)
        )
