"""The server's connections over real sockets: silences, what is no body, early answers."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate

uvicorn = pytest.importorskip("uvicorn")

from tiermoe.cluster.api.connections import BoundedConnection  # noqa: E402

_SILENCE_S = 0.2
_WAIT_S = 10.0
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[Any]]


async def application(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """What an application does, by path."""
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]}
    match scope["path"]:
        case "/json":
            headers = [(b"content-type", b"application/json"), (b"content-length", b"17")]
            await send(start | {"status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "mine"}'})
        case "/text" | "/missing":
            await send(start | {"status": 503 if scope["path"] == "/text" else 404})
            await send({"type": "http.response.body", "body": b"Internal"})
        case "/read":
            size, whole = 0, False
            while not whole:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                size, whole = size + len(message["body"]), not message["more_body"]
            await send(start)
            await send({"type": "http.response.body", "body": b"read %d" % size})
        case "/headers":
            await asyncio.sleep(_SILENCE_S)
            await send(start)
            await send({"type": "http.response.body", "body": repr(scope["headers"]).encode()})
        case "/slow":
            await asyncio.sleep(3 * _SILENCE_S)
            await send(start)
            await send({"type": "http.response.body", "body": b"done"})
        case "/flood":
            await send(start)
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
            await send({"type": "http.response.body"})
        case _:
            await send(start)
            await send({"type": "http.response.body", "body": b"fine"})


def talk(
    *calls: Talk, silence_s: float = _SILENCE_S, protocol: type[BoundedConnection] = BoundedConnection,
    tls: tuple[str, str] | None = None,
) -> list[Any]:  # fmt: skip
    """What each call returns, each on a connection of its own, at once. tls: certificate and key of the server."""

    async def run() -> list[Any]:
        config = uvicorn.Config(application, http=protocol, timeout_keep_alive=silence_s,
                                lifespan="off", log_config=None, port=0, ssl_certfile=tls and tls[0],
                                ssl_keyfile=tls and tls[1])  # fmt: skip
        config.load()
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server._serve([listener]))
            try:
                return await asyncio.gather(*(_one(listener.getsockname(), call, tls) for call in calls))
            finally:
                server.should_exit = True
                await serving

    return asyncio.run(run())


async def _one(address: Any, call: Talk, tls: tuple[str, str] | None) -> Any:
    context = None
    if tls is not None:
        context = ssl.create_default_context(cafile=tls[0])
        context.check_hostname = False
    reader, writer = await asyncio.open_connection(*address, ssl=context)
    try:
        return await asyncio.wait_for(call(reader, writer), _WAIT_S)
    finally:
        writer.close()


def asks(*pieces: bytes, pause_s: float = 0.0) -> Talk:
    """Send the pieces, and return all that comes until the server closes.

    A piece that meets a closed connection makes its end a reset, which takes nothing from what came before.
    """

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        async def write() -> None:
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(pause_s)

        writing = asyncio.create_task(write())
        came = b""
        try:
            with suppress(ConnectionError):
                while block := await reader.read(2**16):
                    came += block
            return came
        finally:
            writing.cancel()

    return call


def waits_to_read(*pieces: bytes) -> Talk:
    """Send all of the pieces, as a client does that reads its answer afterwards, and return what comes. Raises
    ConnectionError: the connection is reset before.
    """

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()

    return call


def chunk(content: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(content), extension, content)


def post(path: str, *more: str) -> bytes:
    return get(path, *more).replace(b"GET", b"POST", 1)


def get(path: str, *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: a", *more, "", ""]).encode()


def parsed(answer: bytes) -> tuple[int, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"] if b"application/json" in head else body


def test_silences_end() -> None:
    silence_s = 1.0  # a busy machine may take longer than `_SILENCE_S` to send the first bytes
    trickle = [b"GET / HTTP/1.1\r\n", *[b"X-A: b\r\n"] * 200]
    nothing, half, trickled, kept = talk(
        asks(), asks(b"GET / HTT"), asks(*trickle, pause_s=0.02), asks(get("/")), silence_s=silence_s
    )
    assert nothing == b""
    for answer in (half, trickled):
        status, error = parsed(answer)
        assert (status, error["message"]) == (408, f"the headers did not come within {silence_s} s; send them at once")
    assert kept.endswith(b"fine\r\n0\r\n\r\n")  # and then nothing more was asked


def test_what_takes_long_is_no_silence() -> None:
    closing = "Connection: close"
    slow, pipelined, rest = talk(
        asks(get("/slow", closing)),
        asks(get("/slow"), b"GET /"),
        asks(get("/", "Content-Length: 100"), *[b"x"] * 20, pause_s=0.05),  # its answer has been sent
    )
    assert slow.endswith(b"done\r\n0\r\n\r\n")
    assert b"done" in pipelined
    assert b"fine" in rest


def test_headers_have_a_bound() -> None:
    many, one, legal = talk(
        asks(b"GET / HTTP/1.1\r\n", *[b"X-A: " + b"b" * 1000 + b"\r\n"] * 200, pause_s=0.0005),
        asks(b"GET / HTTP/1.1\r\nX-A: ", *[b"b" * 1000] * 200, pause_s=0.0005),
        asks(get("/", "X-A: " + "b" * 60_000, "Connection: close")),
        silence_s=5,
    )
    assert [parsed(answer)[0] for answer in (many, one)] == [431, 431]
    assert b"fine" in legal


_CHUNKED = "Transfer-Encoding: chunked"
_TRAILERS = [b"X-A: " + b"b" * 90 + b"\r\n"] * 3000


@pytest.mark.parametrize(
    "framing",
    [[b"0\r\n", *_TRAILERS], [b"0\r\nX-A: ", *[b"b" * 1000] * 300], [chunk(b"x" * 100_000), b"0\r\n", *_TRAILERS],
     [b"1;", *[b"e" * 1000] * 300], [chunk(b"x")] * 30_000, [b"0" * 1000] * 300],
    ids=["trailers", "one trailer", "trailers of a body", "one extension", "tiny chunks", "zeros"],
)  # fmt: skip
def test_what_is_no_body_has_a_bound(framing: list[bytes]) -> None:
    """50 MiB of trailers took 512 MiB, and one endless trailer the event loop for seconds, before any key was asked."""
    (answer,) = talk(asks(post("/read", _CHUNKED), *framing), silence_s=5)
    status, error = parsed(answer)
    assert status == 431
    assert "exceed 65536 bytes" in error["message"] or "too many chunks" in error["message"]


def test_legal_framing_is_taken() -> None:
    chunked = post("/read", _CHUNKED, "Connection: close")
    tiny, large, small = talk(
        asks(chunked, chunk(b"x") * 5000, b"0\r\n\r\n"),
        asks(chunked, *[chunk(b"x" * 2**16)] * 32, b"0\r\n", *_TRAILERS[:9], b"\r\n"),
        asks(post("/read", "Content-Length: 3000000", "Connection: close"), b"x" * 3_000_000),
        silence_s=5,
    )  # fmt: skip
    for answer, size in ((tiny, 5000), (large, 2**21), (small, 3_000_000)):
        assert b"read %d" % size in answer


def test_trailers_are_no_headers() -> None:
    """They were added to the headers that the application saw, a key among them, where both came in one packet."""
    trailers = b"0\r\nAuthorization: Bearer k\r\n\r\n"
    (answer,) = talk(asks(post("/headers", _CHUNKED, "Connection: close") + trailers))
    assert b"b'connection'" in answer
    assert b"authorization" not in answer


def test_pipelined_requests_wait_as_bytes_and_are_answered_in_turn() -> None:
    """A burst of 64 KiB held 19 MiB of parsed requests while the first one was answered."""
    waiting = 0

    class Watched(BoundedConnection):
        def data_received(self, data: bytes) -> None:
            nonlocal waiting
            super().data_received(data)
            waiting = max(waiting, len(self.conn.trailing_data[0]))

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(get("/slow") + get("/") * 100_000)
        await asyncio.sleep(2 * _SILENCE_S)

    last = get("/headers", "X-Last: 1", "Connection: close")
    answers, _ = talk(asks(get("/slow") + get("/") * 1000 + last), flood, silence_s=5, protocol=Watched)
    assert answers.count(b"HTTP/1.1 200") == 1002
    assert answers.index(b"done") < answers.index(b"fine")
    assert b"x-last" in answers[answers.rindex(b"HTTP/1.1") :]
    assert waiting < 2**16 + 2**18  # and one read


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ([post("/json", "Content-Length: 4194304"), b"x" * 2**22], [503]),
        ([post("/missing", _CHUNKED), *[chunk(b"x" * 2**16)] * 64, b"0\r\n\r\n"], [404]),
        ([post("/text", "Content-Length: 4194304"), b"x" * 2**22 + get("/")], [503, 200]),
        ([post("/json", "Content-Length: 4194304", "Connection: close"), b"x" * 2**22], [503]),
        ([post("/json", "Content-Length: 4194304").replace(b"1.1", b"1.0", 1), b"x" * 2**22], [503]),
        ([post("/json", "Content-Length: 4194304", "Expect: 100-continue")], [503]),
    ],
    ids=["length", "chunked", "another request behind", "close", "HTTP/1.0", "expect"],
)
def test_an_early_answer_is_whole(pieces: list[bytes], statuses: list[int]) -> None:
    """The next request got a 431 for the bytes of the body, or the client a reset in place of its answer."""
    (answer,) = talk(waits_to_read(*pieces), silence_s=2)
    found = [int(head.split()[1]) for head in answer.splitlines() if head.startswith(b"HTTP/1.")]
    assert found == statuses


def test_a_refusal_is_not_lost_with_what_the_client_still_sends() -> None:
    many = [b"X-A: " + b"b" * 1000 + b"\r\n"] * 2000
    long, wrong = talk(waits_to_read(b"GET / HTTP/1.1\r\n", *many), waits_to_read(b"\x00", *many), silence_s=5)
    assert (parsed(long)[0], parsed(wrong)[0]) == (431, 400)


@pytest.mark.parametrize("head", [post("/json", "Content-Length: 4194304", "Connection: close"), b"\x00"])
def test_over_tls_a_client_that_still_sends_gets_its_answer(tmp_path: Path, head: bytes) -> None:
    """The server ended the connection under the client's bytes, which is a reset."""

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for piece in (head, *[b"x" * 2**16] * 64):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        came = await reader.readuntil(b"\r\n\r\n")
        return came + await reader.read(2**16)

    (answer,) = talk(call, silence_s=2, tls=certificate(tmp_path, "server"))
    assert parsed(answer)[0] in (400, 503)


