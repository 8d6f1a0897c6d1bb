"""What a server must stand: nonsense, clients that vanish, being told to stop, being killed. Each on one of its own.

    python benchmarks/serve_faults.py [fuzz] [vanish] [stop] [kill] [--requests 10000] [--model MODEL]

fuzz: requests that schemathesis makes up from the server's own OpenAPI description, half of them wrong on purpose; none
may be answered with a status of 500. It needs the command `schemathesis` (`pip install schemathesis`, in any
environment; `--schemathesis` says where). vanish: clients hang up in the middle of their streams; all rows must be free
within two rounds. stop: SIGTERM under load; every answer that fits the drain time must come. kill: kill -9 under load;
a server that is started again must answer as before.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

#: A full queue (503) and a request that ran out of time (504) are as documented; any other status of 5xx is a fault.
EXPECTED = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "503", "504"]\n'
KINDS = 4  # operations that take a body: examples are made for each


class Served:
    """A `paceline serve` of its own."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url

    def ask(self, **body: Any) -> httpx.Response:
        chat = {"messages": [{"role": "user", "content": "Count to ten."}], "temperature": 0, "max_tokens": 32}
        return httpx.post(f"{self.url}/v1/chat/completions", json=chat | body, timeout=600)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    @property
    def busy(self) -> bool:
        return any(slot["is_processing"] for slot in self.get("/slots").json())

    @property
    def rounds(self) -> int:
        found = re.search(r"^paceline:iteration_seconds_count.* (\S+)$", self.get("/metrics").text, re.MULTILINE)
        return int(float(found[1])) if found else 0


@contextmanager
def serving(model: str, *more: str) -> Iterator[Served]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "paceline", "serve", "--model", model, "--port", str(port), *more]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    served = Served(process, f"http://127.0.0.1:{port}")
    try:
        while process.poll() is None:
            try:
                if served.get("/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            raise SystemExit(f"it ended at once; try it by hand: {' '.join(command)}")
        yield served
    finally:
        process.kill()
        process.wait()


def fuzz(options: argparse.Namespace) -> str:
    """10,000 requests; none is answered with 500."""
    each = -(-options.requests // KINDS)
    with serving(options.model, "--context", "96", "--timeout", "20", "--queue", "200") as served:
        command = [options.schemathesis, "run", f"{served.url}/openapi.json", "--checks", "not_a_server_error"]
        command += ["--phases", "fuzzing", "--max-examples", str(each), "--seed", "1", "--workers", "4"]
        command += ["--continue-on-failure", "--no-shrink", "--warnings", "off", "--generation-database", "none"]
        command += ["--suppress-health-check", "all", "--request-timeout", "60", "--include-method", "POST"]
        with TemporaryDirectory() as folder:  # where it leaves what it remembers
            Path(folder, "schemathesis.toml").write_text(EXPECTED, encoding="utf-8")
            ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        told = [line for line in ran.stdout.splitlines() if "generated" in line or "Test cases" in line]
        if ran.returncode or served.process.poll() is not None:
            return f"failed: {ran.stdout[-3000:]}{ran.stderr[-1000:]}"
        wait(lambda: not served.busy)
        return "passed: no server error; " + " ".join(told).strip()


def vanish(options: argparse.Namespace) -> str:
    """Clients that are in the middle of a stream, or wait for one, and whose rows are free within two rounds."""
    with serving(options.model, "--queue", str(options.clients)) as served:
        asyncio.run(hang_up(served, options.clients))
        before = served.rounds
        wait(lambda: not served.busy)
        rounds = served.rounds - before
        again = served.ask(max_tokens=4).status_code
        return f"{'passed' if rounds <= 2 and again == 200 else 'failed'}: all rows free after {rounds} rounds"


async def hang_up(served: Served, clients: int) -> None:
    """Have so many clients ask, and leave when some are answered."""
    body = {"prompt": "The rider", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    chunks = asyncio.Event()

    async def listen(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                chunks.set()

    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        tasks = [asyncio.create_task(listen(client)) for _ in range(clients)]
        await chunks.wait()
        await asyncio.sleep(3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def stop(options: argparse.Namespace) -> str:
    """SIGTERM: what was asked before it is answered, what comes after it is refused, and the process ends."""
    with serving(options.model, "--drain", "120") as served, ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(served.ask, max_tokens=64, stream=number % 2 == 0) for number in range(12)]
        wait(lambda: served.busy)
        served.process.send_signal(signal.SIGTERM)
        answers = [future.result() for future in waiting]
        lost = [a for a in answers if a.status_code != 200 or not ("[DONE]" in a.text or "finish_reason" in a.text)]
        code = served.process.wait(timeout=120)
        return f"{'failed' if lost else 'passed'}: {len(answers) - len(lost)} of 12 answers came; exit status {code}"


def kill(options: argparse.Namespace) -> str:
    """kill -9 under load leaves nothing behind that a new server stumbles over."""
    told = []
    for _ in range(2):
        with serving(options.model) as served, ThreadPoolExecutor(4) as pool:
            told.append(served.ask().json()["choices"][0]["message"]["content"])
            waiting = [pool.submit(served.ask, max_tokens=500, ignore_eos=True) for _ in range(4)]
            wait(lambda served=served: served.busy)
            served.process.kill()
            gone = [isinstance(future.exception(), httpx.TransportError) for future in waiting]
    return f"{'passed' if told[0] == told[1] and all(gone) else 'failed'}: the same answer before and after"


def wait(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("it never came true")
        time.sleep(0.01)


TRIALS: dict[str, Callable[[argparse.Namespace], str]] = {"fuzz": fuzz, "vanish": vanish, "stop": stop, "kill": kill}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help=f"of {', '.join(TRIALS)}; default: all")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=10_000, help="of fuzz")
    parser.add_argument("--clients", type=int, default=200, help="of vanish")
    parser.add_argument("--schemathesis", default="schemathesis", help="the command")
    options = parser.parse_args()
    if unknown := set(options.trials) - set(TRIALS):
        parser.error(f"there is no trial {', '.join(unknown)}")
    results = []
    for name in options.trials or TRIALS:
        results.append(TRIALS[name](options))
        print(f"{name} {results[-1]}", flush=True)
    return 0 if all(result.startswith("passed") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
