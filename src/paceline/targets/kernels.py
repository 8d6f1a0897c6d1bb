"""The arithmetic between the matrix products, on CPU in float32, such that a token's bits depend on nothing but the
token: not on the width of the pass, its neighbours in the batch, or where in the cache its keys stand.

Every kernel treats a row as a unit, always by the same loops.
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, njit

from paceline.targets.team import EXACT, FAST, Floats, Integers, Kernel, floats, part, parts, real


@njit(**EXACT)  # reassociated, the two-step range reduction would lose its point
def exp(x: np.float32) -> np.float32:
    """e^x within 1 ulp (Cephes' polynomial), x clamped to +-87; unlike libm's it becomes vector instructions."""
    x = min(max(x, np.float32(-87.0)), np.float32(87.0))
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4) * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1)
    result: np.float32 = p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return result


@njit(**FAST)
def dot(x: Floats, y: Floats) -> np.float32:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@njit(**FAST)
def _layer_norm(x: Floats, weight: Floats, bias: Floats, y: Floats, eps: np.float32) -> None:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i]
    mean = total / np.float32(x.size)
    for i in range(x.size):
        y[i] = x[i] - mean
    scale = np.float32(1) / math.sqrt(dot(y, y) / np.float32(x.size) + eps)
    for i in range(x.size):
        y[i] = y[i] * scale * weight[i] + bias[i]


# -- norms and activations ---------------------------------------------------------------------------------------------
# Tables: NORM  hidden, delta or 0, weight, bias or 0 (RMS), out, rows, size, bits of eps, tap or 0
#         GATE  gate and up side by side, out, rows, size of out
#         GELU  in, out, rows, size
#         CLAMPED  as GATE, bits of alpha, bits of the limit

DELTA, ROWS, TAP = 1, 5, 8  # of a NORM table


@Kernel
def add_norm(table: Integers) -> None:
    """hidden += delta; tap = hidden; out = norm(hidden)."""
    rows, size = table[5], table[6]
    hidden, weight = carray(floats(table[0]), (rows, size)), carray(floats(table[2]), size)
    out, eps = carray(floats(table[4]), (rows, size)), real(table[7])
    for row in range(part(), rows, parts()):
        x, y = hidden[row], out[row]
        if table[1] != 0:
            delta = carray(floats(table[1]), (rows, size))[row]
            for i in range(size):
                x[i] += delta[i]
        if table[8] != 0:
            carray(floats(table[8]), (rows, size))[row] = x
        if table[3] == 0:
            scale = np.float32(1) / math.sqrt(dot(x, x) / np.float32(size) + eps)
            for i in range(size):
                y[i] = x[i] * scale * weight[i]
        else:
            _layer_norm(x, weight, carray(floats(table[3]), size), y, eps)


@Kernel
def silu_gate(table: Integers) -> None:
    """out = silu(gate) * up."""
    rows, size = table[2], table[3]
    both, out = carray(floats(table[0]), (rows, 2 * size)), carray(floats(table[1]), (rows, size))
    for row in range(part(), rows, parts()):
        gate, up, y = both[row, :size], both[row, size:], out[row]
        for i in range(size):
            y[i] = gate[i] / (np.float32(1) + exp(-gate[i])) * up[i]


@Kernel
def gelu_tanh_gate(table: Integers) -> None:
    """out = gelu(gate) * up, by the approximation with a tanh."""
    rows, size = table[2], table[3]
    both, out = carray(floats(table[0]), (rows, 2 * size)), carray(floats(table[1]), (rows, size))
    for row in range(part(), rows, parts()):
        gate, up, y = both[row, :size], both[row, size:], out[row]
        for i in range(size):
            x = gate[i]
            inner = np.float32(0.79788456080286536) * (x + np.float32(0.044715) * x * x * x)
            y[i] = np.float32(0.5) * x * (np.float32(1) + math.tanh(inner)) * up[i]


@Kernel
def clamped_swiglu(table: Integers) -> None:
    """out = (up + 1) * gate * sigmoid(alpha * gate), of clamped values: gpt-oss's."""
    rows, size, alpha, limit = table[2], table[3], real(table[4]), real(table[5])
    both, out = carray(floats(table[0]), (rows, 2 * size)), carray(floats(table[1]), (rows, size))
    for row in range(part(), rows, parts()):
        gate, up, y = both[row, :size], both[row, size:], out[row]
        for i in range(size):
            g, u = min(gate[i], limit), min(max(up[i], -limit), limit)
            y[i] = (u + np.float32(1)) * (g / (np.float32(1) + exp(-alpha * g)))


@Kernel
def gelu(table: Integers) -> None:
    """out = x * Phi(x)."""
    rows, size = table[2], table[3]
    source, out = carray(floats(table[0]), (rows, size)), carray(floats(table[1]), (rows, size))
    for row in range(part(), rows, parts()):
        x, y = source[row], out[row]
        for i in range(size):
            y[i] = np.float32(0.5) * x[i] * (np.float32(1) + math.erf(x[i] * np.float32(0.70710678118654752)))
