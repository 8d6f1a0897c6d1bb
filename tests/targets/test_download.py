import os
from pathlib import Path
from typing import Any

import pytest

from paceline.targets.download import _size


def test_size_of_a_folder_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip makes and removes folders while its download is watched."""
    for name in ("stays", "goes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"12345")
    list_folder = os.scandir

    def slow(path: Any) -> Any:
        if Path(path).name == "goes":
            Path(path, "file").unlink()
            Path(path).rmdir()
        return list_folder(path)

    monkeypatch.setattr(os, "scandir", slow)
    assert _size(tmp_path) == 5
