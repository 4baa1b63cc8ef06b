"""One replica group of a deployment: its reservation, its actors, and what keeps its lead and its workers alive.

A replica group is a whole runtime: lead, shards, NDP workers and matcher of its own, with a budget of its own. Groups
share the pages of the mapped store, and nothing else, so that nothing which ends one can end another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .actor_group import ActorGroup, NodeWatcher
from .deployed_actors import Reservation, role_of
from .launch import Launch
from .supervision import LeadKeeper, WorkerKeeper
from .topology.estimate import PlanResult


class ReplicaGroup:
    """What runs of one plan.

    Args:
        name: under which its actors are found (`deployed_actors.group_id`).
        label: of its lead, for people.
        planned: what runs where.
    """

    def __init__(self, name: str, label: str, planned: PlanResult, launch: Launch) -> None:
        self.planned, self._label, self._launch = planned, label, launch
        self._reservation: Reservation | None = Reservation(name, planned.topology, launch.local, launch.notify)
        self.actor_group = ActorGroup(name, planned, self._reservation, launch)
        self._watcher: NodeWatcher | None = None
        self._keeper: LeadKeeper | None = None
        self._workers: dict[str, WorkerKeeper] = {}

    @property
    def ended(self) -> bool:
        """Whether it was ended in order (`Attachment.end`)."""
        return self._reservation is not None and self._reservation.ended

    def reserve(self, left: Callable[[], float]) -> None:
        """Reserve all that it takes. Raises as `Reservation.reserve`."""
        assert self._reservation is not None
        self._reservation.reserve(left)

    def start(self, left: Callable[[], float]) -> dict[str, Any]:
        """Start its actors; the lead's effective plan. Raises as `ActorGroup.start`."""
        plan = self.actor_group.start(left)
        self._keeper = LeadKeeper(self.actor_group.name, self.actor_group.lead, self._launch.notify, self._label)
        if self.actor_group.directory is not None:
            workers = [role_of(planned) for planned in self.planned.topology.having("ndp")]
            grows = bool(workers) and self._launch.config.cluster.ndp_workers == "per-node"
            threads = self._launch.config.ndp_threads if grows else None
            self._watcher = NodeWatcher(self.actor_group, threads, workers, self._launch.notify)
        return plan

    def look(self) -> None:
        """Start a dead or hanging lead again, and workers whose files verify again. Raises as `LeadKeeper.look`."""
        assert self._keeper is not None
        for role in list(self.actor_group.actors):
            if role.partition("/")[0] in ("store", "shard", "ndp"):
                if role not in self._workers:
                    self._workers[role] = WorkerKeeper(role, self.actor_group, self._launch.notify)
                self._workers[role].look()
        self._keeper.look()

    def stop_watching(self) -> None:
        """End the thread that looks after its nodes. Bounded, idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def close(self) -> None:
        """End its actors and free what it reserved. Idempotent; never raises."""
        reservation, self._reservation = self._reservation, None
        self.actor_group.close()
        if reservation is not None:
            reservation.release()
