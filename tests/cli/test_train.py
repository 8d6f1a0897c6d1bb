"""`paceline train` on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import one_thread  # noqa: F401
from paceline.errors import DataError
from paceline.training.checkpoints import alone

Run = Callable[..., Any]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"question {i}"]}) + "\n" for i in range(6)))
    return path


def test_data(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    command = ["train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 6, "--group", 3]
    made = run(*command, "--limit", 4, "--show", 2, "--shard", "0/2")
    assert made.code == 0, made.err
    assert "6 of" in made.out
    assert "[user: question" in made.out
    assert "3 of 3 prompts" in made.err
    rest = run(*command, "--limit", 4, "--shard", "1/2", "--json")
    assert json.loads(rest.out)["conversations"] == 4


def test_data_of_another_make(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """One folder does not mix what was computed otherwise."""
    command = ["train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 6, "--group", 3]
    assert run(*command, "--limit", 6, "--tier", "torch", "--shard", "0/2").code == 0
    for options, says in ((["--dtype", "float64"], "dtype"), (["--no-exact"], "exactness")):
        other = run(*command, "--limit", 6, "--tier", "torch", "--shard", "1/2", *options)
        assert (other.code, other.err.count("\n")) == (1, 1)
        assert f"made with another {says}" in other.err
    assert run(*command, "--limit", 6, "--tier", "torch", "--shard", "1/2").code == 0


def test_prompts(run: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    """What the model makes up is what data is made from."""
    path = tmp_path / "own.jsonl"
    made = run("train", "prompts", "-m", tiny_model_dir, "--out", path, "--count", 5, "-n", 200)
    assert (made.code, made.out) == (0, "5 prompts\n"), made.err
    assert all(json.loads(line)["prompt"] for line in path.read_text().splitlines())
    assert run("train", "data", "-m", tiny_model_dir, "-p", path, "--out", tmp_path / "d", "-n", 4).code == 0
    failed = run("train", "prompts", "-m", tiny_model_dir, "--out", tmp_path / "none.jsonl", "--temperature", 0)
    assert (failed.code, failed.err.count("\n")) == (1, 1)
    assert list(tmp_path.glob("*none*")) == []


def test_launched(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Processes of `accelerate launch` find their part by themselves."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    command = ["train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 4, "--group", 2]
    assert run(*command).code == 0
    assert [path.name for path in (tmp_path / "d").glob("samples-*")] == ["samples-00001.safetensors"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--shard", "2/2"], "--shard must be i/n"),
        (["--shard", "x"], "--shard must be i/n"),
        (["--text-share", "0.5"], "--text-share needs --text"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--max-length", "3"], "max_length"),
    ],
)
def test_data_errors(
    run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path, options: list[str], says: str
) -> None:
    result = run("train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", *options)
    assert result.code == 1
    assert says in result.err
    assert len(result.err.strip().splitlines()) == 1


class TestStopPredictor:
    @pytest.fixture
    def command(self, tiny_model_dir: Path, prompts: Path) -> list[object]:
        how = ["--prompts", prompts, "-n", 24, "-k", 3, "--epochs", 2]
        return ["train", "stop-predictor", "-m", tiny_model_dir, "-d", "layer-skip", *how]

    def test_goes_where_the_policy_finds_it(self, run: Run, command: list[object], tiny_model_dir: Path) -> None:
        decode = ["generate", "hello", "-m", tiny_model_dir, "-d", "layer-skip", "-p", "disco", "-n", 6, "--json"]
        without = run(*decode)
        assert without.code == 1
        assert "paceline train stop-predictor" in without.err
        made = run(*command, "-p", "disco")
        assert made.code == 0, made.err
        assert "held-back tokens" in made.out
        assert made.err.rstrip().endswith("layer-skip/disco.safetensors")
        decoded = run(*decode)
        assert decoded.code == 0, decoded.err
        plain = run("generate", "hello", "-m", tiny_model_dir, "-d", "none", "-n", 6, "--json")
        assert json.loads(decoded.out)["tokens"] == json.loads(plain.out)["tokens"]

    def test_examples_are_used_again(self, run: Run, command: list[object], tmp_path: Path) -> None:
        command += ["--examples", tmp_path / "e", "-o", tmp_path / "p", "--json"]
        first = run(*command, "-p", "cali-ts", "--form", "low-rank")
        assert first.code == 0, first.err
        told = json.loads(first.out)
        assert told["form"] == "hidden"
        assert told["data"]["drafter"] == "layer-skip"
        [shard] = (tmp_path / "e").glob("*.safetensors")
        written = shard.stat().st_mtime_ns
        assert run(*command, "-p", "specdec++").code == 0
        assert shard.stat().st_mtime_ns == written
        other = run(*command, "-p", "specdec++", "-t", "0.5")
        assert other.code == 1
        assert "made with another temperatures" in other.err

    def test_goes_on_when_given_again(
        self, run: Run, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped after the drafting: what was drafted stays beside the predictor until that is there."""
        command += ["-p", "disco", "-o", tmp_path / "p"]

        def stop(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("paceline.training.stop_predictor.fit.fit", stop)
            assert run(*command).code == 130
        assert (tmp_path / "p.examples" / "examples-00000.safetensors").exists()
        with monkeypatch.context() as patch:
            patch.setattr("paceline.training.stop_predictor.collect._record", None)
            made = run(*command)
        assert made.code == 0, made.err
        assert not (tmp_path / "p.examples").exists()
        assert run(*command, "-o", tmp_path / "q").code == 0
        assert (tmp_path / "p").read_bytes() == (tmp_path / "q").read_bytes()

    def test_more_prompts_after_a_failure(
        self, run: Run, command: list[object], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was drafted for fewer is in the way only where the user named its folder."""
        command += ["-p", "disco", "-o", tmp_path / "p"]

        def fail(*arguments: object) -> None:
            raise DataError("more prompts are needed")

        more = tmp_path / "more.jsonl"
        more.write_text(prompts.read_text() + '{"prompt": "one more"}\n')
        with monkeypatch.context() as patch:
            patch.setattr("paceline.training.stop_predictor.fit.fit", fail)
            assert run(*command).code == run(*command, "--examples", tmp_path / "e").code == 1
        assert (tmp_path / "p.examples").exists()
        made = run(*command, "--prompts", more)
        assert made.code == 0, made.err
        assert not (tmp_path / "p.examples").exists()
        named = run(*command, "--prompts", more, "--examples", tmp_path / "e")
        assert (named.code, named.err.count("\n")) == (1, 1)
        assert f"{tmp_path / 'e'} holds what was made with another prompts: delete that folder" in named.err

    def test_what_fails_at_once_leaves_no_examples(self, run: Run, command: list[object], tmp_path: Path) -> None:
        """Else their folder would refuse the same command with what was wrong put right."""
        command += ["-p", "disco", "-o", tmp_path / "p", "--examples", tmp_path / "e"]
        for wrong, says in ((["-n", 100_000], "room for 100000 new tokens"), (["-t", "nan"], "temperature must lie")):
            failed = run(*command, *wrong)
            assert (failed.code, failed.err.count("\n")) == (1, 1)
            assert says in failed.err
            assert not (tmp_path / "e").exists()
        made = run(*command)
        assert made.code == 0, made.err

    def test_a_folder_is_no_file(
        self, run: Run, command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("paceline.cli.train.stop_predictor._examples", None)  # it is noticed before
        found = run(*command, "-p", "disco", "-o", tmp_path)
        assert (found.code, found.err.count("\n")) == (1, 1)
        assert f"{tmp_path} is a folder" in found.err

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (["-p", "fixed"], "'fixed' has no predictor"),
            (["-p", "disco", "--form", "full"], "no predictor of form 'full'"),
            (["-p", "disco", "-t", "warm"], "--temperature"),
            (["-p", "disco", "--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
            (["-p", "disco", "-d", "none"], "drafted nothing"),
            (["-p", "disco", "--rank", "3", "--units", "2"], "--rank is of the form low-rank, not of top"),
            (["-p", "cali-ts", "--form", "full", "--rank", "3"], "--rank is of the form low-rank, not of full"),
            (["-p", "specdec++", "--units", "2"], "--units is of the forms low-rank and full, not of residual"),
            (["-p", "specdec++", "-d", "prompt-lookup"], "the form 'residual' needs hidden states, and prompt-lookup"),
            (["-p", "cali-ts", "--form", "full", "-d", "none"], "the form 'full' needs hidden states, and none shows"),
            (["-p", "disco", "--lr", "inf"], "lr must be > 0 and at most"),
        ],
    )
    def test_errors(self, run: Run, command: list[object], options: list[str], says: str, tmp_path: Path) -> None:
        result = run(*command, *options, "-o", tmp_path / "out" / "p")
        assert result.code == 1
        assert not list((tmp_path / "out").glob("*"))
        assert says in result.err
        assert len(result.err.strip().splitlines()) == 1


def test_early_exit(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """From prompts to a head that drafts."""
    prompts.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(24)))
    made = run("train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 16, "-b", 8)
    assert made.code == 0, made.err
    command = ["train", "early-exit", "-m", tiny_model_dir, "--data", tmp_path / "d", "-N", 1, "--device", "cpu"]
    trained = run(*command, "--out", tmp_path / "head", "--epochs", 2, "--tokens", 200, "--report", 2)
    assert trained.code == 0, trained.err
    assert "trained (layers 9,280, norm 32, output 8,224)" in trained.err
    assert "\nstep 0 of " in trained.err
    assert "\nstep 2 of " in trained.err
    assert trained.out.startswith("accepted 0.")
    options = ["--out", tmp_path / "head", "--epochs", 2, "--tokens", 200, "--report", 2]
    again = run(*command, *options, "-N", 2)
    assert (again.code, "--resume" in again.err) == (1, True)
    assert len(list((tmp_path / "d" / "features").iterdir())) == 1  # told before layer 2 was run over the data
    resumed = json.loads(run(*command, *options, "--resume", "--json").out)
    assert resumed["accepted_1"] == pytest.approx(float(trained.out.split()[1]), abs=6e-4)
    drafter = f"early-exit:head={tmp_path / 'head'}"
    out = run("generate", "say 3", "-m", tiny_model_dir, "-d", drafter, "-n", 8, "--json")
    assert out.code == 0, out.err
    assert len(json.loads(out.out)["tokens"]) <= 8


def test_one_training_in_a_folder(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    """Another process is told so; what fails leaves no folder behind."""
    made = run("train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 16)
    assert made.code == 0, made.err
    out = tmp_path / "head"
    command = ["train", "early-exit", "-m", tiny_model_dir, "--data", tmp_path / "d", "-N", 1, "--device", "cpu"]
    command += ["--out", out, "--steps", 1, "--vocab", 100]
    failed = run(*command, "--store-limit", 1e-9)
    assert (failed.code, "--store-limit" in failed.err, out.exists()) == (1, True, False)
    with alone(out):
        for options in ([], ["--resume"]):
            second = run(*command, *options)
            assert (second.code, second.err.count("\n")) == (1, 1)
            assert f"another training runs in {out}" in second.err
    assert not out.exists()
    assert run(*command).code == 0
    assert run(*command, "--resume").code == 0
    out = tmp_path / "file"
    out.touch()
    found = run(*command, "--out", out)
    assert (found.code, found.err.count("\n")) == (1, 1)
    assert f"{out} is a file: name a folder" in found.err


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_the_largest_seed(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path, kind: str) -> None:
    made = run("train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 16, "-b", 8)
    assert made.code == 0, made.err
    command = ["train", kind, "-m", tiny_model_dir, "--data", tmp_path / "d", "--device", "cpu", "--steps", 1]
    command += ["--vocab", 100, "--out", tmp_path / "head", "--adversarial", 0.1]
    trained = run(*command, "--seed", 2**63 - 1)
    assert trained.code == 0, trained.err
    assert "written by" not in trained.err
    assert run(*command, "--seed", 2**63).code == 2


def test_heads_share_features(run: Run, tiny_model_dir: Path, prompts: Path, tmp_path: Path) -> None:
    made = run("train", "data", "-m", tiny_model_dir, "-p", prompts, "--out", tmp_path / "d", "-n", 16, "-b", 8)
    assert made.code == 0, made.err
    for kind, options in (("medusa", ["--adversarial", 0.1]), ("eagle", ["-K", 2])):
        command = ["train", kind, "-m", tiny_model_dir, "--data", tmp_path / "d", "--device", "cpu", *options]
        trained = run(*command, "--out", tmp_path / kind, "--steps", 1, "--vocab", 100)
        assert trained.code == 0, trained.err
        assert "trained (" in trained.err
        assert trained.out.startswith("accepted 0.")
        assert (tmp_path / kind / f"{kind}.json").exists()
    assert len(list((tmp_path / "d" / "features").iterdir())) == 1


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("early-exit", [], "no training data"),
        ("early-exit", ["--lr", 0], "lr must be > 0"),
        ("early-exit", ["--lr", "inf"], "lr must be > 0 and at most 1e+09, not inf"),
        ("early-exit", ["--weight-decay", "inf"], "weight-decay must lie in 0 .. 1e+09, not inf"),
        (
            "eagle",
            ["--adversarial", 0.1, "--discriminator-lr", "inf"],
            "discriminator-lr must be > 0 and at most 1e+09",
        ),
        ("early-exit", ["--device", "cuda"], "no CUDA device"),
        ("medusa", [], "no training data"),
        ("medusa", ["--layers", 0], "K = 1 layer or more"),
        ("eagle", ["--layers", 0], "K = 1 layer or more"),
        ("eagle", ["--adversarial", -0.1], "adversarial must be >= 0 and finite, not -0.1"),
        ("eagle", ["--patience", 3], "--patience is of adversarial learning: give --adversarial, too"),
        ("medusa", ["--discriminator", "full"], "--discriminator is of adversarial learning"),
        ("medusa", ["--adversarial", "inf"], "finite, not inf"),
        ("eagle", ["--noise", "inf"], "noise must be >= 0 and finite, not inf"),
        ("eagle", ["--adversarial", 0.1, "--discriminator-layers", 0], "discriminator-layers must be >= 1"),
    ],
)
def test_training_errors(
    run: Run, tiny_model_dir: Path, tmp_path: Path, kind: str, options: list[object], says: str
) -> None:
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is one here")
    words = ["--device", "cpu", *options] if "--device" not in options else options
    result = run("train", kind, "-m", tiny_model_dir, "--data", tmp_path, "--out", tmp_path / "h", *words)
    assert result.code == 1
    assert says in result.err
    assert len(result.err.strip().splitlines()) == 1
