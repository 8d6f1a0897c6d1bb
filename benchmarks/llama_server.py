"""llama.cpp's own server, alone in its process, until its standard input ends: for serving.py.

Started with the GGUF file, the number of threads, of slots and of tokens for each slot, and what it drafts with if it
is to draft, as NGRAM_SIMPLE; prints its address. Imports nothing but xllamacpp.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import xllamacpp


def main() -> None:
    path, threads, slots, context, *drafter = sys.argv[1:]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp may log to either
    params: Any = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel, params.n_ctx = int(slots), int(slots) * int(context)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    kinds = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{kind}") for kind in drafter]
    params.port = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, file=out, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
