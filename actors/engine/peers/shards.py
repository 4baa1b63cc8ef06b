"""Expert parallelism on the lead: the owner of each expert, commands to the owners, and the residency of their caches.

Every expert belongs to one GPU by a rule that all processes know (`policies.sharding`). A layer's experts go to their
owners first, then the lead computes its own, then it adds the sums. Hidden states and sums cross processes through host
memory (`cache.device.Activations`): rings on one host, gRPC between hosts. A decode batch is a few rows, and its copy
costs less than mapping device memory of another process.

    shard: occupied slots -> ShardResidency.encode -> ExpertResult.resident -> RemoteExperts.resident -> decode: lead

Each answer carries the residency of all layers, one bit an expert (770 bytes at 6144 experts), since a load for one
layer evicts experts of others. Prefetches that a shard was asked for after its last answer count as loading
(`PeerCaches`). The view is exact except for evictions by those prefetches, refused prefetches and failed copies; an
error costs a load or a needless replacement, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError, RuntimeFailure
from ....proto.messages import PlacementCommand, PrefetchCommand
from ....proto.options import Supply
from ....proto.peers import PeerLink, shard_name
from ...core import _core
from ...policies import sharding
from ...policies.routing import RerouteView
from ...settings import ShardSettings
from ..cache.residency import Residency
from ..calls import RemoteExperts
from ..stats import EngineStats

_FLAGS = 2


@dataclass(frozen=True, eq=False)
class ShardResidency:
    """Residency of one shard's cache at one answer.

    here: [keys], experts that are resident or loading. vacant: some slot is free. resting: prefetch is off.
    """

    here: NDArray[np.bool_]
    vacant: bool
    resting: bool

    @staticmethod
    def encode(residency: Residency, resting: bool) -> NDArray[np.uint8]:
        """The bits of all experts, then vacant, then resting; packed. For a cache of whole experts."""
        bits = np.empty(residency.keys + _FLAGS, np.bool_)
        bits[:-_FLAGS] = residency.occupied()
        bits[-_FLAGS:] = residency.free_slots > 0, resting
        return np.packbits(bits)

    @staticmethod
    def decode(packed: NDArray[np.uint8], keys: int) -> ShardResidency | None:
        """The inverse of `encode`; None: the bits are not of `keys` experts."""
        if packed.size != (keys + _FLAGS + 7) // 8:
            return None
        bits = np.unpackbits(packed, count=keys + _FLAGS).view(np.bool_)
        return ShardResidency(bits[:keys], bool(bits[keys]), bool(bits[keys + 1]))


_START_S = 30.0  # seconds to reach a shard, which is started before the lead
_REPORT_S = 5.0
_PRELOAD_S = 600.0  # for a shard's copies of a large model


def owners(layers: int, experts: int, settings: ShardSettings) -> list[int]:
    """The shard of each key [L * E]."""
    return sharding.owners(layers, experts, settings.count, settings.ownership)


def terms(layers: int, experts: int, hidden: int, settings: ShardSettings, index: int) -> dict[str, str | int]:
    """Fields on which lead and shard must agree; the shard reports them, the lead compares."""
    return {
        "index": index, "count": settings.count, "ownership": settings.ownership,
        "moe_layers": layers, "experts_per_layer": experts, "hidden": hidden,
    }  # fmt: skip


def account(stats: EngineStats) -> dict[str, str | int | float | bool]:
    """Counters of one GPU as flat totals, small enough for a health report."""
    return {name: value for name, value in stats.as_dict().items() if isinstance(value, str | int | float)}


class Shards:
    """The other shards, 1..G-1, and the lead's calls to them.

    Args:
        links: of the shards 1..G-1, in this order.
        layers, experts, hidden: MoE layers, experts of a layer, width of a row.
        supply: memory for answers, see `proto.options.Supply`.

    Raises:
        ConfigError: links and settings disagree.
    """

    def __init__(
        self,
        settings: ShardSettings,
        links: Sequence[PeerLink],
        layers: int,
        experts: int,
        hidden: int,
        stats: EngineStats,
        supply: Supply | None = None,
    ) -> None:
        if len(links) != settings.count - 1:
            raise ConfigError(
                f"there are to be {settings.count} shards, but {len(links)} besides the lead can be reached",
                "start a ShardWorker for each, or lower the number of shards",
            )
        self.peers = {
            shard_name(i): RemoteExperts(
                "shard", f"shard {i}", link, settings, "", stats, terms(layers, experts, hidden, settings, i), supply
            )
            for i, link in enumerate(links, start=1)
        }
        by_index = [None, *self.peers.items()]
        self._owners = owners(layers, experts, settings)
        self._owner = [by_index[i] for i in self._owners]
        self.caches = PeerCaches(self, layers, experts)
        self._placed: dict[str, list[int]] = {}  # hot experts of each shard
        self._placed_on: dict[str, int | None] = {}  # connection on which each shard was sent its hot experts
        self._iteration, self._layer = 0, -1

    def start(self) -> None:
        """Connect to all shards. Raises RuntimeFailure: one was not reached."""
        for peer in self.peers.values():
            peer.begin()
        for peer in self.peers.values():
            peer.wait_for_the_first(_START_S)

    @property
    def iteration(self) -> int:
        """Number of the present forward."""
        return self._iteration

    def begin_forward(self) -> None:
        """A forward begins. A shard on a new connection is sent its hot experts again."""
        fresh = [name for name in self._placed if self._placed_on[name] != self.peers[name].connections]
        if fresh:
            self._send_placement([name for name in fresh if self.peers[name].available], keep_others=True)()
        if self._layer >= 0:
            self._iteration, self._layer = self._iteration + 1, -1

    def routed(self, layer: int, routing: _core.Routing) -> None:
        """The forward is at this layer. Layers rise within a forward: a lower one begins the next iteration."""
        if layer <= self._layer:
            self._iteration += 1
        self._layer = layer

    def ran(self, layer: int) -> None:
        """Part of `hooks.Watcher`; nothing to do."""

    def owner_of(self, key: int) -> int:
        """The shard that owns an expert, available or not; 0: the lead."""
        return self._owners[key]

    def peer_of(self, key: int) -> tuple[str, RemoteExperts] | None:
        """The shard that computes an expert; None: the lead, as the owner or because the owner is lost."""
        owner = self._owner[key]
        return owner if owner is not None and owner[1].available else None

    def holds(self, keys: Sequence[int]) -> list[bool]:
        """Whether each expert has a slot on the other shard that owns it, as far as is known here."""
        return self.caches.hold(keys)

    def prefetch(self, layer: int, keys: Sequence[int]) -> None:
        """Post prefetches to the owners, most wanted first, while `layer` runs; never waits."""
        by_peer: dict[str, tuple[RemoteExperts, list[int]]] = {}
        for key in keys:
            found = self.peer_of(key)
            if found is not None:
                by_peer.setdefault(found[0], (found[1], []))[1].append(key)
        for peer, wanted in by_peer.values():
            priorities = np.arange(len(wanted), 0, -1, dtype=np.float32)
            if peer.post(PrefetchCommand(self._iteration, layer, np.array(wanted, np.int32), priorities)):
                peer.asked.update(wanted)

    def relay(self, command: PrefetchCommand) -> PrefetchCommand:
        """Post a matcher's command to the owners of its experts; returns the lead's part."""
        owners = [self.peer_of(key) for key in command.keys.tolist()]
        hint = np.arange(len(owners)) >= len(owners) - command.hints
        for name, peer in self.peers.items():
            chosen = np.array([owner is not None and owner[0] == name for owner in owners], np.bool_)
            if chosen.any() and peer.post(_part(command, chosen, hint)):
                peer.asked.update(command.keys[chosen & ~hint].tolist())
        return _part(command, np.array([owner is None for owner in owners], np.bool_), hint)

    def place(self, keys: Sequence[int], *, keep_others: bool) -> Callable[[], bool]:
        """Make these the hot experts of the shards, which load them; a lost shard gets them on its next connection.

        Args:
            keys: of all GPUs, most urgent first; the lead's are skipped.
            keep_others: other experts stay where there is room, for a running prefill.

        Returns:
            Waits until all shards have queued the loads.
        """
        self._placed = self._by_owner(keys)
        return self._send_placement(list(self._placed), keep_others=keep_others)

    def preload(self, keys: Sequence[int]) -> Callable[[], None]:
        """As `place`, before the first request. The result waits for the loads; RuntimeFailure: a shard failed."""
        self._placed = self._by_owner(keys)
        done = self._send_placement(list(self._placed), keep_others=False, preload=True)

        def loaded() -> None:
            if not done():
                raise RuntimeFailure("a shard did not load its hot experts", "see its log, or use fewer shards")

        return loaded

    def _by_owner(self, keys: Sequence[int]) -> dict[str, list[int]]:
        out: dict[str, list[int]] = {name: [] for name in self.peers}
        for key in keys:
            owner = self._owner[key]
            if owner is not None:
                out[owner[0]].append(key)
        return out

    def _send_placement(self, names: Sequence[str], *, keep_others: bool, preload: bool = False) -> Callable[[], bool]:
        """Send `_placed` to these shards; the result waits and says whether all succeeded."""
        answers = []
        for name in names:
            peer = self.peers[name]
            command = PlacementCommand(np.array(self._placed[name], np.int32), keep_others, preload)
            connection = peer.connections  # read first: a newer connection gets the command again
            answers.append(peer.ask(command, _PRELOAD_S if preload else None))
            self._placed_on[name] = connection if answers[-1] is not None else None

        def done() -> bool:
            each = [answer is not None and answer() for answer in answers]  # wait for all
            return all(each)

        return done

    def reports(self) -> list[dict[str, Any]]:
        """The `RemoteExperts.account` of each shard."""
        return [{"shard": name} | peer.account(_REPORT_S) for name, peer in self.peers.items()]

    def close(self) -> None:
        """Close all connections. Safe to call twice."""
        for peer in self.peers.values():
            peer.close()


def _part(command: PrefetchCommand, chosen: NDArray[np.bool_], hint: NDArray[np.bool_]) -> PrefetchCommand:
    """The chosen keys of a command; hints stay last."""
    keys, priorities = command.keys[chosen], command.priorities[chosen]
    return replace(command, keys=keys, priorities=priorities, hints=int((chosen & hint).sum()))


class PeerCache:
    """The residency of one shard's cache."""

    def __init__(self, peer: RemoteExperts, keys: int) -> None:
        self.peer, self._keys = peer, keys
        self._connection = -1
        self._packed: NDArray[np.uint8] | None = None
        self._known: ShardResidency | None = None
        self.filling = True  # some slot has been vacant ever since the shard connected

    def look(self) -> ShardResidency | None:
        """The latest; None: no answer on this connection yet."""
        peer = self.peer
        if self._connection != peer.connections:
            self._connection, self.filling = peer.connections, True
        packed = peer.resident
        if packed is not self._packed:
            self._packed = packed
            self._known = None if packed is None else ShardResidency.decode(packed, self._keys)
        if self._known is not None and not self._known.vacant:
            self.filling = False
        return self._known


