"""Content codings of request bodies (RFC 9110, 8.4): gzip and deflate, decoded as they arrive within a bound.

What counts against a limit is the decoded body: a few kilobytes of gzip may be gigabytes of zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from .refusals import ApiError, refused

_GZIP = frozenset({"gzip", "x-gzip"})
_MOST_MEMBERS = 1000  # of one gzip body: each makes a new state
_RAW = -zlib.MAX_WBITS  # `deflate` without zlib's header, as some clients send it


class Decoder:
    """Decodes one body.

    Args:
        coding: gzip, x-gzip or deflate.
    """

    def __init__(self, coding: str) -> None:
        self._gzip = coding in _GZIP
        self._name = "gzip" if self._gzip else coding
        self._stream: zlib._Decompress | None = None
        self._first = b""  # a byte that does not say yet which form of deflate it is
        self._members = 0

    def feed(self, data: bytes, most: int) -> bytes:
        """What has come, decoded; more than `most` bytes: there is more, and what follows is not decoded.

        Raises:
            ApiError: 400, it is damaged.
        """
        found, data = bytearray(), self._first + data
        self._first = b""
        while data and len(found) <= most:
            if self._stream is None and not self._begin(data):
                self._first = data
                break
            assert self._stream is not None
            try:
                found += self._stream.decompress(data, most + 1 - len(found))
            except zlib.error as error:
                raise refused(f"the body is not valid {self._name}: {error}", None) from error
            data = b""
            if self._stream.eof:
                data, self._stream = self._stream.unused_data, None
        return bytes(found)

    def finish(self) -> None:
        """The body has ended. Raises ApiError: 400, it is cut off."""
        if self._stream is not None or self._first:
            raise refused(f"the body ends before its {self._name} data; send all of it", None)

    def _begin(self, data: bytes) -> bool:
        """Begin a member; False: more bytes are needed."""
        if self._members and not self._gzip:
            raise refused(f"the body has bytes behind its {self._name} data; leave them out", None)
        if self._members == _MOST_MEMBERS:
            raise refused(f"the body has more than {_MOST_MEMBERS} gzip members; send one", None)
        if self._gzip:
            bits = zlib.MAX_WBITS | 16
        elif len(data) < 2:
            return False
        else:  # RFC 1950: the method is 8, and the two bytes are divisible by 31
            bits = zlib.MAX_WBITS if data[0] & 15 == 8 and int.from_bytes(data[:2]) % 31 == 0 else _RAW
        self._stream = zlib.decompressobj(bits)
        self._members += 1
        return True


def decoder(values: Iterable[bytes]) -> Decoder | None:
    """The decoder of a body with these `Content-Encoding` headers; None: it is sent as it is.

    Raises:
        ApiError: 415, a coding that is not known, or several.
    """
    given = [name.strip().lower() for value in values for name in value.decode("latin-1").split(",")]
    codings = [name for name in given if name not in ("", "identity")]
    if not codings:
        return None
    (coding, *more) = codings
    if not more and (coding in _GZIP or coding == "deflate"):
        return Decoder(coding)
    said = ", ".join(codings)[:100]
    raise ApiError(
        415, f"the content encoding is '{said}'; send gzip, deflate, or the body as it is",
        code="unsupported_content_encoding", headers={"Accept-Encoding": "gzip, deflate, identity"},
    )  # fmt: skip
