"""The bytes that a single token stands for: one token may be half a character."""

from __future__ import annotations

import json
import re

from tokenizers import Tokenizer

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in set(printable))}
    return alphabet


class TokenBytes:
    """Token ids into bytes, for byte-level and for SentencePiece-like vocabularies."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_level_alphabet() if _is_byte_level(tokenizer) else None
        self._added = {token: item.content for token, item in tokenizer.get_added_tokens_decoder().items()}

    def of(self, token: int) -> bytes:
        """The token's bytes; special tokens are their names, and ids without a token are empty."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if self._alphabet is not None and all(letter in self._alphabet for letter in name):
            return bytes(self._alphabet[letter] for letter in name)
        fallback = _BYTE_FALLBACK.fullmatch(name)
        return bytes([int(fallback[1], 16)]) if fallback else name.replace("▁", " ").encode()

    def shown(self, token: int) -> str:
        """The token as text; `bytes:\\xNN...`, as OpenAI writes it, where it is not whole characters."""
        found = self.of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))
