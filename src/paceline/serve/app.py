"""The routes."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from paceline.errors import require
from paceline.serve.answers import AnswerChoice, envelope, speculation, usage
from paceline.serve.errors import DISCONNECTED, ClientGone, RequestTimeout, add_error_handlers, described
from paceline.serve.guard import Guard
from paceline.serve.metrics import Metrics
from paceline.serve.protocol import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest
from paceline.serve.requests import LONG, FrontDesk
from paceline.serve.settings import Settings
from paceline.serve.tools import ToolText
from paceline.serve.worker import Job, Worker
from paceline.version import __version__

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from paceline.api import LLM
    from paceline.serve.worker import News

PAGE = Path(__file__).with_name("page")
READ = ["GET", "HEAD"]

Result = TypeVar("Result")


def make_app(llms: Mapping[str, LLM], settings: Settings) -> FastAPI:
    """The server as an ASGI application.

    Args:
        llms: by the names that requests know their drafters by; all on one target. The first is the default.

    Raises:
        OptionError: the model has no tokenizer, or drafters cannot work side by side.
    """
    target = next(iter(llms.values())).target
    context = settings.context or target.context
    require(context <= target.context, f"context must be at most {target.context}, as the model's is, not {context}")
    model = settings.name or target.name
    metrics, desk = Metrics(model), FrontDesk(llms, context)
    worker = Worker(
        llms,
        rows=settings.rows,
        context=context,
        most_drafted=desk.most_drafted,
        queue=settings.queue,
        keep=settings.keep,
        metrics=metrics,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await run_in_threadpool(worker.close, settings.drain)

    app = FastAPI(title="paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.worker = worker
    add_error_handlers(app)
    service = Service(worker, desk, model, settings.timeout)
    _add_completions(app, service)
    _add_state(app, service, metrics)
    _add_page(app)
    app.add_middleware(Guard, keys=settings.keys, body=settings.body)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


class Service:
    """Answers one kind of request after another from the worker's jobs."""

    def __init__(self, worker: Worker, desk: FrontDesk, model: str, timeout: float) -> None:
        self.worker, self.desk, self.model, self.timeout = worker, desk, model, timeout
        self._line = asyncio.Semaphore(1)  # of long texts: they would take every thread there is

    async def apart(self, request: Request, characters: int, work: Callable[..., Result], *given: Any) -> Result:
        """What a thread makes of a text of so many characters. Raises ClientGone, or RequestTimeout."""

        async def result() -> Result:
            async with self._line if characters > LONG else contextlib.nullcontext():
                return await run_in_threadpool(work, *given)

        try:
            async with asyncio.timeout(self.timeout):
                return await until_gone(request, result())
        except TimeoutError:
            raise RequestTimeout(f"the request took longer than {self.timeout:g} seconds") from None

    def check_model(self, name: str) -> None:
        """Raises HTTPException for another model's name."""
        if name not in ("", self.model):
            raise HTTPException(404, f"model: there is no '{name}' here, but '{self.model}'")

    async def complete(
        self, request: Request, body: Common, prompts: list[list[int]], prediction: Sequence[int], echoes: list[str]
    ) -> Response:
        """Run a request; echoes are what each prompt's choices begin with."""
        self.check_model(body.model)
        make = self.desk.requests(body, prompts, prediction)
        chat = isinstance(body, ChatRequest)
        trace = body.paceline.trace
        choices = [
            AnswerChoice(
                at * body.n + n,
                chat=chat,
                tools=ToolText(body.parallel_tool_calls) if isinstance(body, ChatRequest) and body.uses_tools else None,
                logprobs=body.top is not None,
                trace=trace,
                echo=echo,
            )
            for at, echo in enumerate(echoes)
            for n in range(body.n)
        ]
        job = Job(make, len(prompts), body.n, asyncio.get_running_loop())
        name = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.worker.submit(job)
        streams = False
        try:
            if body.stream:
                first = await until_gone(request, self._event(job))  # an error before it is a plain response
                streams = True
                return JobStream(self.worker, job, self._stream(job, first, body, name, choices))
            return JSONResponse(await until_gone(request, self._whole(job, name, chat, choices)))
        except ClientGone:
            return Response(status_code=DISCONNECTED)
        finally:
            if not streams:
                self.worker.cancel(job)

    async def _event(self, job: Job) -> News:
        """The next of a job's events. Raises what ended it, or RequestTimeout."""
        left = job.asked + self.timeout - time.perf_counter()
        try:
            async with asyncio.timeout(left):
                event = await job.events.get()
        except TimeoutError:
            raise RequestTimeout(f"the request took longer than {self.timeout:g} seconds") from None
        if isinstance(event, Exception):
            raise event
        return event

    async def _whole(self, job: Job, name: str, chat: bool, choices: list[AnswerChoice]) -> dict[str, Any]:
        deltas: dict[int, list[dict[str, Any]]] = {choice.index: [] for choice in choices}
        left = len(choices)
        while left:
            news = await self._event(job)
            deltas[news.choice].append(choices[news.choice].delta(news, self.desk.token_texts))
            left -= news.finish_reason is not None
        answer = envelope("chat.completion" if chat else "text_completion", name, self.model)
        answer["choices"] = [choice.whole(deltas[choice.index]) for choice in choices]
        return answer | {"usage": usage(job, sum(c.tokens for c in choices)), "metrics": speculation(job)}

    async def _stream(
        self, job: Job, news: News, body: Common, name: str, choices: list[AnswerChoice]
    ) -> AsyncIterator[bytes]:
        chat, options, left, began = isinstance(body, ChatRequest), body.stream_options, len(choices), set[int]()
        head = envelope("chat.completion.chunk" if chat else "text_completion", name, self.model)
        try:
            while True:
                delta = choices[news.choice].delta(news, self.desk.token_texts)
                if chat and news.choice not in began:
                    delta["delta"] = {"role": "assistant"} | delta["delta"]
                    began.add(news.choice)
                chunk = head | {"choices": [delta]}
                if options.continuous_usage_stats:
                    chunk["usage"] = usage(job, sum(choice.tokens for choice in choices))
                elif options.include_usage:
                    chunk["usage"] = None
                yield _event(chunk)
                left -= news.finish_reason is not None
                if not left:
                    break
                news = await self._event(job)
            if options.include_usage:
                told = {"usage": usage(job, sum(c.tokens for c in choices)), "metrics": speculation(job)}
                yield _event(head | {"choices": []} | told)
            yield b"data: [DONE]\n\n"
        except Exception as error:  # too late for a status
            yield _event(described(error)[1])


