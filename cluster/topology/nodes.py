"""The nodes there are: from a file, from this machine, or from a Ray that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import ByteSize, Field, TypeAdapter, ValidationError, field_validator

from ...actors.base_settings import Settings
from ...errors import RuntimeFailure
from ..ray_auth import check_joinable
from ..yaml_file import explain, read_yaml
from .local import LocalRay
from .plan import NODE_ID_LABEL
from .spec import NodeInfo

_ANSWER_DEADLINE_S = 10
_BYTES = ("memory", "object_store_memory")
_BYTE_SIZE = TypeAdapter(ByteSize)
_GPU_DEVICES = "nvidia[0-9]*"  # in /dev, one for each GPU


class _Node(Settings):
    id: str = Field(min_length=1)
    address: str = Field(min_length=1)
    alive: bool = True
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("resources", mode="before")
    @classmethod
    def _bytes_with_units(cls, resources: Any) -> Any:
        """Memory may be written as 200GB; nothing else has a unit."""
        if not isinstance(resources, Mapping):
            return resources
        return {k: _BYTE_SIZE.validate_python(v) if k in _BYTES else v for k, v in resources.items()}


class _NodesFile(Settings):
    nodes: tuple[_Node, ...] = Field(min_length=1)


def nodes_from_file(path: Path) -> list[NodeInfo]:
    """Nodes from YAML, in the terms of `ray.nodes()`; bytes may have a unit, such as 200GB.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        found = _NodesFile(**read_yaml(path)).nodes
    except ValidationError as error:
        raise explain(error, _NodesFile, str(path)) from error
    return [NodeInfo(node.id, node.address, node.alive, node.resources, node.labels) for node in found]


def nodes_from_ray(records: Sequence[Mapping[str, Any]]) -> list[NodeInfo]:
    """What `ray.nodes()` returned, sorted by id; Ray's own `node:...` and accelerator-type resources are left out."""
    nodes = [
        NodeInfo(
            id=str(record["NodeID"]),
            address=str(record["NodeManagerAddress"]),
            alive=bool(record["Alive"]),
            resources=_ours(record["Resources"]),
            labels=dict(record.get("Labels") or {}),
        )
        for record in records
    ]
    return sorted(nodes, key=lambda node: node.id)


def this_machine(given: LocalRay) -> list[NodeInfo]:
    """The one node of a local Ray, as `cluster.deploy` starts it."""
    resources = {
        "CPU": float(given.cpus),
        "GPU": float(len(list(Path("/dev").glob(_GPU_DEVICES)))),
        "memory": float(psutil.virtual_memory().available),
        **given.resources,
    }
    return [NodeInfo("local", "127.0.0.1", True, {name: amount for name, amount in resources.items() if amount})]


def nodes_of_cluster(address: str) -> list[NodeInfo]:
    """Ask a running Ray's head for its nodes. No driver joins, so no job, process or file comes of it.

    Args:
        address: HOST:PORT of the head.

    Raises:
        RuntimeFailure: nobody answers there, or not in time, or it wants another authentication.
    """
    check_joinable(address)
    # what `ray status` asks with: it knows the token and the certificates
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

    try:
        reply = GetClusterResourceStateReply()
        reply.ParseFromString(GcsClient(address).get_cluster_resource_state(timeout_s=_ANSWER_DEADLINE_S))
    except Exception as error:  # Ray's client raises RpcError, ValueError and bare Exception
        reason = " ".join(str(error).split())[:200]
        raise RuntimeFailure(
            f"the Ray at '{address}' did not name its nodes ({reason})", "look at it with `ray status`"
        ) from error
    nodes = [
        NodeInfo(
            id=state.node_id.hex(),
            address=state.node_ip_address,
            alive=state.status not in (NodeStatus.DEAD, NodeStatus.DRAINING),
            resources=_ours(state.total_resources),
            labels=dict(state.labels) | {NODE_ID_LABEL: state.node_id.hex()},
        )
        for state in reply.cluster_resource_state.node_states
    ]
    return sorted(nodes, key=lambda node: node.id)


def _ours(resources: Mapping[str, float]) -> dict[str, float]:
    return {
        name: float(amount)
        for name, amount in resources.items()
        if not name.startswith(("node:", "accelerator_type:"))
    }
