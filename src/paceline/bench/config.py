"""What is measured: everything `paceline bench` can be told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import httpx

from paceline.bench.methods import AR, check_method
from paceline.decoding.request import check_verifier
from paceline.decoding.sampling import SamplingParams
from paceline.errors import OptionError, require
from paceline.targets import AUTO, check_tier

#: Options that mean nothing to a server that runs already.
OF_METHODS = {"methods", "tier", "device", "dtype", "exact", "device_map", "quantization", "attn_implementation"}
OF_METHODS |= {"adapter", "fresh", "trace", "verifier"}
#: Options that older results do not name, with what they were then.
NEWER = {"fresh": False, "verifier": "auto"}


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark run. Lists may be given as one comma-separated string.

    Args:
        model: a named model, hub id or folder.
        suite: a file, a folder, a `datasets` id or `speed-bench`: see `load_suite`.
        out: folder of the results; a run that was killed goes on from what is there.
        methods: see `paceline.bench.methods`.
        tasks: only these; default all.
        limit: first prompts of each task.
        turns: user turns of a conversation to run, with the model's own answers between them.
        temperatures: each is measured over all prompts; 0 is greedy decoding.
        top_k, top_p, min_p: at temperatures above 0, for every method alike.
        batch: prompts decoded at a time, all of one task.
        seed: prompt i is sampled with seed + i.
        verifier: how sampled drafts are verified, as for `paceline.load`. With "match" samples are compared with plain
            decoding's, too.
        tier, device, dtype, exact: as for `paceline.load`.
        device_map, quantization, attn_implementation, adapter: the same; `quantization` is its `quantization_config`.
        fresh: leave out what `paceline tune` learned.
        endpoints: servers with the OpenAI API instead of methods, each `URL` or `NAME=URL`; what they serve is
            measured, so `model` is not read, and its other options must not be given.
        trace: write a trace too, for `paceline replay`: what each drafter of the run would draft along the greedy
            outputs.
        progress: a progress bar on stderr.

    Raises:
        OptionError: for a value out of range, and for unknown methods.
    """

    model: str
    suite: str
    out: str | Path
    methods: str | Sequence[str] = ("ar", "hf", "auto")
    tasks: str | Sequence[str] = ()
    limit: int | None = None
    turns: int = 1
    max_new_tokens: int = 128
    temperatures: str | Sequence[float] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    batch: int = 1
    seed: int = 0
    verifier: str = "auto"
    tier: str = AUTO
    device: str = "cpu"
    dtype: str | None = None
    exact: bool | None = None
    device_map: str | None = None
    quantization: str | None = None
    attn_implementation: str | None = None
    adapter: str | None = None
    fresh: bool = False
    endpoints: str | Sequence[str] = ()
    trace: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        servers = bool(self.endpoints)
        for name in ("methods", "tasks", "endpoints"):
            object.__setattr__(self, name, _names(getattr(self, name)))
        object.__setattr__(self, "temperatures", _numbers(self.temperatures))
        object.__setattr__(self, "out", Path(self.out))
        require(not servers or bool(self.endpoints), "name at least one endpoint")
        if self.endpoints:
            self._check_endpoints()
        require(bool(self.methods), "name at least one method")
        for name in ("methods", "temperatures"):
            values = getattr(self, name)
            twice = [value for value in values if values.count(value) > 1]
            what = "endpoints" if servers and name == "methods" else name  # whose names stand in for methods
            require(not twice, f"{what}: {next(iter(twice), None)!r} is named twice")
        for method in () if self.endpoints else self.methods:
            check_method(method)
        require(bool(self.temperatures), "name at least one temperature")
        for temperature in self.each_temperature:
            self.sampling(temperature)
        for name in ("batch", "turns", "limit"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, not {value}")
        check_tier(self.tier)
        check_verifier(self.verifier)
        if self.trace:
            require(AR in self.methods, f"a trace needs the method {AR}")
            greedy = 0.0 in self.each_temperature and self.batch == self.turns == 1
            require(greedy, "a trace is of greedy decoding: temperature 0, batch 1, and first turns only")

    @property
    def each_temperature(self) -> tuple[float, ...]:
        """`temperatures`, which are numbers since the config was made."""
        return cast("tuple[float, ...]", self.temperatures)

    def _check_endpoints(self) -> None:
        names = tuple(parse_endpoint(endpoint)[0] for endpoint in self.endpoints)
        for one in fields(self):
            value = getattr(self, one.name)
            given = one.name in OF_METHODS and value != one.default and (one.name, value) != ("methods", names)
            require(not given, f"{one.name.replace('_', '-')} is no option of endpoints, whose servers choose it")
        object.__setattr__(self, "methods", names)

    def sampling(self, temperature: float) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )

    def settings(self) -> dict[str, Any]:
        """What two runs must share for their measurements to stand in one table; ready for JSON."""
        left_out = {"out", "trace", "progress"} | ({"model", *OF_METHODS} if self.endpoints else {"endpoints"})
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
            if name not in left_out and (name not in NEWER or value != NEWER[name])
        }


def parse_endpoint(endpoint: str) -> tuple[str, str]:
    """Name and address of `NAME=URL`, or of a URL, which is called by its host and port.

    Raises:
        OptionError: it is no http address.
    """
    found = re.fullmatch(r"(?:([^/]+)=)?(https?://.+)", endpoint)
    try:
        url = httpx.URL(found[2] if found else "")
    except httpx.InvalidURL:
        url = httpx.URL("")
    require(bool(url.host), f"an endpoint is [NAME=]http://…, not '{endpoint}'")
    return (found and found[1]) or url.netloc.decode(), str(url).rstrip("/").removesuffix("/v1")


def _numbers(given: str | Sequence[float]) -> tuple[float, ...]:
    try:
        return tuple(map(float, _names(given) if isinstance(given, str) else given))
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError(f"temperatures are numbers with commas between them, or a list, not {given!r}") from error


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    return tuple(part.strip() for part in parts if part.strip())
