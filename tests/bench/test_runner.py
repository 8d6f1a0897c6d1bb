from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from rich.console import Console

from paceline.bench import BenchConfig, ResultRow, Summary, print_summary, run
from paceline.bench import runner as runner_module
from paceline.bench.journal import open_journal
from paceline.bench.methods import Paceline
from paceline.bench.schedule import taking_turns
from paceline.errors import ContextOverflow, OptionError, UnsupportedModel
from paceline.targets import Target
from tiny import byte_tokenizer

METHODS = ("ar", "hf", "prompt-lookup+fixed:k=3")


class Killed(BaseException):
    """A kill in the middle of a run."""


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    rows = [
        {"id": f"{task}{i}", "task": task, "turns": [f"{task} {i} abc abc abc", "And then?"]}
        for task in ("qa", "chat")
        for i in range(3)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def config(suite: Path, tiny_model_dir: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_model_dir),
        "suite": str(suite),
        "out": tmp_path / "out",
        "methods": METHODS,
        "limit": 2,
        "max_new_tokens": 6,
        "tier": "reference",
        "progress": False,
    }


def recorded(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "runs.jsonl").read_text(encoding="utf-8").splitlines()]


def test_results_in_the_documented_schema(config: dict[str, Any]) -> None:
    summary = run(BenchConfig(**config))
    written = [json.loads(line) for line in (config["out"] / "results.jsonl").read_text().splitlines()]
    assert written == summary.rows
    assert [(r["method"], r["task"]) for r in written] == [(m, t) for m in METHODS for t in ("overall", "qa", "chat")]
    for row in written:
        assert list(row) == list(get_type_hints(ResultRow))
        assert row["prompts"] == (4 if row["task"] == "overall" else 2)
        assert row["wrong"] == 0
        assert row["identical"] + row["tie"] == row["prompts"]
    assert written[0]["speedup_ar"] == pytest.approx(1.0)
    assert json.loads((config["out"] / "config.json").read_text())["noise"].keys() == {"paceline", "hf"}
    assert not list(config["out"].glob("*.partial"))


def test_methods_take_turns_at_being_first(config: dict[str, Any]) -> None:
    """Also with several temperatures, each of which must see every order."""
    run(BenchConfig(**config | {"temperatures": (0, 0.7)}))
    runs = recorded(config["out"])
    for temperature in (0.0, 0.7):
        order = [(r["ids"], r["method"]) for r in runs if r["temperature"] == temperature]
        firsts = [method for i, (_, method) in enumerate(order) if i % len(METHODS) == 0]
        assert firsts == [METHODS[i % 3] for i in range(4)]
        assert [ids for ids, _ in order] == [[p] for p in ("qa0", "qa1", "chat0", "chat1") for _ in METHODS]


def test_no_method_comes_behind_the_same_one_each_time() -> None:
    methods = list("abcdef")
    orders = [taking_turns(methods, number) for number in range(60)]
    assert all(sorted(order) == methods for order in orders)
    behind = {pair for order in orders for pair in pairwise(order)}
    assert len(behind) == len(methods) * (len(methods) - 1)
    assert orders[7] == taking_turns(methods, 7)


def test_recorded_calls_hold_ids_and_rounds(config: dict[str, Any]) -> None:
    run(BenchConfig(**config))
    for call in recorded(config["out"]):
        assert len(call["outputs"][0]) <= 6
        assert call["seconds"] > 0
        if call["method"] != "hf":
            assert sum(r[3] for r in call["rounds"][0]) == len(call["outputs"][0])
            assert sum(call["split"].values()) == pytest.approx(call["seconds"])


