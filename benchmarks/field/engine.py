"""The conductor's side of a running adapter: a process that answers one line by one line and sleeps in between.

Between its turns a process is stopped (SIGSTOP), so that threads which spin while they wait (OpenMP's, say) take
nothing from the engine whose turn it is. How threads wait is left as each package has it: made to sleep by
OMP_WAIT_POLICY, llama.cpp's would have to be woken for every product.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class EngineError(Exception):
    """The process ended or did not answer in time."""


class Engine:
    """One adapter's process, in a process group of its own."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(env or {})},
                process_group=0,
            )

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self, seconds: float) -> dict[str, Any]:
        """What it tells when it has loaded; it is put to sleep then.

        Raises:
            EngineError: when it ends or takes longer; it is closed then.
        """
        answer = self._read(seconds)
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Its answer, which may be `{"error": why}`.

        Raises:
            EngineError: as in `ready`.
        """
        self._signal(signal.SIGCONT)
        try:
            self._input.write((json.dumps(question) + "\n").encode())
            self._input.flush()
        except OSError:
            self._fail("ended")
        return self.ready(seconds)

    def memory(self) -> int:
        """Bytes of physical memory in use by the process; shared pages count in each that shares them."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return 0
        return pages * os.sysconf("SC_PAGESIZE")

    def close(self) -> None:
        """End it, asleep or not."""
        if self.alive:
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, seconds: float) -> dict[str, Any]:
        """The next line; there is never more than one on its way."""
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._output], [], [], left)[0]:
                self._fail(f"no answer in {seconds:.0f} seconds")
            piece = os.read(self._output.fileno(), 1 << 16)
            if not piece:
                self._fail("ended")
            line += piece
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _fail(self, what: str) -> None:
        self.close()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        code = self._process.returncode
        raise EngineError(f"{what} (exit status {code}): {lines[-1].strip() if lines else 'it said nothing'}")
