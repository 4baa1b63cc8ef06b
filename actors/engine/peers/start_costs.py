"""The start costs of a planned placement, measured on the empty cache in a fraction of a second.

The planner corrects them by what it sees (`policies.auto.Auto.saw`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...core import _core
from ...policies.auto import Costs, sharing

if TYPE_CHECKING:  # torch
    from ..cache.cache import ExpertCache
    from ..cache.device import Activations
    from ..calls import RemoteExperts
    from .remote import NdpPool

PROBED = 4  # experts that are copied or run together
_REPEATS, _ROWS = 5, 16  # messages of each kind; rows of the longer ones
_ROUNDS, _FALLS = 8, 0.8  # of the whole at most; the next one while a message fell to this share
_USED = 16  # experts of the first layer that are used
_MOST_BUSY = 5.0  # a link takes at most 0.8 of the host's memory bandwidth
_MOST_BESIDE = 4.0  # an expert here beside near-data work against one alone
_TRIPS = 16  # messages to each worker, where there are several
_HEALTH_S, _HELD = 2.0, 0.75  # wait for a worker's report; share of its memory for experts
_LOST_S = 1.0  # put for a message to a worker that does not answer
_BUSY = 1.25  # near-data seconds while the link copies against idle ones, where they cannot be measured


def probe_costs(
    cache: ExpertCache, pool: NdpPool | None, gpu_s: tuple[float, float], here: Callable[[], float],
    activations: Activations | None, top_k: int,
) -> Costs:  # fmt: skip
    """Measure the start costs on an empty cache, in well under a second for experts of a few MB, and share the experts
    out among the NDP workers by what it costs to reach them.

    Copies: of `PROBED` experts or as many as there are slots. Near data, of the worker that is reached soonest: round
    trips of one expert, of several, of one with `_ROWS` rows, and of several while the link copies, which takes memory
    bandwidth and cores. Experts here while the worker computes, which takes a core that this process may need.

    Args:
        gpu_s: of an expert's first row on this device, beside others, and of each further one.
        here: runs a few experts of one row on this device, and gives its seconds.
        activations: carry rows to peers; None: there are none.
    """
    count = max(1, min(PROBED, cache.residency.slots))
    first_s, further_s = max(gpu_s[0], 1e-9), max(gpu_s[1], 1e-9)
    reach = None if pool is None or activations is None else _Reach(cache, activations, pool.bytes, top_k)
    peer = None if pool is None or reach is None else reach.soonest(pool.members)
    best: Costs | None = None
    for _ in range(_ROUNDS):  # processes that have just begun are slow
        copy_s = min(_copying(cache, count, lambda: None) / count for _ in range(_REPEATS))
        near = None if peer is None or activations is None else _near_seconds(cache, peer, activations, copy_s, here)
        near_s, busy_s, free_rows, message_s, beside = near or (first_s, first_s * _BUSY, 1.0, 1e-4, 1.0)
        dense_s = top_k * first_s  # until layers have run
        found = Costs(copy_s, first_s, further_s, near_s, busy_s, free_rows, message_s, dense_s, beside)
        falls = best is None or message_s < _FALLS * best.message_s
        best = found if best is None else Costs(*map(min, found, best))
        if near is None or not falls:
            break
    assert best is not None
    if pool is None or reach is None:
        return best
    reach.costs = best
    pool.share_by(reach)
    return best._replace(message_s=max(best.message_s, reach.slowest_s))


class _Reach:
    """What it takes to reach each NDP worker, measured once; as `remote.Sharers`, who owns experts for it.

    Attributes:
        costs: of one worker. slowest_s: of a message to those that own experts.
    """

    def __init__(self, cache: ExpertCache, activations: Activations, nbytes: int, top_k: int) -> None:
        self.costs: Costs | None = None
        self.slowest_s = 0.0
        self._cache, self._activations, self._nbytes, self._top_k = cache, activations, nbytes, top_k
        # of a worker on a connection: its number, seconds of a message, and bytes that hold experts
        self._known: dict[str, tuple[int, float, float]] = {}

    def soonest(self, members: Sequence[RemoteExperts]) -> RemoteExperts | None:
        """The worker that a message takes least to; None: there is none."""
        if len(members) < 2:
            return next(iter(members), None)
        return min(members, key=lambda peer: self._reached(peer)[0])

    def __call__(self, members: Sequence[RemoteExperts]) -> Sequence[int]:
        if len(members) < 2:  # nothing to choose, and `probe_costs` has measured it
            return range(len(members))
        messages_s, memory = zip(*map(self._reached, members), strict=True)
        layers = len(self._cache.stats.layers)
        experts, slots = len(self._cache.uses) // layers, self._cache.residency.slots // layers
        assert self.costs is not None
        owners = sharing(
            self.costs, messages_s, memory, self._nbytes, layers, experts, self._top_k, min(max(1, slots), experts)
        )
        self.slowest_s = max((messages_s[i] for i in owners if messages_s[i] < _LOST_S), default=0.0)
        return owners

    def _reached(self, peer: RemoteExperts) -> tuple[float, float]:
        """Seconds of a message to a worker, and bytes that hold experts there, once for each connection."""
        number, message_s, held = self._known.get(peer.name, (-1, 0.0, 0.0))
        if number == peer.connections:
            return message_s, held
        connections, held = peer.connections, _HELD * float(peer.account(_HEALTH_S).get("memory", 0))
        try:
            trips = [
                _round_trip(peer, self._activations, self._cache, np.zeros((1, 1), np.int64), lambda: None)
                for _ in range(_TRIPS)
            ]
        except _NoAnswer:
            return _LOST_S, 0.0
        message_s = max(min(total_s - kernel_s for total_s, kernel_s in trips), 1e-7)
        self._known[peer.name] = connections, message_s, held
        return message_s, held


def _copying(cache: ExpertCache, count: int, meanwhile: Callable[[], Any]) -> float:
    """Seconds until `count` experts have been copied, after `meanwhile` began with them; the cache is empty then."""
    start_s = time.perf_counter()
    cache.prefetch(range(count), source="probe")
    meanwhile()
    cache.core.wait_all()
    taken_s = time.perf_counter() - start_s
    cache.flush()
    return taken_s


def _near_seconds(
    cache: ExpertCache, peer: RemoteExperts, activations: Activations, copy_s: float, here: Callable[[], float]
) -> tuple[float, float, float, float, float] | None:
    """Seconds of an expert near data with an idle link and with a busy one, free rows, seconds of a message, and by how
    much an expert here takes longer while the worker computes; None: the worker did not answer. The least of several
    trials, since other work on the machine only adds.
    """
    experts = len(cache.uses) // len(cache.stats.layers)
    several, used = max(2, min(PROBED, experts)), min(_USED, experts)
    turn = iter(range(1 << 30))

    def trip(count: int, rows: int, meanwhile: Callable[[], Any] = lambda: None) -> tuple[float, float]:
        ids = (np.arange(count) + next(turn) * several) % used  # other weights than the last message's
        return _round_trip(peer, activations, cache, np.tile(np.sort(ids), (rows, 1)), meanwhile)

    def least(count: int, rows: int) -> tuple[float, float]:
        total_s, kernel_s = zip(*[trip(count, rows) for _ in range(_REPEATS)], strict=True)
        return min(total_s), min(kernel_s)

    try:
        for _ in range(-(-used // several) + 1):
            trip(several, 1)  # pages in
        (one_s, one_kernel_s), (_, several_s), (_, rows_s) = least(1, 1), least(several, 1), least(1, _ROWS)
        busy_s = list[float]()
        copies = max(1, min(cache.residency.slots, int(one_s / max(copy_s, 1e-9)) + several))
        for _ in range(_REPEATS):
            _copying(cache, copies, lambda: busy_s.append(trip(several, 1)[1]))
        alone_s, beside_s = min(here() for _ in range(_REPEATS)), list[float]()
        for _ in range(_REPEATS):  # the longest message: it outlasts what runs here
            trip(used, _ROWS, lambda: beside_s.append(here()))
    except _NoAnswer:
        return None
    near_s = max(several_s / several, 1e-7)
    slower_s = min(max(min(busy_s) / several, near_s), _MOST_BUSY * near_s)
    free_rows = min(float(_ROWS), max(1.0, _ROWS * near_s / max(rows_s, 1e-9)))
    beside = min(max(min(beside_s) / max(alone_s, 1e-9), 1.0), _MOST_BESIDE)
    return near_s, slower_s, free_rows, max(one_s - one_kernel_s, 1e-7), beside


class _NoAnswer(Exception):
    pass


def _round_trip(
    peer: RemoteExperts, activations: Activations, cache: ExpertCache, ids: NDArray[np.int64],
    meanwhile: Callable[[], Any],
) -> tuple[float, float]:  # fmt: skip
    """Seconds of one message with rows of zeros for experts of the first layer and its answer, and of its kernels;
    `meanwhile` runs once the message has left."""
    import torch

    hidden = torch.zeros((len(ids), cache.pool.hidden), dtype=cache.pool.dtype, device=cache.pool.device)
    routing = _core.Routing(0, len(cache.uses) // len(cache.stats.layers), ids)
    start_s = time.perf_counter()
    outgoing = activations.begin(hidden)
    keys = list(routing.experts)
    call = peer.send(routing, keys, [0] * len(keys), outgoing, np.ones(ids.shape, np.float32), True)
    meanwhile()
    answer = call.result()
    if answer is None:
        raise _NoAnswer
    return time.perf_counter() - start_s, answer.measured_s
