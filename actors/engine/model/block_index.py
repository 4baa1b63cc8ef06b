"""An index that chooses blocks of keys (MiniMax M3), for rows of several lengths in one forward.

transformers cuts the keys into blocks by their places in the cache. Rows of a batch are aligned at their last tokens,
so the padding in front of the shorter ones would shift their blocks. Here the index sees each row's keys from its
first one on, with the padding behind, where it is in the future of every token; the mask that it makes is moved back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def align_blocks(model: nn.Module) -> None:
    """Have a model's indices of blocks choose for each row as for the row alone."""
    for module in model.modules():
        if hasattr(module, "build_block_mask") and "forward" not in vars(module):
            _align(module)


def _align(index: Any) -> None:
    plain, plain_mask = index.forward, index.build_block_mask

    def forward(hidden: torch.Tensor, rotary: Any, cache: Any, positions: torch.Tensor) -> torch.Tensor:
        """hidden [B, S, H], positions [B, S] -> blocks [B, heads, S, blocks]."""
        aligned = cache if cache is None or len(positions) == 1 else _FromTheFirst(cache, index.layer_idx, positions)
        chosen: torch.Tensor = plain(hidden, rotary, aligned, positions)
        return chosen

    def build_block_mask(
        blocks: torch.Tensor, mask: torch.Tensor | None, keys: int, dtype: Any, device: Any, positions: torch.Tensor
    ) -> torch.Tensor:
        """[B, heads, S, keys]: 0 where a token attends, else the least number of the type."""
        if len(positions) == 1:
            one: torch.Tensor = plain_mask(blocks, mask, keys, dtype, device, positions)
            return one
        made: torch.Tensor = plain_mask(blocks, None, keys, dtype, device, positions)  # hides what is in the future
        return _turned(made, -1, keys - _lengths(positions), forward=False)

    index.forward, index.build_block_mask = forward, build_block_mask


class _FromTheFirst:
    """A cache whose index has each row's keys from the first one on; it is what `layers` gives, too."""

    def __init__(self, cache: Any, layer: int, positions: torch.Tensor) -> None:
        self._layer, self._lengths = cache.layers[layer], _lengths(positions)
        self.layers = {layer: self}

    def update_index(self, keys: torch.Tensor) -> torch.Tensor:
        """[B, 1, keys, D]."""
        every: torch.Tensor = self._layer.update_index(keys)
        return _turned(every, 2, every.shape[2] - self._lengths, forward=True)


def _lengths(positions: torch.Tensor) -> torch.Tensor:
    """Tokens of each row [B]."""
    return positions[:, -1] + 1


def _turned(tensor: torch.Tensor, dim: int, by: torch.Tensor, forward: bool) -> torch.Tensor:
    """A tensor [B, ..], each row turned along a dimension: `by` [B] items go from the front to the end, or back."""
    size, dim = tensor.shape[dim], dim % tensor.ndim
    at = torch.arange(size, device=tensor.device)[None] + (by if forward else -by)[:, None]
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = len(by), size
    return tensor.gather(dim, (at % size).view(shape).expand_as(tensor))
