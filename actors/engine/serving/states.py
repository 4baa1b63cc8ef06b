"""A model's own cache, by row and by token: what transformers' layers of a cache hold, joined, left, kept and resumed.

Rows of one cache are aligned at their last tokens. What a layer holds for each token (keys, values, an index's keys) is
padded on the left; what it holds of the past as a whole (running states, convolutions) is stacked.

A *checkpoint* is the state of one row after some tokens, in host memory. It has the keys of the tokens after its
parent, the longest checkpoint of the same beginning, and the whole states: keys of a common beginning are there once.

    find     the longest checkpoint that a prompt begins with, the last token left out, which gives the first logits
    border   where a prompt parts from earlier ones, in pages: a checkpoint there serves those that part there, too
    keep     one more; the least recently used go. An ancestor is used whenever a descendant is, so it goes later

Checkpoints are found by the hash of their tokens, salted: requests of different salts share nothing.
"""

from __future__ import annotations

import copy
import hashlib
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import cache_utils

from ..model import compressed_keys

# dimensions of the requests and of the tokens
_BY_TOKEN = {
    "keys": (0, -2), "values": (0, -2), "idx_keys": (0, -2), "indexer_keys": (0, 1), "indexer_position_ids": (1, 2),
}  # fmt: skip
_STATES = ("conv_states", "recurrent_states", "linear_cache")
_KINDS = {
    cache_utils.DynamicLayer,
    cache_utils.DynamicSlidingWindowLayer,
    cache_utils.DynamicIndexedLayer,
    cache_utils.LinearAttentionLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer,
    cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
    cache_utils.DummyLayer,
}
_OF_MODELS = ("minimax_m3_sparse", *compressed_keys.KINDS)  # `_layer_type` of those that a model's own module has
States = dict[tuple[str, int], torch.Tensor]  # of one layer: by dictionary and key, rows first
_MOST_PAGES = 1 << 16  # of earlier prompts, whose hashes are remembered
_SECRET = secrets.token_bytes(32)  # of this process: no client can compute a hash


def is_known(cache: Any) -> bool:
    """Whether all that this cache holds is known here: it has no layers but those of `_KINDS` and `_OF_MODELS`."""
    known = type(cache) is cache_utils.DynamicCache or type(cache).__name__ == "MiniMaxCache"
    return known and all(
        type(layer) in _KINDS or getattr(layer, "_layer_type", None) in _OF_MODELS for layer in cache.layers
    )


def join(cache: Any, other: Any) -> None:
    """Add the rows of another cache of the same model behind those of `cache`, aligned at their last tokens."""
    for layer, added in zip(_holders(cache), _holders(other), strict=True):
        for name, batch, time in _by_token(layer):
            one, two = getattr(layer, name), getattr(added, name)
            length = max(one.shape[time], two.shape[time])
            setattr(layer, name, torch.cat([_padded(one, time, length), _padded(two, time, length)], batch))
        for kind, number, state in states(layer):
            getattr(layer, kind)[number] = torch.cat([state, getattr(added, kind)[number]])
        if compressed_keys.is_compressed(layer):
            compressed_keys.set_rows(layer, compressed_keys.rows_of(layer) + compressed_keys.rows_of(added))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = max(layer.cumulative_length, added.cumulative_length)


def leave(cache: Any, kept: Sequence[int], length: int) -> None:
    """Keep some rows of a cache. length: of the longest of them, in tokens."""
    for layer in _holders(cache):
        for name, batch, time in _by_token(layer):
            rows = _rows(getattr(layer, name), kept, batch)
            short = min(rows.shape[time], length)
            setattr(layer, name, rows.narrow(time, rows.shape[time] - short, short))
        for kind, number, state in states(layer):
            getattr(layer, kind)[number] = _rows(state, kept, 0)
        if compressed_keys.is_compressed(layer):
            rows = compressed_keys.rows_of(layer)
            compressed_keys.set_rows(layer, [rows[i] for i in kept])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def _holders(cache: Any) -> list[Any]:
    """What of a cache holds tensors: its layers, and the cache itself (MiniMax's running states)."""
    return [*cache.layers, cache]


