"""Token ids into text and bytes, token by token; the server, `tiermoe run` and `tiermoe.LLM` read tokens here only.

`tokenizers` decodes whole lists. `DecodeStream` fails where tokens are not yet UTF-8 ("Invalid prefix encountered").
Here the tokenizer's decoder is a chain of steps. Each one is fed as tokens come, and gives out what no later token
changes:

    Replace, Strip          each token by itself
    Metaspace, WordPiece    each token by itself; the first one differs
    BPEDecoder              each token by itself; the last one differs
    ByteFallback            a run of byte tokens, once it has ended: one wrong byte makes all of the run U+FFFD
    ByteLevel               bytes; characters come once they are whole
    Fuse, then Strip        the ends of the whole text
    Fuse, then Replace      the whole text, but for an end that may begin what is replaced
    others (CTC)            at the end

All pieces together are `tokenizer.decode(all ids)`: the steps are the library's, but for ByteLevel and the last Strip.
"""

from __future__ import annotations

import codecs
import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer, decoders

_REPLACEMENT = "\ufffd"
_OTHER = "a"  # a token that no decoder changes, before or behind another one


class Piece(NamedTuple):
    """A part of the text.

    starts: places in `text` of the tokens that begin in it. A token that completes no character begins where that one
    does.
    """

    text: str
    starts: tuple[int, ...]


class _Step(Protocol):
    """One step of a decoder. A shallow copy has its own state.

    held: what waits for more; false: nothing.
    """

    held: Any

    def feed(self, piece: Piece) -> Iterable[Piece]:
        """What a token, or a fragment of the text, completes."""

    def finish(self) -> Iterable[Piece]:
        """What is left when no more come."""


