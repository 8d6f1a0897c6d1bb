"""The exit head as a draft model of its own."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import paceline
from helpers import hf_greedy, one_thread, perturbed, small_neox  # noqa: F401
from paceline.cli import main
from paceline.drafters.early_exit.export import export_draft_model
from paceline.drafters.early_exit.head import ExitHead
from paceline.errors import CheckpointMismatch, DiskFull, OptionError, UnsupportedModel
from paceline.targets import as_target, load_target
from tiny import byte_tokenizer, small_llama
from tiny_families import VARIANTS, tiny
from told import told

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12], [100, 3, 200, 4, 50, 0, 1, 2]])
PROMPTS = [[5, 6, 7, 8], [100], [1, 2, 3, 4] * 5]


def exported(make: Callable[[], PreTrainedModel], folder: Path, **options: object) -> tuple[ExitHead, PreTrainedModel]:
    head = perturbed(ExitHead.from_target(make(), **{"start": 1, **options}), noise=0.1)
    export_draft_model(make(), byte_tokenizer(), head, folder)
    return head, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("make", [small_llama, small_neox])
@pytest.mark.parametrize("options", [{}, {"exit_layers": 2, "start": 2}, {"exit_layers": 0}, {"rank": 8}])
@torch.no_grad()
def test_the_same_logits(make: Callable[[], PreTrainedModel], options: dict[str, int], tmp_path: Path) -> None:
    head, draft = exported(make, tmp_path / "draft", **options)
    assert draft.config.num_hidden_layers == head.config.start + head.config.exit_layers
    shared = make()
    entering = shared(IDS, output_hidden_states=True).hidden_states[head.config.start]
    torch.testing.assert_close(draft(IDS).logits, head(entering), rtol=0, atol=1e-9)


@torch.no_grad()
def test_a_trimmed_head_keeps_its_best_token(tmp_path: Path) -> None:
    head, draft = exported(small_llama, tmp_path / "draft", tokens=range(50, 90))
    entering = small_llama()(IDS, output_hidden_states=True).hidden_states[1]
    logits, full = head(entering), draft(IDS).logits
    torch.testing.assert_close(full[..., 50:90], logits, rtol=0, atol=1e-9)
    assert torch.equal(full.argmax(-1), logits.argmax(-1) + 50)


@torch.no_grad()
def test_a_trimmed_head_of_a_model_with_a_constant_part(tmp_path: Path) -> None:
    """As real models have it: what the head does not know is as good as impossible in sampled drafts, too."""

    def make() -> PreTrainedModel:
        model = small_llama()
        model.get_input_embeddings().weight += 3 * torch.linspace(-1, 1, 32)
        return model

    _, draft = exported(make, tmp_path / "draft", tokens=range(50, 90))
    probabilities = draft(IDS).logits.softmax(-1)
    assert probabilities[..., 50:90].sum(-1).min() > 1 - 1e-6


def test_drafts_as_early_exit_does(tmp_path: Path) -> None:
    """Vanilla speculative decoding with it accepts the same; transformers' assisted generation takes it, too."""
    head, draft = exported(small_llama, tmp_path / "draft", tokens=range(200))
    head.save(tmp_path / "head")
    llm = paceline.load(small_llama(), drafter="none", tokenizer=byte_tokenizer())
    records = []
    for method in (f"early-exit:head={tmp_path / 'head'}", f"draft-model:model={tmp_path / 'draft'}"):
        outputs = llm.method(f"{method}+fixed:k=3").generate(PROMPTS, batch=2, eos=(), max_new_tokens=16)
        assert [output.tokens for output in outputs] == [hf_greedy(small_llama(), prompt, 16) for prompt in PROMPTS]
        records.append([(record.depth, record.emitted) for output in outputs for record in output.stats.rounds])
    assert records[0] == records[1]
    assert sum(emitted - 1 for _, emitted in records[0]) > 0
    for prompt in PROMPTS:
        assisted = hf_greedy(small_llama(), prompt, 16, assistant_model=draft)
        assert assisted == hf_greedy(small_llama(), prompt, 16)


class TestFolder:
    def test_appears_complete_or_not_at_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, out = small_llama(), tmp_path / "draft"
        head = ExitHead.from_target(model, 1)
        tokenizer = byte_tokenizer()

        def full(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "save_pretrained", full)
            with told(DiskFull, "disk of .*draft is full"):
                export_draft_model(model, tokenizer, head, out)
        assert [*tmp_path.iterdir()] == []
        export_draft_model(model, tokenizer, head, out)
        before = sorted(path.name for path in out.iterdir())
        with told(OptionError, "not empty"):
            export_draft_model(model, tokenizer, head, out)
        assert sorted(path.name for path in out.iterdir()) == before
        assert len({path.stat().st_mode for path in out.iterdir()}) == 1
        assert load_target(str(out)).num_layers == 2

    def test_a_head_of_another_model(self, tmp_path: Path) -> None:
        head = ExitHead.from_target(small_llama(), 1)
        with told(CheckpointMismatch):
            export_draft_model(small_llama(seed=1), None, head, tmp_path / "draft")
        assert [*tmp_path.iterdir()] == []


