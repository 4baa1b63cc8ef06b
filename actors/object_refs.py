"""Experts as Ray objects: what a store puts, and what a reader on another node gets.

The only file of the actors that calls Ray, and only where `cluster.store.transport` is ray.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from ..errors import PeerLost, RemoteFailure, RuntimeFailure, TierMoeError

Arrays = list[NDArray[Any]]


class RefBook:
    """The experts that lie in Ray's object store, least recently used first.

    Args:
        most_bytes: kept at most; the newest is kept in any case. An object that a reader still uses lives on until the
            reader lets go of it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._refs: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the objects kept."""
        return self._nbytes

    def get(self, key: tuple[int, int], nbytes: int, arrays: Callable[[], Arrays]) -> Any:
        """The ref of an expert, put now where it was not; room is made first."""
        import ray

        with self._lock:
            if key in self._refs:
                self._refs.move_to_end(key)
                return self._refs[key][0]
            while self._refs and self._nbytes + nbytes > self._most_bytes:
                self._nbytes -= self._refs.popitem(last=False)[1][1]
            ref = ray.put(arrays())
            self._refs[key] = (ref, nbytes)
            self._nbytes += nbytes
            return ref

    def clear(self) -> None:
        """Let go of all."""
        with self._lock:
            self._refs.clear()
            self._nbytes = 0


class ActorStore:
    """A store as its Ray actor.

    Args:
        actor: its name in this process's Ray namespace.

    Raises:
        RuntimeFailure: there is none, or this process is not on Ray.
    """

    def __init__(self, actor: str) -> None:
        import ray

        try:
            self._handle = ray.get_actor(actor)
        except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
            raise RuntimeFailure(f"no store actor '{actor}' ({error})", "see whether the cluster is up") from error

    def health(self, deadline_s: float) -> dict[str, Any]:
        """The store's account of itself.

        Raises:
            PeerLost: it does not answer.
        """
        return self._get(self._handle.health.remote(), deadline_s)

    def ask(self, layer: int, experts: Sequence[int], deadline_s: float) -> Callable[[], list[Arrays]]:
        """Ask for experts; calling the result waits for their arrays.

        Raises, when called:
            PeerLost: the actor or its node died, or was too slow. RemoteFailure: the store refused.
        """
        asked = self._handle.expert_refs.remote(layer, list(experts))
        return lambda: self._get(self._get(asked, deadline_s), deadline_s)

    @staticmethod
    def _get(ref: Any, deadline_s: float) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=deadline_s)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TierMoeError):
                raise RemoteFailure(cause.what, cause.remedy, type(cause).__name__) from None
            raise PeerLost(f"Ray: {type(error).__name__}", "see whether the store's node is up") from error
