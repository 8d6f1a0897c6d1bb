"""ADED's table 2: latency, accept length and speedup over the size of the corpus that the matrix was counted from.

    python benchmarks/papers/aded_corpus.py --corpus FILE [--corpus FILE …] --suite FILE --out RESULTS [--shares 64,8,1]

For each share, every n-th line of the corpora makes a matrix of trigrams in RESULTS/matrices. Each drafts in the
paper's form (24 nodes) and as `trigram` does by default. RESULTS gets `corpus.json` beside what `paceline bench`
writes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measured import Row, measured, options
from table import markdown
from trigram_replay import Model, share_of

from paceline.bench.methods import AR
from paceline.bench.suites import OVERALL
from paceline.drafters.trigram.build import build
from paceline.errors import PacelineError, require
from paceline.files import whole
from paceline.targets.store import sha256

FORMS = {
    "the paper's": "trigram:matrix={}:literal=true:order=3:depth=4:adapt=output:budget=24+fixed:k=4",
    "`trigram`": "trigram:matrix={}",
}


def matrix(model: Model, corpus: Sequence[Path], every: int, folder: Path) -> dict[str, Any]:
    """Facts of the matrix of every n-th line in `folder`, made unless it is there."""
    note, files = folder / "built.json", {path.name: sha256(path) for path in corpus}
    if not note.exists():
        with tempfile.TemporaryDirectory() as parts:
            built = build(model.tokenizer, share_of(corpus, every, Path(parts)), folder)
        sizes = {"corpus_tokens": built.tokens, "bytes": built.bytes, "ngrams": built.ngrams}
        note.write_text(json.dumps({"every": every, **sizes, "files": files}) + "\n")
    facts: dict[str, Any] = json.loads(note.read_text())
    require(facts.pop("files") == files, f"{folder} is of another corpus: choose another --out, or delete it")
    return facts


def told(rows: Sequence[Row], facts: Sequence[dict[str, Any]], folders: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each form and share."""
    found = {row["method"]: row for row in rows if row["task"] == OVERALL}
    lines = []
    for form, name in FORMS.items():
        for made, folder in zip(facts, folders, strict=True):
            row = found[name.format(folder)]
            own = {"milliseconds": 1e3 / row["tokens_per_s"], "draft_share": row["split"]["draft"] / row["seconds"]}
            lines.append({"form": form, **made, **own, "tau": row["tau"], "speedup": row["speedup_ar"]})
    return lines


def table(lines: Sequence[dict[str, Any]], plain: float) -> str:
    """In the paper's columns.

    Args:
        plain: milliseconds a token of plain decoding.
    """
    head = ["form", "corpus, tokens", "matrix, MB", "latency, ms a token", "accept length", "speedup"]
    cells = [[f"`{AR}`", "", "", f"{plain:.2f}", "", ""]]
    for one in lines:
        sizes = [f"{one['corpus_tokens']:,}", f"{one['bytes'] / 1e6:.1f}"]
        cells.append([one["form"], *sizes, f"{one['milliseconds']:.2f}", f"{one['tau']:.2f}", f"{one['speedup']:.2f}"])
    return markdown([head, *cells])


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--corpus", type=Path, action="append", required=True, help="JSONL, .gz or not")
    parser.add_argument("--shares", default="64,8,1", type=lambda text: [int(word) for word in text.split(",")])
    args = parser.parse_args()
    folders = [args.out / "matrices" / str(every) for every in args.shares]
    try:
        model = Model(args.model)
        facts = [matrix(model, args.corpus, *one) for one in zip(args.shares, folders, strict=True)]
    except (PacelineError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    rows = measured(args, [AR, *(name.format(folder) for name in FORMS.values() for folder in folders)])
    plain = next(1e3 / row["tokens_per_s"] for row in rows if (row["method"], row["task"]) == (AR, OVERALL))
    lines = told(rows, facts, folders)
    with whole(args.out / "corpus.json") as path:
        path.write_text(json.dumps({"plain_milliseconds": plain, "rows": lines}, indent=1) + "\n")
    print(f"\n{table(lines, plain)}")


if __name__ == "__main__":
    main()
