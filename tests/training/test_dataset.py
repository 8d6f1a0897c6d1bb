"""Batches of training data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import one_thread  # noqa: F401
from paceline.errors import DataError
from paceline.training.data.dataset import IGNORE, Dataset
from paceline.training.data.samples import GENERATED, OPEN, PROMPT, UNKNOWN, Manifest, Sample, Shard, write_shard


def test_batches_hold_every_sample_once(tiny_data: Path) -> None:
    data = Dataset(tiny_data)
    assert len(data) > 48
    for seed in ((0, 0), (0, 1), None):
        batches = data.batches(range(len(data)), 200, seed)
        assert sorted(i for batch in batches for i in batch) == list(range(len(data)))
        assert all(len(batch) * data.lengths[batch].max() <= 200 for batch in batches if len(batch) > 1)
    assert data.batches(range(len(data)), 200, (0, 0)) == data.batches(range(len(data)), 200, (0, 0))
    assert data.batches(range(len(data)), 200, (0, 0)) != data.batches(range(len(data)), 200, (0, 1))


def test_labels_are_the_next_tokens(tiny_data: Path) -> None:
    data = Dataset(tiny_data)
    samples = [
        (i, *pair)
        for i, pair in enumerate(p for path in sorted(tiny_data.glob("samples-*")) for p in Shard.load(path).samples())
    ]
    chosen = [3, 17, len(samples) - 1]
    batch = data.batch(chosen)
    for row, index in enumerate(chosen):
        _, ids, mask = samples[index]
        assert batch.ids[row, : len(ids)].tolist() == ids
        want = [token if flag != PROMPT else IGNORE for token, flag in zip(ids[1:], mask[1:], strict=True)]
        assert batch.labels[row].tolist() == want + [IGNORE] * (batch.labels.shape[1] - len(want))
        assert data.learnt[index] == len(ids) - mask.count(PROMPT)
        for at, flag in enumerate(mask[1:]):
            assert (batch.top_ids[row, at, 0] != UNKNOWN) == (flag == GENERATED)
        assert len(batch.rows[row]) == len(ids)
    assert batch.labels.shape == batch.ids.shape == batch.top_ids.shape[:2]


def test_the_target_is_asked_about_the_same_position(tiny_data: Path) -> None:
    """At a greedy position the label is the likeliest token."""
    data = Dataset(tiny_data)
    batch = data.batch([0])
    first = int((batch.labels[0] != IGNORE).nonzero()[0])
    assert batch.labels[0, first] == batch.top_ids[0, first, 0]


def test_cut(tiny_data: Path) -> None:
    data = Dataset(tiny_data, max_length=30)
    assert data.lengths.max() == 30
    assert data.batch([0]).ids.shape[1] <= 30


def test_split(tiny_data: Path) -> None:
    data = Dataset(tiny_data)
    training, held = data.split(4)
    assert len(held) == 4
    assert data.generated[held].all()
    assert sorted(training + held) == list(range(len(data)))
    assert len(data.split(10**6)[1]) == len(data) // 10


def test_no_prompt_is_learnt_and_measured(tiny_data: Path, tmp_path: Path) -> None:
    """Also where two folders hold answers to the same one."""
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    data = Dataset(tiny_data, other)
    training, held = data.split(4)
    assert len(held) == 4
    for index in held:
        asked = data.prompt(index)
        assert asked is not None
        batch, (shard, start) = data.batch([index]), data.where[index]
        length = int((batch.labels[0] != IGNORE).nonzero()[0]) + 1
        assert asked == data.shards[shard].ids[start : start + length].numpy().tobytes()
        assert [data.prompt(i) for i in range(len(data))].count(asked) >= 2
        assert asked not in {data.prompt(i) for i in training}
    assert {i for i in range(len(data)) if not data.generated[i]} <= set(training)


def test_nothing_that_begins_with_a_measured_prompt_is_learnt(tmp_path: Path) -> None:
    """Neither a reference answer to it, nor a dialogue that goes on after the model's."""

    def sample(prompt: list[int], answer: list[int], flag: int) -> Sample:
        return Sample(prompt + answer, [PROMPT] * len(prompt) + [flag] * len(answer))

    prompts = [[9, number, 8] for number in range(40)]
    samples = [sample(prompt, [1, 2], GENERATED) for prompt in prompts]
    samples += [sample(prompt, [3, 300], OPEN) for prompt in prompts]
    samples += [sample([*prompt, 1, 2, 7], [5], GENERATED) for prompt in prompts]
    samples.append(sample([9], [40, 8, 1], OPEN))
    manifest = Manifest(tmp_path)
    manifest.open({"tokenizer": "made up"})
    write_shard(tmp_path, 0, samples, 2, {"samples": len(samples)})
    manifest.add("samples-00000.safetensors", {"samples": len(samples)})
    data = Dataset(tmp_path)
    training, held = data.split(8)
    measured = [samples[index].ids[: samples[index].mask.index(GENERATED)] for index in held]
    told = {at for at, one in enumerate(samples) if any(one.ids[: len(prompt)] == prompt for prompt in measured)}
    assert set(held) < told
    assert sorted(training) == sorted(set(range(len(samples))) - told)


