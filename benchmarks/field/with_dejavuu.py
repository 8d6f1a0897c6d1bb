"""dejavuu over transformers (its `hf` backend), without its ONNX export: chains verified, a drafter a mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from dejavuu.core.engine import generate as run
from dejavuu.core.sampling import Sampler
from dejavuu.decoders.hf import HFBackend
from dejavuu.drafters import make_drafter
from protocol import Asked, Build, Generate, Told, serve


def load(settings: dict[str, Any]) -> Build:
    torch.set_num_threads(settings["threads"])
    with as_transformers_4(Path(settings["model"])) as folder:
        model = HFBackend(str(folder), device="cpu", dtype="float32", attn_implementation="sdpa")

    def build(_: str, options: dict[str, Any]) -> Generate:
        def generate(asked: Asked) -> Told:
            sampler = Sampler(asked.temperature, 1.0, asked.seed) if asked.temperature > 0 else None
            drafter = make_drafter(options["method"]) if options else None
            [eos, *_] = settings["eos"]
            found = run(model, asked.ids, asked.max_new_tokens, drafter, options.get("budget", 0), eos, sampler=sampler)
            return Told(found.tokens, found.steps)

        return generate

    return build


@contextmanager
def as_transformers_4(model: Path) -> Iterator[Path]:
    """The model's folder with the rotary base where transformers 4 looks; it takes 10,000 where it finds none."""
    config = json.loads((model / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    with TemporaryDirectory() as folder:
        for file in model.iterdir():
            if file.name != "config.json":
                (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)


if __name__ == "__main__":
    serve(load, ["dejavuu", "torch", "transformers"])