class JobStream(StreamingResponse):
    """Ends its job when it ends, even where the client has gone before the first chunk."""

    media_type = "text/event-stream"

    def __init__(self, worker: Worker, job: Job, content: AsyncIterator[bytes]) -> None:
        super().__init__(content)
        self.worker, self.job = worker, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.worker.cancel(self.job)


async def until_gone(request: Request, answer: Awaitable[Result]) -> Result:
    """The answer, unless the client hangs up first. Raises ClientGone."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(answer), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _add_completions(app: FastAPI, service: Service) -> None:
    desk = service.desk

    @app.post("/v1/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        ids = await service.apart(request, desk.size(body.messages, body.tools), desk.conversation, body)
        await service.apart(request, 0, desk.check_format, body)
        said = body.prediction.text if body.prediction else ""
        prediction = await service.apart(request, len(said), desk.predicted, said) if said else []
        return await service.complete(request, body, [ids], prediction, [""])

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        service.worker.check_count(len(body.prompt) * body.n)
        prompts = [
            await service.apart(request, len(prompt), desk.encode, prompt) if isinstance(prompt, str) else prompt
            for prompt in body.prompt
        ]
        require(all(prompts), "prompt: it is empty")
        echoes = [""] * len(prompts)
        if body.echo:
            echoes = [
                prompt
                if isinstance(prompt, str)
                else await service.apart(request, len(prompt), desk.decode, prompt, "prompt")
                for prompt in body.prompt
            ]
        return await service.complete(request, body, prompts, [], echoes)

    @app.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        require((body.prompt is None) != (body.messages is None), "prompt: give it or messages")
        if body.messages is not None:
            require(body.add_special_tokens, "add_special_tokens: what a chat begins with is its template's to say")
            ids = await service.apart(request, desk.size(body.messages), desk.chat, body.messages)
        else:
            text = body.prompt or ""
            ids = await service.apart(request, len(text), desk.encode, text, body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": desk.context}

    @app.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        return {"prompt": await service.apart(request, len(body.tokens), desk.decode, body.tokens, "tokens")}


def _add_state(app: FastAPI, service: Service, metrics: Metrics) -> None:
    worker, desk, model = service.worker, service.desk, service.model

    about = {"id": model, "object": "model", "created": 0, "owned_by": "paceline", "max_model_len": desk.context}
    about |= {"drafters": list(desk.llms)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{name:path}")
    async def model_of(name: str) -> dict[str, Any]:
        if name != model:
            raise HTTPException(404, f"model: there is no '{name}' here, but '{model}'")
        return about

    @app.api_route("/health", methods=READ)
    async def health() -> Response:
        """Whether the process lives."""
        return Response(status_code=200)

    @app.api_route("/ready", methods=READ)
    async def ready() -> Response:
        """Whether it takes requests."""
        return Response(status_code=200 if worker.ready else 503)

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/slots")
    async def slots() -> list[dict[str, Any]]:
        busy = worker.state
        return [*busy, *({"id": at, "is_processing": False} for at in range(len(busy), worker.rows))]


def _add_page(app: FastAPI) -> None:
    def file(name: str) -> Callable[[], Awaitable[Response]]:
        async def send() -> Response:
            return FileResponse(PAGE / name)

        return send

    for path, name in (("/", "index.html"), ("/page.css", "page.css"), ("/page.js", "page.js")):
        app.api_route(path, methods=READ, include_in_schema=False)(file(name))
