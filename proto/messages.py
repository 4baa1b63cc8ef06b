"""The messages that the program uses: frozen values with NumPy arrays. `codec.py` turns them into bytes and back.

Symbols in the shapes: N experts, P (row, expert) pairs, T rows, H hidden size, S sequences, D embedding size,
E experts of a layer. A uint16 array holds bfloat16 bit patterns; float arrays that arrive are finite. Arrays that
arrive are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Detail = str | float | int | bool


@dataclass(frozen=True, eq=False)
class ExpertBatch:
    """Rows of one layer for one worker.

    Attributes:
        layer: MoE layer.
        experts: [N] expert ids of this layer, each once.
        bits: [N] width of the replica to use per expert, 1..8; 0: full precision.
        starts: [N + 1], rising from 0 to P; rows[starts[i]:starts[i + 1]] go through experts[i].
        rows: [P] row numbers into hidden.
        weights: [P] routing weight of each pair.
        hidden: [T, H] float32, float16 or bfloat16 (uint16).
        activation: name of the experts' activation, which only the lead's model knows.
        decode: whether the forward is known to hold no row of any prompt.
    """

    layer: int
    experts: NDArray[np.int32]
    bits: NDArray[np.uint8]
    starts: NDArray[np.int32]
    rows: NDArray[np.int32]
    weights: NDArray[np.float32]
    hidden: NDArray[Any]
    activation: str = "silu"
    decode: bool = False


@dataclass(frozen=True, eq=False)
class ExpertResult:
    """What a worker made of a batch.

    Attributes:
        partial: [T, H], sum over this worker's experts of weight * FFN(hidden row).
        measured_s: seconds in the kernel.
        modelled_s: seconds by the cost model of the device that the worker stands for; of a shard, by the clock of its
            link: how long that was busy with the layer's copies.
        paced_s: seconds in all, waiting for the modelled time included.
        resident: [B] the experts in a shard's cache after the batch, packed as `engine/peers/shards.py` says; None:
            not sent.
    """

    partial: NDArray[np.float32]
    measured_s: float
    modelled_s: float
    paced_s: float
    resident: NDArray[np.uint8] | None = None


@dataclass(frozen=True, eq=False)
class PrefetchCommand:
    """Experts to load ahead, for one iteration, decided while `layer` ran.

    Attributes:
        keys: [N], layer * experts of a layer + expert.
        priorities: [N], higher goes first.
        hints: how many of the keys, at the end, are not to be loaded: their priorities only say what eviction may
            want to know.
        mapped: the priorities are p / (layer of the key + 1 - `layer`), p of a matched expert map.
    """

    iteration: int
    layer: int
    keys: NDArray[np.int32]
    priorities: NDArray[np.float32]
    hints: int = 0
    mapped: bool = False


@dataclass(frozen=True, eq=False)
class PlacementCommand:
    """Experts that a shard is to hold until the next such command; answered when their loads are under way.

    Attributes:
        keys: [N], layer * experts of a layer + expert, most urgent first.
        keep_others: other experts may stay where there is room, for a prompt that is using them.
        preload: answer when they are there; they count as loaded before the first request.
    """

    keys: NDArray[np.int32]
    keep_others: bool
    preload: bool


@dataclass(frozen=True, eq=False)
class Context:
    """What the lead saw of one iteration: first the embeddings, then each layer's probabilities.

    Attributes:
        sequences: [S] sequence ids.
        embedding: [S, D] the sequences' semantic embedding; D is 0 where the probabilities are told.
        probabilities: [S, E] router probabilities at this layer; E is 0 where the embedding is told.
    """

    iteration: int
    layer: int
    sequences: NDArray[np.int64]
    embedding: NDArray[np.float32]
    probabilities: NDArray[np.float32]


@dataclass(frozen=True)
class HealthRequest:
    """How are you?"""


@dataclass(frozen=True)
class HealthReport:
    """A worker's own account of its state."""

    role: str
    details: Mapping[str, Detail]


@dataclass(frozen=True)
class Failure:
    """An error of the other side; `channel.call` raises it as `RemoteFailure`.

    Attributes:
        kind: name of the error's class.
        what, remedy: as in `TierMoeError`.
    """

    kind: str
    what: str
    remedy: str


@dataclass(frozen=True, eq=False)
class StoreRequest:
    """Asks for experts of one layer, or for some neurons of each: a large expert takes several messages.

    Attributes:
        experts: [N], each once.
        first: of the neurons wanted.
        neurons: how many; 0: all from `first` on.
    """

    layer: int
    experts: NDArray[np.int32]
    first: int = 0
    neurons: int = 0


@dataclass(frozen=True, eq=False)
class StoreReply:
    """The experts asked for.

    Attributes:
        experts: [N] expert ids.
        tensors: by name, [N, ...] of a dtype that the codec knows; bfloat16 as uint16.
        first: neuron at which the tensors that have neurons begin.
    """

    layer: int
    experts: NDArray[np.int32]
    tensors: Mapping[str, NDArray[Any]]
    first: int = 0


@dataclass(frozen=True)
class FileRequest:
    """Asks for a piece of a file of the store that holds no experts.

    Attributes:
        offset, length: bytes; fewer come where the file ends.
    """

    name: str
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class FileReply:
    """The piece.

    Attributes:
        size: bytes of the whole file.
        data: uint8 [N].
    """

    name: str
    offset: int
    size: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Acknowledged:
    """Done, and nothing to say: a handler that returns None answers with this."""


Message = (
    ExpertBatch
    | ExpertResult
    | PrefetchCommand
    | PlacementCommand
    | Context
    | HealthRequest
    | HealthReport
    | Failure
    | StoreRequest
    | StoreReply
    | FileRequest
    | FileReply
    | Acknowledged
)
