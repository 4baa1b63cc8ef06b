"""The actors of a deployment on Ray: their names, the groups reserved for them, and how each is made and ended.

In Ray an actor of a deployment is called `ID/ROLE`, in the namespace of `ray_session`, a placement group `ID/GROUP`.
Actors of a group start in their bundle. The others (NDP workers, marked stores, the endpoint directory) are softly
bound to the node that was planned, so that Ray may restart them on another node with the same custom resource.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..errors import RuntimeFailure
from ..proto.peers import MATCHER
from .ray_internals import free_resources
from .topology.spec import PlannedActor, Topology

LEAD, ENDPOINTS, EDGE = "lead", "endpoints", "edge"
RESTART_ALWAYS = -1
_NAME = re.compile(r"(?P<id>[0-9a-f]{6}(?:\.[0-9]+)?)/(?P<role>[a-z]+(?:/[0-9]+)?)")
_ACTOR = "ray::"  # titles of actors' processes begin with it
_PATIENCE_S = 2.0  # Ray frees the resources of a run that has just ended within this time
_STEP_S = 1.0


def new_id() -> str:
    """A random id for a deployment: six hexadecimal digits."""
    return secrets.token_hex(3)


def role_of(actor: PlannedActor) -> str:
    """The second part of an actor's name; workers also register under it."""
    return {"lead": LEAD, "directory": ENDPOINTS, "matcher": MATCHER}.get(actor.role, f"{actor.role}/{actor.index}")


def group_id(deployment: str, index: int) -> str:
    """What the names of a replica group's actors begin with: the deployment's id, and but for the first the number."""
    return f"{deployment}.{index}" if index else deployment


def family(group: str) -> str:
    """The deployment's id of a replica group's."""
    return group.partition(".")[0]


def split_name(name: str) -> tuple[str, str] | None:
    """(id, role) of an actor's name; None if it is not an actor of a deployment."""
    match = _NAME.fullmatch(name)
    return (match["id"], match["role"]) if match else None


class DeploymentEnded(RuntimeFailure):
    """The deployment was ended in order while it was starting."""


class Reservation:
    """The placement groups of one replica group, in which its actors are made.

    Args:
        name: the replica group's id, with which all names begin.
        local: whether this Ray has one node and only this deployment's actors.
        notify: called with a line about what the start waits for.
    """

    def __init__(self, name: str, topology: Topology, local: bool, notify: Callable[[str], None]) -> None:
        self._name, self._topology, self._local, self._notify = name, topology, local, notify
        self._groups: dict[str, PlacementGroup] = {}

    def reserve(self, left: Callable[[], float]) -> None:
        """Make the groups and wait until they stand; one line says what for, if that takes long.

        Args:
            left: seconds until the deadline.

        Raises:
            GetTimeoutError: Ray's, at the deadline. DeploymentEnded: the groups were removed meanwhile.
        """
        for group in self._topology.groups:
            selectors = [dict(selector) for selector in group.selectors]
            self._groups[group.name] = placement_group(
                [dict(bundle) for bundle in group.bundles],
                strategy=group.strategy,
                name=f"{self._name}/{group.name}",
                bundle_label_selector=selectors if any(selectors) else None,
            )
        patience_s = time.monotonic() + _PATIENCE_S
        said = self._local
        for group in self._groups.values():
            while not group.wait(timeout_seconds=min(left(), _STEP_S)):
                self.refuse_ended()
                if left() <= 0.001:
                    raise ray.exceptions.GetTimeoutError("placement group")
                if not said and time.monotonic() > patience_s:
                    said = True
                    self._notify(f"waiting for {self._short(self._topology.actors) or 'the cluster to make room'}")
        ungrouped = [actor for actor in self._topology.actors if actor.group is None]
        if not said and (short := self._short(ungrouped)):
            self._notify(f"waiting for {short}")

    def make(
        self, actor: PlannedActor, plain: type, *args: Any, options: Mapping[str, Any] | None = None, **named: Any
    ) -> Any:
        """Start an actor where it was planned; its handle.

        Args:
            plain: its class.
            args, named: of its constructor.
            options: of Ray, besides name, resources and place.
        """
        resources = dict(actor.resources)
        where: dict[str, Any] = {
            "name": f"{self._name}/{role_of(actor)}",
            "num_cpus": resources.pop("CPU", 0),
            "num_gpus": resources.pop("GPU", 0),
            "resources": resources or None,
        }
        if actor.group is not None:
            where["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                self._groups[actor.group], placement_group_bundle_index=actor.bundle or 0
            )
        elif not self._local:
            where["scheduling_strategy"] = NodeAffinitySchedulingStrategy(actor.node, soft=True)
        return ray.remote(**where, **(options or {}))(plain).remote(*args, **named)

    @property
    def ended(self) -> bool:
        """Whether the groups were removed: the deployment was ended in order (`Attachment.end`)."""
        return any(placement_group_table(group)["state"] == "REMOVED" for group in self._groups.values())

    def refuse_ended(self) -> None:
        """Raise DeploymentEnded if the groups were removed."""
        if self.ended:
            raise DeploymentEnded("the deployment was ended while it started", "start it again")

    def release(self) -> None:
        """Free what was reserved; the actors in it end. Never raises."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            with contextlib.suppress(Exception):  # Ray is gone, and the group with it
                remove_placement_group(group)

    def _short(self, actors: tuple[PlannedActor, ...] | list[PlannedActor]) -> str:
        """What others hold of the nodes at the moment, so that these actors find no room; empty: nothing."""
        wanted: dict[str, dict[str, float]] = {}
        for actor in actors:
            of_node = wanted.setdefault(actor.node, {})
            for name, amount in actor.resources.items():
                of_node[name] = of_node.get(name, 0.0) + amount
        free = free_resources()
        return "; ".join(
            f"{amount:g} {name} on {self._address(node)}, which has {free[node].get(name, 0.0):g} free"
            for node, needs in sorted(wanted.items())
            for name, amount in sorted(needs.items())
            if node in free and free[node].get(name, 0.0) < amount
        )

    def _address(self, node: str) -> str:
        return next((load.address for load in self._topology.loads if load.node == node), node)


def make_here(name: str, plain: type, *args: Any, concurrency: int) -> Any:
    """Start an actor beside this process, on its node, which reserves nothing and which Ray restarts; its handle.

    Raises:
        ValueError: Ray's, the name is taken.
    """
    where = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": RESTART_ALWAYS, "max_concurrency": concurrency}
    return ray.remote(name=name, scheduling_strategy=where, **options)(plain).remote(*args)


def end(actor: Any) -> None:
    """Kill an actor for good. Never raises."""
    with contextlib.suppress(Exception):  # it is dead, or Ray is gone
        ray.kill(actor, no_restart=True)


def remake(actor: Any, pid: int | None) -> None:
    """End an actor's process, which Ray makes again.

    Args:
        pid: of the process where it is on this machine; None: it is not. A stopped one obeys only a signal.
    """
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
            process = psutil.Process(pid)
            if "".join(process.cmdline()[:1]).startswith(_ACTOR):  # else another program has the pid by now
                process.kill()
    else:
        ray.kill(actor, no_restart=False)
