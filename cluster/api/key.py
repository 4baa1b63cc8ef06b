"""The bearer key, from a file: what is an argument shows in process lists and in Ray's records."""

from __future__ import annotations

from pathlib import Path

from ...errors import ConfigError


def read_key(file: str | None) -> str | None:
    """The bearer key: the file's text without blanks around it; None: no file.

    Raises:
        ConfigError: unreadable, empty, or not one printable word.
    """
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"key file '{file}' cannot be read: {error}", "give a file with the key in it") from error
    if not key or not all("!" <= letter <= "~" for letter in key):
        raise ConfigError(f"key file '{file}' holds no key", "write one word of printable ASCII characters")
    return key
