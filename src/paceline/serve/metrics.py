"""Prometheus metrics under vLLM's names, so that dashboards and harnesses made for it work as they are."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

if TYPE_CHECKING:
    from paceline.decoding.prefixes import PrefixStore
    from paceline.decoding.request import Request

SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
MOST_POSITIONS = 16  # of accepted tokens that are counted one by one


class Metrics:
    """Counters of one server; written by the engine's thread, read by any."""

    def __init__(self, model: str) -> None:
        self.registry, self.model = CollectorRegistry(), model
        self.running = self._gauge("num_requests_running", "Requests being decoded.")
        self.waiting = self._gauge("num_requests_waiting", "Requests that wait for a row.")
        self.cache = self._gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.")
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation = self._counter("generation_tokens", "Output tokens.")
        self.queries = self._counter("prefix_cache_queries", "Prompt tokens looked up among those that are kept.")
        self.hits = self._counter("prefix_cache_hits", "Prompt tokens found there.")
        self.drafts = self._counter("spec_decode_num_drafts", "Rounds that drafted.")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Drafted tokens that became output.")
        self.positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft.",
            ["model_name", "position"],
            registry=self.registry,
        )
        self.success = Counter(
            "vllm:request_success", "Ended requests.", ["model_name", "finished_reason"], registry=self.registry
        )
        self.first_token = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens; a round's share it evenly.")
        self.each = self._histogram("request_time_per_output_token_seconds", "A request's mean time for a token.")
        self.whole = self._histogram("e2e_request_latency_seconds", "From the request to its end.")
        self.queued = self._histogram("request_queue_time_seconds", "Waiting for a row.")
        self.prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt.")
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")
        self.steps = self._histogram("iteration_seconds", "Rounds of the engine, prompts' chunks included.", "paceline")
        self._last: dict[Request, float] = {}  # when each had its latest token
        self._first: dict[Request, float] = {}

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # -- from the engine's thread ----------------------------------------------------------------------------------
    def step(self, seconds: float) -> None:
        self.steps.observe(seconds)

    def load(self, running: int, waiting: int, used: float, prefixes: PrefixStore | None) -> None:
        self.running.set(running)
        self.waiting.set(max(waiting, 0))
        self.cache.set(used)
        if prefixes:
            self.queries.inc(prefixes.queries)
            self.hits.inc(prefixes.hits)
            prefixes.queries = prefixes.hits = 0

    def round(self, request: Request, asked: float, first: bool) -> None:
        """A request had tokens of a round, the latest in its record."""
        now = time.perf_counter()
        if first:
            self.first_token.observe(now - asked)
            self.queued.observe(max(request.joined - asked, 0.0))
            self.prefill.observe(request.stats.prefill_seconds)
            self.prompt.inc(request.prompt_length)
            self._first[request] = now
        if not request.stats.rounds:
            return
        record = request.stats.rounds[-1]
        if not first:
            for _ in range(record.emitted):
                self.between.observe((now - self._last[request]) / record.emitted)
        self._last[request] = now
        self.generation.inc(record.emitted)
        if record.drafted:
            self.drafts.inc()
            self.drafted.inc(record.drafted)
            self.accepted.inc(record.accepted)
            for position in range(min(record.accepted, MOST_POSITIONS)):
                self.positions.labels(self.model, str(position)).inc()

    def finished(self, request: Request, asked: float) -> None:
        now = time.perf_counter()
        decode = now - self._forget(request, now)
        self.decode.observe(decode)
        self.each.observe(decode / max(request.stats.tokens - 1, 1))
        self.whole.observe(now - asked)
        reason = "length" if request.finish_reason == "length" else "stop"
        self.success.labels(self.model, reason).inc()

    def aborted(self, requests: Iterable[Request]) -> None:
        """They were given up, or failed."""
        for request in requests:
            self._forget(request, 0.0)
            self.success.labels(self.model, "abort").inc()

    def _forget(self, request: Request, default: float) -> float:
        self._last.pop(request, None)
        return self._first.pop(request, default)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"vllm:{name}", what, ["model_name"], registry=self.registry).labels(self.model)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["model_name"], registry=self.registry).labels(self.model)

    def _histogram(self, name: str, what: str, prefix: str = "vllm") -> Histogram:
        made = Histogram(f"{prefix}:{name}", what, ["model_name"], buckets=SECONDS, registry=self.registry)
        return made.labels(self.model)
