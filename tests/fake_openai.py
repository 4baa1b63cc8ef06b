"""A server of OpenAI's protocol on loopback that answers with words, and fails as it is told; no model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "secret"


@dataclass
class FakeOpenAi:
    """What it does, and what it was asked.

    Attributes:
        fails: by number of a request, from 0: a status to answer with, "cut" (the connection ends in the stream),
            "error" (an event of an error), "silent" (no token), "garbage" (what is no JSON).
        pieces: of each answer; a token more comes without text. usage: whether it counts tokens.
        between_s: between two pieces.
        asked: path and body of each request.
    """

    fails: dict[int, int | str] = field(default_factory=dict)
    pieces: int = 3
    usage: bool = True
    between_s: float = 0.0
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    when: Callable[[int], None] = lambda number: None
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, path: str, body: dict[str, Any]) -> int:
        """A request has come; its number."""
        with self.lock:
            self.asked.append((path, body))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return len(self.asked) - 1

    def end(self) -> None:
        with self.lock:
            self.running -= 1


@contextmanager
def fake_openai(**options: Any) -> Iterator[FakeOpenAi]:
    """A running one."""
    fake = FakeOpenAi(**options)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(200, json.dumps({"data": [{"id": "words"}, {"id": "other"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            number = fake.begin(self.path, body)
            try:
                fake.when(number)
                self._stream(fake.fails.get(number), self.path.endswith("/chat/completions"))
            finally:
                fake.end()

        def _stream(self, fails: int | str | None, chat: bool) -> None:
            if isinstance(fails, int):
                self._answer(fails, b"{}")
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for number in range(0 if fails == "silent" else fake.pieces):
                text = f"word{number} "
                self._event({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
                time.sleep(fake.between_s)
                if fails in ("cut", "error"):
                    break
            if fails == "cut":
                self.close_connection = True
                return
            if fails == "error":
                self._event({"error": {"type": "overloaded", "message": "no room"}})
            if fails == "garbage":
                self._chunk(b"data: {garbage}\n\n")
            if fake.usage:
                tokens = 0 if fails == "silent" else fake.pieces + 1
                counted = {"prompt_tokens": 5, "completion_tokens": tokens, "total_tokens": tokens + 5}
                self._event({"choices": [], "usage": counted | {"prompt_tokens_details": {"cached_tokens": 2}}})
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _event(self, chunk: dict[str, Any]) -> None:
            self._chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