def rewind(cache: Any, rejected: Sequence[int], length: int, after: Sequence[Sequence[States]]) -> None:
    """Take the last tokens of each row out of a cache.

    Args:
        rejected: how many, of each row.
        length: of the longest row afterwards, in tokens.
        after: of each layer its states after each token of the last forward (`states_of`).
    """
    for layer, kept in zip(cache.layers, after, strict=True):
        most = layer.sliding_window - 1 if getattr(layer, "is_sliding", False) else length
        for name, batch, time in _by_token(layer):
            setattr(layer, name, _without_last(getattr(layer, name), batch, time, rejected, min(most, length)))
        for kind, number, _ in states(layer):
            rows = [kept[len(kept) - 1 - count][kind, number][i : i + 1] for i, count in enumerate(rejected)]
            getattr(layer, kind)[number] = torch.cat(rows)
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length


def _without_last(tensor: torch.Tensor, batch: int, time: int, rejected: Sequence[int], length: int) -> torch.Tensor:
    """Each row without its last places, aligned at the last that are left; of these `length`."""
    least = min(rejected)
    left = tensor.narrow(time, 0, tensor.shape[time] - least)
    size = left.shape[time]
    if max(rejected) > least:
        left = left.clone()
        for i, count in enumerate(rejected):
            if shift := count - least:
                row = left.narrow(batch, i, 1)
                row.narrow(time, shift, size - shift).copy_(row.narrow(time, 0, size - shift).clone())
                row.narrow(time, 0, shift).zero_()
    short = min(size, length)
    return left.narrow(time, size - short, short)


def states_of(layer: Any) -> States:
    """Copies of what a layer holds of the past as a whole."""
    return {(kind, number): state.clone() for kind, number, state in states(layer)}


def _by_token(layer: Any) -> Iterator[tuple[str, int, int]]:
    """The tensors that have a place for each token: name, dimension of the rows, dimension of the tokens."""
    for name, (batch, time) in _BY_TOKEN.items():
        if getattr(layer, name, None) is not None:
            yield name, batch, time


def states(layer: Any) -> Iterator[tuple[str, int, torch.Tensor]]:
    """The tensors of the past as a whole: name of their dictionary or list, key, tensor with the rows first."""
    for name in _STATES:
        found = getattr(layer, name, {})
        for number, state in list(found.items() if isinstance(found, dict) else enumerate(found)):
            if isinstance(state, torch.Tensor):
                yield name, number, state


def _rows(tensor: torch.Tensor, kept: Sequence[int], batch: int) -> torch.Tensor:
    return tensor.index_select(batch, torch.tensor(kept, device=tensor.device))


def _padded(tensor: torch.Tensor, time: int, length: int) -> torch.Tensor:
    """With zeros in front, which the mask hides."""
    missing = length - tensor.shape[time]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[time] = missing
    return torch.cat([tensor.new_zeros(shape), tensor], time)


def _like(cache: Any) -> Any:
    """Another cache with the same tensors, of which each may be set without changing the first."""
    made = copy.copy(cache)
    made.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in _holders(made):
        for name, value in vars(layer).items():
            if isinstance(value, (dict, list)):
                setattr(layer, name, copy.copy(value))
    return made


def _part(cache: Any, row: int, begin: int, length: int) -> Any:
    """The cache of one row with `length` tokens, on the host, with the keys of those from `begin` on.

    A window's keys are all there, as older ones than the window's are not.
    """
    made = _like(cache)
    for layer in _holders(made):
        whole = bool(getattr(layer, "is_sliding", False))
        for name, batch, time in _by_token(layer):
            tensor = getattr(layer, name)
            wanted = min(length if whole else length - begin, tensor.shape[time])
            of_row = tensor.narrow(batch, row, 1).narrow(time, tensor.shape[time] - wanted, wanted)
            setattr(layer, name, of_row.to("cpu", copy=True).contiguous())
        for kind, number, state in states(layer):
            getattr(layer, kind)[number] = state[row : row + 1].to("cpu", copy=True)
        if compressed_keys.is_compressed(layer):
            compressed_keys.alone(layer, row, torch.device("cpu"))
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length = length
    return made


