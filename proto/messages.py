"""The messages of the program: frozen values with NumPy arrays, encoded by `codec.py`.

Shapes: N experts, P (row, expert) pairs, T rows, H hidden size, S sequences, D embedding size, E experts of a layer.
A uint16 array holds bfloat16 bits. Received arrays are read-only, their floats finite.
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
        experts: [N] expert ids of this layer, each once.
        bits: [N] width of each expert's replica, 1..8; 0: full precision.
        starts: [N + 1], rising from 0 to P; rows[starts[i]:starts[i + 1]] go through experts[i].
        rows: [P] row numbers into hidden.
        weights: [P] routing weight of each pair.
        hidden: [T, H] float32, float16 or bfloat16 (uint16).
        activation: name of the experts' activation.
        decode: whether the forward holds no prompt rows.
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
    """A worker's result of a batch.

    Attributes:
        partial: [T, H], sum over this worker's experts of weight * FFN(hidden row).
        measured_s: seconds in the kernel.
        modelled_s: seconds by the cost model of the simulated device; of a shard, seconds in which its link was busy
            with the layer's copies.
        paced_s: seconds in all, the wait for the modelled time included.
        resident: [B] the experts in a shard's cache after the batch, packed as in `engine/peers/shards.py`.
    """

    partial: NDArray[np.float32]
    measured_s: float
    modelled_s: float
    paced_s: float
    resident: NDArray[np.uint8] | None = None


@dataclass(frozen=True, eq=False)
class PrefetchCommand:
    """Experts to prefetch in one iteration, chosen while `layer` ran.

    Attributes:
        keys: [N], layer * experts of a layer + expert.
        priorities: [N], higher first.
        hints: how many of the last keys are not loaded: their priorities are for eviction only.
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
    """Experts that a shard holds until the next such command; answered when their loads have started.

    Attributes:
        keys: [N], layer * experts of a layer + expert, most urgent first.
        keep_others: other experts may stay where there is room, for a running prompt.
        preload: answer when they are loaded; they count as loaded before the first request.
    """

    keys: NDArray[np.int32]
    keep_others: bool
    preload: bool


@dataclass(frozen=True, eq=False)
class Context:
    """What the lead saw of one iteration: first the embeddings, then each layer's probabilities.

    Attributes:
        sequences: [S] sequence ids.
        embedding: [S, D] semantic embeddings; D is 0 in a message with probabilities.
        probabilities: [S, n*E] router probabilities of this layer and the n - 1 behind it; n is 0 in a message with
            embeddings.
    """

    iteration: int
    layer: int
    sequences: NDArray[np.int64]
    embedding: NDArray[np.float32]
    probabilities: NDArray[np.float32]


@dataclass(frozen=True)
class HealthRequest:
    """Asks for a `HealthReport`."""


@dataclass(frozen=True)
class HealthReport:
    """A worker's state."""

    role: str
    details: Mapping[str, Detail]


@dataclass(frozen=True)
class Failure:
    """An error of the other side, which `channel.call` raises as `RemoteFailure`; `kind` is the error's class."""

    kind: str
    what: str
    remedy: str


@dataclass(frozen=True, eq=False)
class StoreRequest:
    """Asks for `neurons` neurons (0: all), from `first` on, of the `experts` [N] of one layer, each named once."""

    layer: int
    experts: NDArray[np.int32]
    first: int = 0
    neurons: int = 0


@dataclass(frozen=True, eq=False)
class StoreReply:
    """The experts asked for.

    Attributes:
        experts: [N] expert ids.
        tensors: by name, [N, ...]; bfloat16 as uint16.
        first: the first neuron in the tensors that have neurons.
    """

    layer: int
    experts: NDArray[np.int32]
    tensors: Mapping[str, NDArray[Any]]
    first: int = 0


@dataclass(frozen=True)
class FileRequest:
    """Asks for `length` bytes of a file of the store that holds no experts; fewer come at its end."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True, eq=False)
class FileReply:
    """A piece of a file of `size` bytes; `data` uint8 [N]."""

    name: str
    offset: int
    size: int
    data: NDArray[np.uint8]


@dataclass(frozen=True)
class Acknowledged:
    """Done without a result: the answer of a handler that returns None."""


Message = (
    ExpertBatch | ExpertResult | PrefetchCommand | PlacementCommand | Context | HealthRequest | HealthReport | Failure
    | StoreRequest | StoreReply | FileRequest | FileReply | Acknowledged
)  # fmt: skip
