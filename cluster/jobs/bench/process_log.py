"""What the processes of a deployment did while it was measured, second by second, and what was lost and when.

Rises of counters; copies and waits one by one are in the timeline of a lead (`actors.engine.stats.Timeline`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....actors.engine.stats import needed_shares

if TYPE_CHECKING:
    from ...attach import Sample, SampleRates

_WAITS = ("blocked_io_s", "ndp_wait_s", "shard_wait_s")  # of a lead's steps; the rest is the host's


class ProcessLog:
    """Asks all processes of a deployment at each look; what does not answer is named, and the next look goes on.

    Args:
        deployment: its id in the Ray of this process; None: nobody is asked.

    Attributes:
        begun_s: when it began, by `time.perf_counter`.
    """

    def __init__(self, deployment: str | None) -> None:
        self._deployment = deployment
        self._workers, self._peers, self._lost = (list[dict[str, Any]]() for _ in range(3))
        self._before: dict[str, Sample] = {}
        self._alive: dict[str, str] = {}  # address of each node by its id
        self._nodes: list[dict[str, Any]] = []
        if deployment is not None:
            from .nodes import living_nodes, node_facts  # Ray

            self._nodes, self._alive = node_facts(), living_nodes()
        self.begun_s = time.perf_counter()

    def look(self) -> None:
        """Ask once; to be called each second. Takes two seconds at most where one does not answer."""
        if self._deployment is None:
            return
        from ...attach import samples
        from .nodes import living_nodes

        found = {sample.worker: sample for sample in samples(self._deployment)}
        t_s = time.perf_counter() - self.begun_s
        first = not self._before
        for name, sample in found.items():
            before = self._before.get(name)
            if before is None:
                if not first:
                    self._changed(t_s, "joined", sample)
            elif (before.restarts, before.problem) != (sample.restarts, sample.problem):
                self._changed(t_s, sample.problem or f"serves; restarts: {sample.restarts}", sample)
            rates = None if before is None else sample.since(before)
            if rates is not None:
                self._add(t_s, sample, rates)
        for name in self._before.keys() - found.keys():
            self._changed(t_s, "ended", self._before[name])
        self._before = found
        alive = living_nodes()
        for node, address in (self._alive | alive).items():
            if (node in alive) != (node in self._alive):
                what = "node joined" if node in alive else "node lost"
                self._lost.append({"t_s": t_s, "worker": "", "node": address, "what": what})
        self._alive = alive

    def note(self, name: str, what: str) -> None:
        """Something that happened now to what has this name."""
        t_s = time.perf_counter() - self.begun_s
        self._lost.append({"t_s": t_s, "worker": name, "node": "", "what": what})

    def as_dict(self) -> dict[str, Any]:
        """For the JSON object.

        nodes: hardware, versions and resources of each. workers: by process and second; `rates` has each counter a
        second, over the last `over_s` (of those in seconds the share of the time). peers: what went between two
        processes. lost: what died, ended, fell silent, came back or joined, and when.
        """
        workers, peers = (_without_zeros(rows) for rows in (self._workers, self._peers))
        return {"nodes": self._nodes, "workers": workers, "peers": peers, "lost": self._lost}

    def _changed(self, t_s: float, what: str, sample: Sample) -> None:
        self._lost.append({"t_s": t_s, "worker": sample.worker, "node": sample.host or "", "what": what})

    def _add(self, t_s: float, sample: Sample, rates: SampleRates) -> None:
        when = {"t_s": t_s, "over_s": rates.over_s, "worker": sample.worker}
        row = when | {"kind": sample.kind, "node": sample.host or "", "rss_mib": sample.rss_bytes / 2**20}
        row |= {"cpu": rates.cpu, "rates": rates.counters}
        if "step_s" in rates.counters:
            row["host"] = max(0.0, rates.counters["step_s"] - sum(rates.counters.get(name, 0.0) for name in _WAITS))
        if (shares := needed_shares(rates.counters)) is not None:
            row["shares"] = shares
        self._workers.append(row)
        for peer, traffic in rates.peers.items():
            self._peers.append({**when, "peer": peer, "rates": traffic})


def _without_zeros(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without counters that were never other than zero in a process, or between two."""
    moved: dict[tuple[str, str], set[str]] = {}
    for row in rows:
        names = {name for name, value in row["rates"].items() if value}
        moved.setdefault((row["worker"], row.get("peer", "")), set()).update(names)
    found = []
    for row in rows:
        names = moved[row["worker"], row.get("peer", "")]
        found.append({**row, "rates": {name: value for name, value in row["rates"].items() if name in names}})
    return found
