"""Drafts of the model's own head (multi-token prediction): from hidden states of the forwards to tokens.

    carries    which rows of the next forward are whose, and where in its text
    (forward)  the decoder's last hidden states are kept, by request
    propose    the head reads those of the text so far, each with the token behind it; what it gives behind the last
               one is the first draft, and with that the head goes on

A hidden state counts once the text has a token behind it: rows of rejected drafts never do. The head sees the last
`SPAN` tokens that forwards carried; rows that a prefix cache spared are missing, which costs acceptance only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...policies.routing import SequenceRows

if TYPE_CHECKING:
    from transformers.cache_utils import MtpCache

SPAN = 1024  # tokens of a request that the head reads at once, and keeps at least
_LEAST = 0.4  # chance of all drafts of a chain, by the head itself; below, it ends
_CLASSES = ((0.9, 4), (0.6, 2), (0.0, 1))  # the head's chance of its first draft, and the match that it counts as


@dataclass
class _Read:
    """A request, as far as the head knows it.

    begin: place in the text of the first hidden state that the head has not read. pieces: of these states [n, H], by
    forward. count: of these states.
    """

    cache: MtpCache
    begin: int = 0
    pieces: deque[torch.Tensor] = field(default_factory=deque)
    count: int = 0

    def add(self, place: int, states: torch.Tensor) -> None:
        """Take states from a place on, instead of those there, which were of rejected drafts."""
        surplus = self.begin + self.count - place
        if surplus < 0 or place < self.begin:
            self.pieces.clear()
            self.begin, self.count, surplus = place, 0, 0
        while surplus > 0:
            last = self.pieces.pop()
            if len(last) > surplus:
                self.pieces.append(last[: len(last) - surplus])
            self.count -= min(surplus, len(last))
            surplus -= len(last)
        self.pieces.append(states)
        self.count += len(states)
        while self.count - len(self.pieces[0]) >= SPAN:
            self._drop_first()

    def read(self, count: int) -> torch.Tensor:
        """The first states [count, H], which are read now."""
        found = torch.cat(list(self.pieces))
        self.begin, self.count = self.begin + count, self.count - count
        self.pieces = deque([found[count:]])
        return found[:count]

    def _drop_first(self) -> None:
        length = len(self.pieces.popleft())
        self.begin, self.count = self.begin + length, self.count - length


class HeadDrafts:
    """Drafts by the head of one model.

    Args:
        head: `MtpModel` of transformers; its first layer is chained.
        model: whose decoder's output is the hidden states [.., H].
    """

    def __init__(self, head: Any, model: Any) -> None:
        self._head = head
        self._requests: dict[str, _Read] = {}
        self._carried: list[tuple[SequenceRows, int]] = []
        model.get_decoder().register_forward_hook(self._after)

    def carries(self, rows: Sequence[SequenceRows], places: Sequence[int]) -> None:
        """Rows of the next forward, and the place in its text of each request's first one."""
        self._carried = list(zip(rows, places, strict=True))

    def _after(self, decoder: Any, args: Any, out: Any) -> None:
        carried, self._carried = self._carried, []
        if not carried:
            return
        states = out[0].flatten(0, 1)  # [T, H]
        for rows, place in carried:
            first, count = max(rows.start, rows.stop - SPAN), len(states)
            new = states if rows.stop - first == count else states[first : rows.stop].clone()
            held = self._requests.get(rows.name)
            if held is None:
                held = self._requests[rows.name] = _Read(self._new_cache())
            held.add(place + first - rows.start, new)

    def _new_cache(self) -> MtpCache:
        from transformers.cache_utils import MtpCache  # the model's process has it

        cache = MtpCache(config=self._head.config)
        cache.activate_past_recording()  # a window keeps what leaves it, until the drafts are taken back
        return cache

    def unread(self, name: str) -> int:
        """Tokens of a request that the head has not read."""
        held = self._requests.get(name)
        return 0 if held is None else held.count

    def propose(self, name: str, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Up to `most` tokens that may follow a request's text, and how sure the head is, as the length of a match."""
        held, last = self._requests.get(name), len(text) - 1
        if held is None or not 0 < last - held.begin <= held.count:
            return [], 0
        place = held.begin + 1
        states = self._run(text[place:], held.read(last - held.begin)[None], place, held.cache)
        found, chance, first = list[int](), 1.0, 0.0
        while True:
            scores = self._head._project_to_logits(states[:, -1:])[0, -1].float()
            sure, token = (one.item() for one in scores.softmax(-1).max(-1))
            chance *= sure
            if found and chance < _LEAST:
                break
            first = first or sure
            found.append(int(token))
            if len(found) == most:
                break
            states = self._run(found[-1:], states[:, -1:], last + len(found), held.cache)
        self._shorten(held.cache, len(found) - (len(found) == most))
        return found, next(match for least, match in _CLASSES if first >= least)

    def _run(self, tokens: Sequence[int], states: torch.Tensor, place: int, cache: MtpCache) -> torch.Tensor:
        """Hidden states [1, n, H] of the head for tokens, the states before them, and the place of the first token."""
        ids = torch.tensor([list(tokens)], device=states.device)
        places = torch.arange(place, place + len(tokens), device=states.device)[None]
        return self._head.forward_layer(0, states, places, cache, input_ids=ids)

    @staticmethod
    def _shorten(cache: MtpCache, drafted: int) -> None:
        """Take drafts out of the cache, and the oldest tokens where it has too many."""
        cache.crop(-drafted)
        layer = cache.layers[0]
        if layer.keys.shape[-2] > 2 * SPAN:
            layer.keys, layer.values = layer.keys[..., -SPAN:, :], layer.values[..., -SPAN:, :]

    def keep(self, is_open: Callable[[str], bool]) -> None:
        """Forget the requests that ended."""
        for name in [name for name in self._requests if not is_open(name)]:
            del self._requests[name]
