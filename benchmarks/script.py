"""What scripts that people run by hand have in common."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import NoReturn

import httpx

from paceline.errors import PacelineError, first_line


def run_script(main: Callable[[], int | None]) -> NoReturn:
    """Run a script to its exit status. What was asked wrongly ends it with a line, not with a traceback: a model or a
    file that is not there, a file that is none of its kind, a server that does not answer.
    """
    try:
        sys.exit(main())
    except json.JSONDecodeError as error:
        sys.exit(f"error: no JSON: {error}")
    except (PacelineError, OSError, httpx.TransportError) as error:
        sys.exit(f"error: {first_line(error)}")
