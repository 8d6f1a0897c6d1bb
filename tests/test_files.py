from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import DiskFull
from paceline.files import whole


def test_whatever_writes_it_has_the_mode_of_any_file(tmp_path: Path) -> None:
    for name in ("text", "tensors"):
        with whole(tmp_path / "new" / name) as partial:
            partial.write_text("x") if name == "text" else save_file({"x": torch.ones(1)}, partial)
    (tmp_path / "plain").write_text("x")
    files = [tmp_path / "plain", *(tmp_path / "new").iterdir()]
    assert len(files) == 3
    assert len({file.stat().st_mode for file in files}) == 1
    assert load_file(tmp_path / "new" / "tensors")["x"] == 1


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    (tmp_path / ".file.partial").write_text("of one that was killed")
    with pytest.raises(DiskFull, match=f"the disk of {tmp_path} is full: make room and try again"):
        half(path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def half(path: Path) -> None:
    with whole(path, "try again") as partial:
        assert partial.read_text() == ""
        partial.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")
