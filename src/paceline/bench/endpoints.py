"""Servers with the OpenAI API side by side: a suite's prompts over the network, drafts by their own counters."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx

from paceline.bench.config import parse_endpoint
from paceline.bench.journal import DIFFERENCES, RESULTS, SAMPLES, Journal, Run
from paceline.bench.latency import Arrivals
from paceline.bench.methods import AR, Generated
from paceline.bench.metrics import ResultRow, results
from paceline.bench.schedule import Item, items, measure, progress
from paceline.bench.suites import OVERALL, Prompt, batches
from paceline.errors import EndpointError, first_line

if TYPE_CHECKING:
    from paceline.bench.config import BenchConfig
    from paceline.decoding.sampling import SamplingParams

KEY = "OPENAI_API_KEY"  # environment variable
PATIENCE = httpx.Timeout(600, connect=10)  # seconds: for the next piece of an answer, for a connection
WARM_UP_TOKENS = 8
#: vLLM's counters, which others have under the same names: rounds that drafted, tokens drafted, and those accepted.
COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(?:\{.*\})? (\S+)", re.MULTILINE)

Chat = list[dict[str, str]]


class Answer(NamedTuple):
    """What a server sent, and the tokens that it counted."""

    text: str
    tokens: int
    prompt_tokens: int


class Endpoint:
    """A server. A key, if it wants one, is in the environment as OPENAI_API_KEY.

    Args:
        name: as results call it.
        url: without `/v1`.

    Raises:
        EndpointError: it does not answer, or names no model.
    """

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        # A connection for each request: some servers close one that is kept in the moment when it is used again.
        headers = {"Connection": "close"}
        if KEY in os.environ:
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        self._http = httpx.Client(
            base_url=url, timeout=PATIENCE, headers=headers, limits=httpx.Limits(max_connections=None)
        )
        self._usage = {"include_usage": True, "continuous_usage_stats": True}
        try:
            self.model = str(self._checked(self._sent("GET", "/v1/models")).json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{name}: {url}/v1/models names no model") from error

    def close(self) -> None:
        self._http.close()

    def warm_up(self, chats: Sequence[Chat], params: SamplingParams, seed: int) -> None:
        """An untimed call. Servers that do not know how to count tokens as they come are not asked to any more."""
        try:
            self.generate(chats, params, seed)
        except EndpointError:
            if "continuous_usage_stats" not in self._usage:
                raise
            del self._usage["continuous_usage_stats"]
            self.generate(chats, params, seed)

    def generate(self, chats: Sequence[Chat], params: SamplingParams, seed: int) -> tuple[Generated, list[int]]:
        """Answer conversations, all at a time, number i with the random numbers of `seed + i`.

        Returns:
            What came, without ids, which servers do not tell; and tokens of the prompts.

        Raises:
            EndpointError: the server refuses, breaks off, or sends what is none of the API's.
        """
        before = self.counters()
        bodies = [self._body(chat, params, seed + at) for at, chat in enumerate(chats)]
        with ThreadPoolExecutor(len(chats)) as pool:
            arrivals = Arrivals()
            answers = list(pool.map(partial(self._answer, arrivals), range(len(chats)), bodies))
            seconds = arrivals.seconds
        after, tokens = self.counters(), [answer.tokens for answer in answers]
        drafts = None
        if before and after:
            drafts = tuple(after[name] - before[name] for name in COUNTERS)
        made = Generated(
            [[] for _ in chats],
            seconds,
            # Each brings what it accepts and a token more; some accept tokens that are after an answer's end.
            passes=max(sum(tokens) - drafts[2], len(chats)) if drafts else None,
            latencies=[arrivals.latency(at, count) for at, count in enumerate(tokens)],
            texts=[answer.text for answer in answers],
            tokens=tokens,
            drafts=drafts,
        )
        return made, [answer.prompt_tokens for answer in answers]

    def counters(self) -> dict[str, int] | None:
        """`COUNTERS` since the server started; None where it has none."""
        answer = self._sent("GET", "/metrics")
        found = dict.fromkeys(COUNTERS, 0)
        lines = [(name, value) for name, value in _COUNTER.findall(answer.text) if name in found]
        if answer.status_code != httpx.codes.OK or not lines:
            return None
        for name, value in lines:  # of several engines
            found[name] += int(float(value))
        return found

    def _body(self, chat: Chat, params: SamplingParams, seed: int) -> dict[str, Any]:
        body = {"model": self.model, "messages": chat, "max_tokens": params.max_new_tokens, "stream": True}
        body |= {"stream_options": self._usage, "temperature": params.temperature}
        if params.temperature:
            asked = {"top_k": (params.top_k, 0), "top_p": (params.top_p, 1.0), "min_p": (params.min_p, 0.0)}
            body |= {"seed": seed} | {name: value for name, (value, off) in asked.items() if value != off}
        return body

    def _answer(self, arrivals: Arrivals, at: int, body: dict[str, Any]) -> Answer:
        usage: dict[str, Any] = {}
        text, count = "", 0
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.is_error:
                    answer.read()
                self._checked(answer)
                for line in answer.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise EndpointError(f"{self.name}: {_told(chunk, line)}")
                    piece = chunk["choices"][0]["delta"].get("content") or "" if chunk["choices"] else ""
                    text, usage = text + piece, chunk.get("usage") or usage
                    now = usage.get("completion_tokens", count + bool(piece))
                    if now > count:
                        arrivals.note(at, now)
                        count = now
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.name}: {self.url} broke off: {first_line(error)}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EndpointError(f"{self.name}: {self.url} sent no answer of the API: {first_line(error)}") from error
        if 0 < (told := usage.get("completion_tokens", 0)) < count:  # it sends tokens in pieces
            arrivals.recount(at, told)
            count = told
        if not count:  # the end is a token too, which some do not count
            arrivals.note(at, count := 1)
        return Answer(text, count, usage.get("prompt_tokens", 0))

    def _sent(self, method: str, path: str) -> httpx.Response:
        try:
            return self._http.request(method, path)
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.name}: {self.url} does not answer: {first_line(error)}") from error

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_error:
            try:
                told = _told(answer.json(), answer.reason_phrase)
            except ValueError:
                told = answer.reason_phrase
            raise EndpointError(f"{self.name}: {answer.url.path} was refused: {answer.status_code} {told}")
        return answer


def _told(body: Any, otherwise: str) -> str:
    """A line of an error, as OpenAI's API has it, or vLLM's before."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message") if isinstance(error, dict) else error
    return first_line(ValueError(message)) if isinstance(message, str) and message.strip() else otherwise


