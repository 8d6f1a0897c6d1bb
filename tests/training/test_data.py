"""Self-distillation data: what is generated, masked and kept, and that runs can be split, stopped and resumed."""

from __future__ import annotations

import copy
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from helpers import one_thread  # noqa: F401
from paceline.api import LLM, load
from paceline.decoding.request import Request
from paceline.errors import CorpusError, DataError, DiskFull, OptionError
from paceline.training.data import generate as module
from paceline.training.data import samples as storage
from paceline.training.data.dataset import Dataset
from paceline.training.data.generate import DataProgress, make_data
from paceline.training.data.prompts import Conversation
from paceline.training.data.samples import GENERATED, MANIFEST, OPEN, PROMPT, UNKNOWN, Shard, shard_name
from paceline.training.data.self_distill import DistillConfig, Draft, SelfDistillation

TINY = {"max_new_tokens": 8, "greedy_tokens": 2, "temperature": 1.0, "top": 3, "group": 2, "max_length": 200}


@pytest.fixture(scope="module")
def llm(tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast) -> LLM:
    return load(tiny_llama, tokenizer=tiny_tokenizer, drafter="none")


@pytest.fixture
def prompts(tmp_path: Path) -> list[Path]:
    path = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": word * 3} for word in ("red", "green", "blue", "a colour", "x")]
    rows += [{"turns": ["first", "second", "third"], "system": "short"}, {"text": "raw text"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def make(llm: LLM, prompts: list[Path], out: Path, options: dict[str, Any] | None = None, **more: Any) -> Any:
    return make_data(llm, prompts, out, DistillConfig(**{**TINY, **(options or {})}), **more)


def contents(folder: Path) -> list[Shard]:
    return [Shard.load(path) for path in sorted(folder.glob("samples-*"))]


def same(ours: list[Shard], theirs: list[Shard]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def every(folder: Path) -> Iterator[tuple[list[int], list[int], torch.Tensor, torch.Tensor]]:
    """Ids, mask, top ids and top log-probabilities of each sample."""
    for shard in contents(folder):
        sizes = shard.offsets.diff().tolist()
        tops = zip(shard.top_ids.split(sizes), shard.top_logp.split(sizes), strict=True)
        for (ids, mask), (best, logp) in zip(shard.samples(), tops, strict=True):
            yield ids, mask, best, logp


def change(path: Path) -> None:
    """Other text of the same length, as another machine may write it."""
    with safe_open(path, "pt") as file:
        counts = file.metadata()
    columns = {name: column.clone() for name, column in load_file(path).items()}
    path.unlink()  # it is mapped into memory
    columns["ids"][-1] = (columns["ids"][-1] + 1) % 256
    save_file(columns, path, counts)


def test_samples_are_what_the_model_saw_and_wrote(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    manifest = make(llm, prompts, tmp_path / "d")
    found = list(every(tmp_path / "d"))
    texts = [llm.tokenizer.decode(ids) for ids, *_ in found]
    assert manifest["totals"]["samples"] == len(found) >= 7
    assert manifest["totals"]["tokens"] == sum(len(ids) for ids, *_ in found)
    assert manifest["totals"]["generated"] == sum(mask.count(GENERATED) for _, mask, *_ in found)
    assert sum(text.startswith("user: redredred\nassistant: ") for text in texts) == 1
    assert sum(text.startswith("raw text") for text in texts) == 1
    for ids, mask, best, logp in found:
        probabilities = llm.target.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        start = mask.index(1)
        for at in range(1, len(ids)):
            if not mask[at]:
                assert best[at].tolist() == [UNKNOWN] * 3
                continue
            want = probabilities[at - 1].topk(3)
            assert best[at].tolist() == want.indices.tolist()
            assert torch.allclose(logp[at].double(), want.values, atol=1e-2)
            if at < start + 2:  # the first are greedy
                assert ids[at] == best[at, 0]
    sampled = [(ids[at], int(best[at, 0])) for ids, mask, best, _ in found for at in range(len(ids)) if mask[at]]
    assert any(token != likeliest for token, likeliest in sampled)


def answered(llm: LLM, draft: Draft, output: list[int], text: str) -> list[int]:
    """Let the draft's next turn be answered; returns all tokens that the model saw and wrote."""
    request = Request(draft.next_prompt(llm), limit=9, policy=llm.policy.build())
    request.ids += output
    draft.answered(request, [([token], [0.0]) for token in output], text)
    return request.ids


def test_turns_of_a_conversation(llm: LLM) -> None:
    """One sample, in which all answers are learnt; another begins where the template writes an answer otherwise."""
    draft = Draft(Conversation(("one", "two", "three"), system="short"))
    hello = llm.tokenizer.encode("hello")
    first = answered(llm, draft, hello, "hello")
    assert llm.tokenizer.decode(first) == "system: short\nuser: one\nassistant: hello"
    second = answered(llm, draft, [7, 8], "as the template has it")
    [sample] = draft.samples
    assert sample.ids == second
    assert second[: len(first)] == first
    learnt = [token for token, flag in zip(sample.ids, sample.mask, strict=True) if flag]
    assert learnt == [*hello, 7, 8]
    assert {at: best[0][0] for at, best in sample.top.items()} == {
        at: token for at, token in enumerate(sample.ids) if sample.mask[at]
    }
    third = answered(llm, draft, hello, "hello")
    assert "as the template has it\nuser: three" in llm.tokenizer.decode(third)
    assert [s.ids for s in draft.samples] == [second, third]
    assert sum(draft.samples[1].mask) == len(hello)


def test_batch_processes_and_a_kill_make_no_difference(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    make(llm, prompts, tmp_path / "one", batch=1)
    make(llm, prompts, tmp_path / "batched", batch=3)
    for index in (1, 0):
        make(llm, prompts, tmp_path / "split", share=(index, 2))

    class Killed(BaseException):
        pass

    def kill(now: DataProgress) -> None:
        if (now.shard and now.done > 2) or now.tokens > 60:
            raise Killed

    with pytest.raises(Killed):
        make(llm, prompts, tmp_path / "killed", progress=kill)
    before = len(contents(tmp_path / "killed"))
    assert 0 < before < 4
    seen: list[DataProgress] = []
    manifest = make(llm, prompts, tmp_path / "killed", progress=seen.append)
    assert len(manifest["shards"]) == 4
    assert seen[-1].done == seen[-1].of == 7
    for other in ("batched", "split", "killed"):
        assert same(contents(tmp_path / "one"), contents(tmp_path / other)), other


def test_seed_and_damage(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    make(llm, prompts, tmp_path / "a")
    first, before = tmp_path / "a" / shard_name(0), contents(tmp_path / "a")
    part = first.read_bytes()[:-100]
    first.unlink()  # the file is mapped into memory
    first.write_bytes(part)
    with pytest.raises(DataError, match="not a shard"):
        Shard.load(first)
    make(llm, prompts, tmp_path / "a")
    assert same(contents(tmp_path / "a"), before)
    make(llm, prompts, tmp_path / "b", {"seed": 1})
    assert not same(contents(tmp_path / "a")[:1], contents(tmp_path / "b")[:1])


def test_budget(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    manifest = make(llm, prompts, tmp_path / "d", max_tokens=10)
    assert len(manifest["shards"]) == 1
    assert make(llm, prompts, tmp_path / "d", max_tokens=10)["shards"] == manifest["shards"]  # it counts what is there
    assert len(make(llm, prompts, tmp_path / "d")["shards"]) == 4


def test_open_text(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "open.txt"
    text.write_text("".join(f"line {i} of the open text\n" for i in range(4000)))
    config = {"text_share": 0.5, "group": 4}
    manifest = make(llm, prompts, tmp_path / "d", config, text=[text])
    make(llm, prompts, tmp_path / "again", config, text=[text], batch=2)
    assert same(contents(tmp_path / "d"), contents(tmp_path / "again"))
    totals = manifest["totals"]
    assert totals["trained"] - totals["generated"] == pytest.approx(totals["generated"], rel=0.1)
    pieces = [(ids, mask, best) for ids, mask, best, _ in every(tmp_path / "d") if mask[1] == OPEN]
    assert pieces
    for ids, mask, best in pieces:
        assert "of the open text" in llm.tokenizer.decode(ids)
        assert mask == [PROMPT] + [OPEN] * (len(ids) - 1)
        assert (best == UNKNOWN).all()


def test_greedy_is_plain_decoding(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    make(llm, prompts, tmp_path / "d", {"temperature": 0.0, "top": 0})
    want = llm.generate("redredred", max_new_tokens=8).tokens
    prompt = llm.encode("redredred")
    assert [ids for ids, *_ in every(tmp_path / "d") if ids[: len(prompt)] == prompt] == [prompt + want]


def test_prompts_that_do_not_fit(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    manifest = make(llm, prompts, tmp_path / "d", {"max_length": 42})
    assert 0 < manifest["totals"]["samples"] < 7
    with pytest.raises(DataError, match="no prompt leaves room for 8 new tokens in 10 tokens"):
        make(llm, prompts, tmp_path / "none", {"max_length": 10})
    assert not (tmp_path / "none").exists()


def test_what_fails_at_once_leaves_no_folder(llm: LLM, prompts: list[Path], tmp_path: Path, monkeypatch: Any) -> None:
    """Else its manifest would refuse the same command with what was wrong put right."""
    out, text = tmp_path / "d", tmp_path / "open.jsonl"
    text.write_text('{"no": "text"}\n')
    with pytest.raises(OptionError, match="top must not exceed"):
        make(llm, prompts, out, {"top": 1000})
    with pytest.raises(CorpusError, match="line 1"):
        make(llm, prompts, out, {"text_share": 0.5}, text=[text])
    with monkeypatch.context() as patch:
        patch.setattr(SelfDistillation, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(llm, prompts, out, {"seed": 3})
    assert not out.exists()
    make(llm, prompts, out)
    (out / shard_name(3)).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(SelfDistillation, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make(llm, prompts, out)
    assert len(make(llm, prompts, out)["shards"]) == 4  # it was kept, with the others


def interrupted(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_group_of_prompts_that_do_not_fit(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    """Leaves no empty shard."""
    make(llm, prompts, tmp_path / "d", {"max_length": 42, "group": 1})
    assert 0 < len(contents(tmp_path / "d")) < 7
    assert all(len(shard.ids) for shard in contents(tmp_path / "d"))


def test_hashes_of_shards(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    """Of contents: the same for the same text, and known of a folder from before they were kept."""
    out = tmp_path / "d"
    made = make(llm, prompts, out)
    hashes = [entry["sha256"] for entry in made["shards"].values()]
    assert hashes == [shard.digest for shard in contents(out)] == Dataset(out).hashes
    assert len(set(hashes)) == 4
    assert "sha256" not in made["totals"]
    digest, old = Dataset(out).digest, json.loads((out / MANIFEST).read_text())
    assert (old["made"].pop("dtype"), old["made"].pop("exactness")) == ("float64", "inexact")
    for entry in old["shards"].values():
        del entry["sha256"]
    (out / MANIFEST).write_text(json.dumps(old))
    assert Dataset(out).digest == digest
    (out / shard_name(1)).unlink()
    assert make(llm, prompts, out)["shards"] == made["shards"]


def test_a_shard_that_the_manifest_does_not_tell_of(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "d"
    make(llm, prompts, out)
    change(out / shard_name(2))
    with pytest.raises(DataError, match=r"samples-00002\.safetensors is not the shard .* give the command again"):
        Dataset(out)
    make(llm, prompts, out)
    assert len(Dataset(out)) >= 7


def test_refusals(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    make(llm, prompts, tmp_path / "d")
    with pytest.raises(DataError, match="made with another temperature, seed"):
        make(llm, prompts, tmp_path / "d", {"seed": 3, "temperature": 0.5})
    prompts[0].write_text('{"prompt": "new"}\n')
    with pytest.raises(DataError, match="another prompts"):
        make(llm, prompts, tmp_path / "d")
    (tmp_path / "d" / MANIFEST).write_text("[]")
    with pytest.raises(DataError, match="not the manifest"):
        make(llm, prompts, tmp_path / "d")
    with pytest.raises(OptionError, match="share"):
        make(llm, prompts, tmp_path / "e", share=(2, 2))
    with pytest.raises(OptionError, match="open text"):
        make(llm, prompts, tmp_path / "e", {"text_share": 0.2})
    with pytest.raises(OptionError, match="vocabulary of 257"):
        SelfDistillation(llm, DistillConfig(top=300))


@pytest.mark.parametrize(
    "wrong",
    [
        {"greedy_tokens": -1},
        {"temperature": -0.1},
        {"max_new_tokens": 0},
        {"max_length": 5, "max_new_tokens": 5},
        {"top": -1},
        {"text_share": 1.0},
        {"group": 0},
    ],
)
def test_wrong_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DistillConfig(**wrong)


def test_full_disk(llm: LLM, prompts: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = storage.save_file, []

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata)

    monkeypatch.setattr(storage, "save_file", full)
    with pytest.raises(DiskFull, match="make room"):
        make(llm, prompts, tmp_path / "d")
    assert len(contents(tmp_path / "d")) == 1
    assert not list((tmp_path / "d").glob(".samples-*"))
    assert len(make(llm, prompts, tmp_path / "d")["shards"]) == 4
    assert module.shard_counts(tmp_path / "d" / shard_name(0))


def test_a_process_without_work(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    """Of two for one group the second ends quietly, before the first has written anything."""
    assert make(llm, prompts, tmp_path / "d", {"group": 1000}, share=(1, 2))["shards"] == {}
    assert make(llm, prompts, tmp_path / "d", {"group": 1000}, share=(0, 2))["totals"]["samples"]


def test_the_order_of_prompts_counts(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    """Groups are made of them in that order: what goes on with another would have some twice and others never."""
    other, out = tmp_path / "other.jsonl", tmp_path / "d"
    other.write_text(json.dumps({"prompt": "one more"}) + "\n")
    make(llm, [*prompts, other], out, max_tokens=1)
    with pytest.raises(DataError, match="another prompts"):
        make(llm, [other, *prompts], out)
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["made"]["prompts"] = dict(manifest["made"]["prompts"])  # as it was kept before
    (out / MANIFEST).write_text(json.dumps(manifest))
    make(llm, [*prompts, other], out, max_tokens=1)


def test_tokens_that_the_model_does_not_know(
    tiny_llama: LlamaForCausalLM, tiny_tokenizer: PreTrainedTokenizerFast, prompts: list[Path], tmp_path: Path
) -> None:
    """A tokenizer may have them: said before there is data that no training takes."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(["<new>"])
    llm = load(tiny_llama, tokenizer=tokenizer, drafter="none")
    text = tmp_path / "open.txt"
    text.write_text("a text with <new> in it")
    says = r"token id \[257\] is outside the vocabulary of 257"
    with pytest.raises(OptionError, match=says):
        make(llm, prompts, tmp_path / "d", {"text_share": 0.5}, text=[text])
    prompts[0].write_text('{"prompt": "a <new> one"}\n')
    with pytest.raises(OptionError, match=says):
        make(llm, prompts, tmp_path / "d")


def test_open_text_is_no_longer_than_the_context(llm: LLM, prompts: list[Path], tmp_path: Path) -> None:
    text, context = tmp_path / "long.txt", llm.target.context
    text.write_text("abc " * context)
    make(llm, prompts, tmp_path / "d", {"max_length": context + 50, "text_share": 0.9}, text=[text])
    assert max(len(ids) for ids, *_ in every(tmp_path / "d")) <= context