def test_behind_an_answered_body_the_next_request_has_its_whole_time() -> None:
    """It had what the rest of the body left of it."""
    silence_s = 1.0

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(post("/json", "Content-Length: 2") + b"x")
        await asyncio.sleep(0.7 * silence_s)
        writer.write(b"x")
        await asyncio.sleep(0.6 * silence_s)
        writer.write(get("/", "Connection: close"))
        return await reader.read()

    (answer,) = talk(call, silence_s=silence_s)
    assert answer.count(b"HTTP/1.1 503") == 1
    assert answer.endswith(b"fine\r\n0\r\n\r\n")


def test_what_is_dropped_behind_an_answer_ends() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(post("/json", _CHUNKED))
        sent = 0
        with suppress(ConnectionError):
            while True:
                writer.write(chunk(b"x" * 2**16))
                await writer.drain()
                sent += 2**16
        return sent

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(post("/json", _CHUNKED))
        await reader.read()
        with suppress(ConnectionError):
            while True:
                writer.write(b"1\r\nx\r\n")
                await writer.drain()
                await asyncio.sleep(0.02)
        return True

    sent, ended = talk(pours, silent, silence_s=1.0)
    assert sent
    assert ended


def test_an_answer_to_a_whole_request_keeps_the_connection() -> None:
    body = post("/json", "Content-Length: 5") + b"hello"
    (answer,) = talk(asks(body + body + get("/", "Connection: close")))
    assert answer.count(b"HTTP/1.1 503") == 2
    assert b"fine" in answer


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(get("/flood"))
        await asyncio.sleep(5 * _SILENCE_S)
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        return len(await reader.read())

    assert talk(call)[0] < 32 * 2**20  # of 64 MiB


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00", b"\x00" * 64, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
             b"GET /\xff\xfe HTTP/1.1\r\nHost: a\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
             b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"],
)  # fmt: skip
def test_raw_bytes_get_a_json_refusal(sent: bytes) -> None:
    (answer,) = talk(asks(sent))
    status, error = parsed(answer)
    assert (status, error["type"]) == (400, "invalid_request_error")


