"""Files of secrets and of TLS: who may read them, and whether they belong together."""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .private import open_own

_MAX_BYTES = 2**20
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
            found = opened.read(_MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"{what} '{file}' cannot be read: {reason}", "give a file that this user may read") from error
    if len(found) > _MAX_BYTES:
        raise ConfigError(f"{what} '{file}' is larger than {_MAX_BYTES} bytes", "name the right file")
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


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"TLS file '{file}' cannot be read: {error.strerror}", "give readable PEM files") from error
