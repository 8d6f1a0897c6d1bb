"""A GGUF file packed as it is: the target that the long way through float32 makes, without that way."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from paceline.errors import IntegrityError, NativeUnavailable
from paceline.targets import load_target, make_target, native, store, tiers
from paceline.targets.identity import probe_features
from paceline.targets.native import NativeTarget, available, build, start, stored
from paceline.targets.native.blocks import BlockMatrix
from paceline.targets.native.weights import Kind
from paceline.targets.sources import load_model, resolve
from tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(not available(), reason="needs a C++ compiler with OpenMP")

K_QUANTS = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q8_0", "ffn_down": "Q6_K"}
FLOATS = {"output": "F16", "attn_v": "BF16", "attn_output": "F32", "blk.0.ffn_up": "Q5_0", "ffn_down": "Q5_1"}


@pytest.fixture(autouse=True)
def places(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A place of each test's own for models and packed weights; the library is all tests'."""
    library = build.folder()
    monkeypatch.setattr(build, "folder", lambda: library)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def matrices(target: NativeTarget) -> list[tuple[Kind, bytes]]:
    return [(matrix.kind, matrix._memory.numpy().tobytes()) for matrix in [target._embedding, *target.native.matrices]]


@pytest.mark.parametrize(
    ("arch", "kinds"), [("llama", {}), ("llama", K_QUANTS), ("qwen2", {"output": "Q8_0"}), ("qwen3", FLOATS)]
)
def test_it_is_the_target_of_the_long_way(
    arch: str, kinds: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, arch, hidden=256, ffn=256, kinds=kinds)
    dequantised = []
    whole = BlockMatrix.whole
    monkeypatch.setattr(BlockMatrix, "whole", lambda matrix: dequantised.append(matrix.kind) or whole(matrix))
    short = load_target(str(file), tier="native", progress=False)
    assert isinstance(short, NativeTarget)
    assert len(dequantised) == (7 if kinds is FLOATS else 0)  # what has no blocks, gate and up that are not alike
    folder = Path(resolve(str(file), weights=False).location)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "paceline.json"}
    assert not [name for name in before if name.endswith(".safetensors")]

    model, tokenizer = load_model(str(file), progress=False)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() - before.keys() == {"paceline.json", "model.safetensors"}
    assert before.items() <= after.items()  # configuration and tokenizer too
    long = make_target(model, tokenizer, "native")
    assert isinstance(long, NativeTarget)
    assert matrices(short) == matrices(long)
    assert torch.equal(probe_features(short), probe_features(long))
    for name in ("name", "eos", "context", "vocab_size", "weight_count", "weight_bytes"):
        assert getattr(short, name) == getattr(long, name), name
    again = load_target(str(file), tier="native", progress=False)
    assert not isinstance(again.model, start.NoModel)  # the folder has changed: packed again, with the same bits
    assert matrices(again) == matrices(long)  # type: ignore[arg-type]


def test_the_model_reads_from_the_file(tmp_path: Path) -> None:
    """It gives the logits of the dequantised model, and is as it was then."""
    write_gguf(tmp_path / "tiny.gguf", kinds={"attn_q": "Q8_0"})
    source = resolve(str(tmp_path / "tiny.gguf"), progress=False, weights=False)
    assert source.gguf
    found = stored.load(source.location, source.gguf)
    assert found
    model, _, blocks = found
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        with stored.reading(model, blocks):
            got = model(ids).logits
        assert not torch.equal(model(ids).logits, got)
        want = load_model(str(tmp_path / "tiny.gguf"), progress=False)[0](ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_other_files_go_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    source = resolve(str(tmp_path / "tiny.gguf"), progress=False, weights=False)
    with monkeypatch.context() as patch:
        patch.setattr(stored, "STORED", ())
        assert tiers._from_blocks(source, "native") is None
    with monkeypatch.context() as patch:
        patch.setattr(tiers, "_native_pays", lambda *_, **__: False)
        assert tiers._from_blocks(source, "auto") is None

    def unavailable() -> None:
        raise NativeUnavailable("no compiler")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.targets.native.target.library", unavailable)
        assert tiers._from_blocks(source, "native") is None


def test_a_file_that_lacks_weights(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    source = resolve(str(tmp_path / "tiny.gguf"), progress=False, weights=False)
    assert source.gguf
    folder = shutil.copytree(source.location, tmp_path / "copy")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    assert stored.load(str(folder), source.gguf) is None
    source.gguf.write_bytes(b"GGUF")
    with pytest.raises(IntegrityError, match="cannot be read"):
        stored.load(source.location, source.gguf)


def test_a_damaged_entry_in_a_cache_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made in its place has weights once they are wanted."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    (Path(resolve(str(file), progress=False, weights=False).location) / "tokenizer.json").write_text("{")
    monkeypatch.setattr(store.os, "access", lambda *_: False)
    for weights in (False, True):
        folder = Path(resolve(str(file), progress=False, weights=weights).location)
        assert any(folder.glob("*.safetensors")) == weights


def test_a_cache_that_can_only_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the file's small entry and no library in it: the torch tier, by weights of this process's own."""
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = Path(resolve(str(file), progress=False, weights=False).location)
    before = {path: path.stat().st_mtime_ns for path in folder.parent.iterdir()}

    def unavailable() -> None:
        raise NativeUnavailable("the native tier cannot be built: read-only file system")

    monkeypatch.setattr(store.os, "access", lambda *_: False)
    monkeypatch.setattr(native, "instruction_set", unavailable)
    target = load_target(str(file), progress=False)
    assert target.tier == "torch"
    assert store.entry_name(target.name) == folder.name
    assert [record.message for record in caplog.records] == [
        f"{folder.parent} cannot be written to: preparing {folder.name} for this run alone.",
        "the native tier cannot be built: read-only file system; going on with the torch tier",
    ]
    assert resolve(str(file), progress=False).location == target.name  # made once
    assert {path: path.stat().st_mtime_ns for path in folder.parent.iterdir()} == before


@pytest.mark.parametrize("tier", ["native", "torch"])
def test_a_turns_end_ends_output(tier: str, tmp_path: Path) -> None:
    if tier == "native" and not native.available():
        pytest.skip("no C++ compiler with OpenMP")
    write_gguf(tmp_path / "m.gguf", turn_end=0)
    assert set(load_target(str(tmp_path / "m.gguf"), tier=tier, progress=False).eos) == {0, 2}
