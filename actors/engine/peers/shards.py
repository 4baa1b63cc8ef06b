"""Expert parallelism as the lead sees it: who owns which expert, what the owners are asked, and what their caches hold.

Every expert belongs to one GPU by a rule that all processes know (`policies.sharding`). A layer's experts go to their
owners first, then the lead loads and computes its own, then it joins the sums. Hidden states and sums cross
processes through host memory (the channel's rings on one host, gRPC between hosts), on CUDA too, there pinned on both
sides (`cache.device.Activations`): a decode batch is a few rows, and a copy of them costs less than mapping device
memory of another process.

    shard: occupied slots -> ShardResidency.encode -> ExpertResult.resident -> RemoteExperts.resident -> decode: lead

A bit for each expert of the model, so that one answer tells of all layers: slots serve all of them, and the load of one
layer evicts experts of others. At 6144 experts that is 770 bytes beside rows of several kilobytes. What a shard is
asked to prefetch after its last answer counts as on its way there (`PeerCaches`). Between its answers only such
prefetches change its cache, so the view is exact but for what those evicted, what the shard refused, and copies that
failed; where every forward has a batch for each shard, no view is older than a forward. An expert that the view has and
the shard lacks is loaded by the shard; one that the shard has and the view lacks is replaced without need. Neither
makes a result wrong.
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
from ...policies.residency import Residency
from ...policies.routing import RerouteView
from ...policies.sharding import shard_of
from ...settings import ShardSettings
from ..host_view import Routing
from ..stats import EngineStats
from .remote import RemoteExperts

_FLAGS = 2


@dataclass(frozen=True, eq=False)
class ShardResidency:
    """What one shard's cache holds at one moment, as it says with each answer.

    Attributes:
        here: [keys], which experts are resident or on their way.
        vacant: some slot holds nothing.
        resting: what it is asked to prefetch is not loaded now.
    """

    here: NDArray[np.bool_]
    vacant: bool
    resting: bool

    @staticmethod
    def encode(residency: Residency, resting: bool) -> NDArray[np.uint8]:
        """A cache of whole experts, packed: its experts' bits, then vacant, then resting."""
        bits = np.empty(residency.keys + _FLAGS, np.bool_)
        bits[:-_FLAGS] = residency.occupied()
        bits[-_FLAGS:] = residency.free_slots > 0, resting
        return np.packbits(bits)

    @staticmethod
    def decode(packed: NDArray[np.uint8], keys: int) -> ShardResidency | None:
        """What `encode` packed; None if these are not the bits of so many experts."""
        if packed.size != (keys + _FLAGS + 7) // 8:
            return None
        bits = np.unpackbits(packed, count=keys + _FLAGS).view(np.bool_)
        return ShardResidency(bits[:keys], bool(bits[keys]), bool(bits[keys + 1]))


_START_S = 30.0  # seconds to reach a shard, which is started before the lead
_REPORT_S = 5.0
_PRELOAD_S = 600.0  # for a shard's copies, after all those of a large model


def owners(layers: int, experts: int, settings: ShardSettings) -> list[int]:
    """The shard of each key [L * E]."""
    count, rule = settings.count, settings.ownership
    return [shard_of(layer, e, experts, count, rule) for layer in range(layers) for e in range(experts)]


def terms(layers: int, experts: int, hidden: int, settings: ShardSettings, index: int) -> dict[str, str | int]:
    """What lead and shard must agree on; the shard reports it, the lead compares."""
    return {
        "index": index, "count": settings.count, "ownership": settings.ownership,
        "moe_layers": layers, "experts_per_layer": experts, "hidden": hidden,
    }  # fmt: skip


def account(stats: EngineStats) -> dict[str, str | int | float | bool]:
    """Counters of one GPU as flat totals, small enough for a health report."""
    record = stats.as_dict()
    return {name: value for name, value in record.items() if isinstance(value, str | int | float)}


