"""The matcher: stores the expert maps of past iterations and forecasts from similar ones.

    Context (embedding)                    -> begin: semantic search     -> PrefetchCommand for layers 0..d
    Context (probabilities of layer n - 1) -> trajectory search          -> PrefetchCommand for layer n + d
    Context (probabilities of the last)    -> the iteration is stored    -> done

The last layers, of which no search is left to depend, come in one context.

A context is a request whose answer is the command. The lead looks for answers at each layer without waiting, so it
needs no server whose thread would take the interpreter from the forward; the iteration and the layer in an answer tell
whether it is late. Commands for experts of other shards are posted to those, which drop late ones themselves.

A plain class without torch, which serves from construction on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, StoreError
from ..proto.messages import Context, HealthReport, HealthRequest, Message, PrefetchCommand
from ..proto.options import ServerOptions
from ..proto.peers import MATCHER, Directory, PeerLink, ReconnectingChannel, shard_name
from ..proto.private import own_folder
from ..proto.server import ChannelServer
from .policies.fmoe import ExpertMapPrefetch, Forecast, MapOptions
from .policies.fmoe.maps import ExpertMapStore
from .policies.sharding import shard_of
from .sample import ProcessSample, take_sample
from .settings import MatcherSettings, ShardSettings
from .store.artifacts import MapShape, load_maps, save_maps

_log = logging.getLogger(__name__)
_SPIN_S, _DOZE_S = 20e-6, 0.02  # a busy lead writes in every layer, so it need not wake this process


@dataclass(frozen=True)
class ShardLinks:
    """The links to the shards 1..G-1, and how they share the experts.

    Raises:
        ConfigError: there are not G - 1 links.
    """

    settings: ShardSettings
    links: Sequence[PeerLink]

    def __post_init__(self) -> None:
        if len(self.links) != self.settings.count - 1:
            raise ConfigError(
                f"there are {self.settings.count} shards and connections to {len(self.links)}",
                "give a connection to each shard but the lead",
            )


class Matcher:
    """Owns the store of expert maps and the search over it.

    It serves one lead: the newest iteration is the running one, and an unfinished one is dropped.

    Args:
        settings: capacity, how often to save.
        maps: the policy's distance and what to forecast.
        shape: the model of the maps.
        top_k: K, experts that its router picks for a token.
        directory: gives the host to listen on and takes the address.
        token: required of clients; None: only this machine may connect.
        snapshot: file that the store is saved to and loaded from, unless the settings name one. A damaged one is moved
            aside and reported in `health`. None: nothing is saved.
        shards: that load experts of their own; None: all commands go to the lead.

    Raises:
        StoreError: the file of `settings.warm` is damaged. ConfigError: top_k is out of range.
    """

    def __init__(
        self,
        settings: MatcherSettings,
        maps: MapOptions,
        shape: MapShape,
        top_k: int,
        directory: Directory,
        token: str | None = None,
        snapshot: str | None = None,
        shards: ShardLinks | None = None,
    ) -> None:
        if not 1 <= top_k <= shape.experts:
            raise ConfigError(f"top_k is {top_k}, a layer has {shape.experts} experts", "give the router's top_k")
        shards = ShardLinks(ShardSettings(), ()) if shards is None else shards
        sharding = shards.settings
        self._settings, self._shape = settings, shape
        width = min(shape.hidden, settings.width)
        self._maps = ExpertMapStore(shape.layers, shape.experts, width, maps.distance, settings.capacity)
        path = settings.keep if settings.keep is not None else snapshot
        self._snapshot = None if path is None else Path(path)
        self._origin, self._problem = "empty", ""
        self._load_maps()
        self._prefetch = ExpertMapPrefetch(
            self._maps, shape.hidden, top_k, maps.semantic, maps.dynamic, settings.learn
        )
        self._lock = threading.Lock()  # the last request of a lead's old connection may overlap its new connection
        self._iteration: int | None = None
        self._sequences: list[int] = []
        self._counts = dict.fromkeys(
            ("contexts", "commands", "iterations", "stored", "unknown_iterations", "posted", "snapshots"), 0
        )
        self._search_s = self._update_s = 0.0
        self._scores = {"semantic": [0.0, 0], "trajectory": [0.0, 0]}
        keys = range(shape.layers * shape.experts)
        self._owner = np.array(
            [shard_of(*divmod(key, shape.experts), shape.experts, sharding.count, sharding.ownership) for key in keys]
        )
        self._shards = [
            ReconnectingChannel("shard", link, sharding.transport, {"index": i})
            for i, link in enumerate(shards.links, start=1)
        ]
        self._saved = self._maps.generation
        self._closing = threading.Event()
        self._saver = threading.Thread(target=self._save_periodically, name="tiermoe-matcher-snapshots", daemon=True)
        self._server = ChannelServer(
            self.handle,
            ServerOptions(
                host=directory.host(), token=token, tls=directory.tls, spin_s=_SPIN_S, doze_s=_DOZE_S, helps=True
            ),
        )
        for shard in self._shards:
            shard.start()
        if self._snapshot is not None:
            self._saver.start()
        directory.register(MATCHER, self._server.address)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._server.address

    def handle(self, message: Message) -> Message | None:
        """Answer one message of the channel; a raised ConfigError is sent back."""
        if isinstance(message, Context):
            return self._match(message)
        if isinstance(message, HealthRequest):
            return HealthReport("matcher", self.health())
        raise ConfigError(f"the matcher does not answer {type(message).__name__}", "send it contexts")

    def health(self) -> dict[str, Any]:
        """Its maps and counters."""
        means = {f"mean_{kind}_score": total / count for kind, (total, count) in self._scores.items() if count}
        return {
            "state": "serving",
            "address": self.address,
            "pid": os.getpid(),
            "maps": len(self._maps),
            "capacity": self._maps.capacity,
            "distance": self._maps.distance,
            "bytes": self._maps.nbytes,
            "begun_from": self._origin,
            "snapshot_problem": self._problem,
            "unsaved": 0 if self._snapshot is None else self._maps.generation - self._saved,
            "search_s": self._search_s,
            "update_s": self._update_s,
            "shards_connected": sum(shard.current is not None for shard in self._shards),
        } | self._counts | asdict(self._shape) | means  # fmt: skip

    def sample(self) -> ProcessSample:
        """Its counters, and what it posted to each shard."""
        own = {"search_s": self._search_s, "update_s": self._update_s} | self._counts
        posts = {shard_name(i): shard.traffic.of_client() for i, shard in enumerate(self._shards, start=1)}
        return take_sample(own | self._server.traffic.of_server(), posts)

    def save(self) -> bool:
        """Save a snapshot if the store has changed since the last one; whether it had.

        Raises:
            StoreError: it cannot be written. ConfigError: there is no path to save to.
        """
        if self._snapshot is None:
            raise ConfigError("the matcher was given no path for snapshots", "give one")
        with self._lock:
            generation = self._maps.generation
            if generation == self._saved:
                return False
            arrays = self._maps.arrays()
        save_maps(self._snapshot, arrays, self._shape)
        self._saved = generation
        self._counts["snapshots"] += 1
        return True

    def close(self) -> None:
        """Stop serving and save. Safe to call twice."""
        self._server.close()
        for shard in self._shards:
            shard.close()
        self._closing.set()
        if self._saver.is_alive():
            self._saver.join()
        if self._snapshot is not None:
            self._try_saving()

    def retire(self) -> None:
        """`close`, and remove a snapshot that is not a `keep` file, with its folder if that is empty."""
        self.close()
        if self._snapshot is not None and self._settings.keep is None:
            with contextlib.suppress(OSError):
                self._snapshot.unlink()
                self._snapshot.parent.rmdir()

    def _match(self, context: Context) -> PrefetchCommand | None:
        with self._lock:
            self._counts["contexts"] += 1
            self._refuse_foreign(context)
            begin_s = time.perf_counter()
            try:
                forecast = self._forecast(context)
            except ValueError as error:
                why = f"a context is out of order: {error}"
                raise ConfigError(why, "send the embedding first, then each layer once") from error
            self._search_s += time.perf_counter() - begin_s
            command = None if forecast is None else self._command(context.iteration, forecast)
            seen = context.probabilities.shape[1] // self._shape.experts
            if seen and context.layer + seen == self._shape.layers:
                self._end(context)
            return command

    def _forecast(self, context: Context) -> Forecast | None:
        sequences = context.sequences.tolist()
        forecast: Forecast | None = None
        if context.embedding.shape[1]:
            self._iteration, self._sequences = context.iteration, sequences
            forecast = self._prefetch.begin(context.embedding)
        elif context.iteration != self._iteration or sequences != self._sequences:
            self._counts["unknown_iterations"] += 1  # it began before this matcher started
            return None
        else:
            forecast = self._prefetch.observe(context.layer, context.probabilities)
        if forecast is not None:
            total = self._scores["semantic" if forecast.semantic else "trajectory"]
            total[0] += float(forecast.scores.sum())
            total[1] += len(forecast.scores)
        return forecast

    def _end(self, context: Context) -> None:
        if context.iteration != self._iteration:
            return
        begin_s = time.perf_counter()
        self._counts["iterations"] += 1
        self._counts["stored"] += self._prefetch.end()
        self._iteration = None
        self._update_s += time.perf_counter() - begin_s

    def _command(self, iteration: int, forecast: Forecast) -> PrefetchCommand:
        """The command for the lead; those for other shards are posted to them."""
        self._counts["commands"] += 1
        keys = forecast.keys
        if not self._shards:
            hints = len(keys) - forecast.wanted
            return PrefetchCommand(iteration, forecast.now, keys, forecast.priorities, hints, mapped=True)
        hint = np.arange(len(keys)) >= forecast.wanted
        own = np.ones(len(keys), np.bool_)
        for index, shard in enumerate(self._shards, start=1):
            theirs = self._owner[keys] == index
            if theirs.any() and shard.current is not None:  # the lead computes the experts of a lost shard
                self._counts["posted"] += shard.post(_part(iteration, forecast, theirs, hint))
                own &= ~theirs
        return _part(iteration, forecast, own, hint)

    def _refuse_foreign(self, context: Context) -> None:
        shape = self._shape
        embedding, probabilities = context.embedding.shape[1], context.probabilities.shape[1]
        if bool(embedding) == bool(probabilities):
            raise ConfigError("a context has both an embedding and probabilities, or neither", "send one of them")
        if embedding not in (0, shape.hidden) or probabilities % shape.experts:
            raise ConfigError(
                f"a context of {probabilities} experts and embeddings of {embedding} is for another model",
                f"this matcher is for {shape.experts} experts and embeddings of {shape.hidden}",
            )
        layers = max(1, probabilities // shape.experts)
        if context.layer + layers > shape.layers or not len(context.sequences):
            raise ConfigError(
                f"a context of {layers} layers from layer {context.layer} with {len(context.sequences)} sequences",
                f"the model has {shape.layers} MoE layers",
            )

    def _load_maps(self) -> None:
        width = self._maps.width
        if self._snapshot is not None and self._settings.keep is None:  # in a temporary folder, as a rule
            try:
                own_folder(self._snapshot.parent)
            except PermissionError as error:
                self._problem = f"no snapshots are kept in '{self._snapshot.parent}': {error.strerror}"
                _log.warning("%s", self._problem)
                self._snapshot = None
            except OSError:  # said when it is saved
                pass
        if self._snapshot is not None and self._snapshot.exists():
            try:
                self._maps.load(load_maps(self._snapshot, self._shape, width))
                self._origin = "snapshot"
                return
            except StoreError as error:
                self._problem = str(error)
                _log.warning("a snapshot of expert maps is moved aside: %s", error)
                os.replace(self._snapshot, self._snapshot.with_name(self._snapshot.name + ".unusable"))
        if self._settings.warm is not None:
            self._maps.load(load_maps(Path(self._settings.warm), self._shape, width))
            self._origin = "file"

    def _save_periodically(self) -> None:
        while not self._closing.wait(self._settings.snapshot_s):
            self._try_saving()

    def _try_saving(self) -> None:
        try:
            self.save()
        except StoreError as error:
            self._problem = str(error)
            _log.warning("%s", error)


def _part(
    iteration: int, forecast: Forecast, chosen: NDArray[np.bool_], hint: NDArray[np.bool_]
) -> PrefetchCommand:
    """The command for the chosen keys, in order: hints stay last."""
    hints = int((chosen & hint).sum())
    keys, priorities = forecast.keys[chosen], forecast.priorities[chosen]
    return PrefetchCommand(iteration, forecast.now, keys, priorities, hints, mapped=True)