class PeerCaches:
    """The caches of all other shards. layers, experts: L and E."""

    def __init__(self, shards: Shards, layers: int, experts: int) -> None:
        owner = np.array([shards.owner_of(key) for key in range(layers * experts)], np.int64)
        self._owner, self._experts = owner, experts
        self._caches = [PeerCache(peer, len(owner)) for peer in shards.peers.values()]

    def hold(self, keys: Sequence[int]) -> list[bool]:
        """Whether the other shard that owns each expert holds it or was asked for it; False: the lead owns it."""
        caches, found = [(cache, cache.look()) for cache in self._caches], list[bool]()
        for key in keys:
            owner = int(self._owner[key])
            cache, known = caches[owner - 1]
            held = known is not None and bool(known.here[key])
            coming = key in cache.peer.asked and (known is None or not known.resting)
            found.append(owner > 0 and (held or coming))
        return found

    def join(self, layer: int, own: RerouteView) -> RerouteView:
        """The lead's own view of a layer, completed with the other shards' residency."""
        base = layer * self._experts
        keys = slice(base, base + self._experts)
        shard_of = self._owner[keys].copy()
        available = own.available.copy()
        filling = np.zeros(len(self._caches) + 1, np.bool_)
        for shard, cache in enumerate(self._caches, start=1):
            theirs = shard_of == shard
            if not cache.peer.available:
                shard_of[theirs] = 0  # the lead computes them, from its own slots
                continue
            known = cache.look()
            available[theirs] = False if known is None else known.here[keys][theirs]
            filling[shard] = cache.filling
            if known is None or not known.resting:
                available[[key - base for key in cache.peer.asked if base <= key < base + self._experts]] = True
        return RerouteView(available, own.free_slots, own.top_k, own.vacant, shard_of, filling, own.emptied)
