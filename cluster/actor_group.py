"""The actors of one deployment: constructed here and nowhere else, as the plan says, side by side.

    directory -> stores, shards, NDP workers -> matcher -> the lead with its node's store -> all ready -> lead.start

On one machine the lead's process is the first, since its libraries take longest.

The actor classes are plain classes. Ray restarts them if they die, and they register again; the lead also has to
be started (`supervision.py`). What Ray passes to a constructor again may not hold references, so workers get links
(names in the directory), not handles.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from ..actors.store.artifacts import map_shape
from ..actors.store.files import ExpertStore, StoreView
from ..errors import RuntimeFailure, StoreError
from ..proto.peers import MATCHER, PeerLink, StoreLink
from .attach import CONTROL, CONTROL_THREADS, EVENT_THREADS, EVENTS, Lead, actor_records
from .deployed_actors import ENDPOINTS, RESTART_ALWAYS, Reservation, end, role_of
from .endpoints import EndpointDirectory, Endpoints
from .host import thread_limits
from .launch import Launch
from .ray_session import LOOPBACK, as_failure, environment_of
from .topology.estimate import PlanResult
from .topology.inputs import nodes_from_ray
from .topology.spec import NodeInfo, PlannedActor

_CONCURRENCY = 4  # control calls of the workers; what they compute arrives on their channels
_STEP_S = 1.0
_RETIRE_S = 5.0
_POLL_S = 1.0
_START_S = 120.0  # of a worker on a node that has joined
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class ActorGroup:
    """Lead, shards, stores, NDP workers and endpoint directory.

    Args:
        name: the replica group's id.
        planned: what runs where.
        reservation: in which they are made.

    Attributes:
        name: as given.
        lead: once started.
        directory: how to ask for addresses; None if no actor is reached over a channel.
        actors: all handles but the lead's, by role.
    """

    def __init__(self, name: str, planned: PlanResult, reservation: Reservation, launch: Launch) -> None:
        self.name, self._topology, self._reservation, self._launch = name, planned.topology, reservation, launch
        self._settings, self._store_path, self._local = launch.settings, launch.store_path, launch.local
        self._worker_class, self._store_class = launch.stand_ins.worker, launch.stand_ins.store
        self._top_k = planned.facts.top_k
        self._token = secrets.token_hex(32)
        self._layers = {layer for store in self._topology.having("store") for layer in store.layers}
        self.directory: Endpoints | None = None
        self.actors: dict[str, Any] = {}
        self._planned: dict[str, PlannedActor] = {}  # of them
        self.lead = Lead(None)

    def start(self, left: Callable[[], float]) -> dict[str, Any]:
        """Start all and wait until they serve; the lead's effective plan.

        Args:
            left: seconds until the deadline.

        Raises:
            TierMoeError, RayError: what an actor refused or died of. DeploymentEnded: see `Reservation`.
        """
        topology = self._topology
        if topology.having("directory"):
            name = f"{self.name}/{ENDPOINTS}"  # another deployment in the same cluster has its own
            self.directory = Endpoints(name, LOOPBACK if self._local else None, self._launch.config.cluster.tls)
        self._launch.step("starting the store and its peers")
        # Ray starts as many processes at a time as there are cores, in this order. The lead waits for the others, and
        # its libraries take longer than they do.
        early = self._local and self._worker_class is None
        if early:
            lead = self._start_lead([ExpertStore(self._store_path, "stamp").describe()])
            lead.warm.remote()
        for planned in topology.having("directory"):
            self._start(planned, EndpointDirectory)
        views = [self._start_store(planned).describe.remote() for planned in topology.having("store")]
        peers = [*map(self._start_shard, topology.having("shard")), *map(self.start_ndp, topology.having("ndp"))]
        ready = [peer.health.remote() for peer in peers]
        self._wait(views, left)
        found = ray.get(views, timeout=left())
        ready += [self._start_matcher(planned, found[0]).health.remote() for planned in topology.having("matcher")]
        if not early:
            lead = self._start_lead(found)
        self._wait(ready, left)  # before the lead, which connects to them
        plan = lead.start.remote()
        self._wait([plan], left, self._show_stage)
        return ray.get(plan)

    def start_ndp(self, planned: PlannedActor) -> Any:
        """One NDP worker's handle; it is not waited for."""
        from ..actors.ndp_worker import NdpWorker

        settings = self._settings.ndp
        return self._start(
            planned, NdpWorker, settings, self._store_path, self.directory, self._token, index=planned.index, threads=1
        )

    def make_again(self, role: str) -> None:
        """Make a store, shard or NDP worker again that Ray has given up, since its constructor was refused.

        Raises:
            ValueError: Ray's, its name is not free yet.
        """
        kinds = {"store": self._start_store, "shard": self._start_shard, "ndp": self.start_ndp}
        planned = self._planned[role]
        end(self.actors[role])  # a dead actor keeps its name while there are handles
        kinds[planned.role](planned)

    def refuse(self, role: str, refusal: StoreError) -> None:
        """Let who looks for a worker's address find out why there is none."""
        if self.directory is not None:
            with contextlib.suppress(RuntimeFailure):  # it is told again at the next attempt
                self.directory.refuse(role, refusal)

    def end_worker(self, role: str) -> None:
        """End one worker for good."""
        actor = self.actors.pop(role, None)
        if actor is not None:
            end(actor)

    def link(self, role: str) -> PeerLink:
        """The link to a worker for the others, also after it was restarted."""
        assert self.directory is not None
        return PeerLink(self.directory, self._token, name=role)

    def close(self) -> None:
        """End all for good. Idempotent; never raises."""
        if self.lead.handle is not None and self._settings.keep_hot_set:
            with contextlib.suppress(Exception):  # it is dead, or Ray is gone
                self.lead.ask("retire", deadline_s=_RETIRE_S)
        lead, self.lead = self.lead.handle, Lead(None)
        actors, self.actors = self.actors, {}
        if MATCHER in actors:
            with contextlib.suppress(Exception):  # it is dead, or Ray is gone
                ray.get(actors[MATCHER].retire.remote(), timeout=_RETIRE_S)
        for actor in (lead, *actors.values()):
            if actor is not None:
                end(actor)

    def _start_store(self, planned: PlannedActor) -> Any:
        plain = self._store_class
        if plain is None:
            from ..actors.store.server import StoreWorker

            plain = StoreWorker
        named: dict[str, Any] = {}
        if set(planned.layers) != self._layers:
            named["layers"] = planned.layers
        if any(self._stores_for(worker) for worker in self._topology.having("lead", "shard")):
            named |= {"directory": self.directory, "token": self._token}
        return self._start(planned, plain, self._store_path, planned.index, threads=1, **named)

    def _start_shard(self, planned: PlannedActor) -> Any:
        from ..actors.shard_worker import ShardWorker

        stores = self._stores_for(planned)
        named: dict[str, Any] = {"layers": planned.layers, "stores": stores} if stores else {}
        return self._start(
            planned, ShardWorker, self._settings, planned.index, self._store_path, self.directory, self._token, **named
        )

    def _start_matcher(self, planned: PlannedActor, view: StoreView) -> Any:
        from ..actors.matcher import Matcher, ShardLinks

        settings, named = self._settings, {}
        if links := self._links("shard"):
            named = {"shards": ShardLinks(settings.shards, links)}
        # on the matcher's node; what Ray restarts there begins with it
        folder = self._launch.scratch or Path(tempfile.gettempdir()) / f"tiermoe-{self.name}"
        return self._start(
            planned, Matcher, settings.matcher, settings.policy.maps, map_shape(view.manifest), self._top_k,
            self.directory, self._token, snapshot=str(folder / f"{self.name}.safetensors"), threads=1, **named,
        )  # fmt: skip

    def _start_lead(self, views: Sequence[Any]) -> Any:
        worker = self._worker_class
        if worker is None:
            from ..actors.gpu_worker import GpuWorker

            worker = GpuWorker
        planned, stores = self._topology.lead, self._topology.having("store")
        here = [view for view, store in zip(views, stores, strict=True) if store.node == planned.node]
        # without a store on its node it maps nothing, and fetches the dense weights too
        view = here[0] if here else replace(views[0], layers=())
        links = {"ndp": self._links("ndp"), "shards": self._links("shard"), "stores": self._stores_for(planned)}
        matcher: dict[str, Any] = {"matcher": self.link(MATCHER)} if self._topology.having("matcher") else {}
        lead = self._reservation.make(
            planned,
            worker,
            self._settings,
            view,
            **{kind: found for kind, found in links.items() if found},
            **matcher,
            options={
                "max_restarts": RESTART_ALWAYS,
                "max_concurrency": self._settings.kv.max_num_seqs,
                "concurrency_groups": {CONTROL: CONTROL_THREADS, EVENTS: EVENT_THREADS},
            },
        )
        self.lead = Lead(lead)
        return lead

    def _stores_for(self, worker: PlannedActor) -> list[StoreLink]:
        """The other nodes' stores, if a worker does not map every layer from its own node's store."""
        if set(worker.layers) >= self._layers:
            return []
        return [
            StoreLink(role_of(store), store.layers, self.link(role_of(store)), f"{self.name}/{role_of(store)}")
            for store in self._topology.having("store")
            if store.node != worker.node
        ]

    def _links(self, *roles: Any) -> list[PeerLink]:
        return [self.link(role_of(planned)) for planned in self._topology.having(*roles)]

    def _start(self, planned: PlannedActor, plain: type, *args: Any, threads: int | None = None, **named: Any) -> Any:
        """Start a worker that Ray restarts.

        Args:
            threads: of its arithmetic libraries, if it differs from that of the whole Ray.
        """
        options: dict[str, Any] = {"max_restarts": RESTART_ALWAYS, "max_concurrency": _CONCURRENCY}
        if threads not in (None, self._settings.threads) and not self._local:  # where Ray starts a process for it
            options["runtime_env"] = environment_of(thread_limits(threads or 1))
        handle = self._reservation.make(planned, plain, *args, options=options, **named)
        self.actors[role_of(planned)], self._planned[role_of(planned)] = handle, planned
        return handle

    def _show_stage(self) -> None:
        """Show the current part of the lead's start as a step."""
        with contextlib.suppress(RuntimeFailure):  # busy, or of another class
            if self._worker_class is None:
                self._launch.step(str(self.lead.ask("health", deadline_s=_STEP_S)["state"]))

    def _wait(self, refs: Sequence[Any], left: Callable[[], float], notify: Callable[[], None] = lambda: None) -> None:
        """Return when all have come, with a call of `notify` about once a second; the first that fails is raised."""
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=min(left(), _STEP_S))
            for ref in done:
                ray.get(ref)
            if not done:
                notify()
                self._reservation.refuse_ended()
                if left() <= 0.001:
                    raise ray.exceptions.GetTimeoutError("actors")


