"""One replica of a deployment: its reservation, its actors, and what keeps its lead and its NDP workers alive.

A replica is a whole runtime: lead, shards, NDP workers and matcher of its own, with a budget of its own. Replicas
share the pages of the mapped store, and nothing else, so that nothing which ends one can end another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..actors.settings import EngineSettings
from .actor_group import ActorGroup, NodeWatcher
from .config import RunConfig
from .placement import Placement, role_of
from .supervision import LeadKeeper, WorkerKeeper
from .topology.estimate import PlanResult


class Replica:
    """What runs of one plan.

    Args:
        name: under which its actors are found (`placement.replica_id`).
        label: of its lead, for people.
        planned: what runs where.
        config, settings, store_path, notify, step: as of `Deployment`.
        local: whether Ray was started for the deployment.
        worker_class, store_class: as of `Deployment`.
        scratch: temporary folder of the deployment on this machine; None: none.
    """

    def __init__(
        self, name: str, label: str, planned: PlanResult, config: RunConfig, settings: EngineSettings, store_path: str,
        *, local: bool, worker_class: type | None, store_class: type | None, scratch: Path | None,
        notify: Callable[[str], None], step: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.planned, self._label, self._config, self._notify = planned, label, config, notify
        self._placement: Placement | None = Placement(name, planned.topology, local, notify)
        self.group = ActorGroup(
            name, planned.topology, self._placement, settings, store_path, local, worker_class, store_class,
            top_k=planned.facts.top_k, scratch=scratch, tls=config.cluster.tls, step=step,
        )  # fmt: skip
        self._watcher: NodeWatcher | None = None
        self._keeper: LeadKeeper | None = None
        self._workers: dict[str, WorkerKeeper] = {}

    @property
    def ended(self) -> bool:
        """Whether it was ended in order (`Attachment.end`)."""
        return self._placement is not None and self._placement.ended

    def reserve(self, left: Callable[[], float]) -> None:
        """Reserve all that it takes. Raises as `Placement.reserve`."""
        assert self._placement is not None
        self._placement.reserve(left)

    def start(self, left: Callable[[], float]) -> dict[str, Any]:
        """Start its actors; the lead's effective plan. Raises as `ActorGroup.start`."""
        plan = self.group.start(left)
        self._keeper = LeadKeeper(self.group.name, self.group.lead, self._notify, self._label)
        if self.group.directory is not None:
            workers = [role_of(planned) for planned in self.planned.topology.having("ndp")]
            grows = bool(workers) and self._config.cluster.ndp_workers == "per-node"
            threads = self._config.ndp_threads if grows else None
            self._watcher = NodeWatcher(self.group, threads, workers, self._notify)
        return plan

    def look(self) -> None:
        """Start a dead or hanging lead again, and workers whose files verify again. Raises as `LeadKeeper.look`."""
        assert self._keeper is not None
        for role in list(self.group.actors):
            if role.partition("/")[0] in ("store", "shard", "ndp"):
                if role not in self._workers:
                    self._workers[role] = WorkerKeeper(role, self.group, self._notify)
                self._workers[role].look()
        self._keeper.look()

    def stop_watching(self) -> None:
        """End the thread that looks after its nodes. Bounded, idempotent."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close()

    def close(self) -> None:
        """End its actors and free what it reserved. Idempotent; never raises."""
        placement, self._placement = self._placement, None
        self.group.close()
        if placement is not None:
            placement.release()
