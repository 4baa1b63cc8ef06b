"""Grammars that a request's text must follow, by llguidance: which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from ....errors import RequestError

_REMEDY = "install it with: pip install llguidance"


class Grammars:
    """Compiles grammars for one model's vocabulary, which is read with the first one.

    The tokenizer may have tokens that the model does not score (they never come), and fewer tokens than the model
    scores (padding of the embedding, which never comes either).

    Args:
        tokenizer: the text of tokenizer.json; None: there is none.
        vocabulary: tokens that the model scores.
        eos: tokens that end a request; a text that is complete may go on with these only.
    """

    def __init__(self, tokenizer: str | None, vocabulary: int, eos: Sequence[int]) -> None:
        self._json, self._vocabulary, self._eos = tokenizer, vocabulary, list(eos)
        self._tokens: Any = None
        self._lock = threading.Lock()

    def matcher(self, grammar: str) -> Matcher:
        """A matcher of one request's text.

        Args:
            grammar: llguidance's form of it.

        Raises:
            RequestError: no such grammar, or this model cannot be held to one.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError as error:
            raise RequestError("the runtime has no llguidance, which grammars need", _REMEDY) from error
        if self._json is None or not self._eos:
            missing = "tokenizer.json" if self._json is None else "stop token"
            raise RequestError(f"the model has no {missing}, which grammars need", "ask without a grammar")
        with self._lock:
            if self._tokens is None:
                known = 1 + max(Tokenizer.from_str(self._json).get_vocab(with_added_tokens=True).values())
                ends = [token for token in self._eos if token < known]
                if not ends:
                    raise RequestError("the model's stop token is not in its tokenizer", "ask without a grammar")
                self._tokens = LLTokenizer(self._json, n_vocab=max(known, self._vocabulary), eos_token=ends)
        found = LLMatcher(self._tokens, grammar, log_level=0)
        if found.is_error():
            raise RequestError(f"the grammar is refused: {_first_line(found)}", "correct it")
        return Matcher(found, self._eos)


class Matcher:
    """What may follow the tokens of one request.

    Attributes:
        error: why the text cannot go on; None: it can. Then only tokens that end the request are permitted.
    """

    def __init__(self, matcher: Any, eos: Sequence[int]) -> None:
        self._matcher, self._eos = matcher, list(eos)
        self.error: str | None = None

    def consume(self, tokens: Sequence[int]) -> None:
        """These tokens have been generated."""
        if self.error is None and not self._matcher.consume_tokens(list(tokens)):
            self.error = f"the text does not follow its grammar: {_first_line(self._matcher)}"

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [V] with minus infinity for the tokens that may not come next."""
        allowed = np.zeros(scores.shape[0], bool)  # [V]
        if self.error is None:
            bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
            if self._matcher.is_error():
                self.error = f"the grammar is too complex: {_first_line(self._matcher)}"
            elif not allowed.any():
                self.error = "the grammar goes on with tokens only that the model does not score"
        if self.error is not None:
            allowed[:] = False
            allowed[[token for token in self._eos if token < len(allowed)]] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))


def _first_line(matcher: Any) -> str:
    """Of its error; the rest is the parser's state."""
    return str(matcher.get_error()).partition("\n")[0][:300]
