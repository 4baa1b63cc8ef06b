"""What client and server agree on about gRPC: method names, sizes, keepalive, credentials. Imports grpc when asked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .generated import services_pb2
from .options import ChannelOptions, TlsFiles

if TYPE_CHECKING:
    import grpc

PROTOCOL_VERSION = 1
TOKEN_KEY = "tiermoe-token"
CLIENT_KEY = "tiermoe-client"
_ROOM = 64 * 1024  # above the largest message, for what gRPC adds


def _path(service: str, method: str) -> str:
    found = services_pb2.DESCRIPTOR.services_by_name[service]
    return f"/{found.full_name}/{found.methods_by_name[method].name}"


CHANNEL_SERVICE = services_pb2.DESCRIPTOR.services_by_name["Channel"].full_name
CONTROL = _path("Channel", "Control")
EXCHANGE = _path("Channel", "Exchange")
ROLE_CALLS = (_path("ExpertCompute", "Compute"), _path("Store", "Fetch"), _path("Matcher", "Match"))


def settings(max_message_bytes: int) -> list[tuple[str, Any]]:
    """Options of both sides of a connection."""
    return [
        ("grpc.max_send_message_length", max_message_bytes + _ROOM),
        ("grpc.max_receive_message_length", max_message_bytes + _ROOM),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
        ("grpc.enable_http_proxy", 0),
        # a connection of its own, which no other channel of the process shares or breaks
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]


def dial(address: str, options: ChannelOptions) -> grpc.Channel:
    """A gRPC channel to an address; connects when it is used.

    Raises:
        ConfigError: a TLS file cannot be read.
    """
    import grpc

    wire = settings(options.limits.max_message_bytes)
    if options.tls is None:
        return grpc.insecure_channel(address, options=wire)
    if options.tls.server_name is not None:
        wire.append(("grpc.ssl_target_name_override", options.tls.server_name))
    ca, certificate, key = options.tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options=wire)


def server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """What a server shows, and whether it demands the same.

    Raises:
        ConfigError: a TLS file cannot be read.
    """
    import grpc

    ca, certificate, key = tls.read()
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=ca is not None)


def metadata(options: ChannelOptions, client: int) -> tuple[tuple[str, str], ...]:
    """What goes with every call."""
    token = () if options.token is None else ((TOKEN_KEY, options.token),)
    return (*token, (CLIENT_KEY, f"{client:016x}"))


def value_of(key: str, given: Iterable[Any]) -> str | None:
    """The value of a key in a call's metadata."""
    return next((value for name, value in given if name == key), None)


def reason(error: Any) -> str:
    """What gRPC says about a call that ended."""
    return f"{error.code().name.lower()}: {error.details()}"
