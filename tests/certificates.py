"""Certificates for tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

import pytest


def certificate(folder: Path, name: str, seconds: float = 86400.0) -> tuple[str, str]:
    """A certificate for 127.0.0.1 and `tiermoe` that certifies itself, and its key, which only its owner may read.

    Args:
        seconds: from now until it expires.
    """
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("tiermoe")]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(seconds=seconds))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    paths[0].write_bytes(made.public_bytes(pem))
    paths[1].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    paths[1].chmod(0o600)
    return str(paths[0]), str(paths[1])


def folder_of(folder: Path) -> Path:
    """A folder as `--channel-tls` takes it: one certificate for all processes, which is its own CA."""
    folder.mkdir()
    certificate_file, key = certificate(folder, "made")
    Path(key).rename(folder / "key.pem")
    (folder / "ca.pem").write_bytes(Path(certificate_file).read_bytes())
    Path(certificate_file).rename(folder / "cert.pem")
    return folder
