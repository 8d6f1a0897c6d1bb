"""Data that a tiny model wrote, to train its drafters on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.api import load
from paceline.training.data.generate import make_data
from paceline.training.data.self_distill import DistillConfig


@pytest.fixture(scope="session")
def tiny_data(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 answers of `tiny_model_dir`, and a little open text. Do not change it."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(48)))
    (folder / "open.txt").write_text("".join(f"line {i} of a text\n" for i in range(400)))
    config = DistillConfig(max_new_tokens=24, temperature=0.5, max_length=100, top=4, text_share=0.1, group=16)
    llm = load(str(tiny_model_dir), drafter="none", tier="reference")
    make_data(llm, [folder / "prompts.jsonl"], folder / "data", config, text=[folder / "open.txt"], batch=16)
    return folder / "data"
