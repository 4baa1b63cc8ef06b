"""The machine that the simulator runs on: seconds of compute and of the host, its links and its peers.

    costs of a machine (`topology.machine_costs`: measured, or from data sheets) + a model's shape -> Machine

A trace may also have recorded what computing took; then the recording is the machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...actors.policies.cost import CostError, Link, NdpDevice
from ...errors import ConfigError
from ..config import configs_dir
from ..topology.machine_costs import THIS, MachineCosts, PolicyCosts, costs_of, machine_file
from ..yaml_file import explain, read_yaml
from .trace import Costs, TraceHeader

_DENSE_ROWS, _EXPERT_ROWS = 16, 4  # further rows that cost as much as the first, where no compute rate is known
_FAIR = 0.5  # of the memory that kernels get at least beside a copy


class Machine(Costs):
    """A simulated machine: costs of compute and of the host, links, peers. Experts run one after another.

    Attributes:
        link_gbps: 1e9 bytes per second of each GPU's own link; None: copies take no time. link_latency_us: of a copy.
        miss_s: of the host in a layer that misses an expert. load_s: of the host for each expert that is loaded.
        wait_s: from a copy's end until a layer that waits for it continues.
        context_s: of a layer's attention for each token of a sequence's context.
        kernel_share: speed of kernels while a copy is under way; 1: they read other memory than copies.
        gpus: with a link and a shard of the experts each. peer_gbps, peer_us: a message between two of them; None: no
            time for its bytes.
        message_s: of the lead's host for each message that it sends to a peer or takes from one.
        matcher_s: from a published layer until its command is there.
        ndp: the near-data device, of which there are `ndp_workers`; None: there is none. ndp_share: speed of its
            kernels while the lead's link copies; 1: they read other memory than copies.
    """

    name: Annotated[str, Field(min_length=1)]
    link_gbps: Annotated[float, Field(gt=0)] | None = None
    link_latency_us: Annotated[float, Field(ge=0)] = 0.0
    miss_s: Annotated[float, Field(ge=0)] = 0.0
    load_s: Annotated[float, Field(ge=0)] = 0.0
    wait_s: Annotated[float, Field(ge=0)] = 0.0
    context_s: Annotated[float, Field(ge=0)] = 0.0
    kernel_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    gpus: Annotated[int, Field(ge=1)] = 1
    peer_gbps: Annotated[float, Field(gt=0)] | None = None
    peer_us: Annotated[float, Field(ge=0)] = 0.0
    message_s: Annotated[float, Field(ge=0)] = 0.0
    matcher_s: Annotated[float, Field(ge=0)] = 0.0
    ndp: NdpDevice | None = None
    ndp_workers: Annotated[int, Field(ge=1)] = 1
    ndp_share: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def link(self) -> Link | None:
        return None if self.link_gbps is None else Link(self.link_gbps, self.link_latency_us)

    def dense(self, rows: int, context: int = 0) -> float:
        """Seconds of a layer's attention, norms and router. context: tokens whose keys and values it reads."""
        return self.dense_s + (rows - 1) * self.dense_row_s + context * self.context_s

    def experts(self, experts: int, pairs: int) -> float:
        """Seconds of `experts` experts on `pairs` rows in total."""
        return experts * self.expert_s + (pairs - experts) * self.expert_row_s

    def hop(self, nbytes: int) -> float:
        """Seconds of a message from one GPU to another."""
        return self.peer_us * 1e-6 + (0.0 if self.peer_gbps is None else nbytes / (self.peer_gbps * 1e9))


