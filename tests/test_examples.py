"""`examples/`: each program, and each cell of the notebook that says nothing else, runs on a tiny model."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers import one_thread  # noqa: F401
from tiny import byte_tokenizer, small_llama

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOK = EXAMPLES / "paceline.ipynb"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MOST_LINES = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder: the tiny model with a context that the examples' prompts fit."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    small_llama(max_position_embeddings=2048).float().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def run(script: str, *words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("generate", "the same tokens"),
        ("stream", "tokens a pass"),
        ("in_transformers", "the same ids: True"),
        ("own_drafter", "drafted tokens were right"),
    ],
)
@pytest.mark.usefixtures("cache_dir")
def test_script(
    script: str, says: str, model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(script, model, monkeypatch=monkeypatch)
    assert says in capsys.readouterr().out


@pytest.mark.usefixtures("cache_dir")
def test_training(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a head"
    run("train_a_head", str(folder), model, monkeypatch=monkeypatch)
    assert "from Python" in capsys.readouterr().out
    assert (folder / "eagle" / "eagle.safetensors").exists()


def test_training_ends_where_a_command_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        run("train_a_head", str(tmp_path / "head"), str(tmp_path / "no-model"), monkeypatch=monkeypatch)
    assert ended.value.code == 1
    assert not (tmp_path / "head" / "eagle").exists()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_each_is_short_says_what_it_shows_and_stands_in_the_list(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES
    assert f"python examples/{path.name}" in text.partition("import")[0]
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


# -- the notebook --------------------------------------------------------------------------------------------------


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return found


def runs(cell: dict[str, Any]) -> bool:
    return cell["cell_type"] == "code" and "not-run" not in cell["metadata"].get("tags", [])


def test_the_notebook_is_one_and_keeps_no_outputs() -> None:
    """As nbformat 4.5 has it: https://nbformat.readthedocs.io/en/latest/format_description.html."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    names = [cell["id"] for cell in cells()]
    assert len(set(names)) == len(names)
    for cell in cells():
        assert {"cell_type", "id", "metadata", "source"} <= set(cell)
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_cells_that_are_not_run_say_so() -> None:
    before = ""
    for cell in cells():
        if cell["cell_type"] == "code":
            assert runs(cell) != ("not run" in before.lower()), cell["id"]
        before = "".join(cell["source"])


@pytest.mark.usefixtures("cache_dir")
def test_cells(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in filter(runs, cells()):
        source = "".join(cell["source"]).replace('"smollm2-135m"', repr(model))
        exec(compile(source, f"paceline.ipynb, {cell['id']}", "exec"), names)
    said = capsys.readouterr().out
    assert "the same tokens: True" in said
    assert "\033[32m" in said
    assert said.count("tokens a pass") >= 5
