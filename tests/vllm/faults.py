"""vLLM servers with paceline's drafters, and what goes wrong in service: no other request must be harmed.

    python tests/vllm/faults.py [--python INTERPRETER] [--cases throws,aborts,context,replicas]

Greedy ids of all requests are held against those of a server without drafts. `throws`: a proposer that fails for some
texts and in some steps (thrower.py). `aborts`: clients that hang up in the middle of their answers. `context`: requests
that reach the end of the context. `replicas`: two servers behind examples/vllm/proxy.py; then the engine of one is
killed while both work. Exit status 1: an answer that differs, or is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from check import HERE, PROMPTS, environment, paths
from thrower import POISON

import paceline
from paceline.bench.suites import load_suite
from paceline.targets.sources import resolve

CONTEXT, TOKENS, DRAFT, AT_A_TIME = 384, 48, 4, 8
PROXY = HERE.parents[1] / "examples" / "vllm" / "proxy.py"
OURS, FAILING = "paceline.integrations.vllm.Proposer", "thrower.Thrower"
METHOD = "merge:drafters=suffix|trigram:budget=4+fixed:k=4"  # drafts at any load
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

#: Options of every server.
ENGINE = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--max-num-seqs", str(AT_A_TIME)]
ENGINE += ["--no-enable-prefix-caching"]

Asked = tuple[list[int], int]  # a prompt, and how many tokens are wanted


class Check:
    """Requests, their right answers, and what went wrong so far."""

    def __init__(self, model: str, python: Path, asked: Sequence[Asked]) -> None:
        self.model, self.python, self.asked, self.failed = model, python, asked, 0
        with self.server() as (url, _):
            self.right = self.answers(url)

    @contextmanager
    def server(self, proposer: str = "") -> Iterator[tuple[str, int]]:
        """A server that answers, with drafts if it has a proposer: its address, and its engine's process."""
        words = ["-m", "vllm.entrypoints.openai.api_server", "--model", self.model, *ENGINE]
        words += ["--port", str(port := free_port())]
        if proposer:
            speculative = {"method": "custom_class", "model": proposer, "num_speculative_tokens": DRAFT}
            words += ["--speculative-config", json.dumps(speculative)]
            words += ["--additional-config", json.dumps({"paceline": {"method": METHOD}})]
        with running([self.python, *words], SETTINGS | paths(HERE), f"http://127.0.0.1:{port}") as process:
            yield f"http://127.0.0.1:{port}", process

    def answers(self, url: str) -> list[list[int] | None]:
        """Of all requests, some at a time; None where one failed."""
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            return list(pool.map(lambda one: answer(url, *one), self.asked))

    def compare(self, case: str, found: Sequence[list[int] | None]) -> None:
        """Count it as failed unless all are right."""
        equal = sum(ids == other for ids, other in zip(found, self.right, strict=True))
        self.failed += equal < len(found)
        print(f"{case}: {'ok' if equal == len(found) else 'FAILED'}, {equal} of {len(found)} as plain", flush=True)

    def drafted(self, url: str) -> None:
        """The server must have drafted, or all this says nothing."""
        accepted = counted(url, "spec_decode_num_accepted_tokens_total")
        self.failed += not accepted
        print(f"  {accepted:.0f} draft tokens accepted", flush=True)


def main() -> None:
    options = parse()
    llm = paceline.load(options.model, drafter="none")
    prompts = [llm.encode(prompt.turns[0])[:200] for prompt in load_suite(options.suite, (), None, 1)]
    if "throws" in options.cases:
        prompts += [[POISON, *prompt[1:]] for prompt in prompts[:4]]
    asked = [(prompt, TOKENS) for prompt in prompts]
    if "context" in options.cases:
        asked += [(prompt, CONTEXT - len(prompt)) for prompt in prompts[:2]]
    check = Check(resolve(options.model).location, options.python or environment(), asked)
    if "throws" in options.cases:
        with check.server(FAILING) as (url, _):
            check.compare("a proposer that throws", check.answers(url))
            check.drafted(url)
    if {"aborts", "context"} & set(options.cases):
        with check.server(OURS) as (url, _), ThreadPoolExecutor(4) as leaving:
            gone = [leaving.submit(hang_up, url, prompt) for prompt in prompts[:4]]
            check.compare("requests that are given up, and the context's end", check.answers(url))
            assert all(future.result() for future in gone), "nobody hung up in the middle"
            check.drafted(url)
    if "replicas" in options.cases:
        replicas(check)
    raise SystemExit(1 if check.failed else 0)


def replicas(check: Check) -> None:
    """Two servers behind the proxy; of one the engine is killed while both work."""
    with ExitStack() as stack:
        (one, _), (other, group) = (stack.enter_context(check.server(OURS)) for _ in range(2))
        url = f"http://127.0.0.1:{free_port()}"
        proxy = [check.python, PROXY, url.rpartition(":")[2], one, other]
        stack.enter_context(running(proxy, {}, url))
        check.compare("two replicas", check.answers(url))
        check.drafted(one)
        check.drafted(other)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(check.answers, url)
            time.sleep(5)
            [engine] = [one for one in psutil.Process(group).children(recursive=True) if "EngineCor" in one.name()]
            assert not answers.done(), "all was answered before anybody could be killed"
            engine.kill()
            check.compare("a replica is killed", answers.result())
        check.compare("the other one goes on", check.answers(url))


def counted(url: str, metric: str) -> float:
    """A counter of vLLM's, over all its labels."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{metric}{{"))


def answer(url: str, prompt: list[int], tokens: int) -> list[int] | None:
    """New token ids; None where the request failed."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    try:
        ids: list[int] = httpx.post(f"{url}/v1/completions", json=body, timeout=600).json()["choices"][0]["token_ids"]
    except (httpx.HTTPError, ValueError, KeyError):
        return None
    return ids


def hang_up(url: str, prompt: list[int]) -> bool:
    """Whether the answer was still coming when nobody listened any more."""
    body = {"prompt": prompt, "max_tokens": CONTEXT - len(prompt), "temperature": 0, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as response:
        for count, line in enumerate(response.iter_lines()):
            if count >= 6:
                return line != "data: [DONE]"
    return False


@contextmanager
def running(words: Sequence[object], more: dict[str, str], url: str) -> Iterator[int]:
    """A server's process group, as soon as the server answers; ended in the end."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [str(word) for word in words], stdout=log, stderr=log, env=os.environ | more, start_new_session=True
        )
        try:
            while True:
                if process.poll() is not None:
                    log.seek(0)
                    raise SystemExit(f"a server ended at once:\n{log.read()[-3000:]}")
                with suppress(httpx.TransportError):
                    if httpx.get(f"{url}/v1/models", timeout=5).is_success:
                        break
                time.sleep(0.5)
            yield process.pid
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


def free_port() -> int:
    """A port that nobody listens to."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="named model or folder with safetensors")
    parser.add_argument("--cases", default="throws,aborts,context,replicas", type=lambda text: text.split(","))
    parser.add_argument("--suite", default=str(PROMPTS))
    parser.add_argument("--python", type=Path, help="an interpreter that has vLLM, instead of a new environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