_JAVAS = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQB")


@pytest.mark.parametrize(
    "offer", [_JAVAS, ("Connection: upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
              ("Connection: keep-alive, Upgrade", "Upgrade: TLS/1.0, h2c"), ("Upgrade: h2c",)],
    ids=["java", "websocket", "tls", "alone"],
)  # fmt: skip
def test_an_offer_of_another_protocol_is_ignored_and_the_body_read(offer: tuple[str, ...]) -> None:
    """Java's HTTP clients send h2c with the first request of a connection: it was answered as one without a body."""
    sized, rest, body = post("/read", *offer, "Content-Length: 4"), get("/read", "Connection: close"), b"hell"
    chunked = post("/read", *offer, _CHUNKED) + chunk(b"x" * 5000) + b"0\r\nX-A: b\r\n\r\n"
    sent = [
        [sized + body + rest], [sized, body + rest], [sized, *(body[i : i + 1] for i in range(4)), rest],
        [bytes([byte]) for byte in sized + body + rest], [chunked + rest],
        [sized + body + chunked + sized + body + rest],
        [post("/read", *offer, "Content-Length: 100000"), b"x" * 100_000 + rest],
        [post("/read", *offer, "Content-Length: 0") + rest],
    ]  # fmt: skip
    read = [[4], [4], [4], [4], [5000], [4, 5000, 4], [100_000], [0]]
    for answer, sizes in zip(talk(*(asks(*pieces) for pieces in sent), silence_s=5), read, strict=True):
        assert answer.count(b"HTTP/1.1 200") == len(sizes) + 1, answer
        places = [answer.index(b"read %d\r\n" % size) for size in sizes]
        assert places == sorted(places) or len(set(sizes)) < len(sizes)


def test_an_offer_changes_nothing_else_of_a_request() -> None:
    """Neither the framing, whose contradictions stay refused, nor the end of the connection, nor an early answer."""
    offer = ("Connection: close, Upgrade", "Upgrade: h2c")
    closed, early, both, seen, tunnel = talk(
        asks(post("/read", *offer, "Content-Length: 2") + b"hi" + get("/")),
        waits_to_read(post("/json", *_JAVAS, f"Content-Length: {2**22}"), b"x" * 2**22),
        asks(post("/read", *_JAVAS, "Content-Length: 1", _CHUNKED) + b"0\r\n\r\n"),
        asks(get("/headers", *_JAVAS, "X-A: b"), get("/", "Connection: close")),
        asks(b"CONNECT a:80 HTTP/1.1\r\nHost: a\r\n\r\n"),
        silence_s=5,
    )  # fmt: skip
    assert closed.count(b"HTTP/1.1") == 1
    assert b"read 2" in closed
    assert (early.count(b"HTTP/1."), parsed(early)[0]) == (1, 503)
    assert (parsed(both)[0], parsed(tunnel)[0]) == (400, 400)
    assert b"(b'x-a', b'b')" in seen


def test_the_head_behind_an_offer_has_its_bounds() -> None:
    offered = post("/read", *_JAVAS, _CHUNKED)
    trailers, headers = talk(
        asks(offered + b"0\r\n", *_TRAILERS), asks(offered[:-2], *[b"X-A: " + b"b" * 1000 + b"\r\n"] * 200), silence_s=5
    )
    assert [parsed(answer)[0] for answer in (trailers, headers)] == [431, 431]


def test_a_refused_head_has_no_body() -> None:
    """Its JSON was sent behind it, which h11 refuses: the connection ended without an answer."""
    (answer,) = talk(asks(b"HEAD / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 1\r\n\r\n"))
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.endswith(b"\r\n\r\n")


def test_a_target_may_be_a_whole_url() -> None:
    """Its host counts, whatever `Host` says: a check of one would be led past by the other."""
    named, bare = (
        get(url, "X-A: c", "Connection: close") for url in ("HTTP://b:80/headers?x=1", "https://b")
    )  # fmt: skip
    seen, root = talk(asks(named), asks(bare))
    assert b"(b'host', b'b:80')" in seen
    assert b"(b'host', b'a')" not in seen
    assert b"(b'x-a', b'c')" in seen
    assert b"fine" in root


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.0\r\nHost: a\r\nHost: b\r\n\r\n", "multiple Host"),
        (b"GET / HTTP/1.1\r\nX-A: b\r\n\r\n", "Host"),
        (b"GET http://a/ HTTP/1.1\r\n\r\n", "Host"),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", "HTTP/2.0 is not spoken"),
        (b"GET / HTTP/0.9\r\n\r\n", "HTTP/0.9 is not spoken"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", ""),
        (b"GET / HTTP/1.1\r\nHost: a\rX-A: b\r\n\r\n", ""),
        (b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "or in HTTP/1.0"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx", ""),
    ],
    ids=lambda part: repr(part[:60]),
)
def test_what_rfc_9112_calls_invalid_is_400(sent: bytes, words: str) -> None:
    """Two `Host` headers, none, or HTTP/2.0 were answered: a proxy in front may have read another request."""
    (answer,) = talk(asks(sent))
    status, error = parsed(answer)
    assert (status, answer.count(b"HTTP/1.1 ")) == (400, 1)
    assert words in error["message"]


def test_what_rfc_9112_allows_is_answered() -> None:
    """HTTP/1.0 needs no host, folded lines are one, equal lengths count once; an unknown transfer coding is 501."""
    old, empty, folded, equal, star, coded = talk(
        asks(b"GET / HTTP/1.0\r\n\r\n"),
        asks(get("/", "Connection: close").replace(b"Host: a", b"Host:")),
        asks(get("/", "X-A: b\r\n c", "Connection: close")),
        asks(post("/read", "Content-Length: 1, 1", "Connection: close") + b"x"),
        asks(b"OPTIONS * HTTP/1.1\r\nHost: a.b-c_d:8000\r\nConnection: close\r\n\r\n"),
        asks(post("/read", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n"),
        silence_s=2,
    )
    for answer in (old, empty, folded, equal, star):
        assert answer.startswith(b"HTTP/1.1 200"), answer
    assert parsed(coded)[0] == 501
