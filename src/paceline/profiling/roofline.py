"""The roofline: the least time a pass can take here, from what it must read and compute and what the machine can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.profiling.timing import wait

if TYPE_CHECKING:
    from paceline.targets import Target

BUFFER = 512 << 20  # bytes, more than caches hold
SIDE = {"cpu": 2048, "cuda": 8192}  # of the matrices multiplied


@dataclass(frozen=True)
class PassCost:
    """What a pass of a dense model needs at least, whatever runs it.

    Attributes:
        weight_bytes: read of the weights, as the tier stores them.
        cache_bytes: read of the KV cache, once for all of the pass's tokens.
        flops: floating-point operations of the matrix products and of attention, two for a product and its sum.
    """

    weight_bytes: int
    cache_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes


def pass_cost(target: Target, width: int, context: int, greedy: bool = False) -> PassCost:
    """Of a chain of `width` tokens after `context` committed ones, batch 1; of a `Target.forward_greedy`, if asked."""
    weights = target.greedy_weight_count if greedy else target.weight_count
    shape, heads = target.cache_shape(), target.config.num_attention_heads
    seen = sum(range(context + 1, context + width + 1))  # keys, over all tokens of the pass
    return PassCost(
        target.greedy_weight_bytes if greedy else target.weight_bytes,
        2 * shape.layers * shape.kv_heads * shape.head_dim * (context + width) * target.dtype.itemsize,
        2 * weights * width + 4 * shape.layers * heads * shape.head_dim * seen,
    )


@dataclass(frozen=True)
class Roofline:
    """What the machine does at best, with all of torch's threads.

    Attributes:
        bandwidth: bytes a second, reading what no cache holds.
        flops: floating-point operations a second, of a large matrix product or of independent multiply-adds.
    """

    bandwidth: float
    flops: float

    def or_better(self, other: Roofline) -> Roofline:
        return Roofline(max(self.bandwidth, other.bandwidth), max(self.flops, other.flops))

    def floor(self, cost: PassCost) -> float:
        """The least seconds of a pass: reading and computing at best overlap."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops)


@torch.inference_mode()
def measure_roofline(device: torch.device, dtype: torch.dtype, seconds: float = 1.0) -> Roofline:
    """Of torch's own operations, and on a CPU of the native library's loops as well, where there is one: no single
    operation reaches what the machine can do everywhere (torch's product in float32 uses half of AVX-512 on some CPUs).

    Args:
        dtype: of the matrix product.
        seconds: for each of the two measurements, whose best counts: a busy machine only ever makes them worse.
    """
    if device.type == "cpu":
        from paceline.targets.native.memory import Arena  # brings more than those who only time passes need

        buffer = Arena().take(BUFFER).view(torch.float32)  # in huge pages, like the native tier's weights
    else:
        buffer = torch.empty(BUFFER // 4, device=device)
    buffer.fill_(1.0)  # memory that was never written may be a single page of zeros
    reading = _best(lambda: buffer.sum(), device, seconds)
    side = SIDE.get(device.type, SIDE["cpu"])
    floats = dtype if dtype.is_floating_point else torch.float32
    left, right, out = torch.randn(3, side, side, device=device).to(floats).unbind()
    computing = _best(lambda: torch.mm(left, right, out=out), device, seconds)
    measured = Roofline(BUFFER / reading, 2 * side**3 / computing)
    if device.type == "cpu" and (loops := _native_loops(buffer, dtype, seconds)):
        return measured.or_better(loops)
    return measured


def _native_loops(buffer: Tensor, dtype: torch.dtype, seconds: float) -> Roofline | None:
    """Streaming reads and independent multiply-adds at the widest vectors, on all of torch's threads."""
    from paceline.targets.native.build import available, library
    from paceline.targets.native.weights import Kind

    if not available():
        return None
    threads, deadline = torch.get_num_threads(), time.perf_counter() + seconds
    # Other types may have faster multiply-adds than these.
    kinds = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16, torch.int8: Kind.Q8_0}
    best = Roofline(0.0, 0.0)
    while best.bandwidth == 0 or time.perf_counter() < deadline:
        peak = library().paceline_peak(threads, kinds[dtype]) if dtype in kinds else 0.0
        bandwidth = library().paceline_bandwidth(buffer.data_ptr(), buffer.numel(), threads)
        best = best.or_better(Roofline(bandwidth, peak))
    return best


def _best(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the fastest call."""
    calls = 1 if device.type == "cpu" else 10  # at a time, to hide what a launch costs
    best, deadline = float("inf"), time.perf_counter() + seconds
    run()
    while best == float("inf") or time.perf_counter() < deadline:
        wait(device)
        started = time.perf_counter()
        for _ in range(calls):
            run()
        wait(device)
        best = min(best, (time.perf_counter() - started) / calls)
    return best
