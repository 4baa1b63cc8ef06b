"""A lead in this process, its NDP workers and its other shards in children, without Ray: for benchmarks and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..actors.combinations import check_combination
from ..actors.gpu_worker import GpuWorker
from ..actors.settings import EngineSettings
from ..actors.store.artifacts import map_shape
from ..actors.store.files import ExpertStore
from .topology.inputs import facts_of_store
from .worker_process import Role, WorkerProcess


class LocalWorker(GpuWorker):
    """A `GpuWorker` that starts and ends the processes that its settings ask for.

    With CUDA, shard i takes GPU i of this machine.

    Args:
        settings: what to run.
        store: folder of the expert store.
        ndp_workers: how many, where the policy uses them.

    Attributes:
        store: the folder.
        ndp_processes: those of the NDP workers; empty if the policy uses none.
        shard_processes: those of the shards 1..G-1.
        matcher_process: that of the matcher; None if the policy uses none.
    """

    def __init__(self, settings: EngineSettings, store: Path, ndp_workers: int = 1) -> None:
        self.store = store
        view = ExpertStore(str(store), verify="stamp").describe()
        near_data = range(ndp_workers if settings.policy.uses_ndp else 0)
        self.ndp_processes = [WorkerProcess(Role.ndp(settings.ndp, i), store) for i in near_data]
        self.shard_processes = [WorkerProcess(Role.shard(settings, i), store) for i in range(1, settings.shards.count)]
        self.matcher_process: WorkerProcess | None = None
        if (maps := settings.policy.maps) is not None:
            top_k = facts_of_store(Path(store), Path(store)).top_k
            role = Role.matcher(settings.matcher, maps, map_shape(view.manifest), top_k)
            self.matcher_process = WorkerProcess(role)
        super().__init__(
            settings,
            view,
            [process.link for process in self.ndp_processes],
            [process.link for process in self.shard_processes],
            matcher=None if self.matcher_process is None else self.matcher_process.link,
        )

    def start(self) -> dict[str, Any]:
        """Start the processes, side by side, then as `GpuWorker.start`."""
        check_combination(self.settings)
        try:
            for process in self._children:
                process.begin()
            for process in self._children:
                process.wait_until_ready()
        except BaseException:
            self.close()
            raise
        return super().start()

    def close(self) -> None:
        super().close()
        for process in self._children:
            process.ask_to_end()
        for process in self._children:
            process.close()

    @property
    def _children(self) -> list[WorkerProcess]:
        matcher = [] if self.matcher_process is None else [self.matcher_process]
        return [*self.ndp_processes, *self.shard_processes, *matcher]
