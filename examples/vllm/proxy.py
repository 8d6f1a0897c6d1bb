"""A reverse proxy before replicas of one server: to the one with the fewest requests, around those that are gone.

    python proxy.py PORT URL URL ...

A request whose replica fails before its answer began, or says 5xx, goes to another. Needs httpx, starlette and uvicorn,
which vLLM brings along. nginx does the same with `least_conn` and
`proxy_next_upstream error http_500 http_503 non_idempotent`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}  # headers of one connection


class Proxy:
    """Passes requests on to one of several servers."""

    def __init__(self, urls: list[str]) -> None:
        self.busy = dict.fromkeys(urls, 0)
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        *_, last = order = sorted(self.busy, key=self.busy.__getitem__)
        for url in order:
            asked = self._http.build_request(
                request.method, f"{url}{request.url.path}", params=request.query_params, content=body, headers=headers
            )
            self.busy[url] += 1
            try:
                answer = await self._http.send(asked, stream=True)
                if answer.is_server_error and url != last:
                    await self._done(url, answer)
                    continue
                chunks = answer.aiter_raw()
                first = await anext(chunks, b"")
            except httpx.TransportError:
                self.busy[url] -= 1
                continue
            kept = {name: value for name, value in answer.headers.items() if name not in HOP}
            return StreamingResponse(self._passed(url, answer, first, chunks), answer.status_code, kept)
        return PlainTextResponse("no server is there\n", 502)

    async def _passed(
        self, url: str, answer: httpx.Response, first: bytes, chunks: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """All of an answer whose first bytes are here, as long as somebody reads it."""
        try:
            yield first
            async for chunk in chunks:
                yield chunk
        finally:
            await self._done(url, answer)

    async def _done(self, url: str, answer: httpx.Response) -> None:
        self.busy[url] -= 1
        await answer.aclose()


if __name__ == "__main__":
    route = Route("/{path:path}", Proxy(sys.argv[2:]).forward, methods=["GET", "POST"])
    uvicorn.run(Starlette(routes=[route]), port=int(sys.argv[1]), log_level="warning")
