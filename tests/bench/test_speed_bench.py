"""SPEED-Bench's rows, in the two forms that they are published in: the data set's, and those of its `prepare.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import one_thread  # noqa: F401
from paceline.bench import BenchConfig, print_summary, rows, run
from paceline.bench.rows import read_rows
from paceline.bench.speed_bench import HUB, PLACEHOLDER, locate
from paceline.bench.suites import Prompt, load_suite
from paceline.errors import OptionError


def published(question: str, category: str, *turns: str) -> dict[str, Any]:
    """A row of the data set."""
    row = {"question_id": question, "category": category, "sub_category": "", "turns": list(turns), "source": "made up"}
    return row | {"src_id": "1", "difficulty": "", "multiturn": len(turns) > 1}


def prepared(question: str, category: str, *turns: str) -> dict[str, Any]:
    """A row that `prepare.py` has written."""
    row = published(question, category)
    del row["turns"]
    return row | {"messages": [{"role": "user", "content": turn} for turn in turns]}


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(made), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


PROMPTS = [Prompt("c1", "coding", ("Sort.", "Faster.")), Prompt("m1", "math", ("Add.",))]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("qualitative.jsonl", prepared),
        ("qualitative.jsonl", published),
        ("qualitative.parquet", published),
        ("qualitative/test-00000-of-00001.parquet", published),
    ],
)
def test_files_that_the_user_has(tmp_path: Path, name: str, form: Any) -> None:
    path = write(tmp_path / name, [form(p.id, p.task, *p.turns) for p in PROMPTS])
    assert load_suite(f"speed-bench:path={tmp_path}", turns=2) == PROMPTS
    assert load_suite(f"speed-bench:path={path}", tasks=["math"]) == PROMPTS[1:]


def test_of_throughput_there_are_prompts_by_entropy(tmp_path: Path) -> None:
    write(tmp_path / "qualitative.jsonl", [prepared("q", "coding", "Sort.")])
    write(tmp_path / "throughput_1k.jsonl", [prepared("t", "low_entropy", "Again.")])
    [prompt] = load_suite(f"speed-bench:config=throughput_1k:path={tmp_path}")
    assert prompt == Prompt("t", "low_entropy", ("Again.",))


def test_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(name: str, options: dict[str, str]) -> Any:
        asked.append((name, options))
        return [(published("h1", "rag", "Who?"), "test")]

    monkeypatch.setattr(rows, "hub_rows", hub)
    assert load_suite("speed-bench") == [Prompt("h1", "rag", ("Who?",))]
    assert asked == [(HUB, {"config": "qualitative", "split": "test"})]


def test_placeholders_are_not_taken_for_prompts(tmp_path: Path) -> None:
    made = [published("c1", "coding", "Sort."), published("r1", "roleplay", f"{PLACEHOLDER} USING IT\n\n{{name}}")]
    write(tmp_path / "qualitative.jsonl", made)
    with pytest.raises(OptionError, match="1 of 2 prompts are placeholders; fetch their texts") as refused:
        load_suite(f"speed-bench:path={tmp_path}")
    assert "\n" not in str(refused.value)
    assert [p.id for p in load_suite(f"speed-bench:path={tmp_path}:unfetched=skip")] == ["c1"]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("speed-bench:split=test", "no option split; its options are config, path, unfetched"),
        ("speed-bench:config=throughput_4k", "no config throughput_4k; there are qualitative, throughput_1k"),
        ("speed-bench:unfetched=keep", "unfetched=skip is all"),
        ("speed-bench:path=nowhere.jsonl", "cannot read nowhere.jsonl: no such file"),
        ("speed-bench:path=~nosuchuser/x.jsonl", "cannot read ~nosuchuser/x.jsonl: no such file"),
        ("speed-bench:path={}", "has neither qualitative.jsonl nor qualitative.parquet"),
        ("speed-bench:config=throughput_2k:path={}", r"several files throughput_2k/\*.parquet: name one"),
    ],
)
def test_bad_input(tmp_path: Path, source: str, says: str) -> None:
    for part in ("a", "b"):
        (tmp_path / "throughput_2k").mkdir(exist_ok=True)
        (tmp_path / "throughput_2k" / f"{part}.parquet").touch()
    with pytest.raises(OptionError, match=says):
        list(read_rows(source.format(tmp_path)))


def test_locate_takes_a_file_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "my.jsonl", [])
    assert locate({"path": str(path)}) == (str(path), {})


def test_bench_tells_lengths_by_category(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "qualitative.jsonl", [prepared(p.id, p.task, *p.turns) for p in PROMPTS])
    summary = run(
        BenchConfig(
            model=str(tiny_model_dir),
            suite=f"speed-bench:path={tmp_path}",
            out=tmp_path / "out",
            methods=("ar", "prompt-lookup"),
            turns=2,
            max_new_tokens=6,
            tier="reference",
            progress=False,
        )
    )
    found = {(row["method"], row["task"]): row["acceptance_length"] for row in summary.rows}
    assert [found["ar", task] for task in ("overall", "coding", "math")] == [1.0] * 3
    assert found["prompt-lookup", "overall"] == pytest.approx(
        (found["prompt-lookup", "coding"] + found["prompt-lookup", "math"]) / 2
    )
    print_summary(summary)
    said = capsys.readouterr().out
    assert "acceptance length" in said
    assert said.index("coding") < said.index("math") < said.rindex("overall")
