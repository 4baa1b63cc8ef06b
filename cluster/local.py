"""A lead in this process and its NDP worker in a child, without Ray: for benchmarks, evaluation and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..actors.expert_store import ExpertStore
from ..actors.gpu_worker import GpuWorker
from ..actors.settings import EngineSettings
from .ndp_process import NdpProcess


class LocalWorker(GpuWorker):
    """A `GpuWorker` that starts and ends the NDP worker that its policy uses.

    Args:
        settings: what to run.
        store: folder of the expert store.

    Attributes:
        ndp: the NDP worker's process; None where the policy uses none.
    """

    def __init__(self, settings: EngineSettings, store: Path) -> None:
        self.ndp = NdpProcess(settings.ndp, store) if settings.policy.uses_ndp else None
        link = self.ndp.link if self.ndp is not None else None
        super().__init__(settings, ExpertStore(str(store), verify="stamp").describe(), link)

    def start(self) -> dict[str, Any]:
        """Start the NDP worker, then as `GpuWorker.start`."""
        if self.ndp is not None:
            self.ndp.restart()
        return super().start()

    def close(self) -> None:
        super().close()
        if self.ndp is not None:
            self.ndp.close()
