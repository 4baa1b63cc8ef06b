"""Files of secrets and of TLS: who may read them, and whether they belong together."""

from __future__ import annotations

import calendar
import os
import re
import ssl
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .private import open_own

MAX_BYTES = 2**20  # of a file of secrets
_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags
NAME = "tiermoe"  # that the certificate of a channel server has, whatever its address
_FILES = {"ca": "ca.pem", "certificate": "cert.pem", "key": "key.pem"}


def read_private(file: Path, what: str) -> bytes:
    """A file that only its owner may read.

    Args:
        what: it is, for messages.

    Raises:
        ConfigError: it is unreadable, another user's, others may read it, or it is longer than 1 MiB.
    """
    try:
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise ConfigError(f"others may read {what} '{file}' (mode {mode:04o})", f"chmod 600 {file}")
            found = opened.read(MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{what} '{file}' cannot be read: {reason}", "give a file that this user may read") from error
    if len(found) > MAX_BYTES:
        raise ConfigError(f"{what} '{file}' is larger than {MAX_BYTES} bytes", "name the right file")
    return found


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one side.

    Attributes:
        ca: certifies the other side. A server with a CA demands a certificate of its clients.
        certificate, key: this side's own; optional for a client.
        server_name: client only: the name in the server's certificate if it is not the address.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    server_name: str | None = None

    @classmethod
    def of_folder(cls, folder: str) -> TlsFiles:
        """`ca.pem`, `cert.pem` and `key.pem` of a folder: mutual TLS between processes that share one CA."""
        return cls(**{part: str(Path(folder) / name) for part, name in _FILES.items()}, server_name=NAME)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of ca, certificate and key.

        Raises:
            ConfigError: a file cannot be read or is no PEM file, others may read the key, the key is encrypted or is
                not the certificate's, or there is one of them without the other.
        """
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS has a certificate without a key, or a key without one", "give both files")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        ca = certificate = key = None
        if self.ca is not None:
            ca = _read(self.ca)
            try:
                context.load_verify_locations(self.ca)
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(f"TLS file '{self.ca}' holds no certificate: {error}", "give a PEM file") from error
        if self.certificate is not None and self.key is not None:
            certificate, key = _read(self.certificate), read_private(Path(self.key), "TLS key")
            try:
                context.load_cert_chain(self.certificate, self.key, password="")  # else a terminal is asked for one
            except (ssl.SSLError, OSError) as error:
                raise ConfigError(
                    f"TLS certificate '{self.certificate}' and key '{self.key}' cannot be used together: {error}",
                    "give a certificate and the key that it was made with, as PEM, without a password",
                ) from error
        return ca, certificate, key

    def refuse_expired(self) -> None:
        """Raise ConfigError where a certificate has expired: nobody would accept it."""
        for file in (self.ca, self.certificate):
            if file is not None and (end_s := expires_s(Path(file))) <= time.time():
                when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(end_s))
                raise ConfigError(f"TLS certificate '{file}' expired at {when}", "give one that is valid")


def expires_s(file: Path) -> float:
    """When the first of a PEM file's certificates expires, in seconds since 1970.

    Raises:
        ConfigError: it cannot be read, or holds no certificate.
    """
    found = [_not_after(ssl.PEM_cert_to_DER_cert(block)) for block in _PEM.findall(_read(str(file)).decode("latin-1"))]
    if not found:
        raise ConfigError(f"TLS file '{file}' holds no certificate", "give a PEM file")
    return min(found)


def _not_after(der: bytes) -> float:
    """`notAfter` of a certificate (RFC 5280, 4.1): that of `validity`, behind version, serial, algorithm and issuer."""

    def element(at: int) -> tuple[int, int, int]:
        """Tag, begin and end of the content of the element there."""
        length, begin = der[at + 1], at + 2
        if length & 0x80:
            count = length & 0x7F
            length, begin = int.from_bytes(der[begin : begin + count], "big"), begin + count
        return der[at], begin, begin + length

    at = element(element(0)[1])[1]  # into the certificate, and what is signed of it
    if element(at)[0] == _VERSION:
        at = element(at)[2]
    for _ in range(3):
        at = element(at)[2]
    tag, begin, end = element(element(element(at)[1])[2])
    text = der[begin:end].decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return float(calendar.timegm(time.strptime(text, "%Y%m%d%H%M%SZ")))


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file '{file}' cannot be read: {error.strerror}", "give readable PEM files") from error
