"""Numba kernels run by torch's own OpenMP threads.

Numba's parallel loops bring a thread pool of their own, whose spinning workers and torch's would fight over the same
cores around every matrix product. So a kernel here is a plain function that each thread of *torch's* team calls once;
it asks for its share of the work with `part()` and `parts()`. A `Program` is many kernels in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import numpy as np
import torch
from llvmlite import binding, ir
from numba import cfunc, njit, types
from numba.core.types import ExternalFunction
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from paceline.compiled import keep

_OPENMP = ("omp_get_thread_num", "omp_get_num_threads", "GOMP_barrier", "GOMP_parallel")


class Arithmetic(TypedDict):
    """Options of numba's decorators."""

    fastmath: set[str]
    error_model: Literal["numpy"]
    forceinline: bool


# Any order of summation will do, as long as it is always the same: it may depend on the place of a value in its row,
# which the compiler's vectors make of it, but on nothing that a loop over one row cannot know. Division as in C: with
# Python's ZeroDivisionError in it no loop becomes vector instructions. All is inlined: a function of its own is
# compiled for itself and again within each kernel, not always to the same order, and which of them runs depends on
# whether the kernel was compiled just now or read from the disk.
FAST: Arithmetic = {"fastmath": {"reassoc", "contract", "arcp", "nsz"}, "error_model": "numpy", "forceinline": True}
EXACT: Arithmetic = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}


def _openmp() -> Any:
    """The OpenMP runtime that torch's CPU library is linked to; None where it is not GNU-compatible."""
    for library in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        handle = ctypes.CDLL(str(library))
        if all(hasattr(handle, name) for name in _OPENMP):
            return handle
    return None


_runtime = _openmp()
if _runtime is not None:
    for _name in _OPENMP:  # under names of our own: another runtime in the process must not answer for torch's
        _symbol = ctypes.cast(getattr(_runtime, _name), ctypes.c_void_p)
        binding.add_symbol(f"paceline_{_name}", _symbol.value)
    _runtime.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    _runtime.GOMP_parallel.restype = None

Floats = NDArray[np.float32]  # in compiled code: an array, or a pointer to its first element
Integers = NDArray[np.int64]

part: Any = ExternalFunction("paceline_omp_get_thread_num", types.int32())
parts: Any = ExternalFunction("paceline_omp_get_num_threads", types.int32())
barrier: Any = ExternalFunction("paceline_GOMP_barrier", types.void())


def available() -> bool:
    """Whether kernels can be made at all: `Kernel` and the modules that use it must not be touched otherwise."""
    return _runtime is not None


def _at(element: types.Type) -> Any:
    @intrinsic
    def pointer(_typing_context: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


floats = _at(types.float32)  # address -> float*
integers = _at(types.int64)


@njit(**FAST)
def real(bits: int) -> np.float32:
    """The float32 whose bits stand in a table of integers."""
    return np.int32(bits).view(np.float32)


def addresses(*tensors: Tensor | None) -> list[int]:
    """As tables have them; 0 for none."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def bits(value: float) -> int:
    """Of a float32, as tables have them."""
    return int(np.float32(value).view(np.int32))


class Kernel:
    """Call with a table of addresses and sizes (int64); `threads` 1 runs in the calling thread."""

    def __init__(self, function: Callable[[Integers], None], arithmetic: Arithmetic = FAST) -> None:
        signature = types.void(types.CPointer(types.int64))
        compiled = keep(partial(cfunc, signature, **(arithmetic | {"forceinline": False})), function)
        self.address = cast("int", compiled.address)
        self._serial = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self._keep_alive = compiled

    def __call__(self, table: np.ndarray, threads: int) -> None:
        if threads == 1:
            self._serial(table.ctypes.data)
        else:
            _runtime.GOMP_parallel(self.address, table.ctypes.data, threads, 0)


def _call_code(_typing: Any, _kernel: Any, _table: Any) -> Any:
    """Call the kernel at an address with the table at another."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        table = ir.IntType(64).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [table])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [builder.inttoptr(arguments[1], table)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


_call: Any = intrinsic(_call_code)


@Kernel
def _run(steps: Integers) -> None:
    for step in range(1, 2 * steps[0], 2):
        _call(steps[step], steps[step + 1])
        barrier()


class Program:
    """Kernels, each with its table, one after another: every thread of the team has done a step before the next begins.

    The tables stay where they are and may be written between runs; who makes a program keeps them alive.
    """

    def __init__(self, steps: Sequence[tuple[Kernel, np.ndarray]]) -> None:
        addresses = [number for kernel, table in steps for number in (kernel.address, table.ctypes.data)]
        self._steps = np.array([len(steps), *addresses], dtype=np.int64)

    def run(self, threads: int) -> None:
        _run(self._steps, threads)
