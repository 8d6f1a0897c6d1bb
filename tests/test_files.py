from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import DiskFull, OptionError
from paceline.files import fits, read_json, whole, whole_folder


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


def test_what_fails_leaves_no_folder_either(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="no"), whole(tmp_path / "old" / "new" / "newer" / "file"):
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == [tmp_path / "old"]
    assert list((tmp_path / "old").iterdir()) == []


def test_a_folder_that_fails_leaves_no_other(tmp_path: Path) -> None:
    """But those in which somebody has put something meanwhile."""
    (tmp_path / "old").mkdir()

    def fail(beside: str = "") -> None:
        with whole_folder(tmp_path / "old" / "a" / "b" / "c") as partial:
            (partial / "x").write_text("x")
            if beside:
                (tmp_path / "old" / "a" / beside).write_text("x")
            raise ValueError("no")

    for beside, left in (("", []), ("note", ["a", "a/note"])):
        with pytest.raises(ValueError, match="no"):
            fail(beside)
        assert sorted(path.relative_to(tmp_path / "old").as_posix() for path in tmp_path.glob("old/**/*")) == left
    with whole_folder(tmp_path / "new" / "newer") as partial:
        (partial / "x").write_text("x")
    assert (tmp_path / "new" / "newer" / "x").exists()


@pytest.mark.parametrize("there", ["folder", "file"])
def test_what_cannot_be_written_is_called_as_users_call_it(tmp_path: Path, there: str) -> None:
    path = tmp_path / ("x" * 250 if there == "file" else "folder")  # a name that is too long with more letters
    if there == "folder":
        path.mkdir()
    with pytest.raises(OSError) as refused, whole(path) as partial:  # noqa: PT011  (what it names is looked at)
        partial.write_text("x")
    assert refused.value.filename == str(path)
    assert not list(tmp_path.glob(".*"))


def test_a_folder_that_is_there_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty one is filled, behind a link too; one that cannot be replaced is refused before anything is made."""
    for name in ("empty", "real", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("empty", "link", "new"):
        with whole_folder(tmp_path / name) as partial:
            (partial / "x").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert {file.parent.name for file in tmp_path.glob("*/x")} == {"empty", "link", "new", "real"}
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OptionError, match="is the current folder"), whole_folder(Path()):
        pass
    with pytest.raises(NotADirectoryError) as refused, whole_folder(tmp_path / "new" / "x" / "y"):
        pass
    assert refused.value.filename == str(tmp_path / "new" / "x" / "y")
    assert not list(tmp_path.glob(".*"))


def test_json_that_python_does_not_read() -> None:
    assert read_json('{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    for text, part in (("[" * 100_000, "nested too deeply"), ("9" * 5000, "too many digits"), ("{", "Expecting")):
        with pytest.raises(ValueError, match=part):
            read_json(text)


class Pair(NamedTuple):
    name: str
    seconds: float


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [1], [1.5, True, "1", None, [1]]),
        (float, [1, 1.5], [True, "1", None]),
        (list[int] | None, [None, [], [1, 2]], [[1, "2"], {}, 3, "text"]),
        (Sequence[Pair], [[["a", 1]], []], [[["a"]], [["a", "b"]], [3]]),
        (list[tuple[int, int]], [[[1, 2]]], [[[1]], [[1, 2, 3]], [[1, "2"]]]),
        (dict[str, list[str]], [{}, {"a": ["b"]}], [{"a": "b"}, [], {"a": [1]}]),
        (Any, [1, None, "x"], []),
    ],
)
def test_what_fits_an_annotation(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(fits(value, hint) for value in good)
    assert not any(fits(value, hint) for value in bad)
