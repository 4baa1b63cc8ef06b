"""What each typed error about a checkpoint says: one line, one remedy, and damage only where a length shows it."""

from __future__ import annotations

from tiermoe.errors import TierMoeError


def check_words(error: TierMoeError) -> None:
    text = str(error)
    assert error.what, text
    assert error.remedy, text
    assert "\n" not in text, text
    assert ";" not in error.remedy, text
    assert text.count(error.remedy) == 1, text
    assert "0.0 GB" not in text, text
    if "again" in error.remedy:
        assert "bytes" in error.what or "changed while" in error.what or "was truncated while" in error.what, text
