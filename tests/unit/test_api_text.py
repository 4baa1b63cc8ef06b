"""Text that comes in tokens: whole characters, no part of a stop string, offsets, bytes."""

from __future__ import annotations

import pytest
from fake_backend import EOS, byte_tokenizer, score
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.requests import TokenEvent
from tiermoe.cluster.api.text import ChoiceText, StopMatcher, TokenBytes
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.prompt import IncrementalText, load_tokenizer

_TOKENIZER = byte_tokenizer()
_PIECES = st.lists(st.text("abc", max_size=4), max_size=12)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def _feed(pieces: list[str], stops: list[str]) -> tuple[list[str], StopMatcher]:
    matcher = StopMatcher(stops)
    shown = []
    for piece in pieces:
        shown.append(matcher.feed(piece))
        if matcher.matched is not None:
            return shown, matcher
    return [*shown, matcher.finish()], matcher


@settings(max_examples=300, deadline=None)
@given(_PIECES, _STOPS)
def test_stops_are_found_wherever_the_pieces_are_cut(pieces: list[str], stops: list[str]) -> None:
    shown, matcher = _feed(pieces, stops)
    text = "".join(pieces)
    if not any(stop in text for stop in stops):
        assert ("".join(shown), matcher.matched) == (text, None)
        return
    assert matcher.matched in stops
    assert text.startswith("".join(shown) + matcher.matched)
    assert not any(stop in "".join(shown) for stop in stops)


def test_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\n\nuser", "END"])
    assert [matcher.feed(piece) for piece in ("a\n", "\nb", "E", "N", "x", "EN", "D!")] == [
        "a", "\n\nb", "", "", "ENx", "", "",
    ]  # fmt: skip
    assert matcher.matched == "END"
    assert (matcher.feed("more"), matcher.finish()) == ("", "")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.data())
def test_characters_come_whole(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode("utf-8", errors="replace"))
    whole = bytes(tokens).decode()
    incremental = IncrementalText(_TOKENIZER)
    pieces, rest = [], tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        pieces.append(incremental.add(rest[:count]))
        rest = rest[count:]
        assert whole.startswith("".join(pieces))
    assert "".join(pieces) + incremental.finish() == whole


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=24))
def test_any_bytes_give_what_decoding_all_gives(tokens: list[int]) -> None:
    """Bytes that are no UTF-8: nothing is lost, doubled or taken back."""
    incremental = IncrementalText(_TOKENIZER)
    pieces = [incremental.add([token]) for token in tokens]
    assert "".join(pieces) + incremental.finish() == _TOKENIZER.decode(tokens)


def _events(tokens: list[int]) -> list[TokenEvent]:
    return [TokenEvent("r", (token,), logprobs=score((token,), 0)) for token in tokens]


def test_scores_come_with_their_text_and_stop_with_it() -> None:
    text = ChoiceText(_TOKENIZER, ["lo!"])
    shown, offsets = [], []
    for event in _events([*"hé".encode(), *b"llo!", *b"more"]):
        shown.append(text.add(event))
        offsets.append([s.offset for s in text.take_scores(last=text.stopped)])
        if text.stopped:
            break
    assert shown == ["h", "", "é", "", "l", "", ""]
    assert offsets == [[0], [], [1, 1], [], [2], [], []]  # the stop string's tokens are not shown
    assert text.tokens == 7


def test_all_scores_come_at_the_end() -> None:
    text = ChoiceText(_TOKENIZER, [])
    for event in _events([ord("a"), 0xC3]):
        text.add(event)
    assert text.finish() == "\ufffd"
    assert len(text.take_scores(last=True)) == 2


def test_a_stop_string_below_the_minimal_length_is_text() -> None:
    text = ChoiceText(_TOKENIZER, ["b"], min_tokens=3)
    shown = "".join(text.add(event) for event in _events(list(b"abcdb")))
    assert (shown, text.stopped, text.tokens) == ("abcd", True, 5)


def test_bytes_of_tokens() -> None:
    names = TokenBytes(_TOKENIZER)
    assert [names.of(token) for token in range(256)] == [bytes([token]) for token in range(256)]
    assert names.of(EOS) == b"<end>"
    assert names.of(9999) == b""
    assert (names.shown(ord("a")), names.shown(0xC3)) == ("a", "bytes:\\xc3")


@pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there")
def test_bytes_of_the_default_model() -> None:
    tokenizer = load_tokenizer(default_model_dir())
    names = TokenBytes(tokenizer)
    text = "def größe(x):\n\treturn '🙂'  # 大"
    assert b"".join(names.of(token) for token in tokenizer.encode(text).ids).decode() == text