def _nbytes(cache: Any) -> int:
    """Bytes of its tensors."""
    layers = _holders(cache)
    by_token = sum(getattr(layer, name).nbytes for layer in layers for name, _, _ in _by_token(layer))
    compressed = sum(compressed_keys.nbytes(layer) for layer in cache.layers)
    return by_token + compressed + sum(state.nbytes for layer in layers for _, _, state in states(layer))


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of one row after `length` tokens. part: its cache, with the keys of the tokens after `parent`."""

    key: bytes
    length: int
    part: Any
    nbytes: int
    parent: Checkpoint | None

    @property
    def line(self) -> list[Checkpoint]:
        """It and its ancestors, the oldest last."""
        return [self, *(self.parent.line if self.parent is not None else ())]

    def cache(self, device: torch.device) -> Any:
        """A cache of one row that goes on from here."""
        made = _like(self.part)
        parts = [one.part for one in reversed(self.line)]
        for i, layer in enumerate(_holders(made)):
            whole = bool(getattr(layer, "is_sliding", False))
            for name, _, time in _by_token(layer):
                pieces = [getattr(part.layers[i], name) for part in (parts[-1:] if whole else parts)]
                setattr(layer, name, torch.cat(pieces, time).to(device))  # new also where it is one piece
            for kind, number, state in states(layer):
                getattr(layer, kind)[number] = state.to(device, copy=True)  # a forward writes into it
            if compressed_keys.is_compressed(layer):
                compressed_keys.alone(layer, 0, device)
        return made


class Checkpoints:
    """Checkpoints of earlier prompts and answers, in a bounded number of bytes.

    Args:
        limit_bytes: 0: none is kept. page: tokens of a page, the unit of common beginnings.
    """

    def __init__(self, limit_bytes: int, page: int) -> None:
        self.limit_bytes, self._page = limit_bytes, page
        self.nbytes = 0
        self._kept: OrderedDict[bytes, Checkpoint] = OrderedDict()  # least recently used first
        self._lengths: Counter[int] = Counter()
        self._pages: OrderedDict[bytes, None] = OrderedDict()  # hashes of the beginnings of earlier prompts

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Sequence[int], salt: str, most: int) -> Checkpoint | None:
        """The longest checkpoint of the first tokens, of at most `most` of them."""
        lengths = sorted(length for length in self._lengths if length <= most)
        found = [self._kept[key] for key in _hashes(tokens, salt, lengths) if key in self._kept]
        if not found:
            return None
        for one in found[-1].line:
            self._kept.move_to_end(one.key)
        return found[-1]

    def border(self, tokens: Sequence[int], salt: str) -> int:
        """Tokens of the whole pages that an earlier prompt began with, too; 0: none. Remembers this prompt's pages."""
        places = range(self._page, len(tokens), self._page)
        common = 0
        for place, key in zip(places, _hashes(tokens, salt, places), strict=True):
            if key in self._pages:
                common = place
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > _MOST_PAGES:
            self._pages.popitem(last=False)
        return common

    def keep(self, cache: Any, row: int, tokens: Sequence[int], salt: str) -> None:
        """Keep the state of a row of `cache` after `tokens`, unless it is there, or the limit is too low for it."""
        length = len(tokens)
        parent = self.find(tokens, salt, length)
        if not self.limit_bytes or (parent is not None and parent.length == length):
            return
        part = _part(cache, row, 0 if parent is None else parent.length, length)
        (key,) = _hashes(tokens, salt, [length])
        made = Checkpoint(key, length, part, _nbytes(part), parent)
        if sum(one.nbytes for one in made.line) > self.limit_bytes:
            return
        while self.nbytes + made.nbytes > self.limit_bytes:
            self._drop(next(iter(self._kept.values())))  # none of its ancestors, which were used last
        self._kept[key] = made
        self._lengths[length] += 1
        self.nbytes += made.nbytes
        for one in made.line[1:]:
            self._kept.move_to_end(one.key)

    def clear(self) -> None:
        """Drop all."""
        for one in list(self._kept.values()):
            self._drop(one)

    def _drop(self, one: Checkpoint) -> None:
        del self._kept[one.key]
        self._lengths -= Counter([one.length])  # without those of which none is left
        self.nbytes -= one.nbytes


def _hashes(tokens: Sequence[int], salt: str, places: Sequence[int]) -> list[bytes]:
    """A hash of the first tokens, up to each of these ascending places."""
    state = hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=_SECRET, digest_size=16)
    state = hashlib.blake2b(state.digest(), key=_SECRET, digest_size=16)
    data, found, begin = np.asarray(tokens, np.int64).tobytes(), [], 0
    for place in places:
        state.update(data[8 * begin : 8 * place])
        found.append(state.digest())
        begin = place
    return found
