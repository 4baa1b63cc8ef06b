"""API keys: who may ask, and for how much. A key itself is in its file and in this module, and in no message.

    # one key a line; what follows it is optional
    b3c8d1...   name=web    requests=64
    77aa02...   name=batch  requests=16 tokens=200000
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import ConfigError
from ...proto.private import open_own
from ...proto.tls import MAX_BYTES, read_private

_LOG = logging.getLogger("tiermoe.server")
_EVERY_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Key:
    """One client.

    Attributes:
        name: by which logs and messages call it.
        requests: choices that may wait or run for it; None: as many as the server takes.
        tokens: prompt tokens that may wait for it; None: no limit.
        named: whether its line gives the name; else that is the line's number, which another key may get.
    """

    name: str
    secret: bytes = field(default=b"", repr=False)
    requests: int | None = None
    tokens: int | None = None
    named: bool = field(default=False, compare=False)

    def cache_salt(self, own: str | None = None) -> str:
        """The salt of its requests in the prefix cache; "": the one of all requests without a key and a salt.

        A key with a name keeps its salt when its secret is replaced; of one without a name the secret is the salt.

        Args:
            own: the request's salt.
        """
        who = self.name if self.named else hashlib.sha256(self.secret).hexdigest() if self.secret else ""
        parts = [kind + text for kind, text in (("n" if self.named else "s", who), ("r", own or "")) if text]
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest() if parts else ""


ANYONE = Key("anyone")  # where no key is asked for


def read_keys(file: Path) -> tuple[Key, ...]:
    """The keys of a file.

    Raises:
        ConfigError: it is unreadable, others may read it, or a line is malformed.
    """
    text = read_private(file, "key file").removeprefix(codecs.BOM_UTF8)
    lines = enumerate(text.splitlines(), 1)
    keys = tuple(_key(line.split(), f"key file '{file}', line {i}") for i, line in lines if line.split(b"#")[0].strip())
    if not keys:
        raise ConfigError(f"key file '{file}' holds no key", "write one word of printable ASCII characters a line")
    for what, found in (("key", [key.secret for key in keys]), ("name", [key.name for key in keys])):
        if len(set(found)) < len(found):
            raise ConfigError(f"key file '{file}' has the same {what} in two lines", "remove one of them")
    return keys


def _key(words: list[bytes], where: str) -> Key:
    secret, *options = words
    if not all(0x21 <= byte <= 0x7E for byte in secret):
        raise ConfigError(f"{where}: the key is not printable ASCII", "write one word of printable ASCII characters")
    found: dict[str, str] = {}
    for option in options:
        name, _, value = option.decode("ascii", "replace").partition("=")
        known = _NAME.fullmatch(value) if name == "name" else value.isdecimal() and int(value) > 0
        if name not in ("name", "requests", "tokens") or name in found or not known:
            raise ConfigError(  # the word is not shown: it may be a part of a key
                f"{where}: word {len(found) + 2} is not an option", "use name=WORD, requests=COUNT and tokens=COUNT"
            )
        found[name] = value
    limits = {name: int(found[name]) for name in ("requests", "tokens") if name in found}
    return Key(found.get("name", f"key-{where.rsplit(' ', 1)[1]}"), secret, named="name" in found, **limits)


def fingerprint(authorization: bytes) -> str | None:
    """By what a log calls a key that is not known: the beginning of its SHA-256; None: the header has none."""
    given = authorization.split()[-1:]
    return f"sha256:{hashlib.sha256(given[0]).hexdigest()[:8]}" if given else None


def _named(file: Path) -> frozenset[bytes] | None:
    """The first words of a file's lines, whatever its mode; None: it is missing, another user's, or unreadable."""
    try:
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as opened:
            lines = opened.read(MAX_BYTES).removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError:
        return None
    return frozenset(line.split()[0] for line in lines if line.split(b"#")[0].strip())


class KeyRing:
    """The keys of a file, read again when the file changes.

    If the file is refused (others may read it, a line is malformed, it is empty), no new key takes effect, and keys
    that it no longer names are revoked. If it is missing or unreadable, all keys stay valid until it can be read.

    Args:
        file: see `read_keys`.
        clock: seconds, monotonic.
        refused: called with a line each time that the file has changed and is refused.

    Attributes:
        problem: why the file is refused, and which keys are in force; None: the file is in force.

    Raises:
        ConfigError: the file is refused.
    """

    def __init__(
        self, file: Path, clock: Callable[[], float] = time.monotonic, refused: Callable[[str], None] = _LOG.error
    ) -> None:
        self._file, self._clock, self._refused = file, clock, refused
        self._version = self._look()
        self._looked_s = clock()
        self._keys = read_keys(file)
        self.problem: str | None = None

    def find(self, authorization: bytes) -> Key | None:
        """The key of an `Authorization` header; None: it has none that is known. All keys take the same time."""
        self.refresh()
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        given, found = given.strip(), None
        for key in self._keys:
            if hmac.compare_digest(given, key.secret):
                found = key
        return found

    def refresh(self) -> str | None:
        """Read the file if it has changed, at most once a second. Returns `problem`."""
        if self._clock() - self._looked_s < _EVERY_S:
            return self.problem
        self._looked_s = self._clock()
        if (version := self._look()) == self._version:
            return self.problem
        self._version = version
        try:
            self._keys, self.problem = read_keys(self._file), None
        except ConfigError as error:
            before = len(self._keys)
            if (named := _named(self._file)) is None:
                kept = "the former keys stay in force until it can be read"
            else:
                self._keys = tuple(key for key in self._keys if key.secret in named)
                kept = f"{len(self._keys)} of {before} former keys stay in force: those that it names"
            self.problem = f"{error} ({kept})"
            self._refused(self.problem)
        return self.problem

    def _look(self) -> tuple[int, ...] | None:
        """What changes when the file does; None: it is not there."""
        try:
            seen = self._file.stat()
        except OSError:
            return None
        return (seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino)
