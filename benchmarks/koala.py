"""KOALA's table: Medusa and EAGLE heads of K layers, with and without adversarial learning.

    python benchmarks/koala.py train --data DATA … --out DIR [--layers 1,2,3] [--seeds 0,1,2] [-- OPTION …]
    paceline bench --methods "$(python benchmarks/koala.py methods --out DIR)" --suite … --out RESULTS
    python benchmarks/koala.py table --out DIR [--results RESULTS]

`train` trains a head for every combination of what it is given (what stands after `--` goes to `paceline train`), all
on the same data for the same steps; what is in DIR already is not trained again, and more may join it later. `methods`
names, for the benchmark, plain decoding and each head's chain, and with `--tree` its dynamic tree. `table` has a row
for all seeds of a head, mean and standard deviation: simulated acceptance on the samples that training held back, the
same for all heads; what the discriminator adds to it, seed by seed, how often it is right in the end and how well the
head fools it; and of RESULTS n-alpha, tau and the speedup over `ar`. Options after `--` that only one kind has go with
`--kinds`.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from table import Row, about, markdown, named, read
from trained import facts, own_and_passed, train

KINDS = ("medusa", "eagle")
POSITIONS = 3  # of n-alpha, as in the paper
MEASURED = (*(f"accepted_{n}" for n in range(1, POSITIONS + 1)), "held_back_loss")
OF_THE_GAME = ("discriminator_accuracy", "adversarial_held_back_loss")  # the latter: what lambda weighs
HEAD = re.compile(r"\w+:head=(\S+/(medusa|eagle)-k(\d)(?:-adv([\d.]+)-([a-z-]+))?-s\d+)[+:]")
CHAIN = "fixed:k=4"
TREES = {"medusa": "tree=dynamic:budget=16+fixed:k=4", "eagle": "tree=4:budget=16+fixed:k=4"}


class Kind(NamedTuple):
    """A row of the table: heads that differ by their seeds alone."""

    drafter: str
    layers: int
    weight: float  # lambda; 0: distillation alone
    form: str = ""  # of the discriminator

    @classmethod
    def of(cls, drafter: str, trained: dict[str, Any]) -> Kind:
        play = trained.get("adversarial")
        return cls(drafter, trained["layers"], *((play["weight"], play["form"]) if play else (0.0,)))

    @property
    def name(self) -> str:
        return f"{self.drafter}-k{self.layers}" + (f"-adv{self.weight:g}-{self.form}" if self.weight else "")

    @property
    def words(self) -> list[str]:
        play = [f"--adversarial={self.weight:g}", f"--discriminator={self.form}"] if self.weight else []
        return [f"--layers={self.layers}", *play]


def trained_heads(folder: Path) -> dict[Kind, list[Path]]:
    """The folders of the heads that are done."""
    found = defaultdict(list)
    for drafter in KINDS:
        for path in sorted(folder.glob(f"*/{drafter}.json")):
            trained = facts(drafter, path.parent)
            if trained and trained["ended"]:
                found[Kind.of(drafter, trained)].append(path.parent)
    return dict(sorted(found.items(), key=lambda item: (KINDS.index(item[0].drafter), *item[0][1:])))


def train_all(args: argparse.Namespace) -> None:
    data = [word for folder in args.data for word in ("--data", str(folder))]
    for seed, layers, weight, drafter in itertools.product(args.seeds, args.layers, args.adversarial, args.kinds):
        for form in args.discriminator if weight else [""]:
            kind = Kind(drafter, layers, weight, form)
            words = ["--model", args.model, *data, *kind.words, f"--seed={seed}", *args.options]
            train(drafter, args.out / f"{kind.name}-s{seed}", words)


def methods(args: argparse.Namespace) -> None:
    names = ["ar"]
    for kind, folders in trained_heads(args.out).items():
        for folder in folders:
            names.append(f"{kind.drafter}:head={folder}+{CHAIN}")
            if args.tree:
                names.append(f"{kind.drafter}:head={folder}:{TREES[kind.drafter]}")
    print(",".join(names))


def table(args: argparse.Namespace) -> None:
    heads = trained_heads(args.out)
    about_all = ["drafter", "K", "lambda", "discriminator", "seeds"]
    named_so = [*(f"accepted {n}" for n in range(1, POSITIONS + 1)), "held-back loss"]
    lines, gains = [[*about_all, *named_so]], [[*about_all, *named_so, "it is right", "E[-log D]"]]
    for kind, folders in heads.items():
        found, without = measured(kind, folders), Kind(kind.drafter, kind.layers, 0.0)
        lines.append(
            [*_about(kind, folders), *(spread([m.get(key) for m in found.values()], ".3f") for key in MEASURED)]
        )
        if kind.weight and without in heads:
            other = measured(without, heads[without])
            pairs = [(found[seed], other[seed]) for seed in found if seed in other]
            apart = ([a[key] - b[key] for a, b in pairs if key in a] for key in MEASURED)
            game = (spread([m[key] for m in found.values()], ".3f") for key in OF_THE_GAME)
            gains.append([*_about(kind, pairs), *(spread(values, "+.4f") for values in apart), *game])
    print(f"Simulated acceptance, on text of the model that was held back:\n\n{markdown(lines)}")
    if len(gains) > 1:
        print(f"\nWhat the discriminator adds to the same head of the same seed:\n\n{markdown(gains)}")
    if args.results:
        config, rows = read(args.results)
        print(f"\n{about(config)}")
        for temperature in dict.fromkeys(row["temperature"] for row in rows):
            here = [row for row in rows if row["temperature"] == temperature and row["task"] == args.task]
            if not here:
                sys.exit(f"{args.results} has no task {args.task}")
            print(f"\n{named(temperature)}, {here[0]['prompts']} prompts:\n\n{benchmarked(heads, here)}")


def named_heads(rows: Sequence[Row]) -> dict[Kind, list[Path]]:
    """The heads in results, by the names that their folders have from `train_all`."""
    found = defaultdict(list)
    for row in rows:
        if match := HEAD.match(row["method"]):
            folder, drafter, layers, weight, form = match.groups()
            found[Kind(drafter, int(layers), float(weight or 0), form or "")].append(Path(folder))
    return found


def measured(kind: Kind, folders: Sequence[Path]) -> dict[int, dict[str, float]]:
    """By seed, what training measured in the end."""
    trained = [facts(kind.drafter, folder) or {} for folder in folders]
    return {about["seed"]: about["measured"] for about in trained}


def benchmarked(heads: dict[Kind, list[Path]], rows: Sequence[Row]) -> str:
    alphas = [f"{n}-alpha" for n in range(1, POSITIONS + 1)]
    lines = [["drafter", "K", "lambda", "discriminator", "seeds", "draft", *alphas, "tau", "x `ar`"]]
    for kind, folders in heads.items():
        for draft, mark in (("chain", f"+{CHAIN}"), ("tree", f":{TREES[kind.drafter]}")):
            names = {f"{kind.drafter}:head={folder}{mark}" for folder in folders}
            if found := [row for row in rows if row["method"] in names]:
                alpha = [spread([(row["n_alpha"] or [None] * 5)[n] for row in found], ".3f") for n in range(POSITIONS)]
                speeds = [spread([row[key] for row in found], ".2f") for key in ("tau", "speedup_ar")]
                lines.append([*_about(kind, found), draft, *alpha, *speeds])
    return markdown(lines)


def _about(kind: Kind, found: Sequence[object]) -> list[str]:
    return [f"`{kind.drafter}`", str(kind.layers), f"{kind.weight:g}", kind.form, str(len(found))]


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean and, of several, standard deviation."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    mean = format(statistics.mean(known), form)
    return mean if len(known) == 1 else f"{mean} ± {format(statistics.stdev(known), form.lstrip('+'))}"


def main() -> None:
    words, options = own_and_passed()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run in {"train": train_all, "methods": methods, "table": table}.items():
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="a folder for every head")
        command.set_defaults(run=run)
    training, naming, telling = commands.choices["train"], commands.choices["methods"], commands.choices["table"]
    training.add_argument("--model", default="smollm2-135m")
    training.add_argument("--data", type=Path, nargs="+", required=True, help="folders of paceline train data")
    for name, kind, default in (
        ("kinds", str, ",".join(KINDS)),
        ("layers", int, "1,2,3"),
        ("adversarial", float, "0,0.1"),
        ("discriminator", str, "low-cost"),
        ("seeds", int, "0"),
    ):
        listed = _list_of(kind)
        training.add_argument(f"--{name}", type=listed, default=listed(default), help=f"default {default}")
    naming.add_argument("--tree", action="store_true", help="dynamic trees too")
    telling.add_argument("--results", type=Path, help="of paceline bench")
    telling.add_argument("--task", default="overall")
    args = parser.parse_args(words)
    args.options = options
    args.run(args)


def _list_of(kind: Any) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
