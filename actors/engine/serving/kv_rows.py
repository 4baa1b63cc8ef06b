"""Keys and values in 8 bits: a head's row of a token is its numbers, and one scale.

    stored = [codes, D bytes | zeros up to a multiple of 4 bytes | scale, float32]
    int8     scale = max |x| / 127    code = x / scale to the nearest integer
    fp8      scale = max |x| / 448    code = x / scale to the nearest e4m3

What is attended to is what is stored, also of the rows of the forward itself: so tokens do not depend on how a prompt
was divided, on what else is in the batch, or on a prefix that another request left. `kernels/cpu/dense.cpp` computes
the same numbers.

transformers' paged cache makes its allocators by a table, which this module fills: an allocator of a model that has a
`mark` stores such rows, and gives out what they stand for.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
    SlidingAttentionCacheAllocator,
)

from ....kernels.dense import Coded
from ...budget import coded_row_bytes

_LIMITS = {"int8": 127.0, "fp8": 448.0}
_SCALE = 4  # bytes
_MARK = "tiermoe_kv"  # attribute of a configuration


def encode(rows: torch.Tensor, kind: Coded) -> torch.Tensor:
    """Rows [..., D] of numbers -> int8 [..., coded_row_bytes(D)]."""
    wide = rows.float()
    scale = wide.abs().amax(-1, keepdim=True) / _LIMITS[kind]
    found = torch.where(scale > 0, wide / scale, 0.0)
    codes = found.round().to(torch.int8) if kind == "int8" else found.to(torch.float8_e4m3fn).view(torch.int8)
    padding = codes.new_zeros(()).expand(*codes.shape[:-1], coded_row_bytes(rows.shape[-1]) - _SCALE - rows.shape[-1])
    return torch.cat([codes, padding, scale.contiguous().view(torch.int8)], -1)


def decode(stored: torch.Tensor, width: int, kind: Coded, dtype: torch.dtype) -> torch.Tensor:
    """What rows [..., coded_row_bytes(D)] stand for: [..., D]. width: D."""
    codes, scale = stored[..., :width], stored[..., -_SCALE:].view(torch.float32)
    numbers = codes if kind == "int8" else codes.view(torch.float8_e4m3fn)
    return (numbers.float() * scale).to(dtype)


def rounded(rows: torch.Tensor, kind: Coded) -> torch.Tensor:
    """Rows [..., D] as they are attended to."""
    return decode(encode(rows, kind), rows.shape[-1], kind, rows.dtype)


def mark(model: Any, kind: Coded | None) -> None:
    """Have a model's paged caches store rows so from now on; None: in the model's own type."""
    setattr(model.config.get_text_config(), _MARK, kind)


def marked(model: Any) -> Coded | None:
    """How a model's caches store rows; None: in its own type."""
    return getattr(model.config.get_text_config(), _MARK, None)


def coded_blocks(model: Any, blocks: int) -> int:
    """The blocks that transformers is to be asked for, which counts rows of the model's own type, to get so many."""
    if marked(model) is None:
        return blocks
    width = paged.find_head_dim(model.config.get_text_config())
    return -(-blocks * coded_row_bytes(width) // (width * model.dtype.itemsize))


class _Coded:
    """What differs of an allocator with rows of 8 bits."""

    supports_block_table = False  # kernels that read blocks by a table read numbers
    cache_tensor: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.coded: Coded = getattr(kwargs["config"], _MARK)  # also for the native dense program
        super().__init__(*args, **kwargs)
        self.width: int = self.head_dim  # type: ignore[has-type]
        self.head_dim, self.cache_dtype = coded_row_bytes(self.width), torch.int8

    @classmethod
    def get_bytes_per_page(cls, heads: int, head_dim: int, cache_dtype: torch.dtype, page_size: int) -> int:
        """Of keys and values; head_dim: D."""
        return 2 * heads * coded_row_bytes(head_dim) * page_size

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own, on stored rows: written, gathered, then what they stand for."""
        rows = [encode(states, self.coded) for states in (key_states, value_states)]
        found = super().update(*rows, *args, **kwargs)  # type: ignore[misc]
        return tuple(decode(stored, self.width, self.coded, key_states.dtype) for stored in found)


class _Full(FullAttentionCacheAllocator):
    """Of layers that attend to all tokens."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls if getattr(kwargs["config"], _MARK, None) is None else _CodedFull)


class _Sliding(SlidingAttentionCacheAllocator):
    """Of layers with a window."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls if getattr(kwargs["config"], _MARK, None) is None else _CodedSliding)


class _CodedFull(_Coded, _Full):
    """In 8 bits."""


class _CodedSliding(_Coded, _Sliding):
    """In 8 bits."""


paged.ATTN_TYPE_TO_ALLOCATOR |= {paged.FULL_ATTENTION: _Full, paged.SLIDING_ATTENTION: _Sliding}


class CodedCache(DynamicCache):
    """An ordinary cache whose rows are rounded as the paged one's: for scoring, which runs without that."""

    def __init__(self, model: Any, kind: Coded) -> None:
        super().__init__(config=model.config)
        self._kind = kind

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """See transformers."""
        return super().update(rounded(key_states, self._kind), rounded(value_states, self._kind), *args, **kwargs)
