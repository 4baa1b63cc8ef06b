"""The server's connections over real sockets: silences, what is no body, early answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from tiermoe.cluster.api.connections import TimedConnection  # noqa: E402

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
    *calls: Talk, silence_s: float = _SILENCE_S, protocol: type[TimedConnection] = TimedConnection
) -> list[Any]:
    """What each call returns, each on a connection of its own, at once."""

    async def run() -> list[Any]:
        config = uvicorn.Config(application, http=protocol, timeout_keep_alive=silence_s,
                                lifespan="off", log_config=None, port=0)  # fmt: skip
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server._serve([listener]))
            try:
                return await asyncio.gather(*(_one(listener.getsockname(), call) for call in calls))
            finally:
                server.should_exit = True
                await serving

    return asyncio.run(run())


async def _one(address: Any, call: Talk) -> Any:
    reader, writer = await asyncio.open_connection(*address)
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
    nothing, lines, half, trickled, kept = talk(
        asks(), asks(*[b"\r\n"] * 200, pause_s=0.02), asks(b"GET / HTT"), asks(*trickle, pause_s=0.02), asks(get("/")),
        silence_s=silence_s,
    )  # fmt: skip
    assert (nothing, lines) == (b"", b"")
    for answer in (half, trickled):
        status, error = parsed(answer)
        assert (status, error["message"]) == (408, f"the headers did not come within {silence_s} s")
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
     [b"1;", *[b"e" * 1000] * 300], [chunk(b"x", b";" + b"e" * 1000)] * 300, [b"0" * 1000] * 300],
    ids=["trailers", "one trailer", "trailers of a body", "one extension", "extensions", "zeros"],
)  # fmt: skip
def test_what_is_no_body_has_a_bound(framing: list[bytes]) -> None:
    """50 MiB of trailers took 512 MiB, and one endless trailer the event loop for seconds, before any key was asked."""
    (answer,) = talk(asks(post("/read", _CHUNKED), *framing), silence_s=5)
    status, error = parsed(answer)
    assert status in (400, 431)  # the parser has a bound of its own for the digits of a size
    if status == 431:
        assert "exceed 65536 bytes; send larger chunks and no trailers" in error["message"]


def test_legal_framing_is_taken() -> None:
    chunked = post("/read", _CHUNKED, "Connection: close")
    tiny, large, small = talk(
        asks(chunked, chunk(b"x") * 30_000, b"0\r\n\r\n"),
        asks(chunked, *[chunk(b"x" * 2**16)] * 32, b"0\r\n", *_TRAILERS[:9], b"\r\n"),
        asks(post("/read", "Content-Length: 3000000", "Connection: close"), b"x" * 3_000_000),
        silence_s=5,
    )  # fmt: skip
    for answer, size in ((tiny, 30_000), (large, 2**21), (small, 3_000_000)):
        assert b"read %d" % size in answer


def test_trailers_are_no_headers() -> None:
    """They were added to the headers that the application saw, a key among them, where both came in one packet."""
    trailers = b"0\r\nAuthorization: Bearer k\r\n\r\n"
    (answer,) = talk(asks(post("/headers", _CHUNKED, "Connection: close") + trailers))
    assert b"b'connection'" in answer
    assert b"authorization" not in answer


def test_pipelined_requests_wait_as_bytes_and_are_answered_in_turn() -> None:
    """A burst of 64 KiB held 19 MiB of parsed requests while the first one was answered."""
    longest = waiting = 0

    class Watched(TimedConnection):
        def data_received(self, data: bytes) -> None:
            nonlocal longest, waiting
            super().data_received(data)
            longest, waiting = max(longest, len(self.pipeline)), max(waiting, len(getattr(self, "_waiting", b"")))

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(get("/slow") + get("/") * 100_000)
        await asyncio.sleep(2 * _SILENCE_S)

    last = get("/headers", "X-Last: 1", "Connection: close")
    answers, _ = talk(asks(get("/slow") + get("/") * 1000 + last), flood, silence_s=5, protocol=Watched)
    assert answers.count(b"HTTP/1.1 200") == 1002
    assert answers.index(b"done") < answers.index(b"fine")
    assert b"x-last" in answers[answers.rindex(b"HTTP/1.1") :]
    assert longest < 2**10 / len(get("/")) + 1
    assert waiting < 2**16 + 2**18  # and one read


def test_an_early_answer_is_whole_and_ends_its_connection() -> None:
    """The next request got a 431 for the bytes of the body, or the client a reset in place of its answer."""
    big, announced = b"x" * 2**22, post("/json", f"Content-Length: {2**22}")
    sent = [
        [announced, big], [post("/missing", _CHUNKED), *[chunk(b"x" * 2**16)] * 64, b"0\r\n\r\n"],
        [post("/text", f"Content-Length: {2**22}"), big + get("/")], [announced.replace(b"1.1", b"1.0", 1), big],
        [post("/json", f"Content-Length: {2**22}", "Expect: 100-continue")],
    ]  # fmt: skip
    for answer in talk(*(waits_to_read(*pieces) for pieces in sent), silence_s=5):
        assert answer.count(b"HTTP/1.") == 1
        assert answer.partition(b"\r\n\r\n")[0].lower().count(b"connection: close") == 1
        assert parsed(answer)[0] in (404, 503)


def test_a_refusal_is_not_lost_with_what_the_client_still_sends() -> None:
    many = [b"X-A: " + b"b" * 1000 + b"\r\n"] * 2000
    long, wrong = talk(waits_to_read(b"GET / HTTP/1.1\r\n", *many), waits_to_read(b"\x00", *many), silence_s=5)
    assert (parsed(long)[0], parsed(wrong)[0]) == (431, 400)


def test_what_is_dropped_behind_an_answer_has_a_bound() -> None:
    async def pours(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        writer.write(post("/json", _CHUNKED))
        sent = 0
        with suppress(ConnectionError):
            while sent < 2**27:
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
    assert sent < 2**26
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
