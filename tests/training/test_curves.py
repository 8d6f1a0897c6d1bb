from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import OptionError
from paceline.training.curves import CURVES, METRICS, write_curves
from pages import check_stands_alone


def notes(folder: Path, steps: int) -> None:
    lines = [{"step": 0, "accepted_1": 0.1, "argmax": 0.2, "held_back_loss": 5.5}]
    lines += [{"step": n, "loss": 6 / n, "discriminator_loss": 0.5, "lr": 1e-3 / n} for n in range(1, steps)]
    lines += [{"step": steps, "loss": 1.0, "lr": 1e-4, "accepted_1": 0.625, "argmax": 0.7, "held_back_loss": 4.25}]
    (folder / METRICS).write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9'
    )  # as a kill leaves it


def test_curves_of_a_training(tmp_path: Path) -> None:
    notes(tmp_path, 400)
    assert write_curves(tmp_path) == tmp_path / CURVES
    page = (tmp_path / CURVES).read_text()
    text = check_stands_alone(page).text
    for part in (
        "400 steps",
        "Loss",
        "discriminator_loss",
        "Accepted drafts, by depth",
        "argmax",
        "lr",
        "0.625",
        "4.25",
    ):
        assert part in text
    assert "Settings" not in text  # there is no checkpoint
    assert len(page) < 60_000  # lines are thinned


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"there is no metrics\.jsonl"):
        write_curves(tmp_path)
    for text in ("nonsense\n", "", "[1]\n", '{"loss": 1}\n'):
        (tmp_path / METRICS).write_text(text)
        with pytest.raises(OptionError, match="is damaged"):
            write_curves(tmp_path)
    assert not (tmp_path / CURVES).exists()
