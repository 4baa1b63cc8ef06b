"""Compressed keys (DeepSeek V4), for rows of several lengths in one forward.

Such a layer keeps, beside the keys of a window, a compressed key for every so many tokens, and the tokens that the next
one will be made of. Rows are at different places of that cycle, so they cannot be stacked: a batch's layer has a layer
for each row, and the model's own compressor runs once for each. All else of the forward runs for all rows together.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")  # `_layer_type` of such layers of a cache
_ROWS = "tiermoe_rows"  # attribute of a layer of several rows
_STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate", "entry_count")


def compress_apart(model: nn.Module) -> None:
    """Have a model's compressors run once for each row of a batch."""
    for module in model.modules():
        compressor = getattr(module, "compressor", None)
        if isinstance(compressor, nn.Module) and "forward" not in vars(compressor):
            _replace(compressor)


def rows_of(layer: Any) -> list[Any]:
    """What a layer compresses for each row: layers of one row, whose keys are not read."""
    found: list[Any] = vars(layer).get(_ROWS) or [_copied(layer)]
    return found


def is_compressed(layer: Any) -> bool:
    """Whether a layer of a cache has compressed keys."""
    return getattr(layer, "_layer_type", None) in KINDS


def set_rows(layer: Any, rows: Sequence[Any]) -> None:
    """Let a layer compress for these rows; what it held itself goes."""
    layer.values = layer.keys  # they are one tensor
    setattr(layer, _ROWS, list(rows))
    for name in _states(layer):
        setattr(layer, name, {})


def alone(layer: Any, row: int, device: torch.device) -> None:
    """Leave a layer what it compresses for one row, in tensors of their own."""
    of_row = rows_of(layer)[row]
    vars(layer).pop(_ROWS, None)
    layer.values = layer.keys
    for name in _states(of_row):
        held = getattr(of_row, name)
        setattr(layer, name, {key: _on(value, device) for key, value in held.items()})


def nbytes(layer: Any) -> int:
    """Bytes of the tensors of a layer of one row, its keys apart."""
    held = [value for name in _states(layer) for value in getattr(layer, name).values()]
    return sum(value.nbytes for value in held if isinstance(value, torch.Tensor))


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _states(layer: Any) -> list[str]:
    return [name for name in _STATES if hasattr(layer, name)]


def _copied(layer: Any) -> Any:
    made = copy.copy(layer)
    for name in _states(made):
        setattr(made, name, dict(getattr(made, name)))
    return made


class _Of:
    """A cache of which a compressor reads one layer."""

    def __init__(self, number: int, layer: Any) -> None:
        self.layers = {number: layer}


def _replace(compressor: Any) -> None:
    plain = compressor.forward

    def forward(
        hidden: torch.Tensor, residual: torch.Tensor, positions: torch.Tensor, cache: Any, number: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden [B, S, H] -> compressed keys [B, 1, C, D], and what is added to their scores [B, 1, S, C]."""
        rows = None if cache is None else vars(cache.layers[number]).get(_ROWS)
        if rows is None:
            of_all: tuple[torch.Tensor, torch.Tensor | None] = plain(hidden, residual, positions, cache, number)
            return of_all
        found = [
            plain(hidden[i : i + 1], residual[i : i + 1], positions[i : i + 1], _Of(number, row), number)
            for i, row in enumerate(rows)
        ]
        return _side_by_side(found, hidden.shape[1])

    compressor.forward = forward


def _side_by_side(
    found: Sequence[tuple[torch.Tensor, torch.Tensor | None]], tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as long as the longest: what is added to the scores hides the rest."""
    longest = max(keys.shape[2] for keys, _ in found)
    if all(bias is None and keys.shape[2] == longest for keys, bias in found):
        return torch.cat([keys for keys, _ in found]), None
    first = found[0][0]
    keys = first.new_zeros((len(found), 1, longest, first.shape[3]))
    added = first.new_full((len(found), 1, tokens, longest), float("-inf"))
    for i, (own, bias) in enumerate(found):
        count = own.shape[2]
        keys[i, :, :count] = own[0]
        added[i, :, :, :count] = 0.0 if bias is None else bias[0]
    return keys, added
