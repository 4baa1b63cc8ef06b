"""One process of the server, without Ray: what it needs to serve, and how it ends."""

from __future__ import annotations

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
    return ApiSettings(deployment="abcdef", model_name="fake", replicas=1, request_log="text")


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
            while (
                told := post(server_socket)
            ).status_code != 503:  # it takes connections for one tenth of a second more
                pass
            assert told.json()["error"]["message"] == "the server ends"
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
        self.number = number
        self.health = SimpleNamespace(remote=lambda: number)
        self._actor_id = SimpleNamespace(hex=lambda: f"id{number}")


class _Edges(servers.HttpServer):
    """A server over edges 0 and 1, of which Ray's table knows nothing but what the test enters: the others are dead.

    said: what the server's door was told.
    """

    def __init__(self, settings: ApiSettings, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table: dict[str, dict[str, str]] = {}
        self.said: list[str] = []
        door = SimpleNamespace(answer_unavailable=self.said.append, hand_over=lambda: self.said.append("handed over"))
        super().__init__(settings, door, {})  # type: ignore[arg-type]
        self._made = map(_Ref, itertools.count())
        self._edges = [next(self._made), next(self._made)]
        monkeypatch.setattr(servers.gcs, "actors", lambda: self.table)

    def _make(self) -> _Ref:
        return next(self._made)

    def looks(self, rested: bool = False) -> tuple[str | None, list[int]]:
        """What a look says, and the edges after it."""
        if rested:
            self._rest_s = 0.0
        return self.look(), [edge.number for edge in self._edges]


def test_an_edge_that_refuses_to_start_again_is_made_anew_while_another_serves(
    settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    http = _Edges(settings, monkeypatch)
    http.table["id1"] = {"State": "RESTARTING"}
    assert http.looks() == (None, [2, 1])
    assert http.looks() == (None, [2, 1])  # it rests
    assert http.looks(rested=True) == (None, [3, 1])
    assert http.said == []


def test_edges_that_all_refuse_are_tried_again_and_the_server_socket_answers(
    settings: ApiSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key file that was refused when the only edge started again ended `serve`, and what it said was lost."""
    http = _Edges(settings, monkeypatch)

    def get(ref: int, timeout: float) -> None:
        if ref < 4:
            raise RayTaskError("f", "t", ConfigError(f"{ref}", ""))

    monkeypatch.setattr(servers.ray, "get", get)
    monkeypatch.setattr(servers.ray, "wait", lambda refs, num_returns, timeout: ([r for r in refs if r < 5], []))
    said, edges = http.looks()
    assert str(said).startswith("the HTTP server does not serve, and is tried again: 0")
    assert (http.said, edges) == ([servers._NONE_SERVES], [2, 3])
    assert "again: 3" in str(http.look())  # they refuse, too; it rests
    assert "again: 3" in str(http.looks(rested=True)[0])
    http.table |= {"id4": {"State": "ALIVE"}, "id5": {"State": "PENDING_CREATION"}}
    assert http.looks() == (None, [4, 5])
    assert http.said == [servers._NONE_SERVES, "handed over"]
