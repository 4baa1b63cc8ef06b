"""Grammars that a request's text must follow, by llguidance: which tokens may come next.

A grammar is compiled and followed in a process of its own (`grammar_jobs.py`): one that overflows the library's stack,
takes all memory or does not end costs its own request, not the lead.
"""

from __future__ import annotations

import base64
import json
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from ....errors import RequestError, RuntimeFailure
from ....proto.bounded import NotStarted, Worker, Workers
from .grammar_jobs import MODULE

COMPILE_S = 5.0  # of one grammar; ordinary ones take milliseconds
FOLLOW_S = 2.0  # of one token; llguidance bounds its work to some 20 ms
_AT_ONCE = 4  # are compiled
_MAX_CHARS = 4 * 2**20  # of a grammar; the server takes 256 KiB, and its converters may write more
_MAX_HELD = 64  # processes of requests that wait; those that run have one each


class Grammars:
    """Compiles grammars for one model's vocabulary, which is read with the first one.

    The tokenizer may have tokens that the model does not score (they never come), and fewer tokens than the model
    scores (padding of the embedding, which never comes either).

    Args:
        tokenizer: the text of tokenizer.json, as `read_tokenizer` gives it; None: there is none.
        vocabulary: tokens that the model scores.
        eos: tokens that end a request; a text that is complete may go on with these only.
    """

    def __init__(self, tokenizer: str | None, vocabulary: int, eos: Sequence[int]) -> None:
        self._json, self._vocabulary, self._eos = tokenizer, vocabulary, list(eos)
        self._workers: Workers | None = None
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_AT_ONCE)
        self._held = threading.BoundedSemaphore(_MAX_HELD)

    def matcher(self, grammar: str) -> Matcher:
        """A matcher of one request's text.

        Args:
            grammar: llguidance's form of it.

        Raises:
            RequestError: no such grammar, it cannot be compiled within the limits, or this model cannot be held to one.
            RuntimeFailure: no process starts.
        """
        if self._json is None or not self._eos:
            missing = "tokenizer (tokenizer.json or another form)" if self._json is None else "stop token"
            raise RequestError(f"the model has no {missing}, which grammars need", "ask without a grammar")
        if len(grammar) > _MAX_CHARS:
            raise RequestError(f"the grammar has {len(grammar)} characters", f"give at most {_MAX_CHARS}")
        with self._lock:
            if self._workers is None:
                known = 1 + max(Tokenizer.from_str(self._json).get_vocab(with_added_tokens=True).values())
                ends = [token for token in self._eos if token < known]
                if not ends:
                    raise RequestError("the model's stop token is not in its tokenizer", "ask without a grammar")
                given = {"tokenizer": self._json, "vocabulary": max(known, self._vocabulary), "ends": ends}
                self._workers = Workers(MODULE, json.dumps(given).encode())
        found = Matcher(self._workers, grammar, self._eos)
        with self._turns:
            found.begin(COMPILE_S)
        if self._held.acquire(blocking=False):
            weakref.finalize(found, self._held.release)
        else:
            found.rest()
        return found


class Matcher:
    """What may follow the tokens of one request.

    Its process is replaced once where it has ended: all of its state is the grammar and the tokens so far.

    Args:
        workers: where its process is from, which ends with the matcher.
        eos: tokens that end a request.

    Attributes:
        error: why the text cannot go on; None: it can. Then only tokens that end the request are permitted.
    """

    def __init__(self, workers: Workers, grammar: str, eos: Sequence[int]) -> None:
        self._workers, self._grammar, self._eos = workers, grammar, list(eos)
        self._worker: Worker | None = None
        self._tokens: list[int] = []
        self._bits: str | None = None  # of the next token, in base64; None: not known yet
        self.error: str | None = None

    def begin(self, within_s: float) -> None:
        """Compile the grammar.

        Raises:
            RequestError: it is refused, or not done in time and memory. RuntimeFailure: no process starts.
        """
        try:
            self._begin(within_s)
        except ValueError as error:
            raise RequestError(f"the grammar is refused: {error}", "correct it") from error
        except NotStarted as error:
            raise RuntimeFailure(f"the process of a grammar does not start: {error}", "send it again later") from error
        except OSError as error:
            raise RequestError(f"the grammar is refused: {_why(error, within_s)}", "give a simpler one") from error

    def rest(self) -> None:
        """End the process until the next token is wanted."""
        if self._worker is not None:
            self._closer()
            self._worker = None

    def consume(self, tokens: Sequence[int]) -> None:
        """These tokens have been generated."""
        self._tokens += tokens
        if self.error is None:
            self._follow(tokens)

    def mask(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [V] with minus infinity for the tokens that may not come next."""
        allowed = np.zeros(scores.shape[0], bool)  # [V]
        if self.error is None and self._bits is None:
            self._follow(())
        if self.error is None and self._bits is not None:
            bits = np.unpackbits(np.frombuffer(base64.b64decode(self._bits), np.uint8), bitorder="little")
            count = min(len(bits), len(allowed))
            allowed[:count] = bits[:count]
            if not allowed.any():
                self.error = "the grammar goes on with tokens only that the model does not score"
        if self.error is not None:
            allowed[:] = False
            allowed[[token for token in self._eos if token < len(allowed)]] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), float("-inf"))

    def _follow(self, tokens: Sequence[int]) -> None:
        """Ask what may come after `tokens`, which are the last ones."""
        for last in (False, True):
            try:
                if self._worker is None:
                    tokens = self._tokens
                    self._begin(FOLLOW_S)
                assert self._worker is not None
                found = self._worker.ask({"follow": {"tokens": list(tokens)}}, FOLLOW_S)
            except (OSError, ValueError) as error:
                self.rest()
                if last or isinstance(error, (TimeoutError, ValueError)):
                    self.error = f"the grammar is too complex: {_why(error, FOLLOW_S)}"
                    if isinstance(error, NotStarted):
                        self.error = f"the process of the grammar does not start: {error}"
                    return
            else:
                self._bits, self.error = found.get("bits"), found.get("error")
                return

    def _begin(self, within_s: float) -> None:
        self._worker = worker = self._workers.worker()
        self._closer = weakref.finalize(self, worker.close)
        try:
            unreadable = worker.ask({"begin": {"grammar": self._grammar}}, within_s)
            if unreadable is not None:
                what = f"llguidance cannot read the model's tokenizer: {unreadable}"
                raise RequestError(what, "ask without a grammar")
        except BaseException:
            self.rest()
            raise


def _why(error: Exception, within_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"it takes longer than {within_s:g} s"
    return str(error) if isinstance(error, ValueError) else "the process that compiles it ended, by its stack or memory"
