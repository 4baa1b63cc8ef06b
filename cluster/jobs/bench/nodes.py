"""A benchmark's cells as Ray tasks over the nodes of a cluster, one timed cell a node at a time; or processes here.

Each cell has a process of its own. A lost node's cell runs again on another node; a node that joins takes
part. `ray_session.py`, `deployed_actors.py` and `attach.py` also place work on nodes.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import Any, TypeVar

import psutil

from ....errors import RuntimeFailure
from ...host import cpu, versions
from ...ray_session import join, leave, refuse_second, without_ray_notices

T = TypeVar("T")
_LOSSES = 5  # of one cell, before the experiment fails
_NOBODY_S = 60.0  # without any node, before the experiment fails
_FACTS_S = 60.0  # for a node to say what it is; Ray starts a process for it


@contextlib.contextmanager
def joined(address: str) -> Iterator[None]:
    """Join the Ray at HOST:PORT, or with `auto` that of this machine or Ray job; leave it at the end.

    Raises:
        RuntimeFailure: this process uses Ray already, nobody answers, or the cluster refuses.
    """
    refuse_second()
    with without_ray_notices():
        join(address)
        try:
            yield
        finally:
            leave()


def over_processes(run: Callable[[Any], T], things: Sequence[Any], jobs: int) -> Iterator[tuple[int, T]]:
    """Call `run` on each thing in so many processes of this machine; with one, in this process and in order.

    Yields:
        The index of the thing and the result, in the order of completion.
    """
    if jobs == 1 or len(things) < 2:
        yield from enumerate(map(run, things))
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, thing): number for number, thing in enumerate(things)}
        for done in as_completed(running):
            yield running[done], done.result()


def over_nodes(
    run: Callable[[Any], T], things: Sequence[Any], cpus: float = 1.0, gpu: bool = False, each: int = 1
) -> Iterator[tuple[int, T, str]]:
    """Call `run` on each thing on the nodes of the Ray that this process has joined.

    Args:
        run: a function of a module that every node can import; its argument and result are pickled by Ray.
        cpus: CPUs of each call. gpu: each call also takes one GPU of a node that has any; Ray hides the others.
        each: calls at a time on a node, as far as it has CPUs; those that are timed want it to themselves.

    Yields:
        The index of the thing, the result, and the node's address, in the order of completion.

    Raises:
        Exception: of a call; the other calls are cancelled.
        RuntimeFailure: a thing was lost five times, or there has been no node for a minute.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    remote = ray.remote(num_cpus=cpus, max_retries=0)(run)
    waiting, running = list(range(len(things))), dict[Any, tuple[int, str, str]]()
    losses: dict[int, int] = {}
    seen_s = time.monotonic()
    try:
        while waiting or running:
            nodes = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0.0) >= cpus}
            seen_s = time.monotonic() if nodes or running else seen_s
            if time.monotonic() - seen_s > _NOBODY_S:
                raise RuntimeFailure(f"no node with {cpus:g} CPUs", "start one with `ray start --address ...`")
            busy = Counter(at for _, at, _ in running.values())
            room = {name: min(each, int(n["Resources"]["CPU"] / cpus)) - busy[name] for name, n in nodes.items()}
            while waiting and room and max(room.values()) > 0:
                node = max(room, key=room.__getitem__)
                number, pinned = waiting.pop(0), NodeAffinitySchedulingStrategy(node, soft=False)
                gpus = min(1.0, nodes[node]["Resources"].get("GPU", 0.0)) if gpu else 0.0
                call = remote.options(scheduling_strategy=pinned, num_gpus=gpus)
                running[call.remote(things[number])] = (number, node, nodes[node]["NodeManagerAddress"])
                room[node] -= 1
            done, _ = ray.wait(list(running), timeout=1.0) if running else ([], [])
            if not running:
                time.sleep(0.2)
            for reference in done:
                number, _, address = running.pop(reference)
                try:
                    found = ray.get(reference)
                except RayTaskError as error:
                    raise error.cause if isinstance(error.cause, Exception) else error from None
                except RayError as error:  # the node, its process, or the result is lost
                    losses[number] = losses.get(number, 0) + 1
                    if losses[number] >= _LOSSES:
                        what = f"a cell was lost {_LOSSES} times, the last time with {address}"
                        raise RuntimeFailure(what, "see whether it exceeds the nodes' memory") from error
                    waiting.insert(0, number)
                    continue
                yield number, found, address
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


def living_nodes() -> dict[str, str]:
    """Address of each node that belongs to the Ray of this process, by its id."""
    import ray

    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}


def node_facts() -> list[dict[str, Any]]:
    """Address, resources, hardware, memory and versions of each node; one that does not answer has a `problem`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(_facts)
    nodes = {str(node["NodeID"]): node for node in ray.nodes() if node["Alive"]}
    asked = {
        node: ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        for node in nodes
    }
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=_FACTS_S)
    found = []
    for node, entry in sorted(nodes.items(), key=lambda item: str(item[1]["NodeManagerAddress"])):
        own = {name: amount for name, amount in entry["Resources"].items() if not name.startswith(("node:", "object_"))}
        try:
            said = ray.get(asked[node], timeout=0)
        except RayError as error:
            said = {"problem": f"it does not say ({type(error).__name__})"}
        found.append({"node": entry["NodeManagerAddress"], "resources": own} | said)
    return found


def _facts() -> dict[str, Any]:
    """Of the machine of this process."""
    return {"hardware": cpu(), "memory_bytes": psutil.virtual_memory().total, "versions": versions()}
