"""AdaEDL's figures 3 and 4: draft models of several sizes, under always K tokens, max-confidence and AdaEDL.

    python benchmarks/papers/draft_models.py --out drafts
    python benchmarks/papers/adaedl_draft_sizes.py --draft drafts/layers-28 [--draft …] --suite FILE --out RESULTS

K_max is 7 and the temperature 1, as in the paper. tokens/s, in brackets the share of drafted tokens that are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable

from draft_models import size
from measured import Row, grid, measured, options

from paceline.bench.methods import AR
from paceline.bench.suites import OVERALL

RULES = ("fixed:k=7", "max-confidence:k_max=7", "adaedl:k_max=7")  # in the paper's order


def method(folder: str, rule: str) -> str:
    return f"draft-model:model={folder}+{rule}"


def table(rows: Iterable[Row], millions: dict[str, float]) -> str:
    """Over all tasks.

    Args:
        millions: parameters of the draft models, by folder.
    """
    found = {row["method"]: row for row in rows if row["task"] == OVERALL}
    cells = {("none", "parameters, million"): "", ("none", f"`{AR}`"): f"{found[AR]['tokens_per_s']:.1f}"}
    for folder, parameters in millions.items():
        name = f"`{folder}`"
        cells[name, "parameters, million"] = f"{parameters:.0f}"
        for rule in RULES:
            row = found[method(folder, rule)]
            accepted = "" if row["v_d"] is None else f" ({100 * row['v_d']:.0f} %)"
            cells[name, f"`{rule}`"] = f"{row['tokens_per_s']:.1f}{accepted}"
    return grid("draft model", cells)


def main() -> None:
    parser = options(__doc__, temperature=1.0)
    parser.add_argument("--draft", action="append", required=True, metavar="FOLDER", help="may be repeated")
    args = parser.parse_args()
    rows = measured(args, [AR, *(method(folder, rule) for folder in args.draft for rule in RULES)])
    print(f"\n{table(rows, {folder: size(folder)[1] / 1e6 for folder in args.draft})}")


if __name__ == "__main__":
    main()
