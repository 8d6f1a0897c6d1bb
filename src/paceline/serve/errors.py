"""Errors as the OpenAI API tells them."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from paceline.errors import ContextOverflow, PacelineError
from paceline.serve.worker import Closing, QueueFull, RoundFailed

_FORM = re.compile(r"str|NamedTool|list\[.*\]|\[key\]")  # in the place of a fault: which of several forms was tried
_FIELD = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ")  # at the beginning of what is said: the field that is meant
_BY_TYPE = "response_format"  # its form's name stands in the place of a fault, too
TOO_LONG = "context_length_exceeded"  # by this code clients know that a shorter prompt would do
NO_MODEL, NO_KEY = "model_not_found", "invalid_api_key"  # further codes that clients know
RETRY_AFTER = "1"  # seconds: a round takes far less, an answer seldom more
DISCONNECTED = 499  # as nginx calls it: nobody reads it


class ClientGone(Exception):
    """Whoever asked has hung up."""


class RequestTimeout(PacelineError):
    """A request took longer than it may."""


class TooLong(ContextOverflow):
    """A request needs more than the context. `field` is what would have to be smaller."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


#: Status and type by the first class that fits; any other of paceline's own errors is the client's.
KINDS: list[tuple[type[Exception], int, str]] = [
    (QueueFull, 503, "overloaded_error"),
    (Closing, 503, "overloaded_error"),
    (RequestTimeout, 504, "timeout_error"),
    (RoundFailed, 500, "server_error"),
    (PacelineError, 400, "invalid_request_error"),
    (Exception, 500, "server_error"),
]


def error_body(message: str, kind: str, code: int | str, param: str | None = None) -> dict[str, Any]:
    """The object that stands for an error, in a response and in a stream."""
    sound = message.encode(errors="replace").decode()  # it may quote what no response can hold
    return {"error": {"message": sound, "type": kind, "param": param, "code": code}}


def described(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an exception; of one that is not paceline's own nothing is told."""
    status, kind = next((status, kind) for cls, status, kind in KINDS if isinstance(error, cls))
    message = str(error) if isinstance(error, PacelineError) else "internal error"
    code = TOO_LONG if isinstance(error, ContextOverflow) else status
    field = error.field if isinstance(error, TooLong) else _named(message)
    return status, error_body(message, kind, code, field if status == 400 else None)


def _named(message: str) -> str | None:
    """The field that a message begins with."""
    found = _FIELD.match(message)
    return found[1] if found else None


def answer(status: int, body: dict[str, Any]) -> JSONResponse:
    return JSONResponse(body, status, {"Retry-After": RETRY_AFTER} if status == 503 else None)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        nearest = max(error.errors(), key=lambda found: len(found["loc"]))  # of several forms the one that nearly fits
        place = [str(part) for part in nearest["loc"][1:]]
        if place[:1] == [_BY_TYPE]:
            del place[1:2]
        where = ".".join(part for part in place if not _FORM.fullmatch(part)) or None
        said = nearest["msg"].removeprefix("Value error, ")
        if nearest["type"] == "json_invalid":  # the place is a number of characters, and no field
            where, said = None, f"the body is no JSON: {nearest['ctx']['error']} (character {where})"
        what = "is not supported" if nearest["type"] == "extra_forbidden" else said
        if nearest["type"] == "missing" and not where:
            what = "a body is required"
        message = f"{where}: {what}" if where else what
        return answer(400, error_body(message, "invalid_request_error", 400, where or _named(message)))

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        said = str(error.detail)
        code = NO_MODEL if error.status_code == 404 and _named(said) == "model" else error.status_code
        body = error_body(said, "invalid_request_error", code, _named(said))
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(ClientGone)
    async def gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=DISCONNECTED)

    @app.exception_handler(PacelineError)
    async def own(_: Request, error: PacelineError) -> JSONResponse:
        return answer(*described(error))
