"""What stop predictors learn from: drafted tokens, as a policy sees them, with the target's verdicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import DataError
from paceline.files import whole
from paceline.policies.predictors import Seen

HEADER = "paceline"

#: One row: signals, depth, accepted, and the hidden states of target and drafter.
Example = tuple[Tensor, int, bool, Tensor | None, Tensor | None]


@dataclass
class Examples:
    """Drafted tokens that the target judged: of each round those up to the first that it rejected.

    Attributes:
        prompt: index of the prompt that a token was drafted for.
        facts: what they were made with.
    """

    signals: Float[Tensor, "tokens signals"]
    depth: Int[Tensor, " tokens"]
    accepted: Bool[Tensor, " tokens"]
    prompt: Int[Tensor, " tokens"]
    target: Float[Tensor, "tokens width"] | None = None
    draft: Float[Tensor, "tokens draft_width"] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.depth)

    def seen(self, rows: Tensor, device: torch.device | str = "cpu") -> Seen:
        """Some of them, as predictors take them."""

        def part(table: Tensor | None) -> Tensor | None:
            return None if table is None else table[rows].to(device).float()

        return Seen(self.signals[rows].to(device), self.depth[rows].to(device), part(self.target), part(self.draft))

    @classmethod
    def of(cls, rows: Sequence[tuple[Example, int]], facts: dict[str, Any]) -> Examples:
        """Examples, one or more, each with the index of its prompt."""
        examples, prompts = zip(*rows, strict=True)
        shown, depth, accepted, verified, of_draft = zip(*examples, strict=True)
        hidden = verified[0] is not None
        return cls(
            torch.stack(shown),
            torch.tensor(depth),
            torch.tensor(accepted),
            torch.tensor(prompts),
            torch.stack(verified) if hidden else None,
            torch.stack(of_draft) if hidden else None,
            facts,
        )

    @classmethod
    def joined(cls, parts: Sequence[Examples]) -> Examples:
        """One table of several that were made with the same."""

        def column(name: str) -> Any:
            tables = [getattr(part, name) for part in parts]
            return None if tables[0] is None else torch.cat(tables)

        names = [field.name for field in fields(cls) if field.name != "facts"]
        return cls(**{name: column(name) for name in names}, facts=parts[0].facts)

    def save(self, path: Path) -> None:
        """Whole or not at all. Raises DiskFull."""
        columns = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        with whole(path) as partial:
            save_file(columns, partial, {HEADER: json.dumps(self.facts)})

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Raises DataError when the file is missing or not one of ours."""
        try:
            with safe_open(path, "pt") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
                return cls(**columns, facts=json.loads(file.metadata()[HEADER]))
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path} does not hold examples for stop predictors") from error
