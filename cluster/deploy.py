"""A runtime's life: Ray, the plan, its actors, requests, the end.

    scratch -> Ray (local, or joined) -> plans (`topology`) -> replica groups: reservation, actors -> ready

Their names begin with the deployment's id (`deployed_actors.py`), by which others find them (`attach.py`).
`Deployment` is a context manager: leaving it, in whatever way, leaves no process, shared memory or file behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from ..actors.engine.stats import EngineStats, LayerResidency
from ..actors.requests import GenerationRequest, TokenEvent
from ..errors import RuntimeFailure, TierMoeError
from .attach import Lead
from .deployed_actors import DeploymentEnded, group_id, new_id
from .host import thread_limits
from .launch import Launch
from .ray_session import (
    as_failure,
    head_address,
    join,
    leave,
    node_lives,
    refuse_second,
    start_local,
    without_ray_notices,
)
from .replica_group import ReplicaGroup
from .scratch import Scratch
from .supervision import RayWatch
from .topology.decided import decided
from .topology.estimate import PlanResult, make_plans
from .topology.inputs import facts_of_store, local_notes, local_ray, nodes_from_ray, this_machine
from .topology.spec import ModelFacts, NodeInfo, Topology, wants_gpu


class Deployment:
    """A planned topology on Ray, ready inside the `with` block.

    Args:
        launch: what to start.
        on_ray: called once there is a Ray and before anything is placed on it.
        lost: called from a thread with the reason when Ray itself has ended or hangs; None: no watch.

    Attributes:
        id: what the names of its actors begin with.
        config: as given.
        planned: what runs where with how many bytes, and the prediction, once started; of one group.
        plan: the first lead's effective plan, once started.
        startup_s: seconds from the call to ready.
    """

    def __init__(
        self, launch: Launch, *, on_ray: Callable[[Deployment], None] | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.id = new_id()
        self.config, self._launch, self._on_ray, self._lost = launch.config, launch, on_ray, lost
        self._deadline_s = 0.0  # on the monotonic clock, once started
        self._quiet = contextlib.ExitStack()
        self._scratch: Scratch | None = None
        self._groups: list[ReplicaGroup] = []
        self._failed: set[ReplicaGroup] = set()  # whose lead rests
        self._ray_watch: RayWatch | None = None
        self._planned: PlanResult | None = None
        self._notes: tuple[str, ...] = ()
        self.plan: dict[str, Any] = {}
        self.startup_s = 0.0

    def __enter__(self) -> Deployment:
        """Start everything.

        Raises:
            ConfigError: a node is short of a resource, the budget does not fit, or a TLS file is wrong: refused before
                anything is loaded.
            DeploymentEnded: it was ended during the start.
            RuntimeFailure: Ray or an actor did not start in time.
            TierMoeError: what the store or a worker refused (bad store, budget too small, ...).
        """
        refuse_second()
        if (tls := self.config.cluster.tls) is not None:
            tls.read()
            tls.refuse_expired()
        begin = time.monotonic()
        self._deadline_s = begin + self.config.ray.startup_deadline_s
        try:
            facts = self._launch.stand_ins.facts
            facts = facts or facts_of_store(Path(self._launch.store_path), self.config.model_dir)
            self._refuse_early(facts)
            self._quiet.enter_context(without_ray_notices())
            self._launch.step("starting Ray" if self._launch.local else f"joining the Ray at {self.config.ray.address}")
            self._start_ray()
            if self._lost is not None:
                self._ray_watch = RayWatch(self.id, self._launch.local, self._launch.notify, self._lost)
            if self._on_ray is not None:
                self._on_ray(self)
            self._start_groups(self._plans(facts))
        except BaseException as error:
            failure = self._failure(error)
            self.close()
            if failure is None:
                raise
            raise failure from error
        self.startup_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Stream the tokens of one request; leaving the iteration early cancels the request.

        Raises:
            RuntimeFailure: the worker died, reported an error, or the request passed its deadline.
        """
        return self._lead.generate(request, self.config.request_deadline_s)

    def cancel(self, request_id: str) -> None:
        """Stop a request; a worker that is dead or closed has nothing left to stop."""
        self._lead.cancel(request_id)

    @property
    def address(self) -> str:
        """HOST:PORT by which others join the Ray that this runs on."""
        return head_address()

    @property
    def planned(self) -> PlanResult:
        """What runs where, with how many bytes, and the prediction.

        Raises:
            RuntimeFailure: not started.
        """
        if self._planned is None:
            raise RuntimeFailure("the deployment is not started", "enter it first")
        return self._planned

    @property
    def topology(self) -> Topology:
        """The planned actors, as placed; workers that joined later are not included."""
        return self.planned.topology

    def watch(self) -> bool:
        """Whether the deployment still runs; False: it was ended in order (`Attachment.end`).

        Restarts a lead that died or hangs, while others continue: call this about once a second. A lead that
        fails finally is reported, and tried again after a minute, while another one serves.

        Raises:
            TierMoeError: all leads have ended for good, die too often, or refuse to start again; that of the first. Or
                this machine has left its Ray.
        """
        failed: dict[ReplicaGroup, TierMoeError] = {}
        for group in self._groups:
            try:
                group.look()
            except TierMoeError as error:
                failed[group] = error
        if failed and any(group.ended for group in self._groups):
            if not node_lives():  # the GCS also removes reservations of nodes that have left
                raise RuntimeFailure("Ray's raylet on this machine ended", "start it again")
            return False
        if len(failed) == len(self._groups):
            raise next(iter(failed.values()))
        for group in failed.keys() - self._failed:
            self._launch.notify(f"{failed[group].what}; it is tried again after a minute, the other leads serve")
        self._failed = set(failed)
        if self._ray_watch is not None:
            self._ray_watch.look()
        if self._scratch is not None and self._scratch.look():
            self._launch.notify("the process that clears up after this one died; it is started again")
        return True

    def stats(self) -> EngineStats:
        """The lead's counters."""
        return self._lead.ask("stats")

    def residency(self) -> list[LayerResidency]:
        """The residency of each layer on the lead's GPU."""
        return self._lead.ask("residency")

    def shard_stats(self) -> list[dict[str, Any]]:
        """Counters of every GPU, the lead's first."""
        return self._lead.ask("shard_stats")

    def reset_stats(self) -> None:
        """Set the worker's counters to zero."""
        self._lead.ask("reset_stats")

    def health(self) -> dict[str, Any]:
        """The lead's own account of its state and of its peers."""
        return self._lead.ask("health")

    def trace_events(self) -> list[dict[str, Any]]:
        """Chrome trace events that the lead recorded."""
        return self._lead.ask("trace_events")

    def close(self) -> None:
        """End the actors, and Ray if it was started here. Idempotent; never raises."""
        ray_watch, self._ray_watch = self._ray_watch, None
        groups, self._groups = self._groups, []
        try:
            for group in groups:
                group.stop_watching()
            if ray.is_initialized():
                for group in groups:
                    group.close()
                if ray_watch is not None:
                    ray_watch.close()
                leave()
        finally:  # also when a second Ctrl-C cuts the above short
            self._quiet.close()
            if self._scratch is not None:
                self._scratch.close()

    def abandon(self) -> bool:
        """Kill a local Ray; False: there is none. Only for the end of a process."""
        if self._scratch is None:
            return False
        self._scratch.close()
        return True

    @property
    def _lead(self) -> Lead:
        return self._groups[0].actor_group.lead if self._groups else Lead(None)

    def _start_ray(self) -> None:
        ray_settings, threads = self.config.ray, self._launch.settings.threads
        if ray_settings.address is not None:
            join(ray_settings.address, thread_limits(threads))
            return
        self._scratch = Scratch()
        self._launch = replace(self._launch, scratch=self._scratch.path)
        given = local_ray(self.config, self._launch.settings)
        # Ray asks the machine, and its first control group at most: it is told what the plan counts on
        memory = int(this_machine(given)[0].amount("memory"))
        start_local(
            self._scratch, given.cpus, dict(given.resources), ray_settings.object_store_bytes, threads,
            ray_settings.dashboard, memory,
        )  # fmt: skip

    def _refuse_early(self, facts: ModelFacts) -> None:
        """Refuse what a Ray on this machine could not hold before it is started, where its nodes are known."""
        if self._launch.local:
            nodes = this_machine(local_ray(self.config, self._launch.settings))
            self._choose(facts, nodes)
            if not wants_gpu(self._launch.settings, nodes):  # what Ray takes for a GPU, only Ray knows
                make_plans(self.config, self._launch.settings, facts, nodes, "this machine")

    def _plans(self, facts: ModelFacts) -> list[PlanResult]:
        nodes = [node for node in nodes_from_ray(ray.nodes()) if node.alive]  # Ray remembers those that have left
        where = "a Ray of its own" if self._launch.local else f"the Ray at {self.config.ray.address}"
        if not self._launch.local:
            self._choose(facts, nodes)
        notes = (*self._notes, *(local_notes(self.config, self._launch.settings) if self._launch.local else ()))
        return make_plans(self.config, self._launch.settings, facts, nodes, where, notes, here=self._launch.local)

    def _choose(self, facts: ModelFacts, nodes: Sequence[NodeInfo]) -> None:
        """What is decided with the nodes: the default policy and the budget `auto`."""
        settings, self._notes = decided(self.config, self._launch.settings, facts, nodes, here=self._launch.local)
        self._launch = replace(self._launch, settings=settings)

    def _start_groups(self, plans: Sequence[PlanResult]) -> None:
        self._planned = plans[0]
        for index, planned in enumerate(plans):
            label = "the lead" if len(plans) == 1 else f"lead {index + 1} of {len(plans)}"
            group = ReplicaGroup(group_id(self.id, index), label, planned, self._launch)
            self._groups.append(group)
            group.reserve(self._remaining_s)
        started = [group.start(self._remaining_s) for group in self._groups]
        self.plan = started[0]

    def _failure(self, error: BaseException) -> TierMoeError | None:
        """The error to raise for an error of the start; None: that error unchanged."""
        if not isinstance(error, Exception):
            return None
        with contextlib.suppress(Exception):  # where Ray does not say, the error speaks for itself
            if any(group.ended for group in self._groups):
                return DeploymentEnded(f"deployment {self.id} was ended while it started", "start it again")
        # Ray makes the actor's typed error a class of both kinds, whose text is a traceback: that is unwrapped
        if isinstance(error, TierMoeError) and not isinstance(error, ray.exceptions.RayTaskError):
            return None
        deadline_s = self.config.ray.startup_deadline_s
        return as_failure(error, "the runtime did not start", deadline_s, "ray.startup_deadline_s")

    def _remaining_s(self) -> float:
        """Seconds until the start-up deadline; never zero, which Ray takes for `do not wait`."""
        return max(0.001, self._deadline_s - time.monotonic())
