"""`mtp`: the layer that a model was published with drafts for it, in whatever layout it stands in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import mtp_models
import paceline
from helpers import hf_greedy
from paceline import LLM
from paceline.decoding.request import Request
from paceline.drafters.auto import Auto
from paceline.drafters.mtp.drafter import Mtp
from paceline.drafters.mtp.forward import MtpForward
from paceline.drafters.mtp.layers import take_mtp
from paceline.drafting.stepping.forward import ALONG
from paceline.drafting.tree import TokenTree
from paceline.errors import CheckpointError, OptionError, UnknownModel, UnsupportedModel
from paceline.policies.fixed import Fixed
from tiny import small_llama

modeling_layers = pytest.importorskip("transformers.modeling_layers")
pytestmark = pytest.mark.skipif(not hasattr(modeling_layers, "MtpModel"), reason="this transformers has no MTP layers")

PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 9, [42, 43]]
NEW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a model of each kind, written once."""
    return cache(lambda kind: mtp_models.write(kind, tmp_path_factory.mktemp(kind)))


@pytest.fixture(scope="module")
def plain(folder: Callable[[str], Path]) -> Callable[[str], LLM]:
    """Each model, which decodes plainly."""
    return cache(lambda kind: paceline.load(str(folder(kind)), drafter="none", tier="reference"))


def ids(llm: LLM, **sampling: object) -> list[list[int]]:
    return [output.tokens for output in llm.generate(PROMPTS, **{"max_new_tokens": NEW, "eos": (), **sampling})]


@pytest.mark.parametrize("kind", mtp_models.KINDS)
def test_output_is_generates_own(plain: Callable[[str], LLM], kind: str) -> None:
    """Alone, in a batch and in trees; and the layer is right now and then, which a wrong reading of it is not."""
    llm = plain(kind)
    truth = [hf_greedy(llm.target.model, prompt, NEW) for prompt in PROMPTS]
    for method, batch in (("mtp", 1), ("mtp:copy=1+fixed:k=3", 3), ("mtp:tree=3:budget=9+fixed:k=3", 3)):
        assert ids(llm.method(method), batch=batch) == truth
    outputs = llm.method("mtp:copy=0+fixed:k=3").generate(PROMPTS, max_new_tokens=NEW, eos=())
    assert [output.tokens for output in outputs] == truth
    assert sum(output.stats.accepted for output in outputs) > NEW // 2


@pytest.mark.parametrize("kind", mtp_models.KINDS)
@torch.inference_mode()
def test_drafts_are_what_transformers_computes(plain: Callable[[str], LLM], kind: str) -> None:
    """The first step, with the text read in one pass and in several; and the next, from the layer's own state."""
    target = plain(kind).target
    mtp, text = take_mtp("auto", target), [5, 6, 7, 8, 9, 100, 3, 200, 4]
    seen = target.model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    first, states = by_transformers(mtp, seen, text[1:])
    second, _ = by_transformers(mtp, torch.cat([seen, states[:, -1:]], 1), [*text[1:], 77])

    drafter = Mtp(target)
    for waiting in (1, 3, len(text) - 1):
        cache = target.new_cache(1, 32)
        drafter.start(cache)
        request = Request(text[: len(text) - waiting], limit=20, policy=Fixed(k=2))
        request.slot, (tap,) = 0, drafter.taps
        known = request.ids[:-1]
        drafter.begin(request, {tap: seen[0, : len(known)]})
        drafter.catch_up([request])
        request.ids, rest = list(text), seen[0, len(known) :]
        request.state.waiting.add({tap: rest}, range(len(rest)))
        tree = TokenTree.root(text[-1])
        torch.testing.assert_close(drafter.step([request], [tree], 0).logits[0], first, rtol=0, atol=1e-4)
        tree.add(77, 0, "mtp")
        torch.testing.assert_close(drafter.step([request], [tree], 1).logits[0], second, rtol=0, atol=1e-4)