class _EachToken:
    """A token's text depends on no other token, or on whether it is the first or the last one.

    Args:
        texts: of a token that is neither. first, last: of that one; None: as the others.
    """

    def __init__(
        self, text: Callable[[str], str], first: Callable[[str], str] | None = None,
        last: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        self.text, self._first, self._last = text, first, last
        self.held: Piece | None = None

    def feed(self, piece: Piece) -> Iterable[Piece]:
        text, self._first = self._first or self.text, None
        if self._last is None:
            return (Piece(text(piece.text), piece.starts),)
        before, self.held = self.held, piece
        return () if before is None else (Piece(self.text(before.text), before.starts),)

    def finish(self) -> Iterable[Piece]:
        found, self.held = self.held, None
        return () if found is None or self._last is None else (Piece(self._last(found.text), found.starts),)


_Row = tuple[()] | tuple["_Row", Piece]  # pieces, the last one outside: one more costs no copy of the others


def _in_order(row: Any) -> list[Piece]:
    found = []
    while row:
        row, piece = row
        found.append(piece)
    return found[::-1]


class _ByteRuns:
    """Runs of tokens such as `<0xF0>`: characters if all of a run is UTF-8, else U+FFFD for each byte."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self.held: _Row = ()

    def byte(self, token: str) -> bytes | None:
        """The byte that a token stands for; None: it is text."""
        if not token.startswith("<0x") or self._decoder.decode([token]) == token:
            return None
        return bytes((int(token[3:-1], 16),))

    def feed(self, piece: Piece) -> Iterable[Piece]:
        if self.byte(piece.text) is None:
            return (*self.finish(), piece) if self.held else (piece,)
        self.held = (self.held, piece)
        return ()

    def finish(self) -> Iterable[Piece]:
        run, self.held = _in_order(self.held), ()
        text = self._decoder.decode([piece.text for piece in run]) if run else ""
        if text == _REPLACEMENT * len(run):
            return tuple(Piece(_REPLACEMENT, piece.starts) for piece in run)
        starts: list[int] = []
        decoder, before = codecs.getincrementaldecoder("utf-8")(), 0
        for piece in run:
            starts += [before] * len(piece.starts)
            before += len(decoder.decode(self.byte(piece.text) or b""))
        return (Piece(text, tuple(starts)),)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet, known = {chr(byte): byte for byte in printable}, set(printable)
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in known)}
    return alphabet


_ALPHABET = _byte_level_alphabet()


class _Utf8:
    """Tokens in GPT-2's alphabet of bytes; a token with other letters is text."""

    def __init__(self) -> None:
        self.held = b""  # the begin of a character

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([_ALPHABET[letter] for letter in token])
        except KeyError:
            return token.encode()

    def feed(self, piece: Piece) -> Iterable[Piece]:
        data, begun, start = self.bytes_of(piece.text), self.held, 0
        if begun and data:  # a first byte that does not continue the character makes it U+FFFD, and begins the next
            text, taken = codecs.utf_8_decode(begun + data[:1], "replace", False)
            start = int(taken == len(begun) or len(text) == 2)
        text, taken = codecs.utf_8_decode(begun + data, "replace", False)
        self.held = (begun + data)[taken:]
        return (Piece(text, (start,) * len(piece.starts)),)

    def finish(self) -> Iterable[Piece]:
        begun, self.held = self.held, b""
        return (Piece(begun.decode(errors="replace"), ()),)


class _Ends:
    """Takes up to `start` letters from the text's beginning and up to `stop` from its end, if they are `content`.

    waiting: places of tokens behind the begin of what is held, from there on.
    """

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self.held = ""
        self._waiting: tuple[int, ...] = ()

    def feed(self, piece: Piece) -> Iterable[Piece]:
        bare = piece.text.lstrip(self._content)
        taken = min(self._start, len(piece.text) - len(bare))
        self._start = 0 if taken < len(piece.text) else self._start - taken
        starts = (*self._waiting, *(len(self.held) + max(0, start - taken) for start in piece.starts))
        text = self.held + piece.text[taken:]
        ready = len(text) - min(self._stop, len(text) - len(text.rstrip(self._content)))
        self.held = text[ready:]
        self._waiting = tuple(start - ready for start in starts if start > ready)
        return (Piece(text[:ready], tuple(start for start in starts if start <= ready)),)

    def finish(self) -> Iterable[Piece]:
        starts, self.held, self._waiting = self._waiting, "", ()
        return (Piece("", (0,) * len(starts)),)  # what they began is taken


class _Replaced:
    """Replaces a string in the whole text, as `str.replace`. An end that may begin it waits for more.

    waiting: places of tokens behind the begin of what waits, from there on.
    """

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new
        self.held = ""
        self._waiting: tuple[int, ...] = ()

    def feed(self, piece: Piece) -> Iterable[Piece]:
        starts = (*self._waiting, *(len(self.held) + start for start in piece.starts))
        text, done, shown = self.held + piece.text, 0, ""
        found: list[tuple[int, int]] = []  # ends of what is replaced, in the text and in what is shown
        while (place := text.find(self._old, done)) >= 0:
            shown += text[done:place] + self._new
            done = place + len(self._old)
            found.append((done, len(shown)))
        ready = next(i for i in range(max(done, len(text) - len(self._old) + 1), len(text) + 1)
                     if self._old.startswith(text[i:]))  # fmt: skip
        shown, self.held = shown + text[done:ready], text[ready:]
        self._waiting = tuple(start - ready for start in starts if start > ready)
        return (Piece(shown, tuple(self._place(start, found) for start in starts if start <= ready)),)

    def finish(self) -> Iterable[Piece]:
        rest, starts, self.held, self._waiting = self.held, self._waiting, "", ()
        return (Piece(rest, starts),)

    def _place(self, start: int, found: Sequence[tuple[int, int]]) -> int:
        """Where a place of the text is in what is shown; inside what is replaced, places are counted from its end."""
        before = 0
        for end, shown in found:
            if start < end:
                return min(start + before, max(shown - len(self._new), shown - (end - start)))
            before = shown - end
        return start + before


class _AtTheEnd:
    """A step that may change anything until no more tokens come. fused: it gets the text as one token."""

    def __init__(self, decoder: Any, fused: bool) -> None:
        self._decoder, self._fused = decoder, fused
        self.held: _Row = ()

    def feed(self, piece: Piece) -> Iterable[Piece]:
        self.held = (self.held, piece)
        return ()

    def finish(self) -> Iterable[Piece]:
        pieces, self.held = _in_order(self.held), ()
        tokens = [piece.text for piece in pieces]
        text = self._decoder.decode(["".join(tokens)] if self._fused else tokens)
        return (Piece(text, tuple(0 for piece in pieces for _ in piece.starts)),)


def _steps(tokenizer: Tokenizer) -> list[_Step]:
    """The decoder's steps, in their order."""
    if tokenizer.decoder is None:
        return [_EachToken(lambda token: f" {token}", first=str)]
    steps: list[_Step] = []
    fused = False
    for part in _parts(json.loads(tokenizer.decoder.__getstate__())):
        kind, decoder = part["type"], _decoder(part)
        if kind == "Fuse":
            fused = True
        elif fused:
            steps.append(_of_the_whole(part, decoder))
        elif kind == "ByteLevel":
            steps.append(_Utf8())
            fused = True
        else:
            steps.append(_STEPS[kind](decoder) if kind in _STEPS else _AtTheEnd(decoder, False))
    return steps


def _of_the_whole(part: Mapping[str, Any], decoder: Any) -> _Step:
    """A step that gets the text as one token."""
    if part["type"] == "Strip":
        return _Ends(part["content"], part["start"], part["stop"])
    if part["type"] == "Replace" and part["pattern"].get("String"):
        return _Replaced(part["pattern"]["String"], part["content"])
    return _AtTheEnd(decoder, True)


def _alone(decoder: Any) -> Callable[[str], str]:
    return lambda token: str(decoder.decode([token]))


def _behind(decoder: Any) -> Callable[[str], str]:
    return lambda token: str(decoder.decode([_OTHER, token]))[len(_OTHER) :]


def _before(decoder: Any) -> Callable[[str], str]:
    return lambda token: str(decoder.decode([token, _OTHER]))[: -len(_OTHER)]


_STEPS: dict[str, Callable[[Any], _Step]] = {
    "Replace": lambda decoder: _EachToken(_alone(decoder)),
    "Strip": lambda decoder: _EachToken(_alone(decoder)),
    "Metaspace": lambda decoder: _EachToken(_behind(decoder), first=_alone(decoder)),
    "WordPiece": lambda decoder: _EachToken(_behind(decoder), first=_alone(decoder)),
    "BPEDecoder": lambda decoder: _EachToken(_before(decoder), last=_alone(decoder)),
    "ByteFallback": _ByteRuns,
}


def _parts(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The members of a decoder, which may be a sequence of others."""
    return [step for inner in part["decoders"] for step in _parts(inner)] if part["type"] == "Sequence" else [part]


def _decoder(part: Mapping[str, Any]) -> Any:
    """The library's decoder of one part, by its pickled form, which is its part of tokenizer.json."""
    made = decoders.Fuse()
    made.__setstate__(json.dumps(part).encode())
    return made


@lru_cache(4)
def _special_tokens(tokenizer: Tokenizer) -> frozenset[str]:
    """Their names. The library makes an object of each added token, of which some models have thousands."""
    return frozenset(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)


class IncrementalText:
    """Token ids into text as they arrive. Ids without a token have no text.

    Args:
        skip_special: special tokens have no text either.

    Attributes:
        starts: character at which each token begins, of the tokens so far whose place is known. A token without text
            begins where the next one does.
        waiting: tokens since text came last, which takes as long to look at (`pending`).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._steps = tokenizer, _steps(tokenizer)
        self._skipped = _special_tokens(tokenizer) if skip_special else frozenset[str]()
        self.starts: list[int] = []
        self._tokens = self._length = self.waiting = 0
        self._silent = 0  # tokens without text since the last one with some

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        pieces: list[Piece] = []
        self._tokens += len(token_ids)
        for token in token_ids:
            name = self._tokenizer.id_to_token(token)
            if name is None or name in self._skipped:
                self._silent += 1
                continue
            pieces += _through(self._steps, [Piece(name, (0,) * (1 + self._silent))])
            self._silent = 0
        text = self._take(pieces)
        self.waiting = 0 if text else self.waiting + len(token_ids)
        return text

    def finish(self) -> str:
        """What is left when no more tokens come: an unfinished character shows as U+FFFD."""
        rest = self._take(_rest(self._steps))
        self.starts += [self._length] * (self._tokens - len(self.starts))
        return rest

    def pending(self) -> str:
        """What `finish` would give now."""
        if not any(step.held for step in self._steps):
            return ""
        return "".join(piece.text for piece in _rest([copy.copy(step) for step in self._steps]))

    def _take(self, pieces: Sequence[Piece]) -> str:
        for piece in pieces:
            self.starts += [self._length + start for start in piece.starts]
            self._length += len(piece.text)
        return "".join(piece.text for piece in pieces)


def _through(steps: Sequence[_Step], pieces: list[Piece]) -> list[Piece]:
    for step in steps:
        pieces = [out for piece in pieces for out in step.feed(piece)]
    return pieces


def _rest(steps: Sequence[_Step]) -> list[Piece]:
    """What is left in each step, through the steps behind it."""
    pieces: list[Piece] = []
    for step in steps:
        pieces = [out for piece in pieces for out in step.feed(piece)] + list(step.finish())
    return pieces


class TokenBytes:
    """What each token of a vocabulary is, in the middle of a text: bytes, and a name to show."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._steps = tokenizer, _steps(tokenizer)

    def of(self, token: int) -> bytes:
        """The token's bytes; special tokens are their names, and ids without a token are empty."""
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        for step in self._steps:
            if isinstance(step, _EachToken):
                name = step.text(name)
            elif isinstance(step, _Utf8):
                return step.bytes_of(name)
            elif isinstance(step, _ByteRuns) and (byte := step.byte(name)) is not None:
                return byte
        return name.encode()

    def shown(self, token: int) -> str:
        """The token as text; `bytes:\\xNN...`, as OpenAI writes it, if it is not whole characters."""
        found = self.of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