def test_frequencies(tiny_data: Path) -> None:
    """As many as there are labels; a token's share is its probability where the target was asked."""
    data = Dataset(tiny_data)
    found, batches = data.frequencies(257), [data.batch([index]) for index in range(len(data))]
    assert float(found.sum()) == pytest.approx(data.learnt.sum())
    likely = sum(b.top_logp.softmax(-1)[b.top_ids == 65].sum() for b in batches)
    text = sum(((b.labels == 65) & (b.top_ids[..., 0] == UNKNOWN)).sum() for b in batches)
    assert float(found[65]) == pytest.approx(float(likely + text), rel=1e-3)


def test_errors(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training data"):
        Dataset(tmp_path)
    with pytest.raises(DataError, match="tokenizer is not this model's"):
        Dataset(tiny_data, tokenizer="another")
    facts = json.loads((tiny_data / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="is missing"):
        Dataset(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(facts | {"shards": {}}))
    with pytest.raises(DataError, match="no samples to learn from"):
        Dataset(tmp_path)


def test_folders_together(tiny_data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_data, other)
    one, two = Dataset(tiny_data), Dataset(tiny_data, other)
    assert len(two) == 2 * len(one)
    assert two.tokens == 2 * one.tokens
    assert two.digest != one.digest
    last, same = two.batch([len(two) - 1]), one.batch([len(one) - 1])
    assert last.ids.equal(same.ids)
    assert last.rows[0].start == one.tokens + same.rows[0].start
    facts = json.loads((other / "manifest.json").read_text())
    facts["made"]["top"] += 1
    (other / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(DataError, match="another number of likeliest tokens"):
        Dataset(tiny_data, other)


@pytest.mark.parametrize(
    "damage",
    [
        {"mask": lambda mask: mask[:-3].clone()},
        {"ids": lambda ids: ids.float()},
        {"ids": lambda ids: ids - 300},
        {"offsets": lambda offsets: offsets + 1},
        {"offsets": lambda offsets: offsets.flip(0)},
        {"top_ids": lambda top: top[:, 0].clone()},
        {"more": lambda _: torch.zeros(3)},
    ],
)
def test_shards_that_are_none(tiny_data: Path, tmp_path: Path, damage: dict[str, Any]) -> None:
    shutil.copytree(tiny_data, tmp_path / "d", ignore=shutil.ignore_patterns("*.f16"))
    path = sorted((tmp_path / "d").glob("samples-*"))[0]
    columns = load_file(path)
    [(name, change)] = damage.items()
    save_file(columns | {name: change(columns.get(name))}, path)
    with pytest.raises(DataError, match=r"samples-00000\.safetensors is not a shard"):
        Dataset(tmp_path / "d")


def test_tokens_that_the_model_does_not_know(tiny_data: Path) -> None:
    with pytest.raises(DataError, match="tokens that the model does not know"):
        Dataset(tiny_data).frequencies(100)


@pytest.mark.parametrize(
    "text",
    [
        "junk",
        "[]",
        "{}",
        '{"format": 1}',
        "[" * 100_000,
        '{"format": 1, "made": {}}',
        '{"format": 1, "made": [], "shards": {}, "totals": {}}',
        '{"format": 1, "made": {}, "shards": [], "totals": {}}',
        '{"format": 1, "made": {}, "shards": {"samples-00000.safetensors": 1}, "totals": {}}',
    ],
)
def test_manifests_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match="not the manifest"):
        Dataset(tmp_path)


def test_examples_of_stop_predictors(tmp_path: Path) -> None:
    """Their folder has a manifest, too."""
    Manifest(tmp_path).open({"target": "tiny", "drafter": "layer-skip"})
    with pytest.raises(DataError, match="is not training data"):
        Dataset(tmp_path, tokenizer="any")


def test_what_is_held_back(tiny_data: Path) -> None:
    """At least one sample, however few there are; of the model's own where there are such."""
    data = Dataset(tiny_data)
    everything = data.where, data.generated
    for count, held_back in ((5, 1), (2, 1), (40, 4)):
        data.where, data.generated = everything[0][:count], everything[1][:count]
        train, held = data.split(64)
        assert (len(train), len(held)) == (count - held_back, held_back)
        assert all(data.generated[held]) or not any(data.generated)
        data.generated = np.zeros(count, dtype=bool)
        assert len(data.split(64)[1]) == held_back
    data.where = everything[0][:1]
    with pytest.raises(DataError, match="a single sample"):
        data.split(64)
