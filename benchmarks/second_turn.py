"""Time to the first token of a conversation's second turn, against that of its first: the first is not read again.

    paceline serve & python benchmarks/second_turn.py [--url http://127.0.0.1:8000] [--tokens 1500] [--repeats 3]

Every repeat has a text of its own of so many tokens. Fails when the quickest second turn takes more than a quarter of
the quickest first one.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import httpx
from script import run_script

WORDS = ["rider", "front", "wind", "turn", "wheel", "road", "hill", "sprint", "pace", "line", "draft", "gap"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    firsts, seconds = [], []
    with httpx.Client(base_url=options.url, timeout=600) as client:
        ask(client, [{"role": "user", "content": "Hello."}])  # pages come in, threads start
        for number in range(options.repeats):
            messages = [{"role": "user", "content": text(client, options.tokens, number)}]
            taken, answer = ask(client, messages)
            firsts.append(taken)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on, please."}]
            taken, _ = ask(client, messages)
            seconds.append(taken)
            print(f"first turn {1000 * firsts[-1]:.0f} ms, second {1000 * taken:.0f} ms", flush=True)
    share = min(seconds) / min(firsts)
    print(f"the second turn takes {share:.2f} of the first")
    return 0 if share <= 0.25 else 1


def text(client: httpx.Client, tokens: int, seed: int) -> str:
    """Words at random, as many as it takes."""
    pick = random.Random(seed)
    words = pick.choices(WORDS, k=tokens)
    count: int = client.post("/tokenize", json={"prompt": " ".join(words)}).json()["count"]
    return " ".join(words[: round(tokens * tokens / count)])


def ask(client: httpx.Client, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Seconds to the first token, and the answer."""
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24, "stream": True}
    began, taken, parts = time.perf_counter(), 0.0, []
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            taken = taken or time.perf_counter() - began
            if line.startswith('data: {"'):
                parts.append(httpx.Response(200, content=line[6:]).json()["choices"][0]["delta"].get("content") or "")
    return taken, "".join(parts)


if __name__ == "__main__":
    run_script(main)
