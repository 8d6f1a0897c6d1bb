"""All layers of a narrow pass in one call of torch's team: no Python between its products, norms and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.targets import attention, kernels, narrow
from paceline.targets.linear import Linear, PackedLinear
from paceline.targets.narrow import NarrowProduct
from paceline.targets.team import Kernel, Program, addresses, bits

if TYPE_CHECKING:
    from paceline.targets.fused import FusedLayer, Weights
    from paceline.targets.parts import Norm


class _Call(NamedTuple):
    kernel: Kernel
    table: list[int]
    rows: int = -1  # where in the table the width of the pass stands
    flow: bool = False  # the table begins with the flow's address, which each pass has anew


class NarrowLayers:
    """The steps of all layers, each with a table in which a pass fills in its width and where things lie.

    What steps give each other lies in buffers that the next pass uses again: one pass at a time.

    Attributes:
        outputs: of the output matrix; 0: it cannot be asked for here.
    """

    def __init__(self, weights: Weights, activation: Kernel, numbers: Sequence[int]) -> None:
        self._keep_alive = weights  # tables have addresses of theirs
        self.widest, shape = NarrowProduct.widest, weights.shape
        self._activation, self._numbers = activation, numbers
        heads, up = shape.heads * shape.head_dim, weights.layers[0].up
        assert isinstance(up, PackedLinear)
        sizes = {
            "entered": shape.hidden,
            "qkv": heads + 2 * shape.kv_heads * shape.head_dim,
            "attended": heads,
            "unnormed": shape.hidden,
            "delta": shape.hidden,
            "up": up.shape[0],
            "active": up.shape[0] // (2 if shape.gated else 1),
        }
        self._buffers = {name: torch.zeros(self.widest, size) for name, size in sizes.items()}
        self._at = {name: buffer.data_ptr() for name, buffer in self._buffers.items()}
        layers = [list(self._layer(layer)) for layer in weights.layers]
        self._last = list(self._head(weights))
        self.outputs: int = self._last[-1].table[narrow.OUTPUTS] if self._last else 0
        steps = [step for part in (*layers, self._last) for step in part]
        #: `[steps, ATTEND_FIELDS]`, the longest of tables
        self._tables = np.array([step.table + [0] * (attention.ATTEND_FIELDS - len(step.table)) for step in steps])
        self._kernels = [step.kernel for step in steps]
        self._firsts = np.cumsum([0, *map(len, layers)]).tolist()  # of each layer, the first step
        self._entries = np.array(self._firsts[:-1])
        self._attends = np.array([at for at, step in enumerate(steps) if step.kernel is attention.attend])
        self._flows = np.array([at for at, step in enumerate(steps) if step.flow])
        with_rows = [(at, step.rows) for at, step in enumerate(steps) if step.rows >= 0]
        self._rows = tuple(np.array(with_rows).T)
        self._programs: dict[tuple[int, int, bool], Program] = {}

    @classmethod
    def of(cls, weights: Weights, activation: Kernel, numbers: Sequence[int]) -> NarrowLayers | None:
        """None for models with layers of other steps: experts, or attention and MLP side by side.

        Args:
            activation: of the MLPs, with the `numbers` that its table ends with.
        """
        if weights.shape.parallel or weights.shape.residual_scale != 1.0 or not weights.layers:
            return None
        fits = all(map(_has_all_steps, weights.layers)) and _alike(weights)
        return cls(weights, activation, numbers) if fits else None

    def _layer(self, layer: FusedLayer) -> Iterator[_Call]:
        at = self._at
        yield self._norm(layer.attention_norm)
        yield _product(layer.qkv, at["entered"], at["qkv"])
        yield _Call(attention.attend, [at["qkv"], at["attended"]])
        yield from self._added(layer.out, "attended", layer.attention_post_norm)
        yield self._norm(layer.mlp_norm)
        yield _product(layer.up, at["entered"], at["up"])
        size = self._buffers["active"].shape[1]
        yield _Call(self._activation, [at["up"], at["active"], 0, size, *self._numbers], rows=2)
        yield from self._added(layer.down, "active", layer.mlp_post_norm)

    def _head(self, weights: Weights) -> Iterator[_Call]:
        """The final norm and the output matrix, where they have such steps."""
        if weights.norm is not None and isinstance(weights.head, PackedLinear) and weights.head.narrow:
            yield self._norm(weights.norm)
            yield _product(weights.head, self._at["entered"], 0)

    def _norm(self, norm: Norm | None) -> _Call:
        assert norm is not None
        table = [
            0,
            self._at["delta"],
            *addresses(norm.weight, norm.bias),
            self._at["entered"],
            0,
            len(norm.weight),
            bits(norm.eps),
        ]
        return _Call(kernels.add_norm, table, rows=kernels.ROWS, flow=True)

    def _added(self, linear: Linear | None, source: str, post_norm: Norm | None) -> Iterator[_Call]:
        """What a sublayer adds to the flow, from its last matrix."""
        at = self._at
        if post_norm is None:
            yield _product(linear, at[source], at["delta"])
            return
        yield _product(linear, at[source], at["unnormed"])
        table = [
            at["unnormed"],
            0,
            *addresses(post_norm.weight, post_norm.bias),
            at["delta"],
            0,
            len(post_norm.weight),
            bits(post_norm.eps),
        ]
        yield _Call(kernels.add_norm, table, rows=kernels.ROWS)

    def __call__(
        self,
        attends: np.ndarray,
        flow: Tensor,
        start: int,
        stop: int,
        threads: int,
        taps: Mapping[int, Tensor],
        logits: Tensor | None = None,
    ) -> Tensor:
        """What layer `stop - 1` adds to the flow, `[rows, hidden]`, which has become what enters its MLP.

        Args:
            attends: `[layers, ATTEND_FIELDS]`, the tables of attention but for where it reads and writes.
            taps: filled with what enters these layers, above `start` and below `stop`; as `flow` is.
            logits: where `stop` is the number of layers, filled with what the output matrix gives after the final norm,
                `[rows, outputs]`. Then all has been added to the flow.
        """
        tables, first = self._tables, self._firsts[start]
        tables[self._rows] = len(flow)
        tables[self._flows, 0] = flow.data_ptr()
        tables[self._attends, attention.HEADS :] = attends[:, attention.HEADS :]
        tables[self._entries, kernels.DELTA] = self._at["delta"]  # a pass that was stopped may have left a 0
        tables[first, kernels.DELTA] = 0
        tables[self._entries, kernels.TAP] = 0
        for tap, rows in taps.items():
            tables[self._firsts[tap], kernels.TAP] = rows.data_ptr()
        if logits is not None:
            tables[-1, narrow.OUT] = logits.data_ptr()
        key = start, stop, logits is not None
        if key not in self._programs:
            steps = range(first, self._firsts[stop] + (0 if logits is None else len(self._last)))
            self._programs[key] = Program([(self._kernels[step], tables[step]) for step in steps])
        self._programs[key].run(threads)
        return self._buffers["delta"][: len(flow)]


def _has_all_steps(layer: FusedLayer) -> bool:
    linears = (layer.qkv, layer.out, layer.up, layer.down)
    return (
        all(isinstance(linear, PackedLinear) and linear.narrow for linear in linears)
        and layer.attention_norm is not None
        and layer.mlp_norm is not None
        and layer.experts is None
    )


def _alike(weights: Weights) -> bool:
    """Whether all layers' matrices have the shapes that buffers are made for."""
    layers = weights.layers
    shapes = {
        tuple(part.shape for part in (layer.qkv, layer.out, layer.up, layer.down) if isinstance(part, PackedLinear))
        for layer in layers
    }
    return len(shapes) == 1 and all(
        isinstance(layer.qkv, PackedLinear) and layer.qkv.shape[1] == weights.shape.hidden for layer in layers
    )


def _product(linear: Linear | None, source: int, out: int) -> _Call:
    assert isinstance(linear, PackedLinear)
    assert linear.narrow is not None
    table = linear.narrow.table.copy()
    table[narrow.X], table[narrow.OUT] = source, out
    return _Call(linear.narrow.kernel, table.tolist(), rows=narrow.ROWS)
