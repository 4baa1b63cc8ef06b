"""Windows and multiple choice: which tokens are scored."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tiny_models import save_byte_tokenizer
from tokenizers import Tokenizer, processors

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.evaluate.text import (
    CONTEXT,
    TOKENS,
    HeldOut,
    as_tokens,
    build_choices,
    line_starts,
    load_heldout,
    load_text,
    split_windows,
)
from tiermoe.errors import CheckpointError, ConfigError

_LINE = "line {:04d} of {}, é\n"


@pytest.fixture(scope="module")
def shipped() -> HeldOut:
    return load_heldout(default_model_dir())


def small_model(folder: Path, documents: int = 5, lines: int = 30, begin: bool = False) -> Path:
    """A tokenizer of one token a byte, and documents of one kind; `begin`: it puts <s> before a text."""
    folder.mkdir(exist_ok=True)
    tokenizer: Tokenizer = save_byte_tokenizer(folder)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "heldout").mkdir()
    rows = [{"text": "".join(_LINE.format(n, name) for n in range(lines))} for name in "abcdefgh"[:documents]]
    (folder / "heldout" / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_every_shipped_item_is_fair(shipped: HeldOut) -> None:
    items, by_id = build_choices(shipped), {p.id: p for p in shipped.passages}
    assert len(items) == 240  # docs/evaluation.md
    for item in items:
        passages = [by_id[place.passage] for place in item.candidates]
        assert len({p.kind for p in passages}) == 1
        assert len({p.source for p in passages}) == 4
        assert item.candidates[item.answer] == item.true
        assert all(place.start in line_starts(p) for place, p in zip(item.candidates, passages, strict=True))
        assert len({p.ids[c.start : c.start + TOKENS] for p, c in zip(passages, item.candidates, strict=True)}) == 4
    answers = Counter(item.answer for item in items)
    assert min(answers.values()) > len(items) / 8


def test_items_in_tokens(shipped: HeldOut) -> None:
    items = as_tokens(build_choices(shipped), shipped, documents=3, per_document=2)
    assert Counter(item.document for item in items) == {0: 2, 1: 2, 2: 2}
    for item in items:
        assert len(item.context) == CONTEXT
        assert {len(c) for c in item.candidates} == {TOKENS}
        whole = (*item.context, *item.candidates[item.answer])
        texts = [p.ids for p in shipped.documents[item.document]]
        assert any(whole == ids[k : k + len(whole)] for ids in texts for k in range(len(ids)))


def test_windows_are_repeatable_and_their_continuations_do_not_overlap(shipped: HeldOut) -> None:
    options = EvaluationOptions(windows=4, prefix=96, continuation=64)
    windows = split_windows(shipped, options)
    assert windows == split_windows(shipped, options)
    assert {len(w.ids) for w in windows} == {160}
    assert {w.document for w in windows} == set(range(len(shipped.documents)))
    assert max(Counter(w.document for w in windows).values()) == 4
    by_id = {p.id: p.ids for p in shipped.passages}
    seen: set[tuple[str, int]] = set()
    for w in windows:
        ids = by_id[w.passage]
        start = next(k for k in range(0, len(ids), 64) if ids[k : k + 160] == w.ids)
        scored = {(w.passage, k) for k in range(start + 96, start + 160)}
        assert not scored & seen
        seen |= scored


def test_special_tokens_before_a_text_stand_in_every_prefix(tmp_path: Path) -> None:
    heldout = load_heldout(small_model(tmp_path, begin=True))
    assert heldout.leading == (1,)
    windows = split_windows(heldout, EvaluationOptions(prefix=8, continuation=8, windows=3))
    assert all(w.ids[0] == 1 and 1 not in w.ids[1:] and len(w.ids) == 16 for w in windows)
    item = as_tokens(build_choices(heldout), heldout, None, 1)[0]
    assert (item.context[0], len(item.context)) == (1, CONTEXT)


def test_refusals_of_heldout_text(tmp_path: Path) -> None:
    shutil.copy(default_model_dir() / "tokenizer.json", tmp_path)
    (tmp_path / "heldout").mkdir()
    for content, why in (
        ("", "no held-out passages"),
        ('{"text": "a"}\n{"txt": "b"}\n', "line 2 is not an object with a text"),
        ('{"text": "a", "id": "n"}\n{"text": "b", "id": "n"}\n', "the id 'n'"),
    ):
        (tmp_path / "heldout" / "x.jsonl").write_text(content)
        with pytest.raises(CheckpointError, match=why):
            load_heldout(tmp_path)


# -- one's own text ----------------------------------------------------------------------------------------------------


def test_own_text_is_a_document_or_one_a_line(tmp_path: Path) -> None:
    """Issue 30: a policy could not be scored on a user's text."""
    model = small_model(tmp_path / "model", begin=True)
    plain = tmp_path / "notes.md"  # any name
    plain.write_text("\ufeff" + "héllo wörld\n" * 40, encoding="utf-8")
    heldout = load_text(model, plain)
    assert (len(heldout.documents), heldout.leading, heldout.own) == (1, (1,), plain)
    windows = split_windows(heldout, EvaluationOptions(windows=None, prefix=32, continuation=32))
    text = plain.read_text(encoding="utf-8-sig").encode()
    assert len(windows) == (len(text) - 31) // 32  # every token behind the first prefix, one a byte here
    assert all(len(window.ids) == 64 and window.ids[0] == 1 for window in windows)
    scored = [id for window in windows for id in window.ids[32:]]
    assert scored == list(heldout.documents[0][0].ids[31 : 31 + 32 * len(windows)])
    lines = tmp_path / "two.jsonl"
    lines.write_text('{"text": "' + "a b " * 99 + '"}\n\n{"text": "short"}\n{"text": "' + "c d " * 99 + '"}\n')
    windows = split_windows(load_text(model, lines), EvaluationOptions(windows=2, prefix=32, continuation=32))
    assert Counter(window.document for window in windows) == {0: 2, 2: 2}  # the short one has no window


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("empty.txt", b"", "has no text"),
        ("blank.txt", b" \n\t\n", "has no text"),
        ("empty.jsonl", b"\n", "has no text"),
        ("binary", bytes(range(256)), "is not UTF-8 text"),
        ("zeros.txt", b"text\0" * 100, "holds NUL characters"),
        ("latin.txt", "é".encode("latin-1"), "is not UTF-8 text (byte 0)"),
        ("lines.jsonl", b'{"text": "a"}\n{"prompt": "b"}\n', "line 2 is not an object with a text"),
        ("surrogate.jsonl", b'{"text": "\\ud800"}\n', "line 1 is not an object with a text"),
        ("list.jsonl", b"[1]\n", "line 1 is not an object with a text"),
    ],
)
def test_own_text_that_cannot_be_scored_is_refused(name: str, content: bytes, what: str, tmp_path: Path) -> None:
    model, file = small_model(tmp_path / "model"), tmp_path / name
    file.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        load_text(model, file)
    assert what in str(refused.value)
    assert str(file) in str(refused.value)
    assert "heldout" not in str(refused.value)  # the remedy is for the user's file


def test_own_text_that_is_too_short_or_missing_is_refused(tmp_path: Path) -> None:
    model, file = small_model(tmp_path / "model", begin=True), tmp_path / "short.txt"
    file.write_text("only a few words")
    with pytest.raises(ConfigError, match="has 17 tokens, and a window takes 256; give longer text, or lower --prefix"):
        split_windows(load_text(model, file), EvaluationOptions(windows=None))
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_text(model, missing)