def measure_endpoints(config: BenchConfig, prompts: list[Prompt], journal: Journal) -> None:
    """Measure what the journal does not have yet, and write the results.

    Raises:
        EndpointError: a server does not answer, or refuses.
    """
    if journal.complete:
        return
    groups = batches(prompts, config.batch)
    asked = list(items(groups, config))
    with ExitStack() as stack:
        endpoints = []
        for address in config.endpoints:
            endpoints.append(Endpoint(*parse_endpoint(address)))
            stack.callback(endpoints[-1].close)
        show = stack.enter_context(progress(config.progress, asked, config.methods, journal))
        journal.settle(served={endpoint.name: endpoint.model for endpoint in endpoints})
        shortest = min(groups, key=lambda group: sum(len(prompt.turns[0]) for prompt in group))
        for temperature in config.each_temperature:
            params = config.sampling(temperature)
            few = replace(params, max_new_tokens=min(WARM_UP_TOKENS, config.max_new_tokens))
            for endpoint in endpoints:
                endpoint.warm_up([_chat(prompt, ()) for prompt in shortest], few, config.seed)
        teller = _reference(config.methods)

        def call(endpoint: Endpoint, item: Item) -> Run:
            earlier = [journal.runs[item._replace(turn=turn).key(teller)].texts or [] for turn in range(item.turn)]
            chats = [_chat(prompt, [texts[row] for texts in earlier]) for row, prompt in enumerate(item.prompts)]
            made, prompt_tokens = endpoint.generate(chats, config.sampling(item.temperature), item.seed)
            return item.run(endpoint.name, made, prompt_tokens)

        measure(endpoints, asked, journal, call, show)
    journal.write(DIFFERENCES, [])
    journal.write(SAMPLES, [])
    runs = [journal.runs[item.key(name)] for item in asked for name in config.methods]
    rows = results(runs, [], config.methods, config.batch)
    _compare_texts(rows, runs, teller)
    journal.write(RESULTS, rows)


def _reference(names: Sequence[str]) -> str:
    """Whose answers the others' are compared with, and later turns go on from."""
    return AR if AR in names else names[0]


def _chat(prompt: Prompt, answers: Sequence[str]) -> Chat:
    """The conversation up to the turn after these answers."""
    chat = [{"role": "user", "content": prompt.turns[0]}]
    for answer, question in zip(answers, prompt.turns[1:], strict=False):
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return chat


def _compare_texts(rows: Sequence[ResultRow], runs: Sequence[Run], reference: str) -> None:
    """Fill in which greedy answers have the reference's text; why others have not cannot be told from here."""
    greedy = [run for run in runs if not run.temperature]
    texts = {(*run.ids, run.turn): run.texts or [] for run in greedy if run.method == reference}
    for row in rows:
        row["tie"] = row["wrong"] = row["identical"] = None
        if row["temperature"]:
            continue
        row["identical"] = sum(
            text == other
            for run in greedy
            if run.method == row["method"] and row["task"] in (OVERALL, run.task)
            for text, other in zip(run.texts or [], texts[*run.ids, run.turn], strict=True)
        )