class Shards:
    """The other shards, 1..G-1, and the lead's calls to them.

    Args:
        settings: how many, by which rule, over which transport.
        links: of the shards 1..G-1, in this order.
        layers, experts, hidden: MoE layers, experts of a layer, width of a row.
        stats: told of losses.
        supply: where answers are put, see `proto.options.Supply`.

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
        self._placed: dict[str, list[int]] = {}  # what each is to hold, where the placement keeps a hot set
        self._told: dict[str, int | None] = {}  # the number of the connection over which each was told so
        self._iteration, self._layer = 0, -1

    def start(self) -> None:
        """Connect to all.

        Raises:
            RuntimeFailure: one was not reached.
        """
        for peer in self.peers.values():
            peer.begin()
        for peer in self.peers.values():
            peer.wait_for_the_first(_START_S)

    def refresh(self) -> None:
        """A forward begins: a shard that is new on its connection holds nothing yet of what it is to hold."""
        fresh = [name for name in self._placed if self._told[name] != self.peers[name].connections]
        if fresh:
            self._tell([name for name in fresh if self.peers[name].available], keep_others=True, preload=False)()

    @property
    def iteration(self) -> int:
        """Number of the forward under way, or of the one that begins."""
        return self._iteration

    def begin_forward(self) -> None:
        """A forward begins, before its first layer: what is sent until then is for it."""
        self.refresh()
        if self._layer >= 0:
            self._iteration, self._layer = self._iteration + 1, -1

    def routed(self, layer: int, routing: Routing) -> None:
        """The forward is at this layer; layers rise within a forward, so a lower one begins the next iteration."""
        if layer <= self._layer:
            self._iteration += 1
        self._layer = layer

    def ran(self, layer: int) -> None:
        """As a `layer.Watcher`; the shards learn nothing of it."""

    def owner_of(self, key: int) -> int:
        """The shard that owns an expert, 0 for the lead, there or not."""
        return self._owners[key]

    def peer_of(self, key: int) -> tuple[str, RemoteExperts] | None:
        """The shard that computes an expert; None: the lead, as its owner or because its owner is lost."""
        owner = self._owner[key]
        return owner if owner is not None and owner[1].available else None

    def prefetch(self, layer: int, keys: Sequence[int]) -> None:
        """Tell the owners to load experts ahead, most wanted first, decided while `layer` runs; never waits."""
        by_peer: dict[str, tuple[RemoteExperts, list[int]]] = {}
        for key in keys:
            found = self.peer_of(key)
            if found is not None:
                by_peer.setdefault(found[0], (found[1], []))[1].append(key)
        for peer, wanted in by_peer.values():
            priorities = np.arange(len(wanted), 0, -1, dtype=np.float32)
            if peer.post(PrefetchCommand(self._iteration, layer, np.array(wanted, np.int32), priorities)):
                peer.asked.update(wanted)

    def relay(self, command: PrefetchCommand, load: bool) -> PrefetchCommand:
        """Pass a matcher's command on to the owners of its experts; what the lead is to do stays and is returned.

        Args:
            load: False: the owners learn how probable their experts are and load none; all of the command stays.
        """
        owners = [self.peer_of(key) for key in command.keys.tolist()]
        hint = np.arange(len(owners)) >= (len(owners) - command.hints if load else 0)
        for name, peer in self.peers.items():
            chosen = np.array([owner is not None and owner[0] == name for owner in owners], np.bool_)
            if chosen.any() and peer.post(_part(command, chosen, hint)):
                peer.asked.update(command.keys[chosen & ~hint].tolist())
        return _part(command, np.array([owner is None for owner in owners], np.bool_), hint) if load else command

    def place(self, keys: Sequence[int], *, keep_others: bool) -> Callable[[], bool]:
        """Have each shard hold its experts of these until it is told others; loads that are no prefetch.

        A shard that is lost is told when it is back (`refresh`).

        Args:
            keys: of all shards, most urgent first; the lead's are its own matter.
            keep_others: let other experts stay where there is room, for a prefill that is using them.

        Returns:
            What waits until all have begun, before the next batch is sent.
        """
        self._placed = self._by_owner(keys)
        return self._tell(list(self._placed), keep_others=keep_others, preload=False)

    def preload(self, keys: Sequence[int]) -> Callable[[], None]:
        """As `place`, before the first request; what it returns waits until the experts are there.

        It raises RuntimeFailure if a shard did not load them.
        """
        self._placed = self._by_owner(keys)
        asked = self._tell(list(self._placed), keep_others=False, preload=True)

        def loaded() -> None:
            if not asked():
                raise RuntimeFailure("a shard did not load its hot experts", "see its log, or use fewer shards")

        return loaded

    def _by_owner(self, keys: Sequence[int]) -> dict[str, list[int]]:
        """The keys of each shard, in this order."""
        out: dict[str, list[int]] = {name: [] for name in self.peers}
        for key in keys:
            owner = self._owner[key]
            if owner is not None:
                out[owner[0]].append(key)
        return out

    def _tell(self, names: Sequence[str], *, keep_others: bool, preload: bool) -> Callable[[], bool]:
        """Send what `_placed` says; what it returns waits, and says whether all of them did it."""
        answers = []
        for name in names:
            peer = self.peers[name]
            command = PlacementCommand(np.array(self._placed[name], np.int32), keep_others, preload)
            connection = peer.connections  # read first: one that is newer is told again
            answers.append(peer.ask(command, _PRELOAD_S if preload else None))
            self._told[name] = connection if answers[-1] is not None else None

        def done() -> bool:
            each = [answer is not None and answer() for answer in answers]  # all are waited for
            return all(each)

        return done

    def reports(self) -> list[dict[str, Any]]:
        """Each shard's account of itself and its counters; of one that is lost or late only its name and that."""
        return [{"shard": name} | peer.account(_REPORT_S) for name, peer in self.peers.items()]

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        for peer in self.peers.values():
            peer.close()


