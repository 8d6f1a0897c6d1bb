from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import rows
from paceline.bench.suites import Prompt, batches, load_suite
from paceline.errors import OptionError

ROWS = [
    {"id": "w1", "task": "writing", "group": "mt_bench", "turns": ["Write.", "Again."], "reference": []},
    {"id": "q1", "task": "qa", "turns": ["Who?"]},
    {"id": "c1", "task": "coding", "group": "mt_bench", "turns": ["Code.", "More."]},
    {"id": "q2", "task": "qa", "turns": ["Why?"]},
]


def lines(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_bytes(lines(ROWS))
    return path


def test_group_is_the_task_where_there_is_one(suite: Path) -> None:
    prompts = load_suite(str(suite), turns=2)
    assert [(p.id, p.task) for p in prompts] == [("w1", "mt_bench"), ("c1", "mt_bench"), ("q1", "qa"), ("q2", "qa")]
    assert prompts[0].turns == ("Write.", "Again.")


def test_limit_is_per_task_and_turns_are_cut(suite: Path) -> None:
    assert load_suite(str(suite), limit=1) == [Prompt("w1", "mt_bench", ("Write.",)), Prompt("q1", "qa", ("Who?",))]


def test_tasks_are_chosen_by_name(suite: Path) -> None:
    assert [p.id for p in load_suite(str(suite), tasks=["qa"])] == ["q1", "q2"]
    with pytest.raises(OptionError, match=r"has no task maths; its tasks are mt_bench, qa"):
        load_suite(str(suite), tasks=["qa", "maths"])


def test_folder_of_plain_and_gzipped_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b'{"turns": ["Hi."]}\n\n{"turns": ["Ho."]}\n')
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[1:2])))
    (tmp_path / "notes.txt").write_text("not a suite")
    assert load_suite(str(tmp_path)) == [
        Prompt("q1", "qa", ("Who?",)),
        Prompt("b/1", "b", ("Hi.",)),  # without id and task the file's name stands in
        Prompt("b/3", "b", ("Ho.",)),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no prompts"),
        (b'{"turns": ["a"]}\n{"turns": [}\n', r"s\.jsonl, line 2: not JSON"),
        (b'{"turns": ["a"]}\n\n{"turns": ["\xff"]}\n', r"s\.jsonl, line 3: not UTF-8 \(byte 13 of the line\)"),
        (b"[" * 100_000, "line 1: not JSON that can be read .it is nested too deeply"),
        (b'{"id": %s}' % (b"9" * 5000), "line 1: not JSON that can be read .it has a number with too many digits"),
        (b'{"id": "\\ud83d", "turns": ["a"]}\n', "line 1: 'id' has half a character"),
        (b'{"task": "\\ud83d", "turns": ["a"]}\n', "line 1: 'task' has half a character"),
        (b'{"turns": ["a", "\\ud83d"]}\n', r"line 1: 'turns' has half a character .a lone surrogate, such as \\ud83d"),
        (b'["a"]\n', "line 1: not a JSON object"),
        (b'{"id": 1}\n', "line 1: no column that looks like a prompt; there are id, say which with :column=NAME"),
        (b"{}\n", "line 1: 'turns' must be a list of texts"),
        (b'{"prompt": ""}\n', "line 1: 'turns' must be a list of texts"),
        (b'{"turns": []}\n', "line 1: 'turns' must be a list of texts"),
        (b'{"turns": ["  "]}\n', "none of them empty"),
        (b'{"turns": "text"}\n', "line 1: 'turns' must be a list of texts"),
        (b'{"turns": ["a"], "task": 3}\n', "line 1: 'task' must be a text"),
        (b'{"turns": ["a"], "task": "overall"}\n', "must not be called 'overall'"),
        (
            b'{"id": "x", "turns": ["a"]}\n{"id": "x", "turns": ["b"]}\n',
            r"line 2: id 'x' was there before, at .* line 1",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=message):
        load_suite(str(path))


@pytest.mark.parametrize("content", [b"plain text", gzip.compress(lines(ROWS))[:-9]])
def test_damaged_gzip(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"s\.jsonl\.gz: damaged gzip file"):
        load_suite(str(path))


@pytest.fixture
def data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in one of the `datasets` library's formats, read through it as a hub id would be."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "questions"
    folder.mkdir()
    (folder / "train.csv").write_text("question,body\nUsed for training?,x\n")
    (folder / "test.csv").write_text("question,body\nWho?,The first body.\nWhy?,The second body.\n")
    return folder


def test_data_set_test_split_and_a_likely_column(data_set: Path) -> None:
    prompts = load_suite(str(data_set))
    assert [(p.task, p.turns) for p in prompts] == [("questions", ("Who?",)), ("questions", ("Why?",))]
    assert prompts[0].id == f"{data_set}/0"


def test_data_set_options(data_set: Path) -> None:
    assert load_suite(f"{data_set}:split=train:column=body")[0].turns == ("x",)
    for suffix, message in [
        (":split=dev", "no split 'dev'; there are train, test"),
        (":column=title", "no column 'title'; there are question, body"),
        (":rows=5", "its options are config, split, column"),
    ]:
        with pytest.raises(OptionError, match=message):
            load_suite(f"{data_set}{suffix}")


def test_chat_messages_of_a_data_set(tmp_path: Path, data_set: Path) -> None:
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    chat += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    folder = tmp_path / "chats"
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps({"messages": chat, "task": "chat"}) + "\n")
    assert load_suite(str(folder), turns=9) == [Prompt(f"{folder}/0", "chat", ("a", "c"))]


