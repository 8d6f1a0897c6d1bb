from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.decoding.engine import Engine
from paceline.version import __version__

PROGRAM = [sys.executable, "-m", "paceline"]


def test_version_and_help(run):
    assert run("--version") == (0, f"paceline {__version__}\n", "")
    code, out, err = run()
    assert (code, err) == (0, "")
    for command in ("generate", "chat", "profile", "bench", "drafters", "policies"):
        assert command in out
        assert run(command, "--help").code == 0


def test_typing_errors_are_instant():
    """Help and usage errors answer without torch, which takes seconds to import."""
    code = (
        "import sys; from paceline.cli import main\n"
        "codes = [main(['generate', *words]) for words in (['--help'], ['x', '-n', '0'], ['x', '-d', 'y'])]\n"
        "assert codes == [0, 2, 1], codes\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 2


def test_nobody_reads_the_output():
    with subprocess.Popen([*PROGRAM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


@pytest.mark.parametrize(
    ("words", "code"), [("--version", 0), ("generate x -d nope", 1), ("generate -f -", 1), ("generate -n x", 2)]
)
def test_closed_streams(words, code):
    """As some programs start others: nobody is told, and nothing else changes."""
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        told = ["sh", "-c", f'exec "{sys.executable}" -m paceline {words} {closed}']
        done = subprocess.run(told, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert (done.returncode, "Traceback" in done.stderr, done.stderr.count("\n") > 1) == (code, False, False)


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "x", "--compare", "--svg", ""),
        ("generate", "x", "--json-schema", ""),
        ("generate", "x", "--grammar", ""),
        ("profile", "--plot", ""),
        ("replay", ""),
        ("report", ""),
        ("layer-skip", "search", "--suite", "x", "-o", ""),
        ("trigram", "build", "--corpus", ""),
        ("trigram", "build", "--corpus", "x", "-o", ""),
        ("rest", "build", "--corpus", ""),
        ("rest", "build", "--corpus", "x", "-o", ""),
        ("export", "draft-model", "-o", ""),
        ("export", "medusa", "-o", ""),
        ("export", "llama-cpp-lookup", "-o", ""),
        ("train", "data", "--prompts", "", "-o", "x"),
        ("train", "data", "--prompts", "x", "-o", ""),
        ("train", "data", "--prompts", "x", "-o", "x", "--text", ""),
        ("train", "prompts", "-o", ""),
        ("train", "medusa", "--data", ""),
        ("train", "medusa", "--data", "x", "-o", ""),
        ("train", "stop-predictor", "-p", "disco", "-d", "none", "--prompts", ""),
        ("serve", "--config", ""),
    ],
)
def test_empty_paths(run, words):
    """They are not the current folder."""
    result = run(*words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "it is empty" in result.err


def test_interrupted(run, tiny_model_dir, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self, requests, batch=None):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr(Engine, "run", interrupted)
    code, out, err = run("generate", "hello", "-m", tiny_model_dir)
    assert (code, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words", [("--debug", "generate", "x", "-d", "nope"), ("generate", "x", "-d", "nope", "--debug")]
)
def test_debug_shows_the_traceback(run, words):
    code, _, err = run(*words)
    assert code == 1
    assert err.startswith("Traceback")
    assert "\nerror: unknown drafter 'nope'" in err


def test_debug_behind_two_dashes_is_a_prompt(run):
    assert "unknown drafter" in run("generate", "-d", "nope", "--", "--debug").err


@pytest.mark.parametrize(("command", "first"), [("drafters", "prompt-lookup"), ("policies", "adaedl")])
def test_lists(run, command, first):
    code, out, err = run(command)
    assert (code, err) == (0, "")
    assert first in out
    assert "=" in out
