"""TLS: files that are refused, channels, and the HTTP server's side of it."""

from __future__ import annotations

import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import certificate, folder_of

from tiermoe.cluster.jobs.watched import FileWatch, expiry_checks
from tiermoe.errors import ChannelRefused, ConfigError
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import HealthRequest
from tiermoe.proto.options import ChannelOptions, ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink
from tiermoe.proto.server import ChannelServer
from tiermoe.proto.tls import TlsFiles, expires_s

TRANSPORTS = ("grpc", "shm") if sys.platform == "linux" else ("grpc",)
_SOON_S = 5.0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tls_and_mutual_tls(tmp_path: Path, transport: str) -> None:
    server_crt, server_key = certificate(tmp_path, "server")
    client_crt, client_key = certificate(tmp_path, "client")

    def options(tls: TlsFiles | None, deadline_s: float = 20.0) -> ChannelOptions:
        return ChannelOptions(transport=transport, tls=tls, open_deadline_s=deadline_s)  # type: ignore[arg-type]

    with ChannelServer(lambda m: None, ServerOptions(tls=TlsFiles(None, server_crt, server_key))) as server:
        with open_channel(server.address, options(TlsFiles(ca=server_crt))) as channel:
            assert channel.call(HealthRequest(), _SOON_S) is None
        for wrong in (None, TlsFiles(ca=client_crt)):
            with pytest.raises(ChannelRefused):
                open_channel(server.address, options(wrong, 1.0))
    with ChannelServer(lambda m: None, ServerOptions(tls=TlsFiles(client_crt, server_crt, server_key))) as server:
        with open_channel(server.address, options(TlsFiles(server_crt, client_crt, client_key))) as channel:
            assert channel.call(HealthRequest(), _SOON_S) is None
        with pytest.raises(ChannelRefused):
            open_channel(server.address, options(TlsFiles(ca=server_crt), 1.0))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes_with_one_folder_reach_each_other(tmp_path: Path, transport: str) -> None:
    ours, others = (TlsFiles.of_folder(str(folder_of(tmp_path / name))) for name in ("ours", "others"))
    with ChannelServer(lambda m: None, ServerOptions(tls=ours)) as server:
        link = PeerLink(LocalDirectory({"ndp/0": server.address}, ours), name="ndp/0")
        with link.connect(server.address, transport) as channel:  # type: ignore[arg-type]
            assert channel.call(HealthRequest(), _SOON_S) is None
        for wrong in (None, others):
            with pytest.raises(ChannelRefused):
                PeerLink(LocalDirectory(tls=wrong), name="ndp/0").connect(server.address, transport)  # type: ignore[arg-type]


def _other_key(folder: Path) -> None:
    Path(certificate(folder, "other")[1]).rename(folder / "key.pem")


def _locked_key(folder: Path) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key((folder / "key.pem").read_bytes(), None)
    locked = forms.BestAvailableEncryption(b"secret")
    (folder / "key.pem").write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, locked))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "key.pem").chmod(0o640), "others may read TLS key .*mode 0640"),
        (lambda folder: (folder / "key.pem").unlink(), "TLS key .* cannot be read: No such file"),
        (lambda folder: (folder / "cert.pem").unlink(), "cert.pem' cannot be read: No such file"),
        (lambda folder: (folder / "ca.pem").unlink(), "ca.pem' cannot be read: No such file"),
        (lambda folder: (folder / "ca.pem").write_text("no"), "ca.pem' holds no certificate"),
        (lambda folder: (folder / "cert.pem").write_text("no"), "cannot be used together"),
        (_other_key, "cannot be used together: .*MISMATCH"),
        (_locked_key, "cannot be used together"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    folder = folder_of(tmp_path / "tls")
    TlsFiles.of_folder(str(folder)).read()
    damage(folder)
    with pytest.raises(ConfigError, match=words):
        TlsFiles.of_folder(str(folder)).read()
    with pytest.raises(ConfigError, match=words):
        ChannelServer(lambda m: None, ServerOptions(tls=TlsFiles.of_folder(str(folder))))


def test_an_expired_certificate_is_refused_before_anything_starts(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "old", seconds=-3600.0)
    files = TlsFiles(None, crt, key)
    files.read()  # a process that is started again says so by its connections
    with pytest.raises(ConfigError, match=r"old\.crt' expired at 20"):
        files.refuse_expired()


def test_what_expires_is_said_before_and_then_once_each(tmp_path: Path) -> None:
    crt, key = certificate(tmp_path, "soon", seconds=30 * 86400.0)
    later, _ = certificate(tmp_path, "later", seconds=60 * 86400.0)
    (tmp_path / "both.pem").write_text(Path(later).read_text() + Path(crt).read_text())
    end_s, said = expires_s(Path(crt)), list[str]()
    assert abs(end_s - time.time() - 30 * 86400) < 60
    assert expires_s(tmp_path / "both.pem") == end_s
    now_s = 0.0
    watch = FileWatch(expiry_checks(TlsFiles(None, crt, key), lambda: now_s), said.append)
    for left_s in (20 * 86400, 86401, 3601, 3600, 1, 1, 0, -9):
        now_s = end_s - left_s
        watch.look()
    ends = [line.partition("UTC")[2] for line in said]
    again = ": replace it and start again"
    assert ends == [*(f", within {name}{again}" for name in ("14 days", "a day", "an hour", "a minute")),
                    ": new connections fail; replace it and start again"]  # fmt: skip
    assert all(f"TLS certificate '{crt}'" in line for line in said)
    Path(crt).write_text(Path(certificate(tmp_path, "next", 90 * 86400.0)[0]).read_text())
    watch.look()
    assert said[-1] == f"TLS certificate '{crt}' is right again"


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="without a key"):
        TlsFiles(certificate="a").read()


def test_the_server_demands_a_certificate_where_there_is_a_ca(tmp_path: Path) -> None:
    """uvicorn demands none for `ssl_ca_certs` alone."""
    uvicorn = pytest.importorskip("uvicorn")
    from tiermoe.cluster.api.server_socket import server_options

    file, key = certificate(tmp_path, "server")
    for ca, demanded in ((None, ssl.CERT_NONE), (file, ssl.CERT_REQUIRED)):
        config = uvicorn.Config(lambda: None, **server_options(TlsFiles(ca, file, key)))
        config.load()
        assert config.ssl.verify_mode == demanded
