"""What a running deployment looks after: nodes that join, and the endpoint directory's memory.

A thread of the process that holds the deployment. Once a second it

    - asks Ray for its nodes, where `cluster.ndp_workers` is per-node, and starts an NDP worker on one that has the
      resource `ndp` and no worker yet; the lead then gives it its share of the experts;
    - asks the directory for its entries, and enters those again that a restarted one has forgotten.

A node that leaves needs nothing here: Ray restarts its worker where the resource is, or once it is somewhere again. So
there are never more workers than nodes for them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray._private import state as gcs  # what `ray list actors` shows, without a dashboard

from ..errors import RuntimeFailure
from .attach import actor_records
from .config import RunConfig
from .crew import Crew
from .endpoints import Endpoint
from .failures import as_failure
from .names import role_of
from .topology.nodes import nodes_from_ray
from .topology.plan import PlannedActor, Topology
from .topology.spec import NodeInfo

_POLL_S = 1.0
_START_S = 120.0  # of a worker on a node that has joined
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class Watcher:
    """See the module.

    Args:
        crew: whose workers are looked after.
        threads: of an NDP worker that is started; None: none is.
        workers: NDP workers that there are.
        tell: given a line about what came.
    """

    def __init__(self, crew: Crew, threads: int | None, workers: Iterable[str], tell: Callable[[str], None]) -> None:
        self._crew, self._threads, self._tell = crew, threads, tell
        self._workers = set(workers)
        self._refused: set[str] = set()  # nodes whose worker did not come up
        self._known: dict[str, Endpoint] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiermoe-watcher", daemon=True)
        self._thread.start()

    @staticmethod
    def for_crew(crew: Crew, config: RunConfig, topology: Topology, tell: Callable[[str], None]) -> Watcher | None:
        """A watcher, where there is something to look after."""
        workers = [role_of(planned) for planned in topology.having("ndp")]
        grows = bool(workers) and config.cluster.ndp_workers == "per-node"
        if crew.directory is None:
            return None
        return Watcher(crew, config.ndp_threads if grows else None, workers, tell)

    def close(self) -> None:
        """Stop looking. Bounded."""
        self._end.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            try:
                self._remember_endpoints()
                if self._threads is not None:
                    self._greet_nodes(self._threads)
            except Exception as error:  # Ray's are of many kinds; the next look may do better
                _log.info("%s", as_failure(error, "looking after the nodes"))

    def _remember_endpoints(self) -> None:
        assert self._crew.directory is not None
        there = {endpoint.name: endpoint for endpoint in self._crew.directory.entries()}
        for name, endpoint in self._known.items():
            if name not in there:
                self._crew.directory.enter(endpoint)
        self._known |= there

    def _greet_nodes(self, threads: int) -> None:
        """Start a worker on a node that has none, one at a time."""
        marked = [n for n in nodes_from_ray(ray.nodes()) if n.alive and n.amount("ndp") >= 1]
        if len(marked) <= len(self._workers):
            return
        busy = {self._node_of(role) for role in self._workers}
        free = [node for node in marked if node.id not in busy and node.id not in self._refused]
        if free:
            self._greet(free[0], threads)

    def _greet(self, node: NodeInfo, threads: int) -> None:
        index = next(i for i in range(len(self._workers) + 1) if f"ndp/{i}" not in self._workers)
        planned = PlannedActor(f"ndp-{index}", "ndp", index, node.id, {"CPU": float(threads), "ndp": 1.0})
        role = role_of(planned)
        try:
            self._await(self._crew.start_ndp(planned).health.remote())
            self._crew.lead.ask("add_ndp", self._crew.link(role))
        except Exception as error:
            self._crew.dismiss(role)
            if self._end.is_set():
                return
            self._refused.add(node.id)
            why = as_failure(error, f"an NDP worker on node {node.address} did not start", _START_S)
            self._tell(f"node {node.address} joined without a worker: {why}")
            return
        self._workers.add(role)
        self._tell(f"node {node.address} joined: NDP worker {index} runs there")

    def _await(self, ref: Any) -> None:
        end_s = time.monotonic() + _START_S
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if self._end.is_set():
                raise RuntimeFailure("the deployment ends", "start it again")
            if time.monotonic() > end_s:
                raise ray.exceptions.GetTimeoutError("NDP worker")
        ray.get(ref)

    def _node_of(self, role: str) -> str | None:
        """Where a worker is, or was last."""
        name = f"{self._crew.name}/{role}"
        records = {f"{r.deployment}/{r.role}": r for r in actor_records(list(gcs.actors().values()))}
        return records[name].node if name in records else None
