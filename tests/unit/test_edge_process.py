"""The process of the server, without Ray: what it needs to serve, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_api import byte_tokenizer
from fake_leads import FakeLead
from ray.exceptions import RayTaskError

pytest.importorskip("uvicorn")

from tiermoe.actors.requests import TokenEvent
from tiermoe.cluster.api import edge as edges
from tiermoe.cluster.api import server as servers
from tiermoe.cluster.api.edge import Edge
from tiermoe.cluster.api.server_socket import ServerSocket
from tiermoe.cluster.api.settings import ApiSettings
from tiermoe.errors import ConfigError

_WHOLE = [TokenEvent("r", (72,)), TokenEvent("r", (73,), "length")]
_BODY = {"prompt": "p", "max_tokens": 2, "temperature": 0}


@pytest.fixture
def settings(tmp_path: Path) -> ApiSettings:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return ApiSettings(deployment="abcdef", model_name="fake", request_log="text")


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Edge]:
    def made(settings: ApiSettings, server_socket: ServerSocket, lead: FakeLead, **plan: Any) -> Edge:
        monkeypatch.setattr(edges, "leads_of", lambda name: {name: SimpleNamespace(handle=lead)})
        known = {"model": "/fake", "store_path": str(tmp_path), "max_requests": 4, "max_prompt_tokens": 64}
        return Edge(settings, known | plan, server_socket.name, None)

    return made


@contextmanager
def opened() -> Iterator[ServerSocket]:
    with ServerSocket("127.0.0.1", 0) as server_socket:
        server_socket.open(lambda: None)
        yield server_socket


def post(server_socket: ServerSocket, **more: Any) -> httpx.Response:
    return httpx.post(f"{server_socket.url}/v1/completions", json=_BODY | more, timeout=20)


def refusal(server_socket: ServerSocket) -> str | None:
    """What a client is refused with; None: the edge had its connection, as it may for a tenth of a second more."""
    with contextlib.suppress(httpx.RemoteProtocolError):  # taken as the edge closed
        answer = post(server_socket)
        return str(answer.json()["error"]["message"]) if answer.status_code == 503 else None
    return None


def test_it_serves_and_its_log_is_that_of_the_command(
    settings: ApiSettings, make: Callable[..., Edge], capfdbinary: Any
) -> None:
    with opened() as server_socket:
        edge = make(settings, server_socket, FakeLead(_WHOLE, later=[_WHOLE]))
        assert edge.health() == {"state": "waiting", "requests": 0}
        assert post(server_socket).status_code == 503
        server_socket.hand_over()
        answer = post(server_socket)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "HI")
        assert httpx.get(f"{server_socket.url}/ready", timeout=20).json()["status"] == "ready"
        missing = httpx.get(f"{server_socket.url}/nothing", timeout=20)
        assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
        assert edge.health()["state"] == "serving"
        edge.end()
        assert edge.health()["state"] == "ended"
    lines = capfdbinary.readouterr().err.decode().splitlines()
    assert [line.split()[1:4] for line in lines] == [
        ["POST", "/v1/completions", "200"], ["GET", "/nothing", "404"],
    ]  # fmt: skip


@pytest.mark.parametrize("late", [False, True], ids=["in-time", "late"])
def test_it_ends_what_is_under_way(
    late: bool, settings: ApiSettings, make: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its time, else with an event that says so; others are told meanwhile that the server ends."""
    monkeypatch.setattr(edges, "DRAIN_S", 0.5 if late else 20)
    lead = FakeLead([TokenEvent("r", (72,))])
    with opened() as server_socket:
        edge = make(settings, server_socket, lead)
        server_socket.hand_over()
        with httpx.stream(
            "POST", f"{server_socket.url}/v1/completions", json=_BODY | {"stream": True}, timeout=20
        ) as answer:
            lines = answer.iter_lines()
            assert '"H"' in next(lines)
            server_socket.end()
            ending = threading.Thread(target=edge.end)
            ending.start()
            while (told := refusal(server_socket)) is None:
                pass
            assert told == "the server ends"
            if not late:
                (name,) = lead._waiting
                lead._waiting[name].append(TokenEvent("r", (73,), "length"))
            rest = list(lines)
        ending.join(20)
        assert not ending.is_alive()
        assert rest[-2:] == ["data: [DONE]", ""]
        assert ("the server ends" in "".join(rest)) == late


def test_what_is_missing_is_refused_before_it_is_ready(
    settings: ApiSettings, make: Callable[..., Edge], tmp_path: Path
) -> None:
    with opened() as server_socket:
        with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
            make(settings, server_socket, FakeLead([]), store_path="/nowhere")
        keys = tmp_path / "keys"
        with pytest.raises(ConfigError, match="key file"):
            make(settings.model_copy(update={"api_key_file": str(keys)}), server_socket, FakeLead([]))


def test_it_ends_with_the_command(
    settings: ApiSettings, make: Callable[..., Edge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However that ended: killed, it calls nobody."""
    ended = threading.Event()
    monkeypatch.setattr(edges, "os", SimpleNamespace(_exit=lambda code: ended.set()))
    with opened() as server_socket:
        edge = make(settings, server_socket, FakeLead(_WHOLE))
        server_socket.hand_over()
        assert post(server_socket).status_code == 200
    assert ended.wait(20)
    assert edge.health()["state"] == "ended"


class _Ref:
    """A handle of an edge, by its number."""

    def __init__(self, number: int) -> None:
        self.health = SimpleNamespace(remote=lambda: number)
        self._actor_id = SimpleNamespace(hex=lambda: f"id{number}")


def test_an_edge_that_refuses_to_start_again_is_made_anew_and_the_server_socket_answers(
    settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key file that was refused when the edge started again ended `serve`, and what it said was lost."""
    table: dict[str, dict[str, str]] = {"id0": {"State": "RESTARTING"}}
    said: list[str] = []
    clock = SimpleNamespace(monotonic=lambda: now_s)

    def get(number: int, timeout: float) -> None:
        if number < 2:
            raise RayTaskError("f", "t", ConfigError(f"{number}", ""))

    made = map(_Ref, itertools.count())
    door = SimpleNamespace(
        name="", tls=None, access=None, answer_unavailable=said.append, hand_over=lambda: said.append("handed over")
    )
    monkeypatch.setattr(servers, "actor_table", lambda: table)
    monkeypatch.setattr(servers, "time", clock)
    monkeypatch.setattr(servers, "make_here", lambda *args, **options: next(made))
    monkeypatch.setattr(servers.ray, "get", get)
    monkeypatch.setattr(servers.ray, "wait", lambda refs, timeout: (refs, []))
    http, now_s = servers.HttpServer(settings, door, {}), 100.0  # type: ignore[arg-type]
    http._edge = http._make()
    assert (http.look(), said) == (None, [])  # Ray itself starts it again
    table.clear()
    assert str(http.look()).startswith("the HTTP server does not serve, and is tried again: 0")  # edge 1 is made
    assert said == [servers._NONE_SERVES]
    assert "again: 1" in str(http.look())  # it refuses, too; the next one waits for its time
    now_s += 10
    assert "again: 1" in str(http.look())
    table["id2"] = {"State": "ALIVE"}
    assert (http.look(), said) == (None, [servers._NONE_SERVES, "handed over"])