def test_goes_on_after_a_kill(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = Paceline.generate, []

    def killed(self: Paceline, prompts: Any, params: Any, seed: int) -> Any:
        calls.append(self.name)
        if len(calls) == 7:  # past the two warm-ups
            raise Killed
        return original(self, prompts, params, seed)

    monkeypatch.setattr(Paceline, "generate", killed)
    with pytest.raises(Killed):
        run(BenchConfig(**config))
    journal = config["out"] / "runs.jsonl"
    before = journal.read_bytes()
    journal.write_bytes(before + before.splitlines()[0][:40])  # half a line, as a kill leaves it
    monkeypatch.setattr(Paceline, "generate", original)
    run(BenchConfig(**config))
    assert journal.read_bytes().startswith(before)
    keys = [(c["method"], tuple(c["ids"])) for c in recorded(config["out"])]
    assert len(keys) == len(set(keys)) == len(METHODS) * 4


def test_a_complete_run_is_read_not_repeated(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(BenchConfig(**config))
    monkeypatch.setattr(runner_module, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert run(BenchConfig(**config)) == first


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 7}, "max_new_tokens 6, not 7"),
        ({"methods": "ar"}, r"methods ar,hf,prompt-lookup\+fixed:k=3, not ar"),
        ({"limit": 1}, "limit 2, not 1; prompts 4, not 2"),
    ],
)
def test_other_settings_are_refused(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    run(BenchConfig(**config))
    with pytest.raises(OptionError, match=rf"holds a run with {message}.*: choose another folder, or delete it"):
        run(BenchConfig(**config | change))


def test_changed_prompts_are_refused(config: dict[str, Any], suite: Path) -> None:
    run(BenchConfig(**config))
    suite.write_text(suite.read_text().replace("qa 0", "qa 9"))
    with pytest.raises(OptionError, match="prompts_sha256"):
        run(BenchConfig(**config))


def test_another_machine_is_refused(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run(BenchConfig(**config))
    there = runner_module.machine("cpu") | {"cpu": "Another CPU"}
    monkeypatch.setattr(runner_module, "machine", lambda device: there)
    with pytest.raises(OptionError, match="not Another CPU"):
        run(BenchConfig(**config))


def test_samples_that_follow_the_targets_draws_are_compared(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every token is drawn by its position from logits whose bits do not depend on the width of the pass."""
    sampled = config | {"temperatures": (0, 1.0), "verifier": "match", "tier": "torch"}
    rows = [row for row in run(BenchConfig(**sampled)).rows if row["task"] == "overall"]
    same = {(row["method"], row["temperature"]): (row["identical"], row["wrong"]) for row in rows}
    assert same["prompt-lookup+fixed:k=3", 1.0] == same["ar", 1.0] == (4, 0)
    assert same["hf", 1.0] == (None, None)  # transformers has random numbers of its own

    original = Paceline.generate

    def other(self: Paceline, prompts: Any, params: Any, seed: int) -> Any:
        made = original(self, prompts, params, seed)
        if self.name != "ar":
            made.outputs[0][-1] += 1
        return made

    monkeypatch.setattr(Paceline, "generate", other)
    summary = run(BenchConfig(**sampled | {"out": config["out"] / "other", "methods": ("ar", METHODS[2])}))
    assert {row["wrong"] for row in summary.rows if row["method"] == METHODS[2] and row["task"] == "overall"} == {4}
    assert {found["temperature"] for found in summary.differences} == {0, 1.0}


@pytest.mark.parametrize("change", [{"verifier": "auto"}, {"tier": "reference", "verifier": "match"}])
def test_other_samples_are_not_compared(config: dict[str, Any], change: dict[str, str]) -> None:
    summary = run(BenchConfig(**config | {"tier": "torch", "temperatures": (1.0,), "limit": 1} | change))
    assert {row["identical"] for row in summary.rows} == {None}


def test_an_unknown_verifier_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="unknown verifier 'none'; there are auto, match, rejection"):
        BenchConfig(**config | {"verifier": "none"})


def test_another_tier_is_refused(config: dict[str, Any]) -> None:
    """As where `auto` finds a compiler that was not there before."""
    run(BenchConfig(**config))
    (config["out"] / "results.jsonl").unlink()
    about = json.loads((config["out"] / "config.json").read_text())
    (config["out"] / "config.json").write_text(json.dumps(about | {"tier": "another"}))
    with pytest.raises(OptionError, match="holds a run with tier another, not"):
        run(BenchConfig(**config))


def test_of_a_file_that_cannot_be_written_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, text: str, **how: Any) -> None:
        path.write_bytes(text.encode()[:3])
        raise OSError(errno.EIO, "Input/output error", str(path))

    with open_journal(tmp_path, {}, {}) as journal:
        before = (tmp_path / "config.json").read_bytes()
        monkeypatch.setattr(Path, "write_text", broken)
        with pytest.raises(OptionError, match=r"cannot write to .*/config\.json: Input/output error"):
            journal.note(noise=1)
    assert (tmp_path / "config.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["config.json"]


def test_a_run_that_fails_before_it_measures_leaves_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is no /nowhere"):
        run(BenchConfig(**config | {"out": tmp_path / "new" / "run", "methods": ["ar", "eagle:head=/nowhere"]}))
    assert not (tmp_path / "new").exists()


def test_unusable_folders(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot write to"):
        run(BenchConfig(**config | {"out": tmp_path / "file"}))
    config["out"].mkdir()
    (config["out"] / "runs.jsonl").write_text("{}\n")
    with pytest.raises(OptionError, match=r"runs\.jsonl but no config\.json"):
        run(BenchConfig(**config))
    (config["out"] / "config.json").write_text("{}")
    with pytest.raises(OptionError, match="not the config of a benchmark run"):
        run(BenchConfig(**config))


def test_a_damaged_record_is_named(config: dict[str, Any]) -> None:
    run(BenchConfig(**config))
    (config["out"] / "results.jsonl").unlink()
    lines = (config["out"] / "runs.jsonl").read_text().splitlines(keepends=True)
    (config["out"] / "runs.jsonl").write_text(lines[0] + "{}\n" + lines[2])
    with pytest.raises(OptionError, match=r"runs\.jsonl, line 2 is damaged"):
        run(BenchConfig(**config))
    for change in (
        {"ids": 5},
        {"outputs": [["a"]]},
        {"rounds": [[1]]},
        {"seconds": "1"},
        {"latencies": [3]},
        {"ids": []},
    ):
        damaged = json.dumps(json.loads(lines[1]) | change) + "\n"
        (config["out"] / "runs.jsonl").write_text(lines[0] + damaged + lines[2])
        with pytest.raises(OptionError, match=r"runs\.jsonl, line 2 is damaged"):
            run(BenchConfig(**config))
    (config["out"] / "runs.jsonl").write_text(lines[0] + "[" * 100_000 + "\n")
    with pytest.raises(OptionError, match=r"runs\.jsonl, line 2 is damaged"):
        run(BenchConfig(**config))


def test_a_folder_in_use_is_refused(config: dict[str, Any]) -> None:
    with (
        runner_module.open_journal(config["out"], {}, {}),
        pytest.raises(OptionError, match="another process is measuring into"),
    ):
        run(BenchConfig(**config))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"methods": "ar,hf-early-exit:layers=9"}, OptionError),
        ({"methods": "ar,hf-lookup", "batch": 2}, UnsupportedModel),
        ({"max_new_tokens": 250}, ContextOverflow),
    ],
)
def test_refused_before_anything_is_measured(
    config: dict[str, Any], change: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run(BenchConfig(**config | change))
    assert not (config["out"] / "runs.jsonl").exists()
    assert run(BenchConfig(**config)).rows  # the folder is free


def test_a_folder_with_another_programs_config_is_left_alone(config: dict[str, Any]) -> None:
    config["out"].mkdir()
    (config["out"] / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(OptionError, match="not the config of a benchmark run"):
        run(BenchConfig(**config))
    assert json.loads((config["out"] / "config.json").read_text()) == {"model_type": "llama"}


@pytest.mark.parametrize("name", ["differences.jsonl", "config.json"])
@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000])
def test_damaged_files_of_a_complete_run(config: dict[str, Any], name: str, text: str) -> None:
    run(BenchConfig(**config | {"methods": "ar", "limit": 1}))
    (config["out"] / name).write_text(text)
    with pytest.raises(OptionError, match=f"{name} is "):
        run(BenchConfig(**config | {"methods": "ar", "limit": 1}))


def test_a_task_is_no_markup_and_a_bar_is_for_terminals(
    config: dict[str, Any], suite: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite.write_text(json.dumps({"task": "[/red]", "turns": ["abc"]}))
    one = config | {"methods": "ar", "progress": True}
    run(BenchConfig(**one))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    run(BenchConfig(**one | {"out": config["out"] / "there"}))
    assert "[/red], ar" in capsys.readouterr().err


def test_overflow_names_the_prompt(config: dict[str, Any], suite: Path) -> None:
    suite.write_text(json.dumps({"id": "long one", "task": "qa", "turns": ["x" * 300]}))
    with pytest.raises(ContextOverflow, match=r"prompt 'long one' of the suite: .* exceed the model's context of 256"):
        run(BenchConfig(**config))


def test_later_turns_continue_plain_decodings_answer(config: dict[str, Any]) -> None:
    run(BenchConfig(**config | {"turns": 2, "tasks": "qa", "limit": 1}))
    calls = recorded(config["out"])
    assert [c["turn"] for c in calls] == [0] * 3 + [1] * 3
    assert {(c["turn"], c["method"]) for c in calls} == {(turn, method) for turn in (0, 1) for method in METHODS}
    lengths = [c["prompt_tokens"] for c in calls]
    assert lengths == [lengths[0]] * 3 + [lengths[3]] * 3  # all methods see one prompt
    roles = "assistant: \nuser: And then?\nassistant: "
    text = byte_tokenizer().decode(calls[0]["outputs"][0], skip_special_tokens=True)  # of `ar`, which is first
    assert lengths[3][0] == lengths[0][0] + len(byte_tokenizer().encode(text + roles)) - len("assistant: ")
    assert json.loads((config["out"] / "results.jsonl").read_text().splitlines()[0])["prompts"] == 2


def test_a_fast_tier_gets_one_model_of_its_own_for_transformers(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original, loaded = runner_module.load_model, []

    def load_model(name: str, **options: Any) -> Any:
        loaded.append(name)
        return original(name, **options)

    monkeypatch.setattr(runner_module, "load_model", load_model)
    monkeypatch.setattr(Target, "tier", "fast")
    summary = run(BenchConfig(**config | {"methods": "ar,hf,hf-lookup", "tasks": "qa"}))
    assert loaded == [config["model"]]
    assert [row["wrong"] for row in summary.rows] == [0] * 6
    run(BenchConfig(**config | {"methods": "ar,prompt-lookup", "tasks": "qa", "out": tmp_path / "without"}))
    assert loaded == [config["model"]]


class Straying:
    """A method of paceline's whose second output token is never plain decoding's."""

    def __init__(self, name: str, inner: Paceline) -> None:
        self.name, self.paceline, self.inner = name, True, inner

    def generate(self, prompts: Any, params: Any, seed: int) -> Any:
        made = self.inner.generate(prompts, params, seed)
        outputs = [[ids[0], (ids[1] + 1) % 256, *ids[2:]] for ids in made.outputs]
        return replace(made, outputs=outputs)


@pytest.mark.parametrize("exact", [True, False])
def test_on_an_exact_target_a_difference_is_never_a_tie(
    config: dict[str, Any], exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much noise was measured: but transformers' own output may still differ by it."""
    built = runner_module.build_method

    def build_method(name: str, *rest: Any) -> Any:
        method = built(name, *rest)
        return method if name == "ar" else Straying(name, method)

    monkeypatch.setattr(runner_module, "build_method", build_method)
    monkeypatch.setattr(runner_module, "measure_noise", lambda *_: 1e6)
    monkeypatch.setattr(Target, "exact", exact)
    rows = {row["method"]: row for row in run(BenchConfig(**config | {"tasks": "qa"})).rows if row["task"] == "qa"}
    drafted = rows["prompt-lookup+fixed:k=3"]
    assert (rows["hf"]["tie"], rows["hf"]["wrong"]) == (2, 0)
    assert (drafted["identical"], drafted["tie"], drafted["wrong"]) == ((0, 0, 2) if exact else (0, 2, 0))
    assert json.loads((config["out"] / "config.json").read_text())["exact"] is exact


def test_exactness_that_the_target_cannot_promise(config: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="the reference tier cannot be exact here"):
        run(BenchConfig(**config | {"exact": True}))


def test_batches(config: dict[str, Any]) -> None:
    summary = run(BenchConfig(**config | {"batch": 2}))
    assert {tuple(c["ids"]) for c in recorded(config["out"])} == {("qa0", "qa1"), ("chat0", "chat1")}
    assert {(r["batch"], r["wrong"]) for r in summary.rows} == {(2, 0)}
    one = {k: v for k, v in config.items() if k != "out"}
    alone = run(BenchConfig(**one, out=config["out"] / "alone"))
    assert [r["tokens"] for r in alone.rows] == [r["tokens"] for r in summary.rows]


def test_a_temperature_knows_nothing_of_the_one_before(config: dict[str, Any], tmp_path: Path) -> None:
    """Drafters that remember earlier requests would have heard the answers: nearly the same at a low temperature."""
    config |= {"methods": "suffix:share=process:budget=4", "max_new_tokens": 24}
    drafts = []
    for temperatures in ("0.01", "0,0.01"):
        out = tmp_path / temperatures
        run(BenchConfig(**config | {"temperatures": temperatures, "out": out}))
        drafts.append([call["rounds"] for call in recorded(out) if call["temperature"] == 0.01])
    assert drafts[0] == drafts[1]


def test_sampling_depends_on_the_prompt_not_on_the_batch(config: dict[str, Any], tmp_path: Path) -> None:
    outputs = []
    for batch in (1, 2):
        run(
            BenchConfig(
                **config | {"methods": "ar", "temperatures": [1.0], "batch": batch, "out": tmp_path / str(batch)}
            )
        )
        outputs.append([ids for call in recorded(tmp_path / str(batch)) for ids in call["outputs"]])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ""}, "at least one method"),
        ({"methods": "ar,hf,ar"}, "named twice"),
        ({"methods": "ar,nosuch"}, "unknown method 'nosuch'"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"temperatures": " "}, "at least one temperature"),
        ({"temperatures": (-1,)}, "temperature must lie in"),
        ({"temperatures": "0,hot"}, "temperatures are numbers with commas between them, or a list, not '0,hot'"),
        ({"temperatures": 0.5}, "temperatures are numbers"),
        ({"temperatures": [None]}, "temperatures are numbers"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"limit": 0}, "limit must be at least 1"),
        ({"turns": -1}, "turns must be at least 1"),
        ({"tier": "warp"}, "unknown tier 'warp'"),
        ({"top_p": 2.0}, "top_p must lie in"),
    ],
)
def test_bad_options(config: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        BenchConfig(**config | change)


def test_lists_as_one_text(config: dict[str, Any]) -> None:
    made = BenchConfig(**config | {"methods": "ar, trigram", "tasks": "a,b", "temperatures": "0, 1.5"})
    assert (made.methods, made.tasks, made.temperatures) == (("ar", "trigram"), ("a", "b"), (0.0, 1.5))


def printed(summary: Summary, verbose: bool = False, width: int = 160) -> str:
    stream = io.StringIO()
    print_summary(summary, Console(file=stream, width=width), verbose)
    return stream.getvalue()


def test_printed_summary(config: dict[str, Any]) -> None:
    summary = run(BenchConfig(**config))
    summary.rows[6]["speedup_ar"], summary.rows[6]["wrong"] = 0.5, 1
    text = printed(summary)
    assert "overall: 4 prompts, greedy" in text
    assert "qa: 2 prompts" not in text
    assert "WRONG: prompt-lookup+fixed:k=3: 1 of 4 outputs" in text
    assert "slower than plain decoding: prompt-lookup+fixed:k=3 at temperature 0: 0.50x" in text
    assert "qa: 2 prompts, greedy" in printed(summary, verbose=True)
    table, lines = printed(summary, width=200), printed(summary, width=30)  # where numbers would be cut off
    for row in (row for row in summary.rows if row["task"] == "overall"):
        assert f"{row['tokens_per_s']:.1f}" in table
        assert f"{row['method']}\n  tok/s {row['tokens_per_s']:.1f}\n" in lines
