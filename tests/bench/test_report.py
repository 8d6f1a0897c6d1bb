from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bench import BenchConfig, run
from paceline.bench.figures import acceptance, lengths, passes
from paceline.bench.intervals import ratio_interval
from paceline.bench.journal import Run
from paceline.bench.methods import DraftedTree
from paceline.bench.metrics import n_alpha, results
from paceline.bench.report import REPORT, BenchFolder, command, report, write_report
from paceline.bench.samples import sample
from paceline.errors import OptionError
from pages import check_stands_alone
from tiny import byte_tokenizer

METHODS = ["ar", "prompt-lookup+fixed:k=3"]


def call(method: str, number: int, seconds: float, **more: Any) -> Run:
    drafts = method != "ar"
    rounds = [(3, 3, 1, 2)] * 20 if drafts else [(0, 0, 0, 1)] * 40
    timing = [0.001, seconds / len(rounds), 0.0, 0.001]
    return Run(
        outputs=[[65] * 40],
        seconds=seconds,
        passes=len(rounds),
        rounds=[rounds],
        split={"draft": 0.1 * drafts, "verify": seconds - 0.2, "sample": 0.1, "other": 0.1 - 0.1 * drafts},
        timings=[[timing] * len(rounds)],
        method=method,
        temperature=0.0,
        task=("qa", "code")[number % 2],
        ids=[str(number)],
        turn=0,
        prompt_tokens=[5],
        **more,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a run leaves, made up: prompt-lookup takes half the time or a little more."""
    runs = [call(method, n, 4.0 if method == "ar" else 2.0 + 0.1 * n) for n in range(8) for method in METHODS]
    config = {
        "settings": {"model": "tiny", "suite": "prompts.jsonl", "methods": METHODS, "max_new_tokens": 40, "batch": 1},
        "machine": {"cpu": "A CPU & more", "threads": 2},
        "date": "2026-11-23T00:00:00+00:00",
        "tier": "torch",
        "dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write(tmp_path, "runs.jsonl", [vars(one) for one in runs])
    write(tmp_path, "results.jsonl", results(runs, [], METHODS, 1))
    return tmp_path


def write(folder: Path, name: str, rows: Any) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def change(folder: Path, **facts: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


def test_a_run_writes_its_report(tiny_model_dir: Path, tmp_path: Path) -> None:
    suite, out = tmp_path / "suite.jsonl", tmp_path / "out"
    write(tmp_path, "suite.jsonl", [{"id": f"q{n}", "task": "qa", "prompt": f"{n} abc abc abc"} for n in range(2)])
    methods = ["ar", "prompt-lookup+fixed:k=3"]
    summary = run(BenchConfig(str(tiny_model_dir), str(suite), out, methods, max_new_tokens=12, progress=False))
    parsed = check_stands_alone((out / REPORT).read_text())
    for row in summary.rows:
        assert f"{row['tokens_per_s']:.1f}" in parsed.text
    folder = BenchFolder.read(out)
    assert [(one["method"], one["id"]) for one in folder.samples] == [(method, "q0") for method in methods]
    plain = next(one for one in folder.runs if one.method == "ar" and one.ids == ["q0"])
    for one in folder.samples:
        said = "".join(
            text for part in one["rounds"] for text, _, fate in part["tokens"] if fate in ("accepted", "target")
        )
        assert said.removesuffix("<|end|>") == byte_tokenizer().decode(plain.outputs[0], skip_special_tokens=True)
        assert said in parsed.text
    assert [bool(one.trees) for one in folder.runs] == [one.ids == ["q0"] for one in folder.runs]


def test_it_has_all_figures(folder: Path) -> None:
    floor = {
        "1": {"median": 0.1, "floor": 0.05},
        "2": {"median": 0.11, "floor": 0.05},
        "4": {"median": 0.2, "floor": 0.06},
    }
    change(folder, profile={"context": 256, "passes": floor, "roofline": {"bandwidth": 2e10, "flops": 2e11}})
    assert write_report(folder) == folder / REPORT
    parsed = check_stands_alone((folder / REPORT).read_text())
    for title in (
        "Speedup: all tasks",
        "Speedup: qa",
        "Speedup: code",
        "Where the time goes",
        "Acceptance by depth",
        "Draft length over the output",
        "What a pass brings, and what it costs",
        "How it was measured",
    ):
        assert title in parsed.text
    row = BenchFolder.read(folder).rows[3]
    assert row["method"] == METHODS[1]
    low, high = row["speedup_ar_95"] or (0, 0)
    assert low < row["speedup_ar"] < high
    assert f"{row['speedup_ar']:.2f} ({low:.2f} to {high:.2f})" in parsed.text
    assert "Roofline: 20 GB/s, 200 GFLOPS" in parsed.text
    assert "A CPU & more" in parsed.text
    assert not list(folder.glob(".*partial"))


def test_results_alone_make_a_shorter_one(folder: Path) -> None:
    (folder / "runs.jsonl").unlink()
    text = check_stands_alone(report(BenchFolder.read(folder))).text
    assert "There is no runs.jsonl here" in text
    assert "Speedup: qa" in text
    assert "Acceptance by depth" not in text


def test_what_is_wrong_or_slow_is_said(folder: Path) -> None:
    rows = BenchFolder.read(folder).rows
    rows[3].update(wrong=1, speedup_ar=0.8)
    write(folder, "results.jsonl", rows)
    text = check_stands_alone(report(BenchFolder.read(folder))).text
    assert "WRONG: 1 of 8 outputs of prompt-lookup+fixed:k=3" in text
    assert "Slower than plain decoding: prompt-lookup+fixed:k=3, 0.80 of its speed" in text


def test_what_models_and_users_write_is_escaped(folder: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>"
    rounds = [
        {
            "tokens": [(evil, evil, "accepted"), (evil, "other", "refused"), (evil, "target", "target")],
            "refused": 1,
            "thrown": 0,
        }
    ]
    write(
        folder,
        "samples.jsonl",
        [{"method": evil, "task": evil, "temperature": 0.7, "id": evil, "prompt": evil, "rounds": rounds}],
    )
    rows = BenchFolder.read(folder).rows
    for row in rows:
        row["method"] = row["method"].replace("prompt-lookup", evil)
        row["task"] = row["task"].replace("qa", evil)
    write(folder, "results.jsonl", rows)
    parsed = check_stands_alone(report(BenchFolder.read(folder)))
    assert parsed.text.count(evil) > 10


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("results.jsonl", None, "no complete results of paceline bench"),
        ("results.jsonl", "{", "is damaged"),
        ("results.jsonl", "", "holds no results of paceline bench"),
        ("runs.jsonl", '{"other": 1}\n', "is damaged"),
        ("runs.jsonl", "[" * 100_000, "is damaged: it is nested too deeply"),
        ("results.jsonl", "9" * 5000, "is damaged: it has a number with too many digits"),
        ("config.json", "{}", "holds no results of paceline bench"),
    ],
)
def test_other_folders_are_refused(folder: Path, name: str, text: str | None, message: str) -> None:
    (folder / name).unlink()
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(OptionError, match=message):
        write_report(folder)
    assert not (folder / REPORT).exists()


def test_fates_of_drafted_tokens() -> None:
    """Accepted: b, below it d. Refused: c, whose parent was accepted, and f. Thrown away: e below c, and g below f."""
    tokens, parents = [97, 98, 99, 100, 101, 102, 103], [-1, 0, 0, 1, 2, 3, 5]
    tokenizer = byte_tokenizer()
    ids = {letter: tokenizer.encode(letter)[0] for letter in "abcdefgXY"}
    tree = DraftedTree([ids[chr(token)] for token in tokens], parents, ["", *"123456"], [0, 1, 3])
    plain = DraftedTree([ids["X"]], [-1], [""], [0])
    outputs = [[ids[letter] for letter in "bdXY"]]
    made = sample(
        Run(
            outputs=outputs,
            seconds=1.0,
            rounds=[[(6, 4, 2, 3), (0, 0, 0, 1)]],
            trees=[[tree, plain]],
            method="m",
            temperature=0.0,
            task="qa",
            ids=["1"],
            turn=0,
            prompt_tokens=[1],
        ),
        "prompt",
        tokenizer,
    )
    assert made["rounds"] == [
        {
            "tokens": [
                ("b", "1", "accepted"),
                ("d", "3", "accepted"),
                ("f", "5", "refused"),
                ("g", "6", "thrown"),
                ("X", "target", "target"),
            ],
            "refused": 2,
            "thrown": 2,
        },
        {"tokens": [("Y", "target", "target")], "refused": 0, "thrown": 0},
    ]


def test_what_was_accepted_behind_the_end_is_thrown_away() -> None:
    tokenizer = byte_tokenizer()
    ids = [tokenizer.encode(letter)[0] for letter in "abc"]
    tree = DraftedTree(ids, [-1, 0, 1], ["", "x", "x"], [0, 1, 2])
    ended = call("m", 0, 1.0)
    ended.outputs, ended.rounds, ended.trees = [[ids[1]]], [[(2, 2, 1, 1)]], [[tree]]
    [only] = sample(ended, "", tokenizer)["rounds"]
    assert only == {"tokens": [("b", "x", "accepted"), ("c", "x", "thrown")], "refused": 0, "thrown": 1}


chains = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans()).map(
        lambda t: (t[0], t[0], min(t[0], t[1]), min(t[0], t[1]) + t[2])
    ),
    max_size=60,
)


@given(chains)
def test_acceptance_by_depth_is_n_alpha_for_chains(rounds: list[tuple[int, int, int, int]]) -> None:
    alpha = n_alpha(rounds) or []
    for depth, share in acceptance(rounds):
        assert share == alpha[int(depth) - 1]


def test_acceptance_lengths_and_passes_of_known_rounds() -> None:
    assert list(acceptance([(9, 3, 1, 2)] * 10)) == [(1, 1.0), (2, 0.0)]
    assert list(lengths([[(2, 2, 1, 2), (4, 4, 3, 4), (0, 0, 0, 1)]], 2)) == [(1.0, 2.0), (3.0, 4.0), (7.0, 0.0)]
    measured = [call("ar", 0, 4.0), call("drafting", 0, 4.0)]
    assert list(passes(measured)) == [(1.0, 1.0), (4.0, pytest.approx(2.0))]
    assert list(passes(measured[1:])) == []  # nothing to compare with


@given(st.lists(st.tuples(*[st.floats(0.5, 2.0)] * 4), min_size=4, max_size=20))
def test_an_interval_lies_within_what_single_prompts_say(pairs: list[tuple[float, ...]]) -> None:
    found = ratio_interval(np.array(pairs))
    assert found == ratio_interval(np.array(pairs))
    assert found is not None
    low, high = found
    least = min(p[0] for p in pairs) * min(p[3] for p in pairs) / max(p[1] for p in pairs) / max(p[2] for p in pairs)
    most = max(p[0] for p in pairs) * max(p[3] for p in pairs) / min(p[1] for p in pairs) / min(p[2] for p in pairs)
    assert least - 1e-9 <= low <= high <= most + 1e-9


def test_intervals_cover_the_ratio_about_as_often_as_they_say() -> None:
    """Prompts whose seconds are log-normal around a ratio of 2."""
    random, hits = np.random.default_rng(1), 0
    for _ in range(100):
        plain = random.lognormal(0.0, 0.5, 30)
        own = plain / 2 * random.lognormal(0.0, 0.2, 30)
        low, high = ratio_interval(np.stack([plain, np.ones(30), own / np.exp(0.02), np.ones(30)], 1)) or (0, 0)
        hits += low <= 2.0 <= high
    assert hits >= 85


def test_few_prompts_have_no_interval() -> None:
    assert ratio_interval(np.ones((3, 4))) is None
    assert ratio_interval(np.ones((4, 4))) == (1.0, 1.0)


def test_the_command_makes_the_same_run() -> None:
    config = BenchConfig("tiny", "my prompts.jsonl", "out", "ar,trigram", temperatures=[0, 0.7], exact=False, seed=3)
    words = shlex.split(command(config.settings() | {"prompts": 4, "prompts_sha256": "x"}))
    assert words[:6] == ["paceline", "bench", "--model", "tiny", "--suite", "my prompts.jsonl"]
    told = "--methods ar,trigram --temperature 0,0.7 --seed 3 --no-exact --out results"
    assert words[6:] == told.split()


def test_the_command_does_not_round() -> None:
    settings = BenchConfig("tiny", "my.jsonl", "out", "ar", temperatures=[0.66667], top_p=0.9995).settings()
    assert "--temperature 0.66667 " in command(settings)
    assert "--top-p 0.9995 " in command(settings)
