"""EESD's tables 4 and 6: Thompson sampling on other drafters, and on trees of early-exit.

    python benchmarks/papers/draft_models.py --out drafts
    python benchmarks/papers/eesd_thompson.py --draft drafts/exit-head [--draft …] --suite FILE --out RESULTS

Speedups over plain decoding, in brackets HM in %. "Vanilla SD" is `draft-model`, "Self SD" is `layer-skip`, and K = 10
is the paper's fixed length; K = 2 and `cost=auto` are beside it because of what drafting costs here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from measured import Row, grid, measured, options

from paceline.bench.methods import AR
from paceline.bench.suites import OVERALL

RULES = ("fixed:k=10", "fixed:k=2", "beta-ts", "beta-ts:cost=auto")  # of table 4
EARLY_EXIT = ("early-exit", "early-exit:tree=2:nodes=3", "early-exit:tree=3:nodes=6")  # of table 6: chains and trees
THOMPSON = ("beta-ts", "cali-ts", "beta-ts:cost=auto", "cali-ts:cost=auto")


def methods(drafts: Iterable[str]) -> list[str]:
    others = [*(f"draft-model:model={folder}" for folder in drafts), "layer-skip"]
    of_table_4 = [f"{drafter}+{rule}" for drafter in others for rule in RULES]
    return [AR, *of_table_4, *(f"{drafter}+{rule}" for drafter in EARLY_EXIT for rule in THOMPSON)]


def table(rows: Sequence[Row], rules: Sequence[str], drafters: Iterable[str]) -> str:
    """Over all tasks."""
    found = {row["method"]: row for row in rows if row["task"] == OVERALL}
    cells = {(f"`{drafter}`", f"`{rule}`"): shown(found[f"{drafter}+{rule}"]) for drafter in drafters for rule in rules}
    return grid("drafter", cells)


def shown(row: Row) -> str:
    return f"{row['speedup_ar']:.2f}" + (f" ({row['hm']:.0f})" if row["hm"] is not None else "")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draft", action="append", default=[], metavar="FOLDER", help="a draft model; may be repeated")
    args = parser.parse_args()
    rows = measured(args, methods(args.draft))
    others = [*(f"draft-model:model={folder}" for folder in args.draft), "layer-skip"]
    print(f"\nOther drafters (table 4):\n\n{table(rows, RULES, others)}")
    print(f"\nTrees (table 6):\n\n{table(rows, THOMPSON, EARLY_EXIT)}")


if __name__ == "__main__":
    main()