def machine_of(
    costs: MachineCosts, policy: PolicyCosts, header: TraceHeader, *, dense_bytes: float, kv_bytes: float,
    slot_bytes: int | None = None, copy_bytes: int | None = None, link: Link | None = None,
) -> Machine:  # fmt: skip
    """A machine's costs for one model under one preset. The host's time of a layer counts as dense: copies overlap it.

    Args:
        dense_bytes: of a layer's weights outside the experts. kv_bytes: of a token's keys and values in a layer.
        slot_bytes: of an expert as kernels read it, copy_bytes: as the link carries it; None: as recorded.
        link: to which copies are throttled, as far as it is slower than the machine's; None: the machine's.

    Raises:
        ConfigError: the near-data device is unknown or refused.
    """
    nbytes = header.slot_bytes if slot_bytes is None else slot_bytes
    copied = nbytes if copy_bytes is None else copy_bytes
    dense_s, expert_s = costs.dense_s(dense_bytes), costs.expert_s(nbytes)
    own = Link(costs.copy_gbps, costs.copy_us)
    if link is None or link.latency_us * 1e-6 + copied / (link.gbps * 1e9) < costs.copy_s(copied):
        link = own
    dense_row_s, expert_row_s = dense_s / _DENSE_ROWS, expert_s / _EXPERT_ROWS
    if costs.tflops is not None:  # a multiplication and an addition a weight
        per_byte_s = 2 / (4 if header.expert_dtype == "float32" else 2) / (costs.tflops * 1e12)
        dense_row_s, expert_row_s = dense_bytes * per_byte_s, nbytes * per_byte_s
    share = 1.0
    if costs.host_gbps is not None:  # a copy reads and writes
        rest_gbps = max(costs.host_gbps - 2 * link.gbps, costs.host_gbps * _FAIR)
        share = min(1.0, rest_gbps / (nbytes / expert_s * 1e-9))
    return Machine(
        name=costs.machine, forward_s=policy.step_us * 1e-6, dense_s=dense_s + policy.layer_us * 1e-6,
        dense_row_s=dense_row_s, expert_s=expert_s, expert_row_s=expert_row_s,
        link_gbps=link.gbps * header.slot_bytes / copied, link_latency_us=link.latency_us,
        miss_s=policy.miss_us * 1e-6, load_s=policy.load_us * 1e-6, wait_s=costs.wait_us * 1e-6,
        context_s=kv_bytes / (costs.dense_gbps * 1e9), kernel_share=share, gpus=costs.gpus, peer_gbps=costs.peer_gbps,
        peer_us=costs.peer_us, message_s=costs.message_us * 1e-6, matcher_s=costs.matcher_us * 1e-6,
        ndp=None if costs.ndp is None else ndp_device(costs.ndp), ndp_workers=costs.ndp_workers,
    )  # fmt: skip


def ndp_device(name: str) -> NdpDevice:
    """A near-data device of configs/hardware. Raises ConfigError: it is unknown or refused."""
    path = configs_dir() / "hardware" / f"{name}.yaml"
    try:
        return NdpDevice.from_dict(read_yaml(path))
    except CostError as error:
        raise ConfigError(f"'{path}': {error}", "correct the file") from error


def load_machine(
    header: TraceHeader, machine: str | Path | None, link_gbps: float | None, link_latency_us: float | None,
    policy: str = "on-demand",
) -> Machine:  # fmt: skip
    """The machine of a name or file (`machine_costs.costs_of`), or the recorded one; with another link if given.

    A table names no model, so a layer's dense weights are those of multi-head attention: 4 H^2, and 2 H of keys and
    values a token. A file may also give `Machine`'s own fields for one model.

    Args:
        policy: preset whose host costs count.

    Raises:
        ConfigError: the machine is refused, or there is none and the trace was recorded without costs.
    """
    given = {"link_gbps": link_gbps, "link_latency_us": link_latency_us}
    changed: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    fields: dict[str, Any] = {}
    if machine is None:
        if header.costs is None:
            raise ConfigError("the trace has no times of computing", "give a machine with --machine NAME")
        fields, origin = {"name": "recorded", **header.costs.model_dump()}, "the trace"
    else:
        origin = str(machine)
        values = None if str(machine) == THIS else read_yaml(machine_file(machine))
        if values is not None and "expert_s" in values:
            fields = dict(values)
        else:
            costs, item = costs_of(machine), 4 if header.expert_dtype == "float32" else 2
            fields = machine_of(
                costs, costs.of_policy(policy), header, dense_bytes=4 * header.hidden**2 * item,
                kv_bytes=2 * header.hidden * item,
            ).model_dump()  # fmt: skip
    try:
        return Machine(**fields | changed)
    except ValidationError as error:
        raise explain(error, Machine, origin, None if machine is not None else changed) from error


def without_ndp(policy: str, machine: str) -> ConfigError:
    """The refusal of a policy that computes on NDP workers, by a machine that has none."""
    what = f"policy '{policy}' computes on an NDP worker, and machine '{machine}' has none"
    return ConfigError(what, "replay it with --machine h100-pcie4-ndp, or a policy that only caches")
