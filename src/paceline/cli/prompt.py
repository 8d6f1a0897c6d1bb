"""The prompt a command continues: from its argument, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path

from paceline.errors import OptionError, check_text, require


def read_prompt(argument: str | None, file: str | None, what: str = "prompt") -> str:
    """The text of exactly one of `argument` and `file` ("-": standard input).

    Args:
        what: what errors call it.

    Raises:
        OptionError: none or both given, an unreadable file, text that is empty or not UTF-8.
    """
    if (argument is None) == (file is None):
        raise OptionError("give a prompt, or --file PATH (- for standard input)" + (", not both" if file else ""))
    text = argument if argument is not None else _read(str(file), what)
    require(bool(text.strip()), f"the {what} is empty")
    return check_text(text, what)


def _read(file: str, what: str) -> str:
    require(bool(file), f"cannot read the {what} from a file without a name")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise OptionError(f"cannot read the {what} from {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{file} is not UTF-8 text (byte {error.start})") from error
