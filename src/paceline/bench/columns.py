"""What of a row of data is the prompt: a column of texts or of a chat, in the forms that data sets have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.errors import require

#: Columns that hold the prompt, when none is named: the first of these that is there.
PROMPT_COLUMNS = (
    "turns",
    "prompt",
    "question",
    "instruction",
    "messages",
    "conversations",
    "conversation",
    "text",
    "document",
    "article",
)
#: What a row is called, and whose results it counts among, where it says so: see `suites.load_suite`.
NAMES = ("id", "question_id", "task", "group", "category")
USERS = ("user", "human", "prompter")


def prompt_column(columns: Iterable[str], row: Mapping[str, Any], named: str | None, where: str) -> str:
    """The column of the prompt: the one that is named, else the first with a usual name, else the first chat.

    Args:
        columns: those that there are.
        row: one row of them, to see what a chat is.
        where: how an error begins.

    Raises:
        OptionError: there is no such column, or none that looks like a prompt.
    """
    columns = list(columns)
    chats = (column for column in columns if is_chat(row.get(column)))
    found = named or next((column for column in PROMPT_COLUMNS if column in columns), None) or next(chats, None)
    require(
        found in columns,
        f"{where}: {'no column ' + repr(found) if found else 'no column that looks like a prompt'}; "
        f"there are {', '.join(columns)}, say which with :column=NAME",
    )
    return str(found)


def is_chat(value: Any) -> bool:
    """A list of messages, `{"role": …, "content": …}` or `{"from": …, "value": …}`."""
    return isinstance(value, list) and bool(value) and all(isinstance(m, Mapping) and _role(m) for m in value)


def turns(value: Any) -> list[Any]:
    """The user's messages in a text, a list of texts or a chat; `suites.load_suite` checks them."""
    if not isinstance(value, list):
        return [value]
    return [_text(message) for message in value if _role(message) in USERS] if is_chat(value) else value


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role") or message.get("from")


def _text(message: Mapping[str, Any]) -> Any:
    """What it says, its parts of text in one; no text where a part is something else, such as an image."""
    content = message.get("content", message.get("value"))
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else None