def test_command(tiny_model_dir: Path, tmp_path: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", "draft-model", "--model", str(tiny_model_dir), "--out", str(tmp_path / "draft")]
    assert main(command) == 1
    assert "no trained exit head" in capsys.readouterr().err
    target = load_target(str(tiny_model_dir), tier="reference")
    ExitHead.from_target(target.model, 1, tokens=range(99)).save(ExitHead.stored_path(target))
    assert main([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["layers"] == 2
    assert made["parameters"] == as_target(AutoModelForCausalLM.from_pretrained(made["out"])).model.num_parameters()
    use = ["generate", "hello", "--model", str(tiny_model_dir), "--raw", "-n", "4", "--json"]
    assert main([*use, "--drafter", f"draft-model:model={made['out']}"]) == 0
    assert main([*use, "--drafter", "early-exit"]) == 0
    capsys.readouterr()
    assert main([*command, "--dtype", "bfloat16"]) == 1
    assert "not empty" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["draft-model", "medusa", "eagle", "dflash"])
def test_a_folder_that_is_not_empty_is_told_before_anything_is_loaded(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["export", method, "--model", str(tmp_path / "nothing"), "--out", str(tmp_path)]) == 1
    assert "is not empty: name a new folder" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_logits_in_every_family(variant: str, tmp_path: Path) -> None:
    draft_of(variant, tmp_path)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "dense", "step", "start"),
    [
        ("qwen2_moe", [1], 1, 1),  # the head's layer has experts, layer 1 has not
        ("qwen2_moe", [1], 1, 2),
        ("qwen2_moe", [0, 2], 1, 1),
        ("qwen3_moe", [], 2, 1),
        ("qwen3_moe", [], 2, 2),
        ("qwen3_moe", [], 3, 2),
    ],
)
def test_layers_without_experts(family: str, dense: list[int], step: int, start: int, tmp_path: Path) -> None:
    """A head's layers are of the kinds that the first layers are of, wherever they come in the draft model."""
    fields = {"mlp_only_layers": dense, "decoder_sparse_step": step}
    model, draft = draft_of(family, tmp_path, start, **fields)
    kinds = [hasattr(layer.mlp, "experts") for layer in draft.model.layers]
    target_kinds = [hasattr(layer.mlp, "experts") for layer in model.model.layers]
    assert kinds == [*target_kinds[:start], target_kinds[0]]
    assert len({*target_kinds}) == 2


def draft_of(variant: str, folder: Path, start: int = 1, **fields: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny target, and its draft model, which says what the head says."""
    model = tiny(variant, **fields)
    with torch.enable_grad():
        head = perturbed(ExitHead.from_target(model, start, copied=0), noise=0.02)
    export_draft_model(model, None, head, folder / "draft")
    attention = model.config._attn_implementation
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", attn_implementation=attention)
    ids = IDS % model.config.vocab_size
    entering = model(ids, output_hidden_states=True).hidden_states[start]
    capped = getattr(model.config, "final_logit_softcapping", None)
    wanted = head(entering)
    wanted = wanted if capped is None else (wanted / capped).tanh() * capped
    torch.testing.assert_close(draft(ids).logits, wanted, rtol=0, atol=1e-3)
    return model, draft


def test_layers_that_no_configuration_describes(tmp_path: Path) -> None:
    model = tiny("llama")
    head = ExitHead.from_target(model, 1)
    head.decoder.layers[0].mlp.gate_proj = torch.nn.Linear(60, 7, bias=False)
    with told(UnsupportedModel, "a LlamaForCausalLM cannot have this head's layers after its own: .*mlp.gate_proj"):
        export_draft_model(model, None, head, tmp_path / "draft")
    assert [*tmp_path.iterdir()] == []


@torch.no_grad()
def test_the_same_logits_where_layers_differ(tmp_path: Path) -> None:
    """A head's layers are of the first layer's kind, whatever the target's next one is."""

    def make() -> PreTrainedModel:
        types = ["sliding_attention", "full_attention", "sliding_attention"]
        return tiny("gemma3", vocab_size=257, layer_types=types, final_logit_softcapping=None).double()

    head, draft = exported(make, tmp_path / "draft")
    assert draft.config.layer_types == ["sliding_attention"] * 2
    entering = make()(IDS, output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(draft(IDS).logits, head(entering), rtol=0, atol=1e-5)
