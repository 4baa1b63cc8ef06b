"""Web pages before the server: those that are allowed read every answer, and no other one drives it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import FakeBackend, ask, error, post

from tiermoe.cluster.api.origins import Access, checked_host, checked_origin
from tiermoe.cluster.api.settings import LimitSettings

PAGE = "https://chat.example.com"
SECRET = "sesame-open"
_ASKED = {"prompt": "hi"}


def key_file(folder: Path) -> Path:
    file = folder / "keys"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    return file


def preflight(
    path: str = "/v1/chat/completions", origin: str = PAGE, more: dict[str, str] | None = None, **options: Any
) -> httpx.Response:
    headers = {
        "Origin": origin, "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }  # fmt: skip
    return ask(FakeBackend(), lambda http: http.options(path, headers=headers | (more or {})), **options)


@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000", "app://obsidian.md", "null"])
def test_a_preflight_is_answered_without_a_key(origin: str, keyed: bool, tmp_path: Path) -> None:
    """It was 405, and 401 with keys: no page could use the server."""
    keys = key_file(tmp_path) if keyed else None
    for given, shown in (((origin,), origin), (("*",), "*")):
        found = preflight(origin=origin, access=Access(given, keyed=keyed), keys=keys)
        assert found.status_code == 204
        assert found.headers["access-control-allow-origin"] == shown
        assert "POST" in found.headers["access-control-allow-methods"]
        assert found.headers["access-control-allow-headers"] == "authorization,content-type,x-stainless-lang"
        assert ("Origin" in found.headers.get("vary", "")) == (shown != "*")
        assert "access-control-allow-private-network" not in found.headers
    more = {"Access-Control-Request-Private-Network": "true"}
    found = preflight(origin=origin, access=Access((origin,)), more=more)
    assert found.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize("access", [None, Access(("https://other.example.com",)), Access((PAGE + ":8443",))])
def test_the_preflight_of_another_page_is_refused(access: Access | None, tmp_path: Path) -> None:
    for keys in (None, key_file(tmp_path)):
        found = preflight(access=access, keys=keys)
        assert error(found)[0] == 403
        assert f"--allow-origin {PAGE}" in error(found)[2]
        assert "access-control-allow-origin" not in found.headers


def test_every_answer_can_be_read_by_an_allowed_page(tmp_path: Path) -> None:
    """Refusals before the application, failures behind it and streams too: else a page sees a network error alone."""
    keys, access = key_file(tmp_path), Access((PAGE,), keyed=True)

    async def call(http: httpx.AsyncClient) -> dict[int, httpx.Response]:
        page, key = {"Origin": PAGE}, {"Authorization": f"Bearer {SECRET}"}
        big, kind = b" " * 2000, {"Content-Type": "application/json"}
        stream = {"prompt": "hi", "stream": True, "user": "u"}
        return {
            200: await http.post("/v1/completions", json=stream, headers=page | key),
            401: await http.post("/v1/completions", json=_ASKED, headers=page),
            404: await http.get("/nothing", headers=page | key),
            400: await http.post("/v1/completions", json={}, headers=page | key),
            413: await http.post("/v1/completions", content=big, headers=page | key | kind),
            415: await http.post("/v1/completions", content=b"{}", headers=page | key | {"Content-Type": "text/plain"}),
            429: await http.post("/v1/completions", json={"prompt": ["a"] * 9}, headers=page | key),
        }

    found = ask(FakeBackend(max_requests=1), call, keys=keys, access=access,
                limits=LimitSettings(waiting=1, body_bytes=1024))  # fmt: skip
    for status, response in found.items():
        assert response.status_code == status, response.text
        assert response.headers["access-control-allow-origin"] == PAGE
        exposed = response.headers["access-control-expose-headers"]
        assert {"x-request-id", "warning", "retry-after"} <= set(exposed.replace(" ", "").split(","))
        assert "Origin" in response.headers["vary"]
    assert "warning" in found[200].headers


def test_a_failure_of_ours_can_be_read_by_an_allowed_page(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("tiermoe.cluster.api.routes.completion", fails)

    async def call(http: httpx.AsyncClient) -> httpx.Response:
        http._transport.raise_app_exceptions = False  # type: ignore[attr-defined]
        return await http.post("/v1/completions", json=_ASKED, headers={"Origin": PAGE})

    found = ask(FakeBackend(), call, access=Access((PAGE,)))
    assert error(found)[:1] == (500,)
    assert found.headers["access-control-allow-origin"] == PAGE
    assert found.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize", "/v1/models", "/metrics"])
def test_another_page_cannot_drive_a_server_without_a_key(path: str) -> None:
    backend = FakeBackend()
    for origin in ("https://evil.example.com", "http://test:8000", "null", "file://", "http://test.evil.example.com"):
        for access in (None, Access((PAGE,))):
            method = "GET" if path in ("/v1/models", "/metrics") else "POST"
            found = ask(
                backend,
                lambda http, o=origin, m=method: http.request(m, path, json=_ASKED, headers={"Origin": o}),
                access=access,
            )
            assert error(found)[0] == 403
            assert "access-control-allow-origin" not in found.headers
    assert backend.requests == []


def test_the_servers_own_page_and_programs_are_let_in(tmp_path: Path) -> None:
    same = [("http://test", {}), ("http://test:80", {}), ("https://test", {}), ("HTTP://Test", {}),
            ("http://127.0.0.1:8000", {"Host": "127.0.0.1:8000"}), ("http://[::1]:8000", {"Host": "[::1]:8000"})]
    for origin, host in same:
        assert post("/v1/completions", _ASKED, headers={"Origin": origin} | host).status_code == 200
    assert post("/v1/completions", _ASKED).status_code == 200
    # a page does not know the key
    headers = {"Origin": "https://evil.example.com", "Authorization": f"Bearer {SECRET}"}
    keyed = post("/v1/completions", _ASKED, headers=headers, keys=key_file(tmp_path))
    assert keyed.status_code == 200
    assert "access-control-allow-origin" not in keyed.headers
    assert post("/v1/completions", _ASKED, headers={"Origin": "https://any.example.com"},
                access=Access(("*",))).status_code == 200  # fmt: skip


def status_of(host: str | None, server: str, path: str = "/v1/models", access: Access | None = None) -> int:
    """For a request under a name, on a connection to an address."""

    async def call(http: httpx.AsyncClient) -> int:
        found: list[int] = []

        async def send(message: Any) -> None:
            found.extend([message["status"]] if message["type"] == "http.response.start" else [])

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "scheme": "http", "server": (server, 8000),
            "client": ("127.0.0.1", 1), "headers": [] if host is None else [(b"host", host.encode())],
        }  # fmt: skip
        await http._transport.app(scope, receive, send)  # type: ignore[attr-defined]
        return found[0]

    return ask(FakeBackend(), call, access=access)


_MACHINE = socket.gethostname()


@pytest.mark.parametrize(
    ("server", "names", "others"),
    [
        ("127.0.0.1", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST", "localhost.", "127.1.2.3", "[::1]:8000", "",
                       "0.0.0.0:8000", None, _MACHINE, "a.localhost"],
         ["evil.example.com", "evil.example.com:8000", "127.0.0.1.example.com", "localhost.example.com", "10.0.0.9",
          "evil", "evil.local", "[2001:db8::1]"]),
        ("::1", ["[::1]", "localhost"], ["evil.example.com", "[::2]"]),
        ("10.0.0.9", ["10.0.0.9:8000", "192.168.1.1", "[fd00::1]:8000", "localhost", "tiermoe", "tiermoe.ns.svc",
                      "tiermoe.ns.svc.cluster.local", "node.internal", "node.local"],
         ["evil.example.com", "10.0.0.9.example.com", "local.example.com"]),
        ("::ffff:10.0.0.9", ["10.0.0.9"], ["evil.example.com"]),
    ],
    ids=["loopback", "loopback 6", "outside", "both stacks"],
)  # fmt: skip
def test_a_name_that_another_owns_is_refused(server: str, names: list[str | None], others: list[str]) -> None:
    """DNS rebinding: its page and the server have one origin for the browser."""
    assert {name: status_of(name, server) for name in names} == dict.fromkeys(names, 200)
    assert {name: status_of(name, server) for name in others} == dict.fromkeys(others, 403)


def test_names_that_are_allowed_keys_and_probes() -> None:
    allowed = Access(hosts=("api.example.com", "*.lan.example.com"), bound="gpu.example.com")
    for name in ("api.example.com", "API.example.com.:8000", "a.b.lan.example.com", "gpu.example.com", "localhost"):
        assert status_of(name, "127.0.0.1", access=allowed) == 200
    for name in ("lan.example.com", "example.com", "xapi.example.com"):
        assert status_of(name, "127.0.0.1", access=allowed) == 403
    assert status_of("any.example.com", "127.0.0.1", access=Access(hosts=("*",))) == 200
    assert status_of("any.example.com", "127.0.0.1", access=Access(keyed=True)) == 200
    assert status_of("any.example.com", "127.0.0.1", access=Access(hosts=("a.example.com",), keyed=True)) == 403
    for path in ("/health", "/ready", "/health/"):
        assert status_of("any.example.com", "127.0.0.1", path) == 200


def test_what_is_no_origin_and_no_host() -> None:
    origins = {"HTTPS://A.example:443/": "https://a.example", "http://a:80": "http://a", "*": "*", "null": "null",
               "http://[::1]:3000": "http://[::1]:3000"}  # fmt: skip
    assert {text: checked_origin(text) for text in origins} == origins
    hosts = {"A.example.": "a.example", "[::1]": "::1", "10.0.0.1": "10.0.0.1", "*.a.b": "*.a.b", "*": "*"}
    assert {text: checked_host(text) for text in hosts} == hosts
    for text in ("", "a.example", "https://", "https://a/b", "https://a?b", "https://u@a", "https://a b", "*.a"):
        with pytest.raises(ValueError, match="is no origin; give SCHEME://HOST"):
            checked_origin(text)
    for text in ("", "a:80", "http://a", "a/b", "a b", "*a", "a.*"):
        with pytest.raises(ValueError, match="is no host; give a name"):
            checked_host(text)


def test_many_pages_at_once_get_their_own_permission() -> None:
    pages = [f"https://{i}.example.com" for i in range(20)]

    async def call(http: httpx.AsyncClient) -> list[str]:
        answers = await asyncio.gather(*(http.get("/v1/models", headers={"Origin": page}) for page in pages))
        return [answer.headers["access-control-allow-origin"] for answer in answers]

    assert ask(FakeBackend(), call, access=Access(tuple(pages))) == pages
