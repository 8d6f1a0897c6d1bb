"""The programs in `benchmarks/papers`: what they make of results, on made-up ones."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.errors import OptionError
from tiny import byte_tokenizer, small_llama

Load = Callable[[str], ModuleType]
PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "papers"


@pytest.fixture(scope="module")
def load() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        yield importlib.import_module


def row(method: str, speed: float, **others: object) -> dict[str, object]:
    return {"method": method, "task": "overall", "tokens_per_s": speed, "v_d": None, "hm": None, **others}


def test_draft_models_keep_the_layers_that_change_most(load: Load) -> None:
    made = load("draft_models")
    assert made.most_influential([0.9, 0.1, 0.5, 0.2], 3) == [0, 2, 4]
    assert made.most_influential([0.9, 0.1, 0.5, 0.2], 4) == [0, 2, 3, 4]


def test_a_layer_that_adds_nothing_has_no_influence(load: Load) -> None:
    model = small_llama()
    idle = model.model.layers[1]
    with torch.no_grad():
        for part in (idle.self_attn.o_proj, idle.mlp.down_proj):
            part.weight.zero_()
    ids = torch.arange(5)[None]
    scores = load("draft_models").influence(model, lambda text, return_tensors: {"input_ids": ids}, ["a text"])
    assert len(scores) == model.config.num_hidden_layers - 1
    assert scores[1] == pytest.approx(0, abs=1e-6)
    assert scores[0] > 1e-4


def test_histograms_count_whole_drafts(load: Load) -> None:
    lengths = load("adaedl_accepted_lengths")
    rounds = [(3, 3, 0, 1), (3, 3, 3, 4), (3, 3, 1, 2), (3, 3, 1, 2), (3, 3, 2, 2), (2, 2, 1, 2)]
    runs = [{"method": "d+fixed:k=3", "task": "qa", "rounds": [rounds[:2], rounds[2:]]}]
    [found] = lengths.histograms(runs)
    assert found.rounds == [1, 2, 0, 1]  # not the one that the output's end cut off, nor the shorter draft
    assert (found.task, found.drafted, found.mean) == ("qa", 3, 1.25)
    assert found.deviation == pytest.approx(1.0897, abs=1e-4)
    assert lengths.table([found]).splitlines()[-1] == "| qa | 3 | 4 | 1.25 | 1.09 | 25.0 % | 25.0 % |"
    assert lengths.histograms([{"method": "d+fixed:k=3", "task": "qa", "rounds": [rounds[4:]]}]) == []


def test_histograms_are_drawn(load: Load, tmp_path: Path) -> None:
    lengths = load("adaedl_accepted_lengths")
    lengths.plot([lengths.Histogram("qa", 3, [1, 2, 0, 1])], tmp_path / "some.png")
    assert (tmp_path / "some.png").stat().st_size > 1000


def test_thompson_sampling_on_other_drafters(load: Load) -> None:
    thompson = load("eesd_thompson")
    names = thompson.methods(["small"])
    assert len(set(names)) == len(names) == 1 + 2 * 4 + 3 * 4
    rows = [row(name, 1.0, speedup_ar=1.234, hm=27.4) for name in names] + [row("ar", 9.0, task="qa")]
    table = thompson.table(rows, thompson.RULES, ["draft-model:model=small", "layer-skip"])
    assert table.splitlines()[2] == "| `draft-model:model=small` |" + " 1.23 (27) |" * 4
    assert thompson.shown(row("d", 1.0, speedup_ar=1.0)) == "1.00"  # nothing was drafted


def test_draft_sizes(load: Load) -> None:
    sizes = load("adaedl_draft_sizes")
    speeds = zip(sizes.RULES, (5.0, 20.0, 30.0), strict=True)
    rows = [row("ar", 50.0), *(row(sizes.method("small", rule), speed, v_d=0.25) for rule, speed in speeds)]
    lines = sizes.table(rows, {"small": 74.3}).splitlines()
    assert lines[2] == "| none |  | 50.0 |  |  |  |"
    assert lines[3] == "| `small` | 74 |  | 5.0 (25 %) | 20.0 (25 %) | 30.0 (25 %) |"


def test_corpus_sizes(load: Load) -> None:
    corpus = load("aded_corpus")
    folders = [Path("64"), Path("1")]
    facts = [{"corpus_tokens": 1000 * n, "bytes": 1e6 * n, "ngrams": n} for n in (1, 2)]
    more = {"split": {"draft": 0.5}, "seconds": 10.0, "tau": 1.5, "speedup_ar": 0.5}
    rows = [row(name.format(folder), 50.0, **more) for name in corpus.FORMS.values() for folder in folders]
    lines = corpus.told(rows, facts, folders)
    assert [line["draft_share"] for line in lines] == [0.05] * 4
    text = corpus.table(lines, 10.0).splitlines()
    assert text[2] == "| `ar` |  |  | 10.00 |  |  |"
    assert text[4] == "| the paper's | 2,000 | 2.0 | 20.00 | 1.50 | 0.50 |"


def test_matrices_are_counted_once_from_every_nth_line(load: Load, tmp_path: Path) -> None:
    corpus, model = load("aded_corpus"), SimpleNamespace(tokenizer=byte_tokenizer())
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(5)))
    facts = [corpus.matrix(model, [tmp_path / "a.jsonl"], 2, tmp_path / "matrix") for _ in range(2)]
    assert facts[0] == facts[1]
    assert (facts[0]["every"], facts[0]["corpus_tokens"]) == (2, 3 * len("line 0"))
    (tmp_path / "a.jsonl").write_text('{"text": "another"}\n')
    with pytest.raises(OptionError, match="is of another corpus"):
        corpus.matrix(model, [tmp_path / "a.jsonl"], 2, tmp_path / "matrix")


def test_a_process_tells_its_peak(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = load("aded_memory")
    program = tmp_path / "child.py"
    program.write_text("import sys\nprint('{\"words\": %d}' % len(sys.argv[2:]))")
    monkeypatch.setattr(memory, "__file__", str(program))
    told, peak = memory.peak("trigram", "a model", "native", 1)
    assert told == {"words": 3}
    assert peak > 1e6
    assert "| `trigram` | nothing | 2.5 |" in memory.table([{"method": "trigram", "runs": "nothing", "extra": 2.5e6}])


def test_what_cannot_run_is_one_line(load: Load, tmp_path: Path) -> None:
    args = SimpleNamespace(model="m", suite=str(tmp_path / "no.jsonl"), out=tmp_path / "out", limit=None, tasks="")
    args.max_new_tokens, args.temperature, args.tier = 8, 0.0, "auto"
    with pytest.raises(SystemExit, match=r"error: cannot read .*no\.jsonl: no such file"):
        load("measured").measured(args, ["ar"])
    with pytest.raises(SystemExit, match="error: unknown method 'nobody'"):
        load("measured").measured(args, ["nobody"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*_*.py")))
def test_each_program_says_how_to_call_it(
    load: Load, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        load(name).main()
    assert f"benchmarks/papers/{name}.py" in capsys.readouterr().out
