"""`paceline train` for a tiny model of every family: heads are made, learn for a step and fit their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from helpers import one_thread  # noqa: F401
from paceline.drafters.eagle.head import EagleHead
from paceline.drafters.early_exit.head import ExitHead
from paceline.drafters.medusa.head import MedusaHead
from paceline.targets.reference import as_target
from paceline.training.heads.eagle import EagleOptions, prepare_eagle
from paceline.training.heads.early_exit import ExitConfig, prepare_early_exit
from paceline.training.heads.medusa import MedusaOptions, prepare_medusa
from paceline.training.heads.prepare import TrainingPlan
from paceline.training.trainer import TrainConfig, Trainer
from tiny import byte_tokenizer
from tiny_families import VARIANTS, tiny

KINDS: dict[str, tuple[Any, Any, Any]] = {
    "early-exit": (prepare_early_exit, ExitConfig(layers=1, vocab=120), ExitHead),
    "medusa": (prepare_medusa, MedusaOptions(vocab=120), MedusaHead),
    "eagle": (prepare_eagle, EagleOptions(vocab=120), EagleHead),
}


FAMILIES = [variant for variant in VARIANTS if "-" not in variant]
RUNS = [(family, list(KINDS)[index % len(KINDS)]) for index, family in enumerate(FAMILIES)]  # by turns: it takes long


@pytest.mark.parametrize(("family", "kind"), RUNS)
def test_heads_are_trained(family: str, kind: str, tiny_data: Path, tmp_path: Path, cache_dir: Path) -> None:
    uniform: dict[str, Any] = {"qwen2_moe": {"mlp_only_layers": []}, "qwen3_moe": {"decoder_sparse_step": 1}}
    model = tiny(family, vocab_size=257, eos_token_id=256, max_position_embeddings=256, **uniform.get(family, {}))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    config = TrainConfig(epochs=1, tokens=4000, accumulate=4, held_back=2)
    prepare, options, head = KINDS[kind]
    plan = TrainingPlan(config, torch.device("cpu"), "reference")
    made = prepare(str(tmp_path / "model"), [tiny_data], options, plan)
    trainer = Trainer(made.task, made.data, config, tmp_path / "out", Accelerator(cpu=True), settings=made.settings)
    trainer.run()
    trained = head.load(tmp_path / "out", as_target(AutoModelForCausalLM.from_pretrained(tmp_path / "model")))
    assert all(torch.isfinite(weight).all() for weight in trained.parameters())
