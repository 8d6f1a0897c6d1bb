"""The native tier from packed weights: the same target, whatever became of the file, without transformers' models."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import paceline
from paceline.drafters.eagle.head import EagleHead
from paceline.drafting.own_layers import layers_config
from paceline.targets import load_target, tiers
from paceline.targets.identity import model_key, probe_features
from paceline.targets.native import available, build, kept, start
from paceline.targets.sources import load_model
from paceline.targets.target import Target
from tiny import small_llama

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")

#: What takes seconds to import, and what only other commands need.
NOT_AT_START = (
    *("transformers.modeling_utils", "transformers.models.llama.modeling_llama", "transformers.models.auto"),
    *("transformers.generation.logits_process", "transformers.activations"),
    *("torch._dynamo", "sympy", "scipy", "pandas", "matplotlib", "optuna", "accelerate", "tensorboard", "numba"),
)
NOT_FOR_HELP = (*NOT_AT_START, "torch", "transformers", "tokenizers", "numpy")


@pytest.fixture
def folder(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model folder of the test's own, and a place for packed weights."""
    monkeypatch.setattr(start, "folder", lambda: tmp_path / "packed")
    return str(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def load(folder: str, **options: Any) -> tuple[Target, bool]:
    """The target, and whether it started from packed weights."""
    target = load_target(folder, tier="native", **options)
    return target, isinstance(target.model, start.NoModel)


def test_start_gives_the_same_target(folder: str) -> None:
    (first, packed), (second, started) = load(folder), load(folder)
    assert (packed, started) == (False, True)
    assert torch.equal(probe_features(first), probe_features(second))
    ids = list(range(1, 200))
    for target in (first, second):
        cache = target.new_cache(1, 256)
        taps = target.prefill(ids, cache, taps=(0, target.num_layers))
        assert (taps[0].shape[0], cache.lengths[0]) == (199, 199)
    for name in ("name", "eos", "context", "dtype", "device", "vocab_size", "num_layers", "weight_count"):
        assert getattr(first, name) == getattr(second, name), name
    assert (first.weight_bytes, model_key(first)) == (second.weight_bytes, model_key(second))
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    assert type(first.tokenizer) is type(second.tokenizer)
    assert first.tokenizer.encode("Hi!") == second.tokenizer.encode("Hi!")


def test_a_model_is_called_as_it_is_now(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (first, _), (second, started) = load("."), load(folder)
    assert started
    assert (first.name, second.name) == (".", folder)
    assert model_key(first) == model_key(second)


def test_output_is_that_of_a_model(folder: str) -> None:
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    outputs = [paceline.load(folder, tier="native").generate(prompt, max_new_tokens=32, eos=()) for _ in range(2)]
    assert outputs[0].tokens == outputs[1].tokens


def test_config_is_plain_until_more_is_asked_of_it(folder: str) -> None:
    (first, _), (second, _) = load(folder), load(folder)
    assert isinstance(second.config, start.KeptConfig)
    assert second.config.rope_parameters == first.config.rope_parameters
    assert layers_config(second.config, 2) == layers_config(first.config, 2)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = second.config.nonsense
    with pytest.raises(AttributeError, match="_hidden"):
        _ = second.config._hidden
    with pytest.raises(AttributeError, match=r"no transformers model to ask for 'generate'.*tier='reference'"):
        _ = second.model.generate


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:20], "cut short"),
        (lambda data: data[:-70], "cut short"),
        (lambda data: b"x" * len(data), "header is damaged"),
        (lambda data: data[:100] + b"#" + data[101:], "header is damaged"),
        (lambda data: data[:-65] + bytes([data[-65] ^ 1]) + data[-64:], "weights are damaged"),
    ],
)
def test_damaged_file_is_told_and_made_again(
    damage: Any, reason: str, folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    load(folder)
    path = start.file_of(folder)
    good = path.read_bytes()
    bad = damage(good)
    if reason == "weights are damaged":  # the last byte that is not padding
        at = max(index for index, byte in enumerate(good) if byte)
        bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING, "paceline"):
        assert load(folder)[1] is False
    assert reason in caplog.text
    assert path.read_bytes() == good
    assert load(folder)[1] is True