class NodeWatcher:
    """Looks after nodes that join a running deployment, and after the endpoint directory's memory.

    A thread of the process that started the deployment. Once a second it

        - asks Ray for its nodes, where `cluster.ndp_workers` is per-node, and starts an NDP worker on one that has the
          resource `ndp` and no worker yet; the lead then gives it its share of the experts;
        - asks the directory for its entries, and enters those again that a restarted one has forgotten.

    A node that leaves needs nothing here: Ray restarts its worker on a node with the resource, once there is one.
    So there are never more workers than nodes for them.

    Args:
        group: whose workers are looked after; it has a directory.
        threads: of an NDP worker that is started; None: none is started.
        workers: roles of the NDP workers that there are.
        notify: called with a line about each node that joined.
    """

    def __init__(
        self, group: ActorGroup, threads: int | None, workers: Iterable[str], notify: Callable[[str], None]
    ) -> None:
        self._group, self._threads, self._notify = group, threads, notify
        self._workers = set(workers)
        self._refused: set[str] = set()  # nodes whose worker did not come up
        self._known: dict[str, str] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiermoe-watcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking. Bounded."""
        self._end.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        while not self._end.wait(_POLL_S):
            try:
                self._remember_endpoints()
                if self._threads is not None:
                    self._start_worker_where_missing(self._threads)
            except Exception as error:  # Ray's are of many kinds; the next look may do better
                _log.info("%s", as_failure(error, "looking after the nodes"))

    def _remember_endpoints(self) -> None:
        assert self._group.directory is not None
        there = self._group.directory.entries()
        for name, address in self._known.items():
            if name not in there:
                self._group.directory.register(name, address)
        self._known |= there

    def _start_worker_where_missing(self, threads: int) -> None:
        """Start a worker on a node that has none, one at a time."""
        marked = [n for n in nodes_from_ray(ray.nodes()) if n.alive and n.amount("ndp") >= 1]
        if len(marked) <= len(self._workers):
            return
        nodes = {r.role: r.node for r in actor_records() if r.deployment == self._group.name}  # where each is, or was
        busy = {nodes.get(role) for role in self._workers}
        free = [node for node in marked if node.id not in busy and node.id not in self._refused]
        if free:
            self._start_worker(free[0], threads)

    def _start_worker(self, node: NodeInfo, threads: int) -> None:
        index = next(i for i in range(len(self._workers) + 1) if f"ndp/{i}" not in self._workers)
        planned = PlannedActor(f"ndp-{index}", "ndp", index, node.id, {"CPU": float(threads), "ndp": 1.0})
        role = role_of(planned)
        try:
            self._await(self._group.start_ndp(planned).health.remote())
            self._group.lead.ask("add_ndp", self._group.link(role))
        except Exception as error:
            self._group.end_worker(role)
            if self._end.is_set():
                return
            self._refused.add(node.id)
            why = as_failure(error, f"an NDP worker on node {node.address} did not start", _START_S)
            self._notify(f"node {node.address} joined without a worker: {why}")
            return
        self._workers.add(role)
        self._notify(f"node {node.address} joined: NDP worker {index} runs there")

    def _await(self, ref: Any) -> None:
        end_s = time.monotonic() + _START_S
        while not ray.wait([ref], timeout=_POLL_S)[0]:
            if self._end.is_set():
                raise RuntimeFailure("the deployment ends", "start it again")
            if time.monotonic() > end_s:
                raise ray.exceptions.GetTimeoutError("NDP worker")
        ray.get(ref)
