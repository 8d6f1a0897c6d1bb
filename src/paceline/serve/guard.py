"""What every request passes first: its id, the API key, the limit of its body, and a line in the log."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
import uuid
from collections.abc import Collection
from typing import TYPE_CHECKING
from urllib.parse import quote

import orjson
from starlette.exceptions import HTTPException

from paceline.serve.errors import NO_KEY, answer, described, error_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("paceline.serve")

OPEN = ("/", "/health", "/ready", "/page.css", "/page.js", "/favicon.ico")  # without a key
_ID = re.compile(r"[\w.:-]{1,64}")


class JsonLines(logging.Formatter):
    """A JSON object a record: of a request what is told of it, else the message."""

    def format(self, record: logging.LogRecord) -> str:
        said = {"time": round(record.created, 3), "level": record.levelname.lower()}
        said |= getattr(record, "request", None) or {"message": record.getMessage()}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(said, default=str).decode()


class Guard:
    """Pure ASGI, so that a client's disconnection reaches the handlers.

    Args:
        keys: any of them will do; none: all may come in.
        body: most bytes of a request's body.
    """

    def __init__(self, app: ASGIApp, *, keys: Collection[str], body: int) -> None:
        self.app, self.body = app, body
        self.keys = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        began, status = time.perf_counter(), 0

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            await send(message)

        refusal = self._refusal(scope, headers)
        try:
            if refusal:
                await answer(*refusal)(scope, receive, tell)
            else:
                await self.app({**scope, "request_id": name}, self._limited(receive), tell)
        except Exception as error:
            if status:  # too late for an answer
                raise
            log.exception("a request failed")
            await answer(*described(error))(scope, receive, tell)
        finally:
            self._log(scope, name, status, time.perf_counter() - began)

    def _refusal(self, scope: Scope, headers: dict[str, str]) -> tuple[int, dict[str, object]] | None:
        if self.keys and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
            scheme, _, key = headers.get("authorization", "").partition(" ")
            known = [secrets.compare_digest(_digest(key), one) for one in self.keys]  # all are compared
            if scheme.lower() != "bearer" or not any(known):
                return 401, error_body("invalid API key", "authentication_error", NO_KEY)
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > self.body:
            return 413, error_body(f"the body has more than {self.body} bytes", "invalid_request_error", 413)
        return None

    def _limited(self, receive: Receive) -> Receive:
        """For bodies that do not say beforehand how long they are."""
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.body:
                raise HTTPException(413, f"the body has more than {self.body} bytes")
            return message

        return limited

    def _log(self, scope: Scope, name: str, status: int, seconds: float) -> None:
        said = {
            "request_id": name,
            "method": scope["method"],
            "path": scope.get("raw_path", b"").decode("latin-1") or quote(scope["path"]),  # as sent: no line breaks
            "status": status,
            "seconds": round(seconds, 4),
        }
        log.info("%s", " ".join(str(value) for value in said.values()), extra={"request": said})


def _digest(key: str) -> bytes:
    """Of one length, so that comparing takes one time."""
    return hashlib.sha256(key.encode()).digest()