def by_transformers(mtp: torch.nn.Module, seen: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after the last token, and all states: of the whole text at once, without a cache of ours."""
    positions = torch.arange(1, len(tokens) + 1)[None]  # transformers counts from the second token, which is the same
    states = mtp.forward_layer(
        0, seen, positions, transformers_cache(mtp), input_ids=torch.tensor([tokens]), use_cache=True
    )
    return mtp._project_to_logits(states)[0, -1], states


def transformers_cache(mtp: torch.nn.Module) -> object:
    from transformers.cache_utils import MtpCache

    return MtpCache(config=mtp.config)


@pytest.mark.parametrize("kind", ["qwen3_5_text", "glm4_moe"])
def test_a_seed_gives_its_own_sample(plain: Callable[[str], LLM], kind: str) -> None:
    sampling = {"temperature": 0.8, "seed": 3}
    want = ids(plain(kind), **sampling)
    matched = plain(kind).method("mtp+fixed:k=3")
    matched.verifier = "match"
    assert ids(matched, **sampling) == want
    rejected = plain(kind).method("mtp:copy=0+fixed:k=3")
    assert ids(rejected, **sampling) == ids(rejected, **sampling)


@pytest.mark.parametrize("policy", ["fixed:k=0", "fixed:k=2"])
def test_it_looks_back_so_far(policy: str, plain: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long prompt, and of what came while no draft was asked for, so many tokens wait."""
    monkeypatch.setattr(MtpForward, "tail", 16)
    llm, prompt = plain("glm4_moe").method(f"mtp:copy=0+{policy}"), [1, 2, 3, 4] * 9
    [request] = llm.requests([prompt], max_new_tokens=60, eos=())
    drafter = llm.drafter
    assert isinstance(drafter, Mtp)
    for _ in llm.engine.run([request]):
        read, waiting = int(drafter.forward.cache.lengths[0]), len(request.state.waiting)
        if policy == "fixed:k=0":
            assert read == 0
            assert 16 + ALONG <= waiting <= 2 * (16 + ALONG)
        else:
            assert read + waiting == len(request.ids) - 1 - (len(prompt) - 1 - 16 - ALONG)
    assert request.output == hf_greedy(llm.target.model, prompt, 60)


def test_a_request_that_ends_within_a_copied_draft(plain: Callable[[str], LLM]) -> None:
    """When nothing of a long prompt has been read yet."""
    llm, prompt = plain("llama").method("mtp:copy=1+fixed:k=6"), [1, 2, 3, 4, 5, 6, 7, 8] * 26
    truth = hf_greedy(llm.target.model, prompt, 8)
    for eos in truth[1:4]:
        [output] = llm.generate([prompt], max_new_tokens=8, eos=(eos,))
        assert output.tokens == truth[: truth.index(eos) + 1]


def test_auto_asks_it(plain: Callable[[str], LLM]) -> None:
    """Where nothing else was trained for the model, chains or trees; but not `head=none`."""
    for kind in ("qwen3_5_text", "glm4_moe"):
        llm = plain(kind).method("auto:budget=8")
        assert isinstance(llm.drafter, Auto)
        assert any(isinstance(part, Mtp) for part in llm.drafter.parts)
        outputs = llm.generate(PROMPTS, max_new_tokens=NEW, eos=(), batch=3)
        assert [output.tokens for output in outputs] == ids(plain(kind))
        assert "mtp" in {source for output in outputs for source in output.stats.sources}
        without = plain(kind).method("auto:head=none")
        assert not any(isinstance(part, Mtp) for part in without.drafter.parts)


def test_auto_does_without_what_the_files_lack(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Fine-tuned models are often saved without the layer that their configuration still names."""
    bare = stripped(folder("qwen3_5_text"), tmp_path / "bare")
    llm = paceline.load(str(bare), tier="reference")
    assert not any(isinstance(part, Mtp) for part in llm.drafter.parts)
    assert ids(llm) == ids(llm.method("none"))
    with pytest.raises(CheckpointError, match=r"holds no layer for .*weights are missing"):
        llm.method("mtp")
    assert ids(llm.method(f"mtp:head={folder('qwen3_5_text')}+fixed:k=3")) == ids(llm.method("none"))


def stripped(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_layer_made_in_python(plain: Callable[[str], LLM]) -> None:
    llm = plain("llama")
    made = take_mtp("auto", llm.target)
    assert ids(llm.method(lambda target: Mtp(target, head=made), "fixed:k=3")) == ids(llm)
    with pytest.raises(OptionError, match="states of size 32, the model of 16"):
        Mtp(paceline.load(small_llama(hidden_size=16), drafter="none").target, head=made)


def test_quantised_files_are_refused(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Their layer would be read without its scales."""
    copied = tmp_path / "fp8"
    copied.mkdir()
    for file in folder("llama").iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    facts = json.loads((copied / "config.json").read_text())
    facts["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (copied / "config.json").write_text(json.dumps(facts))
    llm = paceline.load(str(folder("llama")), drafter="none", tier="reference")
    with pytest.raises(UnsupportedModel, match="are quantised"):
        llm.method(f"mtp:head={copied}")


def test_a_sliding_layer(tmp_path: Path) -> None:
    """As Mellum has it, under a name of transformers' own; its window is shorter than the text."""
    llm = paceline.load(str(mtp_models.write("mellum", tmp_path / "mellum")), drafter="none", tier="reference")
    drafter = Mtp(llm.target)
    assert drafter.forward._shape.reach.window == mtp_models.WINDOW
    outputs = llm.method("mtp:copy=0+fixed:k=3").generate(PROMPTS, max_new_tokens=60, eos=(), batch=3)
    assert [output.tokens for output in outputs] == [hf_greedy(llm.target.model, prompt, 60) for prompt in PROMPTS]
    assert sum(output.stats.accepted for output in outputs) > 60


def test_the_model_stays_as_it_was(folder: Callable[[str], Path]) -> None:
    """Whatever transformers has to be told; and embeddings that are trained further go on being so."""
    llm = paceline.load(str(folder("qwen3_5_text")), drafter="none", tier="reference")
    model = llm.target.model
    before, patterns = model.config.to_dict(), model._keys_to_ignore_on_load_unexpected
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    llm.method("mtp")
    with pytest.raises(CheckpointError):
        llm.method(f"mtp:head={folder('deepseek_v3')}")
    assert model.config.to_dict() == before
    assert model.config.name_or_path == str(folder("qwen3_5_text"))
    assert model._keys_to_ignore_on_load_unexpected == patterns
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == trained != []


def test_what_cannot_be(folder: Callable[[str], Path], tmp_path: Path) -> None:
    without = paceline.load(small_llama(), drafter="none")
    with pytest.raises(OptionError, match="published without a layer for multi-token prediction"):
        without.method("mtp")
    with pytest.raises(OptionError, match="tree must be >= 1"):
        without.method("mtp:tree=0")
    with pytest.raises(OptionError, match="must be a folder, a hub id or an MtpModel, not 3"):
        Mtp(without.target, head=3)
    with pytest.raises(OptionError, match="name the folder"):
        without.method("mtp:head=")
    small = paceline.load(small_llama(hidden_size=16), drafter="none")
    with pytest.raises(CheckpointError, match="holds no layer for"):
        small.method(f"mtp:head={folder('llama')}")
    with pytest.raises(UnsupportedModel, match="it is not a model folder"):
        without.method(f"mtp:head={tmp_path}")
    with pytest.raises(UnknownModel, match="there is no model folder"):
        without.method("mtp:head=/nowhere")


def test_no_files(folder: Callable[[str], Path]) -> None:
    model = small_llama()
    model.config.num_mtp_layers = 1
    with pytest.raises(OptionError, match="was not read from files"):
        paceline.load(model, drafter="mtp")


def test_fast_tiers_refuse_it(plain: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    target = plain("llama").target
    monkeypatch.setattr(type(target), "tier", "native")
    with pytest.raises(UnsupportedModel, match="mtp runs on the reference tier"):
        Mtp(target)


def test_a_count_of_zero_is_none(folder: Callable[[str], Path], tmp_path: Path) -> None:
    copied = stripped(folder("qwen3_5_text"), tmp_path / "none")
    facts = json.loads((copied / "config.json").read_text()) | {"mtp_num_hidden_layers": 0}
    (copied / "config.json").write_text(json.dumps(facts))
    with pytest.raises(OptionError, match="published without"):
        paceline.load(str(copied), drafter="mtp", tier="reference")
