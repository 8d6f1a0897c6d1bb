"""Random load on a running server: every answer is what the offline engine gives, whatever happens around it.

    paceline serve & python benchmarks/serve_soak.py --url http://127.0.0.1:8000 --pid $! [--requests 500] [--fuzz 1000]
    paceline serve & python benchmarks/serve_soak.py --pid $! --minutes 30     # again and again: memory must stay flat

Requests arrive at random, with lengths, drafters, seeds, temperatures and grammars at random; one in five vanishes in
the middle of its stream, and hostile bodies come between them. Then each answer is compared with the same model's own,
token ids on tiers that are exact. Fails on a difference, a status of 500, a row that is still taken at the end, or when
the server's memory grows by more than 3 % after the first third of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any

import httpx
from script import run_script

import paceline

WORDS = [
    "the",
    "rider",
    "at",
    "the",
    "front",
    "turns",
    "off",
    "and",
    "the",
    "next",
    "one",
    "takes",
    "the",
    "wind",
    "for",
    "a",
    "while",
    "before",
    "they",
    "swap",
    "again",
]
RIDER = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "turns": {"type": "integer"}},
    "required": ["name"],
}
JUNK: list[Any] = [None, -1, 0, 1e308, "", "x" * 3000, [], {}, [[]], True, {"a": 1}, "\x00", [None], 2**70]


def drawn(pick: random.Random, drafters: list[str], seed: int) -> dict[str, Any]:
    """A request that can be repeated offline."""
    method = pick.choice([{"drafter": pick.choice(drafters)}, {"speculate": False}, {}])
    schema = {"type": "json_schema", "json_schema": {"name": "rider", "schema": RIDER}}
    formats = {"response_format": schema} if pick.random() < 0.2 else {}
    return formats | {
        "messages": [{"role": "user", "content": " ".join(pick.choices(WORDS, k=int(2 ** pick.uniform(1, 9))))}],
        "max_tokens": int(2 ** pick.uniform(0, 7)),
        "temperature": pick.choice([0, 0, 0.8]),
        "seed": seed,
        "paceline": method | {"trace": True, "verifier": "match"},
    }


def hostile(pick: random.Random, body: dict[str, Any]) -> bytes:
    """A body with something wrong in it: a value, a name, or the JSON itself."""
    names = [*body, "n", "stop", "stream", "logprobs", "tools", "logit_bias", "prediction", "response_format", "colour"]
    for name in pick.sample(names, pick.randint(1, 3)):
        body[name] = pick.choice(JUNK)
    if body["max_tokens"] is None or pick.random() < 0.5:
        body["max_tokens"] = 2  # without it an answer takes all the room there is
    data = json.dumps(body).encode()
    return data if pick.random() < 0.8 else data[: pick.randrange(len(data))]


async def vanish(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True, "max_tokens": 500}) as answer:
        async for _ in answer.aiter_lines():
            return


async def load(options: argparse.Namespace, drafters: list[str]) -> tuple[list[tuple[dict[str, Any], Any]], list[str]]:
    pick, answers, faults = random.Random(options.seed), [], list[str]()
    bodies = [drawn(pick, drafters, seed) for seed in range(options.requests)]
    gate = asyncio.Semaphore(options.concurrency)
    async with httpx.AsyncClient(base_url=options.url, timeout=600) as client:

        async def one(at: int, body: dict[str, Any]) -> None:
            async with gate:
                if at % 5 == 0:
                    await vanish(client, body)
                    return
                answer = await client.post("/v1/chat/completions", json=body)
                if answer.status_code == 200:
                    answers.append((body, answer.json()["choices"][0]))
                else:
                    faults.append(f"{answer.status_code}: {answer.text[:200]}")

        async def fuzz(at: int) -> None:
            async with gate:
                data = hostile(pick, drawn(pick, drafters, at))
                path = pick.choice(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
                answer = await client.post(path, content=data, headers={"content-type": "application/json"})
                if answer.status_code >= 500 and answer.status_code != 503:
                    faults.append(f"{answer.status_code} for {data[:300]!r}")

        tasks = [*(one(at, body) for at, body in enumerate(bodies)), *(fuzz(at) for at in range(options.fuzz))]
        pick.shuffle(tasks)
        running = []
        for task in tasks:
            running.append(asyncio.create_task(task))
            await asyncio.sleep(pick.expovariate(options.rate))
        await asyncio.gather(*running)
        for _ in range(100):
            slots = (await client.get("/slots")).json()
            if not any(slot["is_processing"] for slot in slots):
                break
            await asyncio.sleep(0.1)
        else:
            faults.append(f"rows are still taken: {slots}")
    return answers, faults


def resident(pid: int | None) -> float:
    """MB that a process holds; 0 when it is not known."""
    if pid is None:
        return 0.0
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m", help="what the server serves")
    parser.add_argument("--pid", type=int, help="of the server: its memory is shown")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--fuzz", type=int, default=500, help="hostile bodies")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--rate", type=float, default=20.0, help="arrivals a second")
    parser.add_argument("--minutes", type=float, default=0.0, help="repeat the load for so long")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    drafters = httpx.get(f"{options.url}/v1/models").json()["data"][0]["drafters"]
    began, answers, faults, memory = time.perf_counter(), [], [], list[tuple[float, float]]()
    while not memory or memory[-1][0] < 60 * options.minutes:
        some, wrong = asyncio.run(load(options, drafters))
        answers, faults = some, [*faults, *wrong]  # of the last run are compared
        memory.append((time.perf_counter() - began, resident(options.pid)))
        print(f"{len(some)} answers, {memory[-1][0]:.0f} s, {memory[-1][1]:.0f} MB", flush=True)
        options.seed += 1
    settled = [held for seconds, held in memory if seconds >= memory[-1][0] / 3]
    if len(settled) > 1 and settled[-1] > 1.03 * settled[0]:
        faults.append(f"memory has grown: {settled[0]:.0f} MB, {settled[-1]:.0f} MB")

    llm = paceline.load(options.model, drafter="none")
    for body, choice in answers:
        sampling = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body["seed"]}
        sampling["json_schema"] = RIDER if "response_format" in body else None
        if llm.generate(body["messages"], **sampling).tokens != choice["paceline"]["tokens"]:
            faults.append(f"another answer than offline: {body}")
    print(f"target tier {llm.target.tier}, exact: {llm.target.exact}; {len(faults)} faults")
    print("\n".join(faults[:20]))
    return 1 if faults else 0


if __name__ == "__main__":
    run_script(main)
