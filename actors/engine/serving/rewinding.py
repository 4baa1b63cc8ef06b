"""A model's own cache without its last tokens: what a forward over drafts leaves once some of them are rejected.

Keys of rejected tokens are cut off. A running state (a convolution, linear attention, a state space) has no place for a
token: it is the past as a whole. So while drafts are verified, the modules that carry one run token by token, as they
do in decode, and the state after each token is kept until the drafts are judged. Attention and experts run on all
tokens at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..model.compressed_keys import is_compressed
from .states import States, is_known, rewind, states, states_of


def rewinds(cache: Any) -> bool:
    """Whether the tokens of all parts of a cache can be taken back: not of compressed keys, or states beside layers."""
    return is_known(cache) and not any(states(cache)) and not any(map(is_compressed, cache.layers))


class Rewinding:
    """Forwards of one model whose last tokens may be taken back.

    Args:
        model: whose modules have the number of their layer in the cache as `layer_idx`, as in transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._carriers: dict[int, nn.Module] = {}  # by layer: the module that changes its states
        self._after: dict[int, list[States]] = {}  # by layer: after each token of the last forward

    def learn(self, cache: Any, forward: Callable[[], Any]) -> Any:
        """Find the modules that change a layer's states in a forward of one more token; the forward's result."""
        self._carriers, before = {}, dict[nn.Module, list[tuple[int, int]]]()

        def marks(module: Any) -> list[tuple[int, int]]:
            layer = cache.layers[module.layer_idx]
            return [(id(state), state._version) for _, _, state in states(layer)]

        def enter(module: nn.Module, args: Any) -> None:
            before[module] = marks(module)

        def leave(module: Any, args: Any, out: Any) -> None:
            if marks(module) != before[module]:
                self._carriers.setdefault(module.layer_idx, module)  # the innermost one, which ends first

        numbered = [module for module in self._model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        hooks = [module.register_forward_pre_hook(enter) for module in numbered]
        hooks += [module.register_forward_hook(leave) for module in numbered]
        try:
            return forward()
        finally:
            for hook in hooks:
                hook.remove()

    def takes(self, cache: Any) -> bool:
        """Whether all that a cache holds can be taken back, once `learn` has run."""
        return rewinds(cache) and all(
            not any(True for _ in states(layer)) or (i in self._carriers and not getattr(layer, "is_sliding", False))
            for i, layer in enumerate(cache.layers)
        )

    @contextmanager
    def recording(self, cache: Any) -> Iterator[None]:
        """In this context a forward on `cache` can be taken back, in part."""
        self._after = {}
        hooks, whole = list[Any](), dict[nn.Module, tuple[Any, Any]]()

        def first(module: nn.Module, args: Any, kwargs: Any) -> Any:
            whole[module] = args, kwargs
            return _token(args, 0, _fed(args, kwargs)), _token(kwargs, 0, _fed(args, kwargs))

        def rest(module: Any, args: Any, kwargs: Any, out: Any) -> Any:
            args, kwargs = whole.pop(module)
            fed, found, layer = _fed(args, kwargs), [out], cache.layers[module.layer_idx]
            after = self._after[module.layer_idx] = [states_of(layer)]
            for token in range(1, fed):
                found.append(module.forward(*_token(args, token, fed), **_token(kwargs, token, fed)))
                after.append(states_of(layer))
            return _joined(found)

        for module in self._carriers.values():
            hooks.append(module.register_forward_pre_hook(first, with_kwargs=True))
            hooks.append(module.register_forward_hook(rest, with_kwargs=True))
        windows = [layer for layer in cache.layers if getattr(layer, "is_sliding", False)]
        for layer in windows:
            layer.record_past = True  # the keys that leave its window meanwhile
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for layer in windows:
                layer.record_past = False

    def rewind(self, cache: Any, rejected: Sequence[int], length: int) -> None:
        """Take back the last tokens of a recorded forward: so many of each row.

        Args:
            length: of the longest row afterwards.
        """
        rewind(cache, rejected, length, [self._after.get(i, []) for i in range(len(cache.layers))])
        self._after = {}


def _fed(args: Any, kwargs: Any) -> int:
    """Tokens of a forward of one module: of its first tensor, its hidden states [B, fed, H]."""
    return next(one.shape[1] for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor) and one.ndim == 3)


def _token(given: Any, token: int, fed: int) -> Any:
    """A module's arguments for one of the tokens."""
    if isinstance(given, torch.Tensor):
        return given[:, token : token + 1] if given.ndim > 1 and given.shape[1] == fed else given
    if isinstance(given, dict):
        return {name: _token(one, token, fed) for name, one in given.items()}
    return tuple(_token(one, token, fed) for one in given) if isinstance(given, tuple) else given


def _joined(found: Sequence[Any]) -> Any:
    """What a module gives for all tokens, by what it gives for each."""
    if isinstance(found[0], torch.Tensor):
        return torch.cat(list(found), 1)
    parts = zip(*found, strict=True)  # such as queries, keys and values; what is not of a token is that of the last
    return tuple(torch.cat(part, 1) if all(map(_of_a_token, part)) else part[-1] for part in parts)


def _of_a_token(found: Any) -> bool:
    """Whether it is a tensor [B, 1, ..]."""
    return isinstance(found, torch.Tensor) and found.ndim > 2 and found.shape[1] == 1
