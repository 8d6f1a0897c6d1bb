"""What a training may be resumed with."""

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.errors import OptionError
from paceline.training.checkpoints import Checkpoints


def test_options_that_came_after_a_training_was_begun(tmp_path: Path) -> None:
    """It is resumed where they are left empty, and refused where they say something."""
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    Checkpoints(tmp_path, {"lr": 1.0}, 1).save(3, module, optimizer)
    empty = {"lr": 1.0, "init": "", "taps": [], "regression": 0.0}
    assert Checkpoints(tmp_path, empty, 1).restore(module, optimizer) == 3
    with pytest.raises(OptionError, match="another init, regression"):
        Checkpoints(tmp_path, {"lr": 1.0, "init": "head", "regression": 0.5}, 1).restore(module, optimizer)