@pytest.mark.parametrize(
    ("column", "value", "turns"),
    [
        ("conversations", [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], ("a",)),
        ("conversation", [{"role": "prompter", "content": "a"}], ("a",)),
        ("dialogue_of_two", [{"role": "user", "content": "a"}, {"role": "user", "content": "c"}], ("a", "c")),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}], ("ab",)),
        ("prompt", [{"role": "user", "content": "a"}], ("a",)),
        ("text", "a", ("a",)),
    ],
)
def test_chats_of_all_forms(tmp_path: Path, column: str, value: object, turns: tuple[str, ...]) -> None:
    """In a file of JSON lines; a name that nobody knows is taken for a chat by what is in it."""
    path = tmp_path / "chats.jsonl"
    path.write_bytes(lines([{"source": 3, column: value, "category": 7}]))
    assert load_suite(str(path), turns=9) == [Prompt("chats/1", "chats", turns)]


def test_column_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(lines([{"question_id": 5, "prompt": "p", "body": "b", "category": "c"}]))
    assert load_suite(f"{path}:column=body") == [Prompt("5", "c", ("b",))]
    assert load_suite(f"{tmp_path}:column=body") == load_suite(f"{path}:column=body")
    with pytest.raises(OptionError, match=r"line 1: no column 'none'; there are question_id, prompt, body, category"):
        load_suite(f"{path}:column=none")
    with pytest.raises(OptionError, match="split is no option of files: theirs is column"):
        load_suite(f"{path}:split=test")


@pytest.mark.parametrize(
    "value",
    [[{"role": "assistant", "content": "b"}], [{"role": "user", "content": [{"type": "image", "url": "u"}]}]],
    ids=["nothing of the user's", "an image"],
)
def test_chats_without_a_text_of_the_users(tmp_path: Path, value: object) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(lines([{"messages": value}]))
    with pytest.raises(OptionError, match="line 1: 'turns' must be a list of texts"):
        load_suite(str(path))


def test_parquet(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "chats.parquet"
    parquet.write_table(
        pyarrow.Table.from_pylist([{"task": "t", "messages": [{"role": "user", "content": "a"}]}]), path
    )
    assert load_suite(str(path)) == [Prompt("chats/0", "t", ("a",))]
    with pytest.raises(OptionError, match=r"chats\.parquet, row 0: no column 'body'; there are task, messages"):
        load_suite(f"{path}:column=body")
    path.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(OptionError, match=r"cannot read .*chats\.parquet: ") as refused:
        load_suite(str(path))
    assert "\n" not in str(refused.value)


def test_parquet_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.parquet"
    path.touch()
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(OptionError, match="parquet files need paceline's extra 'bench'"):
        load_suite(str(path))


def test_neither_file_nor_data_set(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="neither a file nor a data set that can be read"):
        load_suite(str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["absent.jsonl", "absent.jsonl.gz", "absent.parquet", "~nosuchuser/absent.jsonl"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "hub_rows", lambda *source: pytest.fail("asked the hub"))
    with pytest.raises(OptionError, match=f"cannot read {name}: no such file"):
        load_suite(name)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 2)), max_size=20),
    st.integers(1, 4),
)
def test_batches_have_one_task_and_lose_nobody(kinds: list[tuple[str, int]], size: int) -> None:
    prompts = [Prompt(str(i), task, ("x",) * turns) for i, (task, turns) in enumerate(kinds)]
    groups = batches(prompts, size)
    assert sorted(p.id for group in groups for p in group) == sorted(p.id for p in prompts)
    for group in groups:
        assert 1 <= len(group) <= size
        assert len({(p.task, len(p.turns)) for p in group}) == 1
    assert len(groups) <= len(set(kinds)) + len(prompts) // size


@pytest.mark.parametrize("source", ["", " "])
def test_no_name(source: str) -> None:
    with pytest.raises(OptionError, match="name a suite"):
        load_suite(source)
