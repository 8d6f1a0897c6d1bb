"""The web server around the application."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import uvicorn

from paceline.errors import OptionError, require

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

log = logging.getLogger("paceline.serve")

AFTER = 5  # seconds more than there are to finish answers in: whoever waits is told then that there will be none


def bound(host: str, port: int) -> socket.socket:
    """A socket with this address, not listening yet. Raises OptionError where it cannot be had."""
    require(bool(host.strip()), "host must not be empty: 0.0.0.0 listens on all addresses")
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise OptionError(f"cannot serve on {host}:{port}: {error.strerror}") from error
    return made


class Draining(uvicorn.Server):
    """Has the engine finish, or give up, what it decodes while connections are still open."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain: float) -> None:
        super().__init__(config)
        self._app, self._drain = app, drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if sockets and self.started:  # of sockets that it was given it says nothing
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            log.info("Listening on http://%s:%d (Ctrl-C to stop)", host, self.config.port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(asyncio.to_thread(self._app.state.worker.close, self._drain))
        await super().shutdown(sockets)
        await closing
        if self.force_exit:  # then uvicorn leaves the application as it is
            await self.lifespan.shutdown()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self.force_exit and self.started:  # Ctrl-C again: nothing is waited for any more
            threading.Thread(target=self._app.state.worker.close, args=(0.0,)).start()


def run(app: FastAPI, at: socket.socket, drain: float) -> None:
    """Serve an application of `make_app` until the process is told to stop.

    Args:
        drain: seconds that requests have to end then.

    Raises:
        OptionError: it could not begin; why is in the log.
    """
    host, port, *_ = at.getsockname()
    config = uvicorn.Config(app, host, port, access_log=False, log_config=None)
    config.timeout_graceful_shutdown = round(drain) + AFTER
    server = Draining(config, app, drain)
    with suppress(SystemExit):
        server.run(sockets=[at])
    if not server.started:
        raise OptionError(f"cannot serve on {host}:{port}")
