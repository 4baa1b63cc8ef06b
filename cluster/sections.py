"""The sections `cluster` and `hardware` of a configuration file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ByteSize, Field

from ..actors.base_settings import Settings
from ..actors.policies.sharding import Ownership


class StoreLayout(Settings):
    """Where the full-precision experts lie in host memory.

    layout: replicated: every store holds all layers. sliced: each layer is in `copies` of them, layers go round.
    nodes: workers: one store on every node that has a GPU worker. marked: one on every node with the resource `store`;
    the others read over the network.
    transport, deadline_s: of reading another node's store, see `StoreSettings`.
    """

    layout: Literal["replicated", "sliced"] = "replicated"
    nodes: Literal["workers", "marked"] = "workers"
    copies: int = Field(default=1, ge=1, le=64, description="stores that hold a layer, for sliced")
    transport: Literal["auto", "ray", "grpc"] = Field(
        default="auto", description="grpc: our channel; ray: object refs; auto: the faster"
    )
    deadline_s: float = Field(default=10.0, gt=0, description="seconds for an expert of another node")


class ClusterConfig(Settings):
    """How many actors of each kind, and where."""

    shards: int = Field(default=1, ge=1, le=64, description="GPUs that hold experts; the lead's is the first")
    ownership: Ownership = Field(default="layer-expert", description="rule by which experts belong to shards")
    strategy: Literal["pack", "spread"] = Field(default="pack", description="shards on few nodes, or on many")
    lead: str | None = Field(default=None, description="id or address of the lead's node; none: the roomiest")
    gpu_memory: Annotated[ByteSize, Field(ge=1)] | None = Field(
        default=None, description="bytes of one GPU, such as 80GB, which Ray does not know; none: not checked"
    )
    store: StoreLayout = StoreLayout()
    ndp_workers: Literal["per-node"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="NDP workers, for policies that use them; per-node: one on each node with `ndp`"
    )


class HardwareConfig(Settings):
    """What the prediction of tokens per second assumes; none: the figure for the kind of device, see `estimate`.

    Gigabytes are 1e9 bytes. Nothing here is measured or changes what runs.
    """

    memory_gbps: float | None = Field(default=None, gt=0, description="of a GPU's memory, or the CPU stand-in's")
    link_gbps: float | None = Field(default=None, gt=0, description="host to GPU; none on the stand-in: link.gbps")
    link_latency_us: float | None = Field(default=None, ge=0, description="before each copy")
    network_gbps: float = Field(default=3.0, gt=0, description="between nodes, one direction: 25 Gbit/s Ethernet")
    network_latency_us: float = Field(default=50.0, ge=0, description="of one message between nodes")
    prefetch_useful: float = Field(
        default=0.5, ge=0, le=1, description="share of the missing experts that prefetch brings in time"
    )
