from __future__ import annotations

import json
import logging
import socket
import sys

import pytest
import uvicorn

from paceline.serve.guard import Guard, JsonLines


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[uvicorn.Server]:
    """The servers that would have been run."""
    servers: list[uvicorn.Server] = []

    def run(self: uvicorn.Server, sockets: list[socket.socket]) -> None:
        servers.append(self)
        self.started = self.config.port != 1

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return servers


def test_options_come_from_a_file_and_the_command_line(run, tiny_model_dir, tmp_path, served):
    file = tmp_path / "serve.toml"
    file.write_text('rows = 2\nport = 9000\napi-key = ["secret"]\n')
    code, _, err = run(
        "serve", "-m", tiny_model_dir, "--config", file, "--port", 9001, "--context", 64, "--offer", "lookahead"
    )
    assert (code, err) == (0, "")
    [server] = served
    assert (server.config.host, server.config.port) == ("127.0.0.1", 9001)
    worker = server.config.app.state.worker
    assert (worker.rows, worker.context) == (2, 64)
    assert list(worker.llms) == ["auto", "none", "prompt-lookup", "suffix", "recycling", "lookahead"]


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (["--timeout", "0"], "", "timeout must be above 0"),
        (["--drain", "inf"], "", "drain must be above 0, and finite"),
        (["--api-key", "clé"], "", "ASCII characters only"),
        (["--config", "FILE"], "rows = true", "rows is no switch"),
        (["--host", ""], "", "host must not be empty"),
        (["--host", "no.such.host.invalid"], "", "cannot serve on no.such.host.invalid"),
        (["--port", "1"], "", "cannot serve on"),
        (["--config", "FILE"], "colour = 1", "unknown options: colour"),
        (["--config", "FILE"], "rows =", "cannot read the options"),
        (["--config", "FILE.none"], "", "cannot read the options"),
        (["--offer", "nonsense"], "", "nonsense"),
    ],
)
def test_what_is_wrong_is_one_line(run, tiny_model_dir, tmp_path, served, words, text, said):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    code, _, err = run("serve", "-m", tiny_model_dir, *(word.replace("FILE", str(file)) for word in words))
    assert code == 1
    assert said in err
    assert err.count("\n") == 1


def test_a_key_of_the_environment_is_one_key(run, tiny_model_dir, tmp_path, served, monkeypatch):
    """Spaces and all; before the file's, and after the command line's."""
    file = tmp_path / "serve.toml"
    file.write_text('api-key = ["of the file"]\n')

    def keys(*words: str) -> list[bytes]:
        code, _, err = run("serve", "-m", tiny_model_dir, "-d", "none", "--config", file, *words)
        assert (code, err) == (0, "")
        [guard] = [layer for layer in served.pop().config.app.user_middleware if layer.cls is Guard]
        return guard.kwargs["keys"]

    assert keys() == ("of the file",)
    monkeypatch.setenv("PACELINE_API_KEY", "correct horse battery staple")
    assert keys() == ("correct horse battery staple",)
    assert keys("--api-key", "another") == ("another",)
    monkeypatch.setenv("PACELINE_API_KEY", " ")
    code, _, err = run("serve", "-m", tiny_model_dir, "-d", "none", "--config", file)
    assert (code, err.strip()) == (1, "error: an API key must not be empty")


def test_lines_of_the_log_as_json():
    request = logging.makeLogRecord({"msg": "a 200", "levelname": "INFO", "request": {"status": 200, "path": "/a"}})
    told = json.loads(JsonLines().format(request))
    assert told.pop("time") > 0
    assert told == {"level": "info", "status": 200, "path": "/a"}
    try:
        raise ValueError("so it is\nin two lines")
    except ValueError:
        failed = logging.makeLogRecord({"msg": "it %s", "args": ("failed",), "exc_info": sys.exc_info()})
    line = JsonLines().format(failed)
    assert "\n" not in line
    assert json.loads(line)["message"] == "it failed"
    assert "so it is" in json.loads(line)["traceback"]


def test_a_port_that_is_taken(run, tiny_model_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, err = run("serve", "-m", tiny_model_dir, "--drafter", "none", "--port", taken.getsockname()[1])
    assert code == 1
    assert "error: cannot serve on" in err


def test_the_extra_is_named(run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "paceline.serve.server", None)  # as where it cannot be imported
    assert "pip install 'paceline[serve]'" in run("serve").err
