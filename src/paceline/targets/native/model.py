"""A Llama-family model packed for the C++ pass, called on tensors. The structures mirror native.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.targets.native.build import library
from paceline.targets.native.weights import CMatrix, Packed, pointer


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CMatrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
    )


class CModel(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("hidden", "heads", "kv_heads", "head_dim", "inner", "reserved")),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.POINTER(CLayer)),
        ("norm", ctypes.c_void_p),
        ("head", CMatrix),
    )


class CPass(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("cosine", "sine", "cache")),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "row_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in ("position", "row", "slot", "prefix", "extra_start", "extra")),
        ("workspace", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class Sizes:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int  # of the MLP
    epsilon: float  # of the norms
    scale: float  # of attention scores


@dataclass(frozen=True)
class LayerWeights:
    qkv: Packed
    out: Packed
    gate_up: Packed  # interleaved
    down: Packed
    attention_norm: Float[Tensor, " hidden"] | None
    mlp_norm: Float[Tensor, " hidden"] | None
    query_norm: Float[Tensor, " head_dim"] | None = None
    key_norm: Float[Tensor, " head_dim"] | None = None

    @property
    def matrices(self) -> tuple[Packed, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def c(self) -> CLayer:
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        return CLayer(*(matrix.c for matrix in self.matrices), *map(pointer, norms))


class Places(NamedTuple):
    """Where each token of a pass stands (int32 arrays); tokens are flat over the rows of the batch.

    A token's key and value go to `slot` of cache row `row`. It sees slots `0 .. prefix-1` of that row, then, in this
    order, `extra[extra_start[t] : extra_start[t+1]]`; its own slot is the last it sees.
    """

    position: Int[np.ndarray, " tokens"]
    row: Int[np.ndarray, " tokens"]
    slot: Int[np.ndarray, " tokens"]
    prefix: Int[np.ndarray, " tokens"]
    extra_start: Int[np.ndarray, " tokens+1"]
    extra: Int[np.ndarray, " entries"]


class NativeModel:
    """Not for several threads at once: calls share a workspace."""

    def __init__(
        self, sizes: Sizes, layers: Sequence[LayerWeights], norm: Float[Tensor, " hidden"] | None, head: Packed
    ) -> None:
        self.sizes = sizes
        self._keep = (layers, norm, head)  # the C structures point into them
        self._outputs = head.outputs
        self._layers = (CLayer * len(layers))(*(layer.c() for layer in layers))
        whole, real = astuple(sizes)[:-2], astuple(sizes)[-2:]
        self._c, self._without_norm = (
            ctypes.byref(CModel(*whole, 0, *real, self._layers, at, head.c)) for at in (pointer(norm), None)
        )
        self._workspace = torch.empty(0)
        self._library = library()

    @property
    def matrices(self) -> list[Packed]:
        """All that a pass reads, each of a chain by itself, the head last."""
        layers, _, head = self._keep
        return [*(part for layer in layers for matrix in layer.matrices for part in matrix.chain), head]

    def layers(
        self,
        hidden: Float[Tensor, "tokens hidden"],
        cosine: Float[Tensor, "positions half_head_dim"],
        sine: Float[Tensor, "positions half_head_dim"],
        store: Float[Tensor, "layers 2 rows kv_heads capacity head_dim"],
        places: Places,
        start: int,
        stop: int,
        skip: bytes | None = None,
    ) -> None:
        """Layers `start .. stop-1`, in place over `hidden` (contiguous); writes the tokens' keys and values.

        Args:
            skip: two flags a layer of the range: leave out its attention, its MLP.
        """
        call = CPass(
            len(hidden),
            torch.get_num_threads(),
            *(tensor.data_ptr() for tensor in (cosine, sine, store)),
            *store.stride()[:4],
            *(array.ctypes.data for array in places),
        )
        call.workspace = self._scratch(self._library.paceline_workspace(self._c, ctypes.byref(call)))
        self._library.paceline_layers(self._c, ctypes.byref(call), start, stop, skip, hidden.data_ptr())

    def head(self, hidden: Float[Tensor, "tokens hidden"], normed: bool = False) -> Float[Tensor, "tokens vocab"]:
        """Final norm, unless it is `normed` already, and output matrix; `hidden` contiguous."""
        tokens, threads = len(hidden), torch.get_num_threads()
        logits = torch.empty(tokens, self._outputs)
        workspace = self._scratch(tokens * (self.sizes.hidden + 64))
        model = self._without_norm if normed else self._c
        self._library.paceline_head(model, hidden.data_ptr(), tokens, threads, workspace, logits.data_ptr())
        return logits

    def _scratch(self, floats: int) -> int:
        if self._workspace.numel() < floats:
            self._workspace = torch.empty(floats)
        return self._workspace.data_ptr()
