"""Who listens where: the endpoint directory of a cluster.

`EndpointDirectory` is a plain class that `actor_group.py` makes an actor. `Endpoints` is what a process uses: the same
questions through the actor's name. Servers bind port 0 and register what they got.
"""

from __future__ import annotations

from typing import Any

from ..actors.sample import ProcessSample, take_sample
from ..errors import RuntimeFailure, StoreError
from ..proto.peers import LocalDirectory
from ..proto.tls import TlsFiles

_ANSWER_DEADLINE_S = 10.0


class EndpointDirectory(LocalDirectory):
    """Names such as "ndp/0", and the HOST:PORT that each registered last, or why its process cannot start."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals: dict[str, StoreError] = {}

    def register(self, name: str, address: str) -> None:
        self._refusals.pop(name, None)
        super().register(name, address)

    def refuse(self, name: str, refusal: StoreError) -> None:
        """Until a name registers, `lookup` raises this."""
        self._refusals[name] = refusal

    def lookup(self, name: str) -> str | None:
        if name in self._refusals:
            raise self._refusals[name]
        return super().lookup(name)

    def sample(self) -> ProcessSample:
        """Of its process; it counts nothing."""
        return take_sample()

    def entries(self) -> dict[str, str]:
        """All addresses by name."""
        return dict(sorted(self.addresses.copy().items()))


class Endpoints:
    """The directory through Ray.

    Args:
        actor: name of an actor made of `EndpointDirectory`, in the caller's Ray namespace. A name and not a handle: an
            actor that Ray restarts gets its arguments again, which may not hold references.
        host: where processes of this cluster listen; None: at their node's own address.
        tls: files of their channels' TLS, at the same path on each node; None: no encryption.

    All methods raise `RuntimeFailure` if the directory does not answer.
    """

    def __init__(self, actor: str, host: str | None = None, tls: TlsFiles | None = None) -> None:
        self._actor, self._host, self.tls = actor, host, tls

    def host(self) -> str:
        """The address of this node that the other processes of the cluster can reach."""
        if self._host is not None:
            return self._host
        import ray.util  # only who asks a cluster needs it

        return str(ray.util.get_node_ip_address())

    def register(self, name: str, address: str) -> None:
        """Enter or replace an address."""
        self._ask("register", name, address)

    def lookup(self, name: str) -> str | None:
        """The address; None: the name is not registered. Raises StoreError: its process's files do not verify."""
        return self._ask("lookup", name)

    def refuse(self, name: str, refusal: StoreError) -> None:
        """Until a name registers, `lookup` raises this."""
        self._ask("refuse", name, refusal)

    def entries(self) -> dict[str, str]:
        """All addresses by name."""
        return self._ask("entries")

    def _ask(self, method: str, *args: Any) -> Any:
        import ray  # only who asks a cluster needs it

        try:
            handle = ray.get_actor(self._actor)
            return ray.get(getattr(handle, method).remote(*args), timeout=_ANSWER_DEADLINE_S)
        except (ray.exceptions.RayError, ValueError) as error:  # ValueError: there is no such actor
            if isinstance(refusal := getattr(error, "cause", None), StoreError):
                raise refusal from error
            raise RuntimeFailure(
                f"the endpoint directory does not answer: {type(error).__name__}", "check that the cluster is up"
            ) from error