def test_changes_of_what_it_was_made_from_are_seen(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load(folder)
    os.utime(Path(folder, "model.safetensors"), ns=(1, 1))
    assert load(folder)[1] is False
    assert load(folder)[1] is True
    monkeypatch.setattr(start, "_sources", lambda: "of another version")
    assert load(folder)[1] is False


@pytest.mark.parametrize("how", ["link", "copy", "rename"])
def test_another_model_in_its_place_is_seen(how: str, folder: str, tmp_path: Path) -> None:
    """Of the same sizes and times."""
    other, called = Path(shutil.copytree(folder, tmp_path / "other")), tmp_path / "called"
    small_llama(1).float().save_pretrained(other)
    for path in (*other.iterdir(), *Path(folder).iterdir()):
        os.utime(path, ns=(10**18, 10**18))
    called.symlink_to(folder)
    first, _ = load(str(called))
    assert load(str(called))[1] is True
    name = "model.safetensors"
    if how == "link":
        called.unlink()
        called.symlink_to(other)
    elif how == "copy":  # over it, with its times
        shutil.copy2(other / name, Path(folder, name))
    else:
        (other / name).replace(Path(folder, name))
    second, started = load(str(called))
    assert not started
    assert not torch.equal(probe_features(first), probe_features(second))
    assert load(str(called))[1] is True


def test_nothing_is_kept_of_files_that_change_while_they_are_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*given: Any, **options: Any) -> Target:
        os.utime(Path(folder, "model.safetensors"), ns=(1, 1))  # somebody saves another checkpoint
        return make_target(*given, **options)

    make_target = tiers.make_target
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "make_target", slow)
        assert load(folder)[1] is False
    assert load(folder)[1] is False
    assert load(folder)[1] is True


def test_sources_are_those_of_the_layout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code that reads or lays out weights makes the file another one when it changes."""
    copy = shutil.copytree(Path(start.__file__).parents[1], tmp_path / "targets")
    monkeypatch.setattr(start, "__file__", str(copy / "native" / "start.py"))
    before = start._sources.__wrapped__()
    for path in (*copy.glob("native/*.h"), copy / "native" / "weights.py", copy / "rope.py"):
        with path.open("a") as file:
            file.write("\n")
        after = start._sources.__wrapped__()
        assert after != before, path.name
        before = after


def test_nothing_prevents_decoding(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start.file_of(folder)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(kept, "write", full)
        assert load(folder)[1] is False
    with monkeypatch.context() as patch:
        patch.setattr(start, "SHARE", 0.0)
        assert load(folder)[1] is False
    with FileLock(path.with_suffix(".lock")):  # another process writes it
        assert load(folder)[1] is False
    Path(folder, "adapter_config.json").write_text("{}")
    monkeypatch.setattr(start, "_tokenizer_class", None)  # not reached
    start.keep(load_target(folder, tier="native"), folder, start.made_from(folder))  # type: ignore[arg-type]
    assert list(path.parent.glob("*packed*")) == []


def test_only_what_was_packed_starts(folder: str) -> None:
    load(folder)
    assert load_target(folder, tier="torch").tier == "torch"
    assert load_target(folder, exact=False).tier == "torch"
    assert load(folder, dtype=torch.bfloat16)[1] is False
    assert load(folder, dtype="float32")[1] is True
    auto = load_target(folder)
    assert isinstance(auto.model, start.NoModel) == (build.instruction_set() != "portable")


def test_tokenizer_that_needs_the_auto_class(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert start._tokenizer_class(None, folder) == ""
    first, _ = load(folder)
    assert start._tokenizer_class(first.tokenizer, folder).endswith(f":{type(first.tokenizer).__name__}")
    assert start._tokenizer_class(first.tokenizer, folder + "/nowhere") == ""
    monkeypatch.setattr(start, "_tokenizer_class", lambda *_: "")
    start.file_of(folder).unlink()
    load(folder)
    second, started = load(folder)
    assert started
    assert type(second.tokenizer) is type(first.tokenizer)


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a Path"):
        kept.write(tmp_path / "file", {}, {"path": type("Path", (), {})()})
    with pytest.raises(TypeError, match="dict"):
        kept.write(tmp_path / "file", {}, {1: 2})
    assert not (tmp_path / "file").exists()
    with pytest.raises(kept.IntegrityError, match="os:system"):
        kept._object("os:system", {})


@pytest.mark.parametrize("kind", ["help", "auto", "eagle"])
def test_imports(kind: str, folder: str, tmp_path: Path) -> None:
    load(folder)
    drafter = kind
    if kind == "eagle":
        EagleHead.from_target(load_model(folder)[0]).save(tmp_path / "eagle")
        drafter = f"eagle:head={tmp_path / 'eagle'}"
    words = f"generate --model {folder} --tier native --drafter {drafter} --raw -n 2 abc"
    asked = ["--help"] if kind == "help" else words.split()
    code = (
        "import sys, pathlib\nfrom paceline.cli.app import main\n"
        f"if {kind != 'help'}:\n"
        "    from paceline.targets.native import build, start\n"
        f"    start.folder = lambda: pathlib.Path({str(tmp_path / 'packed')!r})\n"
        f"    library = pathlib.Path({str(build.folder())!r})\n"
        "    build.folder = lambda: library\n"
        f"assert main({asked!r}) == 0\nprint('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.partition("MODULES ")[2].split()
    unwanted = NOT_FOR_HELP if kind == "help" else NOT_AT_START
    assert [m for m in modules if any(m == name or m.startswith(name + ".") for name in unwanted)] == []
