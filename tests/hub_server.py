"""A hub of models on loopback, for tests: the routes of huggingface.co that `huggingface_hub` asks for."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<revision>[^/]+))?")


@dataclass
class Served:
    """A repository. gated: its files, not its list, are refused. broken: names of files whose bytes end early, once."""

    files: dict[str, bytes]
    gated: bool = False
    renamed: str | None = None
    broken: set[str] = field(default_factory=set)

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, data in sorted(self.files.items()):
            digest.update(name.encode() + hashlib.sha1(data).digest())
        return digest.hexdigest()


class HubServer(ThreadingHTTPServer):
    """Repositories by name, and every request as (method, path, Range header)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Served] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.down = False
        self.blocked: set[str] = set()  # files whose second half comes after `released`
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add(self, name: str, folder: Path, **more: bytes) -> Served:
        """Serve a folder's files, those of folders below it too."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Served(files | more)
        return self.repositories[name]

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        found = (_RESOLVE.fullmatch(path) for method, path, _ in self.requests if method == "GET")
        return {match["file"] for match in found if match is not None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        if self.server.down:
            return self._send(503, b"down")
        if (match := _RESOLVE.fullmatch(path)) is not None:
            return self._file(match)
        match = _API.fullmatch(path)
        repository = self.server.repositories.get(match["repo"]) if match is not None else None
        if match is None or repository is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if repository.renamed is not None:
            return self._send(307, b"", {"Location": path.replace(match["repo"], repository.renamed, 1)})
        if match["revision"] not in (None, "main", "v1", repository.commit):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        answer: object = {"id": match["repo"], "modelId": match["repo"], "sha": repository.commit, "siblings": []}
        if match["what"] == "tree":
            answer = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in sorted(repository.files.items())
            ]
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, match: re.Match[str]) -> None:
        repository = self.server.repositories.get(match["repo"])
        if repository is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if repository.renamed is not None:
            there = f"/{repository.renamed}/resolve/{match['revision']}/{match['file']}"
            return self._send(307, b"", {"Location": there})
        if repository.gated:
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"})
        if match["revision"] not in ("main", "v1", repository.commit):
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        data = repository.files.get(match["file"])
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        common = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": repository.commit,
                  "Accept-Ranges": "bytes"}  # fmt: skip
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1 if last else len(data), len(data))
            common["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            return self._send(206, data[start:stop], common)
        if self.command == "GET" and match["file"] in repository.broken:
            repository.broken.discard(match["file"])
            self._send(200, data, common, only=len(data) // 2)
            self.close_connection = True
            return None
        self._send(200, data, common, blocked=match["file"] in self.server.blocked)

    def _send(
        self, status: int, data: bytes, headers: dict[str, str] | None = None, only: int | None = None,
        blocked: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            half = len(data) // 2 if blocked else 0
            self.wfile.write(data[:half])
            if blocked:
                self.server.released.wait(10)
            self.wfile.write(data[half:only])


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """A server that ends with the block."""
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
