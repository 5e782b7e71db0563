"""A decoder-only transformer that is one function for three uses: training, reading prompts, decoding.

Without a cache `forward` sees whole sequences. With one it sees only their new tokens and finds the rest in the cache;
the logits are the same up to rounding. Sequences are padded on the right, with any token: causal attention never looks
there, and in the cache the padding is overwritten before it comes into reach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

__all__ = ["Cache", "Transformer", "one_thread"]


class Transformer(nn.Module):
    """Pre-norm blocks, learned positions, an output layer of its own.

    :param vocabulary: number of token ids.
    :param context: the longest sequence, in tokens.
    :raises ValueError: `width` is no multiple of `heads`.
    """

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width}, it must be a multiple of heads={heads}")
        self.context = context
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # near-uniform predictions to begin with: exploration is free
                nn.init.normal_(parameter, std=0.02 if name == "head.weight" else width**-0.5)

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Logits [rows, length, vocabulary] of the tokens that follow.

        :param tokens: int64 [rows, length].
        :param positions: int64 [rows, length], only with a cache: where in its sequence each token stands.
        :param cache: of as many rows; takes in the keys and values of `tokens`.
        """
        if positions is None or cache is None:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = block(x)
        else:
            x = self.tokens(tokens) + self.positions(positions)
            reach = int(positions.max()) + 1
            visible = torch.arange(reach) <= positions[:, None, :, None]
            for layer, block in enumerate(self.blocks):
                x = block(x, _Past(cache.keys[layer], cache.values[layer], positions, visible))
        return cast(Tensor, self.head(self.norm(x)))


class Cache:
    """Keys and values, each float32 [layers, rows, context, heads, width / heads]; row r belongs to sequence r."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def empty(cls, rows: int, context: int, width: int, layers: int, heads: int) -> Cache:
        shape = (layers, rows, context, heads, width // heads)
        return cls(torch.zeros(shape), torch.zeros(shape))

    def rows(self, start: int, stop: int) -> Cache:
        """A view of some rows."""
        return Cache(self.keys[:, start:stop], self.values[:, start:stop])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy rows over others."""
        taken, filled = torch.tensor(sources), torch.tensor(targets)
        with one_thread():
            for tensor in (self.keys, self.values):
                tensor.index_copy_(1, filled, tensor.index_select(1, taken))


class _Past:
    """What one layer needs of the cache."""

    def __init__(self, keys: Tensor, values: Tensor, positions: Tensor, visible: Tensor) -> None:
        self.keys = keys
        self.values = values
        self.positions = positions
        self.visible = visible
        """bool [rows, 1, length, reach]: which positions each new token attends to."""

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Take in the new keys and values; all within reach, [rows, reach, heads, width / heads]."""
        rows = torch.arange(len(keys))[:, None]
        self.keys[rows, self.positions] = keys
        self.values[rows, self.positions] = values
        reach = self.visible.shape[-1]
        return self.keys[:, :reach], self.values[:, :reach]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, past: _Past | None = None) -> Tensor:
        x = x + self._attention(self.attention_norm(x), past)
        return x + cast(Tensor, self.down(gelu(self.up(self.mlp_norm(x)))))

    def _attention(self, x: Tensor, past: _Past | None) -> Tensor:
        rows, length, width = x.shape
        mixed = self.queries_keys_values(x).view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = mixed.unbind(2)
        if past is not None:
            keys, values = past.extended(keys, values)
        y = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=None if past is None else past.visible,
            is_causal=past is None,
        )
        return cast(Tensor, self.attended(y.transpose(1, 2).reshape(rows, length, width)))


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on the calling thread alone: matrices this small lose more to the others than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
