"""What a matrix product costs by the kind of storage: microseconds, and bytes a second of packed weights.

One matrix of random weights in each kind, by turns, least of some rounds; larger than the caches, so that narrow
products wait for memory or for unpacking, whichever is slower.

    python benchmarks/storage_kinds.py
    python benchmarks/storage_kinds.py --kinds Q4_1,Q4_K --tokens 1,2,4 --outputs 14336 --inputs 4096
"""

from __future__ import annotations

import argparse
import time

import gguf
import numpy as np
import torch

from paceline.targets.native.build import instruction_set
from paceline.targets.native.model import NativeModel, Sizes
from paceline.targets.native.weights import FLOATS, Kind, Packed


def main() -> None:
    def listed(text: str) -> list[str]:
        return text.split(",")

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", type=listed, default=["Q4_1", *(kind.name for kind in Kind if kind != Kind.Q4_1)])
    parser.add_argument("--tokens", type=listed, default=["1", "2", "4", "8", "16"])
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    models = {name: matrix(Kind[name], options.outputs, options.inputs) for name in options.kinds}
    first = options.kinds[0]
    print(f"{instruction_set()}, {torch.get_num_threads()} threads; least microseconds (GB/s, ratio to {first})")
    print(f"{'':6} {'MB':>6}" + "".join(f"{count:>22}" for count in options.tokens))
    hidden = {count: torch.randn(int(count), options.inputs) for count in options.tokens}
    least = {(name, count): float("inf") for name in models for count in hidden}
    for _ in range(options.rounds):
        for count, x in hidden.items():
            for name, model in models.items():
                started = time.perf_counter()
                model.head(x, normed=True)
                least[name, count] = min(least[name, count], time.perf_counter() - started)
    for name, model in models.items():
        size = model.matrices[-1].bytes
        print(f"{name:6} {size / 1e6:6.1f}" + "".join(
            f"{1e6 * least[name, count]:9.0f} ({size / least[name, count] / 1e9:5.1f}, "
            f"{least[name, count] / least[first, count]:4.2f})" for count in hidden
        ))  # fmt: skip


def matrix(kind: Kind, outputs: int, inputs: int) -> NativeModel:
    if kind in FLOATS:
        rows = torch.randn(outputs, inputs).to(FLOATS[kind]).view(torch.uint8)
    else:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]
        raw = np.random.default_rng(0).integers(0, 256, (outputs, inputs // block * size), dtype=np.uint8)
        raw &= 0xBF  # keeps every scale finite
        rows = torch.from_numpy(raw)
    packed = Packed(kind, inputs, [outputs])
    packed.write(rows, packed.places(0))
    return NativeModel(Sizes(inputs), [], None, packed)


if __name__ == "__main__":
    main()
