"""Content codings of request bodies (RFC 9110, 8.4): gzip and deflate, decoded as they arrive within a bound.

What counts against a limit is the decoded body: a few kilobytes of gzip may be gigabytes of zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from .refusals import ApiError, refused

_CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_EITHER = zlib.MAX_WBITS | 32  # gzip's header or zlib's, whichever is there


class Decoder:
    """Decodes one body.

    Args:
        name: of the coding, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name, self._stream = name, zlib.decompressobj(_EITHER)
        self._begun = False

    def feed(self, data: bytes, most: int) -> bytes:
        """What has come, decoded; more than `most` bytes: there is more, and what follows is not decoded.

        Raises:
            ApiError: 400, it is damaged, or has bytes behind its end.
        """
        self._begun |= bool(data)
        behind = data if self._stream.eof else b""
        try:
            found = b"" if self._stream.eof else self._stream.decompress(data, most + 1)
        except zlib.error as error:
            raise refused(f"the body is not valid {self._name}: {error}", None) from error
        if behind or self._stream.unused_data:
            raise refused(f"the body has bytes behind its {self._name} data; leave them out", None)
        return found

    def finish(self) -> None:
        """The body has ended. Raises ApiError: 400, it is cut off."""
        if self._begun and not self._stream.eof:
            raise refused(f"the body ends before its {self._name} data; send all of it", None)


def decoder(values: Iterable[bytes]) -> Decoder | None:
    """The decoder of a body with these `Content-Encoding` headers; None: it is sent as it is.

    Raises:
        ApiError: 415, a coding that is not known, or several.
    """
    given = [name.strip().lower() for value in values for name in value.decode("latin-1").split(",")]
    codings = [name for name in given if name not in ("", "identity")]
    if not codings:
        return None
    if len(codings) == 1 and codings[0] in _CODINGS:
        return Decoder(codings[0].removeprefix("x-"))
    said = ", ".join(codings)[:100]
    raise ApiError(
        415, f"the content encoding is '{said}'; send gzip, deflate, or the body as it is",
        code="unsupported_content_encoding", headers={"Accept-Encoding": "gzip, deflate, identity"},
    )  # fmt: skip
