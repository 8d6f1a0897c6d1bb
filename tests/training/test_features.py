"""The store of features: what it holds, and when it is computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers import one_thread  # noqa: F401
from paceline.errors import DataError, DiskFull, OptionError
from paceline.targets.identity import probe_features
from paceline.targets.reference import as_target
from paceline.training.data.dataset import Batch, Dataset
from paceline.training.heads.feature_store import FeatureStore
from paceline.training.heads.frozen_layers import FrozenLayers


class Counting(FrozenLayers):
    """Counts the tokens that it was asked about."""

    tokens = 0

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.tokens += sum(map(len, batch.rows))
        return super().__call__(batch)


@pytest.fixture
def data(tiny_data: Path, tmp_path: Path) -> Path:
    """Of one's own, without a store."""
    return Path(shutil.copytree(tiny_data, tmp_path / "data", ignore=shutil.ignore_patterns("features")))


@pytest.fixture
def layers(tiny_model_dir: Path) -> Counting:
    return Counting(as_target(AutoModelForCausalLM.from_pretrained(tiny_model_dir)))


def store(layers: FrozenLayers, data: Path, limit: float = 1.0) -> FeatureStore:
    return FeatureStore(layers, Dataset(data), probe_features(layers.target), limit)


def test_features_are_what_the_output_matrix_reads(layers: Counting, data: Path) -> None:
    features, samples = store(layers, data), Dataset(data)
    for chosen in ([0], [40, 3, 21]):
        batch = samples.batch(chosen)
        with torch.no_grad():
            want = layers.target.model.model(batch.ids).last_hidden_state
        got = features(batch)
        assert got.shape == want.shape
        for row, tokens in enumerate(batch.rows):
            torch.testing.assert_close(got[row, : len(tokens)], want[row, : len(tokens)], rtol=2e-3, atol=2e-3)
            assert not got[row, len(tokens) :].any()


def test_it_is_computed_once(layers: Counting, data: Path) -> None:
    told: list[tuple[int, int]] = []
    FeatureStore(layers, Dataset(data), probe_features(layers.target), progress=lambda *now: told.append(now))
    assert layers.tokens == told[-1][0] == told[-1][1] == Dataset(data).lengths.sum()
    store(layers, data)
    assert layers.tokens == told[-1][1]
    first, *rest = sorted((data / "features").glob("*/samples-*.f16"))
    assert len(rest) > 1
    whole = np.fromfile(first, np.float16)
    first.unlink()  # as where it was stopped
    before = layers.tokens
    store(layers, data)
    assert layers.tokens - before < 0.6 * before
    assert np.array_equal(np.fromfile(first, np.float16), whole)


def test_layers_of_another_precision_have_a_store_of_their_own(tiny_model_dir: Path, data: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    exact, rounded = (
        store(FrozenLayers(as_target(model.to(dtype))), data) for dtype in (torch.float32, torch.bfloat16)
    )
    assert not set(exact.paths) & set(rounded.paths)


def test_it_is_bounded(layers: Counting, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 32 * Dataset(data).tokens / 1e9
    with pytest.raises(OptionError, match="--store-limit"):
        store(layers, data, 0.99 * size)
    assert not (data / "features").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(DiskFull, match="too full"):
        store(layers, data)
    monkeypatch.undo()
    store(layers, data, size)
    assert sum(path.stat().st_size for path in data.glob("features/*/*.f16")) == round(size * 1e9)


def test_a_shard_made_again_has_its_states_computed_anew(layers: Counting, data: Path) -> None:
    """Other text, as many tokens; what was computed of the text before goes."""
    before = store(layers, data).paths
    manifest = json.loads((data / "manifest.json").read_text())
    for entry in manifest["shards"].values():
        del entry["sha256"]  # as of a folder from before they were kept
    (data / "manifest.json").write_text(json.dumps(manifest))
    shard = sorted(data.glob("samples-*"))[1]
    columns = {name: column.clone() for name, column in load_file(shard).items()}
    shard.unlink()  # it is mapped into memory
    save_file(columns | {"ids": columns["ids"].flip(0)}, shard)
    before[0].rename(old := before[0].with_name("samples-00000.f16"))  # its name does not tell of what it is
    computed = layers.tokens
    again = store(layers, data)
    samples = Dataset(data)
    of = [int(samples.lengths[[n == i for n, _ in samples.where]].sum()) for i in (0, 1)]
    assert layers.tokens - computed == sum(of)
    assert again.paths[2:] == before[2:]
    assert not old.exists()
    assert not before[1].exists()
    batch = samples.batch([next(i for i, (number, _) in enumerate(samples.where) if number == 1)])
    torch.testing.assert_close(again(batch), layers(batch), rtol=2e-3, atol=2e-3)


def test_damaged(layers: Counting, data: Path) -> None:
    store(layers, data)
    path = next(data.glob("features/*/samples-00000-*.f16"))
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match="delete it"):
        store(layers, data)
    path.unlink()
    store(layers, data)
    about = path.with_name("about.safetensors")
    about.write_bytes(b"x")
    with pytest.raises(DataError, match="damaged: delete"):
        store(layers, data)
