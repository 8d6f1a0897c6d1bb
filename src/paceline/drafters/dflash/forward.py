"""DFlash's head at work: keys and values of the text are kept, and a block is one pass over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from paceline.drafters.dflash.head import DFlashHead, DFlashLayer
from paceline.drafting.base import Row
from paceline.drafting.own_layers import fast_linear
from paceline.drafting.parallel import Guesses
from paceline.targets.llama_layers import LlamaNorm, turned
from paceline.targets.span import Span
from paceline.targets.target import PREFILL_CHUNK, Target

Linear = Callable[[Float[Tensor, "rows in"]], Float[Tensor, "rows out"]]


class DFlashForward:
    """What `DFlashHead.forward` computes, with products as fast as the target's tier has them.

    Slot i of a row of the cache holds what the layers make of the target's hidden states at position i, and after the
    last of these the block of this round.

    Args:
        block: tokens of a block.
    """

    def __init__(self, head: DFlashHead, target: Target, block: int) -> None:
        self.target, self.block = target, block
        self.mask, self.from_known = head.config.mask, head.config.from_known
        self.fc, self.known_norm, self.norm = _fast(target, head.fc), _Norm(head.hidden_norm), _Norm(head.norm)
        layers = [cast("DFlashLayer", layer) for layer in head.layers]
        # All layers make keys and values of the same: one product.
        self.known = _fast(target, *(part for it in layers for part in (it.self_attn.k_proj, it.self_attn.v_proj)))
        self.key_norms = torch.stack([layer.self_attn.k_norm.weight.detach() for layer in layers])
        self.layers = [_Layer(layer, target, *sight) for layer, sight in zip(layers, head.config.sight, strict=True)]
        attention = layers[0].self_attn
        self.rotary, self.eps, self.head_dim = head.rotary, attention.k_norm.variance_epsilon, attention.head_dim
        self.heads = attention.k_proj.out_features // attention.head_dim
        self.output = self._output(head)
        self.lengths: np.ndarray  # int64 [batch]: positions of which keys and values are known
        self.keys: Float[Tensor, "layers batch heads slots head_dim"]
        self.values: Float[Tensor, "layers batch heads slots head_dim"]

    def _output(self, head: DFlashHead) -> Linear:
        own = head.own_outputs(self.target)
        return self.target.logits if own is None else fast_linear(*own, self.target, output=True)

    def start(self, batch: int, capacity: int) -> None:
        shape = (len(self.layers), batch, self.heads, capacity + self.block, self.head_dim)
        self.keys, self.values = (
            torch.zeros(shape, dtype=self.target.dtype, device=self.target.device) for _ in range(2)
        )
        self.lengths = np.zeros(batch, dtype=np.int64)

    def move(self, source: int, target: int) -> None:
        count = self.lengths[target] = self.lengths[source]
        for cache in (self.keys, self.values):
            cache[:, target, :, :count] = cache[:, source, :, :count]

    def read(self, slot: int, states: Float[Tensor, "tokens taps*hidden"]) -> None:
        """The target's hidden states at the positions that follow."""
        for piece in states.split(PREFILL_CHUNK) if len(states) else ():
            first = int(self.lengths[slot])
            last = self.lengths[slot] = first + len(piece)
            made = self.known(self.known_norm(self.fc(piece)))
            # tokens, layers, keys or values, heads, head_dim
            keys, values = made.view(len(piece), len(self.layers), 2, self.heads, self.head_dim).unbind(2)
            keys = functional.rms_norm(keys, (self.head_dim,), eps=self.eps) * self.key_norms[:, None]
            cos, sin = (table[0, :, None, None] for table in self._angles(keys, np.arange(first, last)[None]))
            self.keys[:, slot, :, first:last] = (keys * cos + turned(keys) * sin).permute(1, 2, 0, 3)
            self.values[:, slot, :, first:last] = values.permute(1, 2, 0, 3)

    def __call__(self, rows: Sequence[Row]) -> Guesses:
        """A block after each row's last token."""
        batch, starts = len(rows), self.lengths[: len(rows)]
        ids = torch.full((batch, self.block), self.mask, dtype=torch.long)
        ids[:, 0] = torch.tensor([row.ids[-1] for row in rows])
        hidden = self.target.embed(Span(ids.to(self.target.device), starts.copy())).flatten(0, 1)
        positions = starts[:, None] + np.arange(self.block)
        angles, begins = self._angles(hidden, positions), starts.tolist()
        for layer, keys, values in zip(self.layers, self.keys[:, :batch], self.values[:, :batch], strict=True):
            hidden = layer(hidden, keys, values, begins, angles)
        states = self.norm(hidden).view(batch, self.block, -1)[:, 0 if self.from_known else 1 :]
        return Guesses(states, self.output(states.flatten(0, 1)).view(*states.shape[:2], -1))

    def _angles(self, like: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary(like, torch.from_numpy(positions).to(like.device))
        return cos, sin


class _Layer:
    """A decoder layer over a block, `[batch * block, hidden]`."""

    def __init__(self, layer: DFlashLayer, target: Target, causal: bool, window: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.causal, self.window, self.shared = causal, window, attention.shared
        self.first_norm, self.second_norm = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.query_norm, self.key_norm = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self.head_dim = attention.head_dim
        self.sizes = [part.out_features for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.qkv = _fast(target, attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.down = _fast(target, attention.o_proj), _fast(target, mlp.down_proj)
        self.gate_up = _fast(target, mlp.gate_proj, mlp.up_proj)

    def seen(self, start: int, block: int, device: torch.device) -> Bool[Tensor, "block slots"] | None:
        """Which of a row's slots each token of its block sees; None: all see all.

        Args:
            start: slots before the block.
        """
        if not self.causal and not self.window:
            return None
        slots, own = torch.arange(start + block, device=device), torch.arange(start, start + block, device=device)
        seen = slots <= own[:, None] if self.causal else slots >= 0
        return seen & (slots > own[:, None] - self.window) if self.window else seen

    def __call__(
        self,
        hidden: Float[Tensor, "rows hidden"],
        keys: Float[Tensor, "batch heads slots head_dim"],
        values: Float[Tensor, "batch heads slots head_dim"],
        starts: Sequence[int],
        angles: tuple[Tensor, Tensor],
    ) -> Float[Tensor, "rows hidden"]:
        batch = len(starts)
        block = len(hidden) // batch
        made = self.qkv(self.first_norm(hidden)).split(self.sizes, -1)
        # batch, heads, block, head_dim
        query, key, value = (x.view(batch, block, -1, self.head_dim).transpose(1, 2) for x in made)
        cos, sin = (table[:, None] for table in angles)
        query, key = self.query_norm(query), self.key_norm(key)
        query, key = (x * cos + turned(x) * sin for x in (query, key))
        # Row by row: what a request draws must not depend on the others.
        attended = []
        for row, start in enumerate(starts):
            end, seen = start + block, self.seen(start, block, hidden.device)
            keys[row, :, start:end], values[row, :, start:end] = key[row], value[row]
            one = (query[row, None], keys[row, None, :, :end], values[row, None, :, :end])
            attended.append(functional.scaled_dot_product_attention(*one, attn_mask=seen, enable_gqa=self.shared > 1))
        mixed = torch.cat(attended).transpose(1, 2).reshape(batch * block, -1)
        hidden = hidden + self.out(mixed)
        gate, up = self.gate_up(self.second_norm(hidden)).chunk(2, -1)
        return hidden + self.down(functional.silu(gate) * up)


class _Norm:
    """`LlamaNorm` in one operation."""

    def __init__(self, norm: LlamaNorm) -> None:
        self.weight, self.eps = norm.weight.detach(), norm.variance_epsilon

    def __call__(self, hidden: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


def _fast(target: Target, *parts: torch.nn.Linear) -> Linear:
    """Linear layers of the same input as one, their outputs side by side."""
    bias = None if parts[0].bias is None else torch.cat([part.bias.detach() for part in parts])
    return fast_linear(torch.cat([part.weight.detach() for part in parts]), bias, target)
