"""How often what followed a text's last tokens when they stood in it before follows again, by how many of them match.

Of what the model wrote in folders of `paceline train data`, the first `--tokens` of each answer. It is what drafters
that copy take for granted before they have seen any (`CHANCES` in drafting/copies.py).

    python benchmarks/copy_rates.py DATA …
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.drafting.copies import LONGEST, Copies, Rates
from paceline.training.data.dataset import Dataset
from paceline.training.data.samples import UNKNOWN


class Counts(Rates):
    """Counts alone, of what `Copies` learns."""

    def __init__(self) -> None:
        super().__init__()
        self.right, self.of = [0] * LONGEST, [0] * LONGEST

    def copied(self, matched: int, right: bool) -> None:
        self.right[matched - 1] += right
        self.of[matched - 1] += 1


def main() -> None:
    """Print a line a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    for folder in arguments.data:
        data, counts = Dataset(folder), Counts()
        for sample in range(len(data)):
            batch = data.batch([sample])
            ids, written = batch.ids[0].tolist(), (batch.top_ids[0, :, 0] != UNKNOWN).nonzero().flatten().tolist()
            if written:  # at these places the token that follows is the model's
                begin = written[0] + 1
                copies = Copies(ids[:begin], counts)
                for end in range(begin, min(begin + arguments.tokens, len(ids))):
                    copies.read(ids[: end + 1])
        rates = " ".join(f"{right / max(of, 1):.3f}" for right, of in zip(counts.right, counts.of, strict=True))
        print(f"{folder}: {rates} of {sum(counts.of)}")


if __name__ == "__main__":
    main()
