"""The messages of the program: frozen values with NumPy arrays. This is their only declaration: `codec.py` reads it.

The note in the type of a number is its `struct` code on the wire. That of an array is its shape, a letter a dimension:
equal letters of a message are equal sizes, `N+1` is one more than N. `NDArray[Any]` is an array of float32, float16 or
bfloat16. Both ends run the same version (`grpc_transport.PROTOCOL_VERSION`): a change here raises it.

Shapes: N experts, P (row, expert) pairs, T rows, H hidden size, S sequences, D embedding size, E experts of a layer.
A uint16 array holds bfloat16 bits. Received arrays are read-only, their floats finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from . import _ring
from .options import Limits, malformed

Detail = str | float | int | bool
U32 = Annotated[int, "I"]
U64 = Annotated[int, "Q"]

_MAX_DETAILS = 256  # of a health report
_MAX_NAME = 256  # characters of a file's name
_BATCH_FAULTS = {
    1: "an expert id is out of range",
    2: "an expert is named twice",
    3: "a width is above 8 bits",
    4: "starts does not rise from 0 to the number of pairs",
    5: "a row number is out of range",
}


class Message:
    """What a channel carries."""

    def check(self, limits: Limits) -> None:
        """Raise MessageError where a received message breaks a rule that its types do not state."""


def _below(name: str, value: int, limit: int) -> None:
    if value >= limit:
        raise malformed(f"{name} {value} is not below {limit}")


def _ids(name: str, array: NDArray[np.int32], limit: int) -> None:
    if not _ring.below(array, limit):
        raise malformed(f"{name} are not all in 0..{limit - 1}")


def _file_name(name: str) -> None:
    if len(name) > _MAX_NAME:
        raise malformed(f"a file name of {len(name)} characters")


@dataclass(frozen=True, eq=False)
class ExpertBatch(Message):
    """Rows of one layer for one worker.

    Attributes:
        experts: [N] expert ids of this layer, each once.
        bits: [N] width of each expert's replica, 1..8; 0: full precision.
        starts: [N + 1], rising from 0 to P; rows[starts[i]:starts[i + 1]] go through experts[i].
        rows: [P] row numbers into hidden.
        weights: [P] routing weight of each pair.
        hidden: [T, H] float32, float16 or bfloat16 (uint16).
        activation: name of the experts' activation.
        decode: whether the forward holds no prompt rows.
    """

    layer: U32
    experts: Annotated[NDArray[np.int32], "N"]
    bits: Annotated[NDArray[np.uint8], "N"]
    starts: Annotated[NDArray[np.int32], "N+1"]
    rows: Annotated[NDArray[np.int32], "P"]
    weights: Annotated[NDArray[np.float32], "P"]
    hidden: Annotated[NDArray[Any], "T H"]
    activation: str = "silu"
    decode: bool = False

    def check(self, limits: Limits) -> None:
        _below("layer", self.layer, limits.layers)
        tokens = self.hidden.shape[0]
        fault = _ring.batch_fault(self.experts, self.bits, self.starts, self.rows, tokens, limits.experts)
        if fault:
            raise malformed(_BATCH_FAULTS[fault])


@dataclass(frozen=True, eq=False)
class ExpertResult(Message):
    """A worker's result of a batch.

    Attributes:
        partial: [T, H], sum over this worker's experts of weight * FFN(hidden row).
        measured_s: seconds in the kernel; of a shard, all but its waits for copies.
        modelled_s: seconds by the cost model of the simulated device; of a shard, seconds in which its link was busy
            with the layer's copies.
        paced_s: seconds in all, the wait for the modelled time included; of a shard, its waits for copies.
        resident: [B] the experts in a shard's cache after the batch, packed as in `engine/peers/shards.py`.
    """

    partial: Annotated[NDArray[np.float32], "T H"]
    measured_s: float
    modelled_s: float
    paced_s: float
    resident: Annotated[NDArray[np.uint8] | None, "B"] = None

    def check(self, limits: Limits) -> None:
        for seconds in (self.measured_s, self.modelled_s, self.paced_s):
            if not 0.0 <= seconds < math.inf:
                raise malformed(f"a result took {seconds} seconds")


@dataclass(frozen=True, eq=False)
class PrefetchCommand(Message):
    """Experts to prefetch in one iteration, chosen while `layer` ran.

    Attributes:
        keys: [N], layer * experts of a layer + expert.
        priorities: [N], higher first.
        hints: how many of the last keys are not loaded: their priorities are for eviction only.
        mapped: the priorities are p / (layer of the key + 1 - `layer`), p of a matched expert map.
    """

    iteration: U64
    layer: U32
    keys: Annotated[NDArray[np.int32], "N"]
    priorities: Annotated[NDArray[np.float32], "N"]
    hints: U32 = 0
    mapped: bool = False

    def check(self, limits: Limits) -> None:
        _below("layer", self.layer, limits.layers)
        _ids("keys", self.keys, limits.layers * limits.experts)
        _below("the number of hints", self.hints, len(self.keys) + 1)


@dataclass(frozen=True, eq=False)
class PlacementCommand(Message):
    """Experts that a shard holds until the next such command; answered when their loads have started.

    Attributes:
        keys: [N], layer * experts of a layer + expert, most urgent first.
        keep_others: other experts may stay where there is room, for a running prompt.
        preload: answer when they are loaded; they count as loaded before the first request.
    """

    keys: Annotated[NDArray[np.int32], "N"]
    keep_others: bool
    preload: bool

    def check(self, limits: Limits) -> None:
        _ids("keys", self.keys, limits.layers * limits.experts)


@dataclass(frozen=True, eq=False)
class Context(Message):
    """What the lead saw of one iteration: first the embeddings, then each layer's probabilities.

    Attributes:
        sequences: [S] sequence ids.
        embedding: [S, D] semantic embeddings; D is 0 in a message with probabilities.
        probabilities: [S, n*E] router probabilities of this layer and the n - 1 behind it; n is 0 in a message with
            embeddings.
    """

    iteration: U64
    layer: U32
    sequences: Annotated[NDArray[np.int64], "S"]
    embedding: Annotated[NDArray[np.float32], "S D"]
    probabilities: Annotated[NDArray[np.float32], "S E"]

    def check(self, limits: Limits) -> None:
        _below("layer", self.layer, limits.layers)
        _below("the number of experts", self.probabilities.shape[1], (limits.layers - self.layer) * limits.experts + 1)


@dataclass(frozen=True)
class HealthRequest(Message):
    """Asks for a `HealthReport`."""


@dataclass(frozen=True)
class HealthReport(Message):
    """A worker's state."""

    role: str
    details: Mapping[str, Detail]

    def check(self, limits: Limits) -> None:
        details: Any = self.details
        if not isinstance(details, dict) or not all(isinstance(value, Detail) for value in details.values()):
            raise malformed("the details of a health report are no numbers and texts by name")
        _below("the number of details", len(details), _MAX_DETAILS + 1)


