"""Calls of tools in a model's text, as chat templates of the Hermes and Qwen kind have them written."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from paceline.decoding.grammar import STYLE
from paceline.files import read_json

BEGIN, END = "<tool_call>", "</tool_call>"


def calls_grammar(schemas: Mapping[str, Mapping[str, Any]], several: bool) -> str:
    """The Lark grammar of one call or more, and nothing else.

    Args:
        schemas: of the arguments, by the tools' names.
        several: whether there may be more than one.
    """
    lines = ["start: call" + (r' ("\n" call)*' if several else "")]
    lines += ["call: " + " | ".join(f"call{at}" for at in range(len(schemas)))]
    for at, (name, schema) in enumerate(schemas.items()):
        before = f'{BEGIN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        lines += [f"call{at}: {json.dumps(before)} arguments{at} {json.dumps('}' + chr(10) + END)}"]
        lines += [f"arguments{at}: %json {json.dumps({'type': 'object', **schema, 'x-guidance': STYLE})}"]
    return "\n".join(lines)


class ToolText:
    """Tells a text's calls from the rest, as it comes.

    What stands between `<tool_call>` and `</tool_call>` is a JSON object with `name` and `arguments`. Anything that is
    not stays text.

    Args:
        several: whether a text may have more than one call; if not, those after the first are left out.
    """

    def __init__(self, several: bool = True) -> None:
        self.calls: list[dict[str, Any]] = []
        self._several = several
        self._held = ""
        self._searched = 0  # of what follows the first beginning there: so much has no end that counts

    def push(self, text: str) -> str:
        """The text that is certainly no call."""
        self._held += text
        shown = ""
        while BEGIN in self._held:
            before, _, rest = self._held.partition(BEGIN)
            found, at = _end(rest, self._searched)
            if not found:
                self._held, self._searched = BEGIN + rest, at
                return shown + before
            inside, self._held, self._searched = rest[:at], rest[at + len(END) :], 0
            call = _call(inside)
            shown += before if call else before + BEGIN + inside + END
            self.calls += [call] if call and (self._several or not self.calls) else []
        held = next((n for n in range(len(BEGIN) - 1, 0, -1) if self._held.endswith(BEGIN[:n])), 0)
        end = len(self._held) - held
        shown, self._held = shown + self._held[:end], self._held[end:]
        return shown

    def flush(self) -> str:
        """The rest, when no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _end(rest: str, begin: int) -> tuple[bool, int]:
    """Whether there is an end, from `begin` on, that is not within a JSON string; and where, or where to look next."""
    while (at := rest.find(END, begin)) >= 0:
        try:
            read_json(rest[:at])
        except ValueError as error:
            if str(error).startswith("Unterminated string"):
                begin = at + 1
                continue
        return True, at
    return False, begin


def _call(text: str) -> dict[str, Any] | None:
    try:
        call = read_json(text)
        name, arguments = call["name"], call.get("arguments", {})
        strict: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, **strict)
        (name + written).encode()  # half a surrogate pair, which JSON can escape, is in no answer
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": written}}
