from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_REQUEST: _ClassVar[Role]
    ROLE_REPLY: _ClassVar[Role]
    ROLE_POST: _ClassVar[Role]
    ROLE_PROBE: _ClassVar[Role]
    ROLE_UNKNOWN: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_REQUEST: Role
ROLE_REPLY: Role
ROLE_POST: Role
ROLE_PROBE: Role
ROLE_UNKNOWN: Role

class Frame(_message.Message):
    __slots__ = ("client", "request", "settled", "deadline_ns", "role", "kind", "body", "layout", "padding", "payload")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_NS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    client: int
    request: int
    settled: int
    deadline_ns: int
    role: int
    kind: int
    body: bytes
    layout: bytes
    padding: bytes
    payload: bytes
    def __init__(self, client: _Optional[int] = ..., request: _Optional[int] = ..., settled: _Optional[int] = ..., deadline_ns: _Optional[int] = ..., role: _Optional[int] = ..., kind: _Optional[int] = ..., body: _Optional[bytes] = ..., layout: _Optional[bytes] = ..., padding: _Optional[bytes] = ..., payload: _Optional[bytes] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "fd", "ring_bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    fd: int
    ring_bytes: int
    def __init__(self, pid: _Optional[int] = ..., fd: _Optional[int] = ..., ring_bytes: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("version", "client", "max_message_bytes", "shared_memory")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    version: int
    client: int
    max_message_bytes: int
    shared_memory: SharedMemory
    def __init__(self, version: _Optional[int] = ..., client: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., shared_memory: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("version", "nonce", "max_message_bytes", "clock_ns")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: bytes
    max_message_bytes: int
    clock_ns: int
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[bytes] = ..., max_message_bytes: _Optional[int] = ..., clock_ns: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    def __init__(self, sequence: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("sequence", "clock_ns")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_NS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    clock_ns: int
    def __init__(self, sequence: _Optional[int] = ..., clock_ns: _Optional[int] = ...) -> None: ...

class ControlRequest(_message.Message):
    __slots__ = ("hello", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ping: Ping
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("welcome", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    pong: Pong
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...
