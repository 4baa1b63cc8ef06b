"""Who listens where: the endpoint directory of a cluster.

`EndpointDirectory` is a plain class that `deploy.py` makes an actor. `Endpoints` is what a process uses: the same
questions through the actor's handle. Servers bind port 0 and register what they got.
"""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import RuntimeFailure

_ANSWER_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Endpoint:
    """One process that listens.

    Attributes:
        name: role and number, e.g. "ndp/0".
        address: HOST:PORT.
        generation: rises with every registration in the cluster: a worker that was restarted has a higher one.
        pid: of the process, on its host.
    """

    name: str
    address: str
    generation: int
    pid: int


class EndpointDirectory:
    """Name -> endpoint. Thread-safe. The newest registration of a name holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generations = itertools.count(1)
        self._endpoints: dict[str, Endpoint] = {}

    def register(self, name: str, address: str, pid: int) -> int:
        """Enter or replace an endpoint; returns its generation."""
        with self._lock:
            generation = next(self._generations)
            self._endpoints[name] = Endpoint(name, address, generation, pid)
            return generation

    def lookup(self, name: str) -> dict[str, Any] | None:
        """The fields of an endpoint."""
        with self._lock:
            found = self._endpoints.get(name)
        return None if found is None else asdict(found)

    def remove(self, name: str, generation: int) -> bool:
        """Take an endpoint out, unless a newer one has its name already."""
        with self._lock:
            found = self._endpoints.get(name)
            if found is None or found.generation != generation:
                return False
            del self._endpoints[name]
            return True

    def entries(self, prefix: str = "") -> list[dict[str, Any]]:
        """The fields of all endpoints whose names begin so, by name."""
        with self._lock:
            found = sorted((e for n, e in self._endpoints.items() if n.startswith(prefix)), key=lambda e: e.name)
        return [asdict(endpoint) for endpoint in found]


class Endpoints:
    """The directory through Ray.

    Args:
        actor: name of an actor made of `EndpointDirectory`, in the caller's Ray namespace. A name and not a handle: an
            actor that Ray restarts gets its arguments again, which may not hold references.
        host: where processes of this cluster listen; None: at their node's own address.

    All methods raise `RuntimeFailure` where the directory does not answer.
    """

    def __init__(self, actor: str, host: str | None = None) -> None:
        self._actor, self._host = actor, host

    def host(self) -> str:
        """The address of this node that the other processes of the cluster can reach."""
        if self._host is not None:
            return self._host
        import ray.util  # only who asks a cluster needs it

        return str(ray.util.get_node_ip_address())

    def register(self, name: str, address: str) -> int:
        """Enter this process; returns its generation."""
        return self._ask("register", name, address, os.getpid())

    def enter(self, endpoint: Endpoint) -> int:
        """Enter another process again, which a directory that was restarted has forgotten; its new generation."""
        return self._ask("register", endpoint.name, endpoint.address, endpoint.pid)

    def lookup(self, name: str) -> str | None:
        """The address; None: nobody has this name."""
        found = self._ask("lookup", name)
        return None if found is None else found["address"]

    def remove(self, name: str, generation: int) -> bool:
        """Take out what `register` entered; False: it is gone or replaced."""
        return self._ask("remove", name, generation)

    def entries(self, prefix: str = "") -> list[Endpoint]:
        """All endpoints whose names begin so."""
        return [Endpoint(**fields) for fields in self._ask("entries", prefix)]

    def _ask(self, method: str, *args: Any) -> Any:
        import ray  # only who asks a cluster needs it

        try:
            handle = ray.get_actor(self._actor)
            return ray.get(getattr(handle, method).remote(*args), timeout=_ANSWER_DEADLINE_S)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: there is no such actor
            raise RuntimeFailure(
                f"the endpoint directory does not answer: {type(error).__name__}", "see whether the cluster is up"
            ) from error