@dataclass(frozen=True)
class Failure(Message):
    """An error of the other side, which `channel.call` raises as `RemoteFailure`; `kind` is the error's class."""

    kind: str
    what: str
    remedy: str


@dataclass(frozen=True, eq=False)
class StoreRequest(Message):
    """Asks for `neurons` neurons (0: all), from `first` on, of the `experts` [N] of one layer, each named once."""

    layer: U32
    experts: Annotated[NDArray[np.int32], "N"]
    first: U32 = 0
    neurons: U32 = 0

    def check(self, limits: Limits) -> None:
        _below("layer", self.layer, limits.layers)
        _ids("experts", self.experts, limits.experts)


@dataclass(frozen=True, eq=False)
class StoreReply(Message):
    """The experts asked for.

    Attributes:
        experts: [N] expert ids.
        tensors: by name, [N, ...]; bfloat16 as uint16.
        first: the first neuron in the tensors that have neurons.
    """

    layer: U32
    experts: Annotated[NDArray[np.int32], "N"]
    tensors: Annotated[Mapping[str, NDArray[Any]], "N ..."]
    first: U32 = 0

    def check(self, limits: Limits) -> None:
        _below("layer", self.layer, limits.layers)
        _ids("experts", self.experts, limits.experts)


@dataclass(frozen=True)
class FileRequest(Message):
    """Asks for `length` bytes of a file of the store that holds no experts; fewer come at its end."""

    name: str
    offset: U64
    length: U32

    def check(self, limits: Limits) -> None:
        _file_name(self.name)
        if not 0 < self.length <= limits.max_message_bytes:
            raise malformed(f"{self.length} bytes of a file are asked for")


@dataclass(frozen=True, eq=False)
class FileReply(Message):
    """A piece of a file of `size` bytes; `data` uint8 [N]."""

    name: str
    offset: U64
    size: U64
    data: Annotated[NDArray[np.uint8], "N"]

    def check(self, limits: Limits) -> None:
        _file_name(self.name)
        if self.offset + len(self.data) > self.size:
            raise malformed(f"bytes up to {self.offset + len(self.data)} of a file of {self.size}")


@dataclass(frozen=True)
class Acknowledged(Message):
    """Done without a result: the answer of a handler that returns None."""


# By kind: the number of a message on the wire is its place here, from 1 on.
MESSAGES: tuple[type[Message], ...] = (
    Acknowledged, Failure, ExpertBatch, ExpertResult, PrefetchCommand, Context, HealthRequest, HealthReport,
    StoreRequest, StoreReply, FileRequest, FileReply, PlacementCommand,
)  # fmt: skip

# On the control stream: Hello and its Welcome first, then each Ping and its Pong until the end of the connection.


@dataclass(frozen=True)
class Hello:
    """A client's first words. The version comes first in every version of the program.

    Attributes:
        pid, fd, ring_bytes: where the client's shared memory is, and the size of each ring; ring_bytes 0: gRPC only.
    """

    version: U32
    client: U64
    max_message_bytes: U64
    pid: U32 = 0
    fd: U32 = 0
    ring_bytes: U64 = 0


@dataclass(frozen=True)
class Welcome:
    """The server's answer.

    Attributes:
        clock_ns: of the server's monotonic clock.
        nonce: in hexadecimal, what the server found in the client's memory; empty: it could not look there.
    """

    version: U32
    max_message_bytes: U64
    clock_ns: U64
    nonce: str = ""


@dataclass(frozen=True)
class Ping:
    """Asks for a `Pong`."""

    sequence: U64


@dataclass(frozen=True)
class Pong:
    """The answer to the ping of this number, with the server's monotonic clock."""

    sequence: U64
    clock_ns: U64
