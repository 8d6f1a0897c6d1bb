"""A server on a tiny model, in a thread of the test's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

import paceline
from helpers import one_thread  # noqa: F401
from paceline import LLM
from paceline.serve.app import make_app
from paceline.serve.server import Draining
from paceline.serve.settings import Settings
from paceline.serve.worker import Worker
from paceline.targets.linear import can_pack
from tiny import byte_tokenizer, small_llama

TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


class Running:
    """A server that answers at `url`."""

    def __init__(self, server: uvicorn.Server, worker: Worker, port: int) -> None:
        self.server, self.worker, self.url = server, worker, f"http://127.0.0.1:{port}"

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@contextmanager
def serving(llms: dict[str, LLM], settings: Settings) -> Iterator[Running]:
    app = make_app(llms, settings)
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = Draining(config, app, settings.drain)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Running(server, app.state.worker, port)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="package")
def tiny() -> LLM:
    """Exact where oneDNN is: what the server gives is compared with it, token by token."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TOOLS + tokenizer.chat_template
    model = small_llama(max_position_embeddings=1024).float()
    return paceline.load(model, tokenizer=tokenizer, tier="torch" if can_pack() else "reference", drafter="none")


@pytest.fixture(scope="package")
def llms(tiny: LLM) -> dict[str, LLM]:
    return {name: tiny.method(name) for name in ("prompt-lookup", "none", "suffix")}


@pytest.fixture(scope="package")
def server(llms: dict[str, LLM]) -> Iterator[Running]:
    settings = Settings(rows=3, context=512, queue=8, keep=600, body=20_000, name="tiny", origins=("http://page",))
    with serving(llms, settings) as running:
        yield running
