"""Channels between processes: messages of `messages.py` over shared memory or gRPC.

    server = ChannelServer(handler)                  # handler: message -> answer
    channel = open_channel(server.address)
    result = channel.call(batch, deadline_s=1.0)     # raises DeadlinePassed, PeerLost, RemoteFailure

The control stream over gRPC opens every channel, proves whether both processes share a host, and stays open as a sign
of life. Messages then travel through rings in shared memory where they can, else through a second stream. On both ways:

- A request has an id. Where no answer comes the peer is asked, and the request is sent again if it never arrived. It is
  executed once however often it arrives.
- Its deadline holds on both sides: an expired request is not executed, a late answer is not waited for.
- Sizes, shapes and numbers are checked before anything uses them (`codec.py`).
- What is full makes the sender wait (`submit`) or drops the message and counts it (`post`).
"""

from __future__ import annotations

import contextlib
import os
import secrets

from ..errors import ChannelRefused
from . import grpc_wire as wire
from . import shm
from .client import Channel
from .control import Control
from .faults import Fault, FaultInjector
from .generated import channel_pb2
from .limits import Limits
from .links import Link, RingLink, StreamLink
from .options import ChannelOptions, ServerOptions, TlsFiles
from .pending import Pending
from .server import ChannelServer

__all__ = [
    "Channel",
    "ChannelOptions",
    "ChannelServer",
    "Fault",
    "FaultInjector",
    "Limits",
    "Pending",
    "ServerOptions",
    "TlsFiles",
    "open_channel",
]


def open_channel(address: str, options: ChannelOptions | None = None) -> Channel:
    """Connect to a `ChannelServer`.

    Args:
        address: HOST:PORT.
        options: None: the defaults.

    Raises:
        ChannelRefused: nobody answers, the token or version is wrong, or shared memory was demanded and is impossible.
        ConfigError: a TLS file cannot be read.
    """
    options = options if options is not None else ChannelOptions()
    client = secrets.randbits(63) + 1
    most = options.limits.max_message_bytes
    hello = channel_pb2.Hello(version=wire.PROTOCOL_VERSION, client=client, max_message_bytes=most)
    offered: shm.Offer | None = None
    if options.transport != "grpc" and shm.supported():
        with contextlib.suppress(OSError):  # gRPC then
            offered = shm.offer(options.ring_bytes, options.spin_s)
            place = channel_pb2.SharedMemory(pid=os.getpid(), fd=offered.fd, ring_bytes=offered.ring_bytes)
            hello.shared_memory.CopyFrom(place)
    metadata = wire.metadata(options, client)
    try:
        grpc_channel = wire.dial(address, options)
        control = Control(address, grpc_channel, metadata, hello, options)
    finally:
        if offered is not None:
            offered.forget_fd()
    assert control.welcome is not None
    most = min(most, control.welcome.max_message_bytes)
    link: Link
    if offered is not None and control.welcome.nonce == offered.nonce:
        link = RingLink(offered.rings, options.limits.max_message_bytes, options.supply)
    elif options.transport == "shm":
        control.close()
        raise ChannelRefused(
            f"{address} cannot share memory with this process", "use transport auto or grpc, or run both on one host"
        )
    else:
        link = StreamLink(grpc_channel, metadata, options.queued_bytes)
    return Channel(control, link, client, most, options)
