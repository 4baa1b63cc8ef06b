"""Token ids into text, piece by piece: for every decoder the pieces are what decoding all ids gives; stop strings."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fake_api import EOS, FakeBackend, byte_tokenizer, complete, fallback_tokenizer, post, score
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent
from tiermoe.cluster.api.schema import Display
from tiermoe.cluster.api.text import ChoiceText, StopMatcher
from tiermoe.cluster.detokenizer import IncrementalText, TokenBytes
from tiermoe.cluster.llm import TextStream

_SPACE = decoders.Replace("▁", " ")
_CLEAN_UP = [decoders.Replace(old, new) for old, new in ((" .", "."), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"))]
DECODERS: dict[str, Any] = {
    "none": None,
    "byte-level": decoders.ByteLevel(),
    "byte-level, stripped": decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
    "mixtral": decoders.Sequence([_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence([_SPACE, decoders.ByteFallback(), decoders.Fuse()]),
    "long begin": decoders.Sequence([_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
    "both ends": decoders.Sequence([_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 3, 2)]),
    "nested": decoders.Sequence([decoders.Sequence([_SPACE]), decoders.Sequence([decoders.ByteFallback()])]),
    "bytes, then spaces": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace": decoders.Metaspace(),
    "metaspace, never": decoders.Metaspace(prepend_scheme="never"),
    "wordpiece": decoders.WordPiece(),
    "wordpiece, no cleanup": decoders.WordPiece(cleanup=False),
    "bpe": decoders.BPEDecoder(),
    "each token": decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Replace(Regex("[ab]+"), "x")]),
    "ctc": decoders.CTC(),
    "replaced at the end": decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
    "replaced by more": decoders.Sequence([decoders.Fuse(), decoders.Replace("aba", "abab")]),
    "a pattern at the end": decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("[ab]+"), "x")]),
    "clean-up": decoders.Sequence([decoders.WordPiece("\0", cleanup=False), decoders.Fuse(), *_CLEAN_UP]),
    "clean-up of bytes": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), *_CLEAN_UP]),
}
_NAMES = list(dict.fromkeys([
    *(f"<0x{byte:02X}>" for byte in range(256)), "<0x0a>", "<0xzz>", "▁", "▁▁", "▁a", "a", "b", "ab", "##a", "##",
    "c</w>", "d.</w>", ".", " n't", " .", "é", "大", "🙂", "Ġa", "ab▁", "|", "<pad>", "\ufffd",
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
]))  # fmt: skip
_SIZE = len(_NAMES) + 6


def tokenizer_of(decoder: Any) -> Tokenizer:
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(_NAMES)}, unk_token="a"))
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(["<s>", "</s>", " s é", AddedToken("Ġz")])
    made.add_tokens(["<tool>", "大大"])
    return made


TOKENIZERS = {name: tokenizer_of(decoder) for name, decoder in DECODERS.items()}
_BYTES, _LETTERS = st.integers(0, 255), st.integers(258, _SIZE + 3)  # with ids that have no token


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=150, deadline=None)
@given(st.lists(_BYTES | _LETTERS, max_size=14), st.booleans(), st.data())
@example([0x0A], True, None)  # "Invalid prefix encountered"
@example([0xF0, 0x9F, 258], True, None)
@example([*"🙂".encode(), 0xF0], True, None)  # one wrong byte changes the whole run
@example([258, 258, _SIZE + 3], False, None)  # tokens that begin in what is stripped
def test_the_pieces_are_what_decoding_all_gives(name: str, ids: list[int], skip: bool, data: Any) -> None:
    tokenizer = TOKENIZERS[name]
    if name == "both ends":  # the library's Strip panics on a text that is shorter than what it may take
        ids = [_NAMES.index("a"), *ids]
    text, shown, rest = IncrementalText(tokenizer, skip_special=skip), "", list(ids)
    while rest:
        count = 1 if data is None else data.draw(st.integers(1, len(rest)))
        shown += text.add(rest[:count])
        rest = rest[count:]
        so_far = tokenizer.decode(ids[: len(ids) - len(rest)], skip_special_tokens=skip)
        assert shown + text.pending() == so_far
    whole = shown + text.finish()
    assert whole == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(text.starts) == len(ids)
    assert text.starts == sorted(text.starts)


@pytest.mark.parametrize("name", ["byte-level", "mixtral", "gemma", "metaspace, never", "nested"])
@given(st.text(st.sampled_from("ab.é大🙂\n "), max_size=12))
@example("  ")
def test_tokens_begin_where_their_characters_are(name: str, given_text: str) -> None:
    """A token for each byte, or for each character."""
    tokenizer = TOKENIZERS[name]
    letters = {token: letter for letter, token in byte_tokenizer().get_vocab().items()}
    level = [letters[byte] for byte in given_text.encode()]
    names = level if name == "byte-level" else [part for letter in given_text for part in _spelled(letter)]
    ids = [tokenizer.token_to_id(part) for part in names]
    text, tokens = IncrementalText(tokenizer), TokenBytes(tokenizer)
    whole = "".join(text.add([token]) for token in ids) + text.finish()
    data = b"".join(tokens.of(token) for token in ids)
    cut = len(data.decode()) - len(whole)  # the leading space that a decoder strips
    assert data.decode()[cut:] == whole
    assert data.decode()[:cut].strip(" ") == ""
    places = [max(0, len(b"".join(map(tokens.of, ids[:i])).decode(errors="ignore")) - cut) for i in range(len(ids))]
    assert text.starts == places


def test_a_text_that_is_cleaned_up_is_shown_as_it_comes() -> None:
    """Such decoders gave out nothing before the last token."""
    tokenizer = TOKENIZERS["clean-up"]
    text = IncrementalText(tokenizer)
    shown = [text.add([tokenizer.token_to_id(name)]) for name in ("a", ".", "b", "'", "a", "a")]
    assert shown == ["a", ".", " b", "", " ' a".replace(" ' ", "'"), " a"]
    assert text.starts == [0, 1, 2, 4, 4, 6]


def _spelled(letter: str) -> list[str]:
    return {" ": ["▁"], "a": ["a"], "b": ["b"], ".": ["."], "大": ["大"]}.get(
        letter, [f"<0x{byte:02X}>" for byte in letter.encode()]
    )


def test_every_decoder_of_the_library_is_known_or_waits_for_the_end() -> None:
    kinds = {name for name in dir(decoders) if name[0].isupper()} - {"Decoder", "DecodeStream"}
    seen = json.dumps([json.loads(d.__getstate__()) for d in DECODERS.values() if d is not None])
    assert {kind for kind in kinds if f'"{kind}"' not in seen} == set()


def test_special_tokens_are_read_once_for_all_texts() -> None:
    """The library makes an object of each added token: with the thousands of some models, 30 ms a choice."""

    class Counting:
        read = 0

        def __getattr__(self, name: str) -> Any:
            self.read += name == "get_added_tokens_decoder"
            return getattr(_LEVEL, name)

    tokenizer: Any = Counting()
    texts = [IncrementalText(tokenizer) for _ in range(3)]
    assert [text.add([72, EOS]) for text in texts] == ["H"] * 3
    assert tokenizer.read == 1


def test_scores_of_bytes_come_with_the_run_that_they_are_in() -> None:
    text, scores = ChoiceText(fallback_tokenizer(), Display()), []
    tokens = (*"é\n".encode(), EOS, 0xF0)
    for token in tokens:
        text.add(TokenEvent("r", (token,), logprobs=score((token,), 0)))
        scores += text.take_scores(last=False)
    assert scores == []
    assert text.finish() == "\ufffd" * 4
    assert [(found.found.token_id, found.offset) for found in text.take_scores(last=True)] == [
        (0xC3, 0), (0xA9, 1), (0x0A, 2), (EOS, 3), (0xF0, 3),
    ]  # fmt: skip


def test_byte_fallback_through_the_server() -> None:
    made = {"tokenizer": fallback_tokenizer()}
    answers = {"hi": "a\n🙂".encode() + b"\xf0", "stop": b"one\ntwo"}
    (choice,) = complete({"prompt": "hi"}, FakeBackend(answers), **made)["choices"]
    assert choice["text"] == "\ufffd" * 7  # as the tokenizer decodes a run of bytes that are no UTF-8
    (choice,) = complete({"prompt": "stop", "stop": "\n", "logprobs": 0}, FakeBackend(answers), **made)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("one", ["o", "n", "e"])
    body = {"prompt": [*"é\n".encode(), ord("x")], "echo": True, "logprobs": 0, "max_tokens": 2}
    (choice,) = complete(body, **made)["choices"]
    assert choice["text"] == "é\nxÉ"
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3, 3]
    assert post("/detokenize", {"tokens": [0x0A, 0xF0, 0x9F]}, **made).json() == {"prompt": "\ufffd" * 3}
    assert post("/detokenize", {"tokens": [*"\n🙂".encode()]}, **made).json() == {"prompt": "\n🙂"}


def test_byte_fallback_in_a_program_and_on_a_terminal() -> None:
    tokens = [*"ä\n".encode(), EOS, *b"b"]

    def generate(request: GenerationRequest) -> Iterator[TokenEvent]:
        yield from (TokenEvent(request.request_id, (token,)) for token in tokens)
        yield TokenEvent(request.request_id, (0xF0,), "length")

    for tokenizer, text in ((byte_tokenizer(), "ä\nb\ufffd"), (fallback_tokenizer(), "\ufffd" * 5)):
        stream = TextStream(generate, tokenizer, (1,), SamplingParams(8))
        pieces = list(stream)
        assert "".join(pieces) == stream.completion.text == text == tokenizer.decode([*tokens, 0xF0])


def test_offsets_of_an_echo_leave_out_what_the_tokenizer_adds() -> None:
    """The beginning-of-text token is no part of the echo of a text, and one of the echo of ids."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", EOS)])
    body = {"echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    (choice,) = complete(body | {"prompt": "ab"}, tokenizer=tokenizer)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("abA", [0, 0, 1, 2])
    (choice,) = complete(body | {"prompt": [EOS, ord("a"), ord("b")]}, tokenizer=tokenizer)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<end>abA", [0, 5, 6, 7])


_LEVEL = byte_tokenizer()
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


@pytest.mark.parametrize(
    ("tokenizer", "token"), [(fallback_tokenizer(), 0xF0), (fallback_tokenizer(), 0x61), (byte_tokenizer(), 0x61)]
)
def test_a_text_costs_as_much_as_it_is_long(tokenizer: Tokenizer, token: int) -> None:
    """A run of byte tokens with stop strings was decoded anew with each one: 20 ms a token after 8000."""
    stops = tuple(f"{'a' * 600}b{'a' * 400}{i}" for i in range(4))
    took_s = []
    for length in (600, 2400):
        text, begin_s = ChoiceText(tokenizer, Display(stops)), time.process_time()
        for event in _events([token] * length):
            text.delta(event)
        text.finish()
        took_s.append(time.process_time() - begin_s)
    assert took_s[1] < max(0.3, 9 * took_s[0])


def _events(tokens: list[int]) -> list[TokenEvent]:
    return [TokenEvent("r", (token,), logprobs=score((token,), 0)) for token in tokens]


def test_scores_come_with_their_text_and_stop_with_it_or_come_at_the_end() -> None:
    text = ChoiceText(_LEVEL, Display(("lo!",)))
    shown, offsets = [], []
    for event in _events([*"hé".encode(), *b"llo!", *b"more"]):
        shown.append(text.add(event))
        offsets.append([s.offset for s in text.take_scores(last=text.stopped)])
        if text.stopped:
            break
    assert shown == ["h", "", "é", "", "l", "", ""]
    assert offsets == [[0], [], [1, 1], [], [2], [], []]  # the stop string's tokens are not shown
    assert text.tokens == 7
    text = ChoiceText(_LEVEL, Display())
    for event in _events([ord("a"), 0xC3]):
        text.add(event)
    assert text.finish() == "\ufffd"
    assert len(text.take_scores(last=True)) == 2
    text = ChoiceText(_LEVEL, Display(("b",)), min_tokens=3)  # below the minimal length a stop string is text
    shown = "".join(text.add(event) for event in _events(list(b"abcdb")))
    assert (shown, text.stopped, text.tokens) == ("abcd", True, 5)


@pytest.mark.parametrize(
    ("display", "shown"),
    [
        (Display(("lo",)), "hel"),
        (Display(("lo",), include_stop=True), "hello"),
        (Display(), "hel<lo!"),  # the stop token is the last
        (Display(include_stop=True), "hel<lo!?"),
        (Display(skip_special=False), "hel<end><lo!"),
    ],
    ids=str,
)
def test_what_of_stops_and_special_tokens_is_shown(display: Display, shown: str) -> None:
    word = b"hello" if display.stops else b"hel<lo!"
    text = ChoiceText(_LEVEL, display)
    deltas = [text.delta(TokenEvent("r", (token,))) for token in word[:3]]
    deltas += [text.delta(TokenEvent("r", (EOS, *word[3:]))), text.delta(TokenEvent("r", (ord("?"),), "stop"))]
    found = [delta for delta in deltas if delta is not None]
    ends = [i for i, delta in enumerate(found) if delta.finish is not None]
    whole = "".join(delta.text for delta in found[: ends[0] + 1])
    assert (whole, found[ends[0]].finish) == (shown, "stop")