def _part(command: PrefetchCommand, chosen: NDArray[np.bool_], hint: NDArray[np.bool_]) -> PrefetchCommand:
    """The chosen keys of a command; hints come last and stay so."""
    keys, priorities = command.keys[chosen], command.priorities[chosen]
    return replace(command, keys=keys, priorities=priorities, hints=int((chosen & hint).sum()))


Mask = NDArray[np.bool_]


class PeerCache:
    """One shard's."""

    def __init__(self, peer: RemoteExperts, keys: int) -> None:
        self.peer, self._keys = peer, keys
        self._connection = -1
        self._packed: NDArray[np.uint8] | None = None
        self._known: ShardResidency | None = None
        self.filling = True  # since it was connected there has always been a vacant slot

    def look(self) -> ShardResidency | None:
        """As it is known now; None: it has said nothing since it was connected."""
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
    """Those of all shards but the lead.

    Args:
        shards: the peers. layers, experts: L and E.
    """

    def __init__(self, shards: Shards, layers: int, experts: int) -> None:
        owner = np.array([shards.owner_of(key) for key in range(layers * experts)], np.int64)
        self._owner, self._experts = owner, experts
        self._caches = [PeerCache(peer, len(owner)) for peer in shards.peers.values()]

    def join(self, layer: int, own: RerouteView) -> RerouteView:
        """The lead's own view of a layer, with what the others hold of it."""
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
            held = cache.look()
            available[theirs] = False if held is None else held.here[keys][theirs]
            filling[shard] = cache.filling
            if held is None or not held.resting:
                coming = [key - base for key in cache.peer.asked if base <= key < base + self._experts]
                available[coming] = True
        return RerouteView(available, own.free_slots, own.top_k, own.vacant, shard_of, filling, own.emptied)
