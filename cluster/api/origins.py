"""Web pages and the server: which may use it (CORS), and that no other one drives it through a visitor's browser.

A browser sends requests of any page to any address, this machine's included. Two checks keep pages out that were not
allowed, where no key does:

    Origin    a page of another origin: 403, and no headers that let it read an answer
    Host      a name that the page's owner has pointed at this address (DNS rebinding), so that the origins look equal:
              403. An address in digits is none of a name's owner, and cannot be rebound.

With a key there is nothing to protect: a page cannot know it, and a browser does not add it. Programs send no `Origin`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from .refusals import ApiError

Headers = list[tuple[bytes, bytes]]

ANY = "*"
PROBED = frozenset({"/health", "/ready"})  # by balancers and Kubernetes, under any name
_PORTS = {"http": 80, "https": 443}
_LOCAL = ("localhost", "local", "internal", "svc")  # no public name server answers for names below these
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,;'\"]+")
_NAME = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,8192}")  # of headers
_EXPOSED = (b"access-control-expose-headers", b"x-request-id, warning, retry-after")
_REMEMBERED_S = b"600"


def checked_origin(text: str) -> str:
    """An origin as browsers write it. Raises ValueError."""
    found = text.strip().lower().removesuffix("/")
    if found in (ANY, "null"):
        return found
    if not _ORIGIN.fullmatch(found):
        raise ValueError(f"'{text}' is no origin; give SCHEME://HOST or SCHEME://HOST:PORT, or *")
    scheme, _, rest = found.partition("://")
    port = _PORTS.get(scheme)
    return f"{scheme}://{rest.removesuffix(f':{port}')}" if port else found


def checked_host(text: str) -> str:
    """A host's name or address, without a port. Raises ValueError."""
    found = text.strip().lower().removeprefix("[").removesuffix("]").removesuffix(".")
    if found == ANY or _address(found) is not None or _NAME.fullmatch(found):
        return found
    raise ValueError(f"'{text}' is no host; give a name or an address without a port, *.NAME, or *")


@dataclass(frozen=True)
class Access:
    """Who may ask, as far as browsers are concerned.

    Attributes:
        origins: of pages that may use the server; `*`: all of them.
        hosts: names of the server besides its addresses and this machine's own; `*`: all.
        bound: what the server was told to listen on.
        keyed: whether a key is asked for. Then `Origin` is not checked, and `Host` only where `hosts` are given.
    """

    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    bound: str | None = None
    keyed: bool = False

    def refusal(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> ApiError | None:
        """Why a request is refused; None: it is not."""
        if path_of(scope) in PROBED and not self.is_preflight(scope, headers):
            return None
        host, _ = _authority(headers.get(b"host", b"").decode("latin-1"))
        if (self.hosts or not self.keyed) and not self._names_this(host, scope):
            return ApiError(
                403, f"'{host[:100]}' is no name of this server; ask for it by its address, or start it with "
                f"--allowed-host {host[:100]}", code="host_not_allowed",
            )  # fmt: skip
        origin = _text(headers.get(b"origin"))
        if origin is None or self.allows(origin) or _same(origin, headers.get(b"host", b"").decode("latin-1")):
            return None
        if self.keyed and not self.is_preflight(scope, headers):
            return None
        return ApiError(
            403, f"pages of '{origin[:100]}' may not use this server; start it with --allow-origin {origin[:100]}",
            code="origin_not_allowed",
        )  # fmt: skip

    def allows(self, origin: str) -> bool:
        """Whether pages of this origin may use the server."""
        return ANY in self.origins or origin in self.origins

    @staticmethod
    def is_preflight(scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> bool:
        """Whether a browser asks what a page's request may have; it sends no key with the question."""
        return scope["method"] == "OPTIONS" and b"origin" in headers and b"access-control-request-method" in headers

    def permission(self, headers: Mapping[bytes, bytes]) -> Headers:
        """The answer to a preflight of an origin that is allowed, besides `answer_headers`."""
        found = [(b"access-control-allow-methods", b"GET, HEAD, POST"), (b"access-control-max-age", _REMEMBERED_S)]
        wanted = headers.get(b"access-control-request-headers", b"")
        if _NAMES.fullmatch(wanted):
            found.append((b"access-control-allow-headers", wanted))
        if headers.get(b"access-control-request-private-network") == b"true":
            found.append((b"access-control-allow-private-network", b"true"))
        return [*found, (b"vary", b"Access-Control-Request-Headers")]

    def answer_headers(self, headers: Mapping[bytes, bytes]) -> Headers:
        """What lets a page read an answer, whatever its status."""
        if not self.origins:
            return []
        if ANY in self.origins:
            return [(b"access-control-allow-origin", b"*"), _EXPOSED]
        vary, origin = (b"vary", b"Origin"), headers.get(b"origin", b"")
        if _text(origin) not in self.origins:
            return [vary]
        return [(b"access-control-allow-origin", origin), _EXPOSED, vary]

    def _names_this(self, host: str, scope: Mapping[str, Any]) -> bool:
        server = scope.get("server") or (None, None)
        here = str(server[0] or "").lower()
        # an HTTP/1.0 client without a name, or what browsers resolve to this machine themselves
        if host in ("", "localhost", here) or host.endswith(".localhost") or ANY in self.hosts:
            return True
        if host in self.hosts or any(name[:2] == "*." and host.endswith(name[1:]) for name in self.hosts):
            return True
        machine = socket.gethostname().lower()
        if host in (machine, machine.partition(".")[0], (self.bound or "").lower()):
            return True
        local, address = _address(here), _address(host)
        # of a connection through loopback, every other name and address came from elsewhere
        outside = local is not None and not local.is_loopback
        if address is not None:
            return outside or address.is_loopback or address.is_unspecified or address == local
        return outside and ("." not in host or host.rpartition(".")[2] in _LOCAL)


def headers_of(scope: Mapping[str, Any]) -> dict[bytes, bytes]:
    """A request's headers by name; of several with one name the last."""
    return {name.lower(): value for name, value in scope["headers"]}


def path_of(scope: Mapping[str, Any]) -> str:
    """A request's path; a slash at its end means nothing."""
    return str(scope["path"]).rstrip("/") or "/"


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1").lower()


def _authority(text: str) -> tuple[str, str]:
    """Host and port of a `Host` header."""
    bracketed, _, rest = text.lower().rpartition("]")
    host, _, port = rest.partition(":")
    return bracketed.removeprefix("[") or host.removesuffix("."), port


def _same(origin: str, host: str) -> bool:
    """Whether a page comes from the server itself; the scheme may be that of a proxy before it."""
    scheme, _, rest = origin.partition("://")
    usual = str(_PORTS.get(scheme, ""))
    (own, own_port), (page, page_port) = _authority(host), _authority(rest)
    return usual != "" and (own, own_port or usual) == (page, page_port or usual)


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(text)
    except ValueError:
        return None
    return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found
