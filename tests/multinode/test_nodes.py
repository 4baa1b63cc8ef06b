"""A runtime over three Ray nodes, each a machine of its own: head with the lead, a second shard, store and NDP worker.

Whatever happens to nodes, cables and processes: a request ends with the tokens of the unmodified model, or with a typed
error before its deadline, and the runtime is well again afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from ray_nodes import RemoteError, RemoteRuntime, peers
from serving import default_model_greedy, prepared

from tiermoe.benchmarks.machines import IsolatedMachine, Loopback, Node, RayNodes, Switch, why_not_isolated
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts

PROMPTS, PROMPT_TOKENS, TOKENS = 5, 48, 32
LONG = 160  # tokens of a request that something happens to
STRUCK_AT = 8  # its token at which that happens
CUT_S = 3.0
RECOVER_S = 60.0
STORE_DEADLINE_S = 10.0  # of a read: longer than a cut

NOT_ISOLATED = why_not_isolated()

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.timeout(600),  # the first test starts three nodes and a runtime, which a busy machine is slow at
]


@dataclass(frozen=True)
class Place:
    """Three nodes, a program on the first that deploys there, and what the model says without any of it.

    Attributes:
        long: what the last prompt gives with `LONG` tokens.
    """

    nodes: RayNodes
    runtime: RemoteRuntime
    store: Path
    prompts: list[tuple[int, ...]]
    expected: list[list[int]]
    long: list[int]

    def options(self, policy: str, budget: str, **cluster: Any) -> dict[str, Any]:
        return {
            "policy": policy, "budget": budget, "threads": 1, "device": "cpu", "integrity_checks": True,
            "ray": {"address": self.nodes.address, "startup_deadline_s": 120},
            "cluster": {
                "shards": 2,
                "strategy": "spread",
                "store": {"nodes": "marked", "deadline_s": STORE_DEADLINE_S},
                **cluster,
            },
        }  # fmt: skip

    @property
    def second(self) -> Node:
        return self.nodes.nodes[1]

    @property
    def third(self) -> Node:
        return self.nodes.nodes[2]

    def serves(self) -> None:
        """All requests at once, and one alone, give the very tokens of the model."""
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda prompt: self.runtime.tokens(prompt, TOKENS), self.prompts))
        assert found == self.expected

    def struck(self, strike: Callable[[], object], over: Callable[[], bool] = lambda: True) -> None:
        """A long request during which something happens, after its eighth token, and more of them until it is over.

        All must give the tokens of the undisturbed model.
        """
        tokens: list[int] = []
        for piece in self.runtime.generate(self.prompts[-1], LONG, ignore_eos=True):
            if len(tokens) < STRUCK_AT <= len(tokens) + len(piece):
                strike()
            tokens += piece
        assert tokens == self.long
        while not over():
            assert self.runtime.tokens(self.prompts[-1], LONG, ignore_eos=True) == self.long

    def disconnected(self, node: Node) -> None:
        """Such requests while a node's cable is cut for `CUT_S`."""
        machines = self.nodes.machines
        timer = threading.Timer(CUT_S, machines.restore, [node.machine])

        def cut() -> None:
            machines.cut(node.machine)
            timer.start()

        self.struck(cut, lambda: not timer.is_alive())

    def ndp_pairs(self) -> dict[str, int]:
        """Pairs of token and expert that each NDP worker has computed."""
        roles = [name for name in peers(self.runtime.ask("health")) if name.startswith("ndp/")]
        return {role: self.runtime.health_of(role)["pairs"] for role in roles}

    def is_well(self, *peers: str) -> None:
        """The lead has its peers again, and the runtime gives the very tokens of the model."""
        self.runtime.wait_until_healthy(RECOVER_S, peers)
        self.serves()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    store = Path(prepared(default_model_dir(), tmp_path_factory.mktemp("nodes") / "store").describe().path)
    prompts = heldout_prompts(default_model_dir(), PROMPTS, PROMPT_TOKENS)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="nodes-")))  # short: Ray makes sockets in it
        machines = Switch(folder) if NOT_ISOLATED is None else Loopback()
        stack.callback(machines.close)
        nodes = RayNodes(machines, cpus=2)
        runtime = stack.enter_context(closing(RemoteRuntime(nodes.head)))
        nodes.add_all((2, {}), (2, {"store": 1, "ndp": 1}))
        expected = default_model_greedy(prompts, TOKENS)
        (long,) = default_model_greedy(prompts[-1:], LONG, ignore_eos=True)
        yield Place(nodes, runtime, store, prompts, expected, long)


@pytest.fixture(scope="class")
def with_ndp(place: Place) -> Iterator[Place]:
    """The lead on the head, a shard on the second node, store and NDP worker on the third."""
    options = place.options("context-ndp-full", "0.25", lead=place.nodes.head.address, ndp_workers="per-node")
    started = place.runtime.start(place.store, **options)
    homes = {actor["name"]: _address(started, actor["node"]) for actor in started["topology"]["actors"]}
    head, second, third = (node.address for node in place.nodes.nodes)
    assert homes == {"lead": head, "directory": head, "shard-1": second, "store-0": third, "ndp-0": third}
    yield place
    place.runtime.stop()


class TestNdpAndShard:
    """One after the other in one deployment, which is well again after each."""

    def test_the_very_tokens_of_the_model(self, with_ndp: Place) -> None:
        with_ndp.serves()
        stats = with_ndp.runtime.stats()
        assert stats["ndp_tokens"] > 0
        assert stats["shard_tokens"] > 0
        # by itself: processes of different machines share no memory, whatever their kernel
        wanted = {"grpc"} if with_ndp.nodes.machines.isolated else {"shm"}
        assert {peer["transport"] for peer in with_ndp.runtime.started["plan"]["shards"][1:]} == wanted

    @pytest.mark.skipif(NOT_ISOLATED is not None, reason=f"a cable is needed to be cut: {NOT_ISOLATED}")
    def test_the_cable_of_store_and_ndp_worker_is_cut(self, with_ndp: Place) -> None:
        before = with_ndp.runtime.stats()["ndp_losses"]
        with_ndp.disconnected(with_ndp.third)
        assert with_ndp.runtime.stats()["ndp_losses"] > before
        with_ndp.is_well("shard/1", "ndp/0", "store/0")

    def test_the_process_of_the_shard_is_killed(self, with_ndp: Place) -> None:
        before = with_ndp.runtime.stats()["shard_losses"]
        with_ndp.struck(with_ndp.second.actor("ShardWorker").kill)
        assert with_ndp.runtime.stats()["shard_losses"] > before
        with_ndp.is_well("shard/1", "ndp/0", "store/0")

    def test_the_process_of_the_ndp_worker_is_killed(self, with_ndp: Place) -> None:
        before = with_ndp.runtime.stats()["ndp_losses"]
        with_ndp.struck(with_ndp.third.actor("NdpWorker").kill)
        assert with_ndp.runtime.stats()["ndp_losses"] > before
        with_ndp.is_well("shard/1", "ndp/0", "store/0")

    def test_a_node_that_joins_takes_its_share(self, with_ndp: Place) -> None:
        with ThreadPoolExecutor() as pool:
            joined = pool.submit(with_ndp.nodes.add, cpus=2, resources={"store": 1, "ndp": 1})
            with_ndp.struck(lambda: None, lambda: "ndp/1" in with_ndp.runtime.ask("health"))
        with_ndp.is_well("shard/1", "ndp/0", "ndp/1", "store/0")
        assert joined.result().actor("NdpWorker").is_running()
        before = with_ndp.ndp_pairs()
        with_ndp.serves()
        risen = {role: pairs - before[role] for role, pairs in with_ndp.ndp_pairs().items()}
        assert sorted(risen) == ["ndp/0", "ndp/1"]
        assert 0.5 < risen["ndp/1"] / risen["ndp/0"] < 2, risen  # it has half of the cold experts


@pytest.fixture(scope="class")
def with_stores(place: Place) -> Iterator[Place]:
    """The lead on the second node, whose machine has no store files; stores on the third and the fourth."""
    if len(place.nodes.nodes) < 4:  # this class alone
        place.nodes.add(cpus=2, resources={"store": 1, "ndp": 1})
    if isinstance(place.second.machine, IsolatedMachine):
        place.second.machine.hide(place.store)
    options = place.options("next-gate", "0.1", lead=place.second.address)
    started = place.runtime.start(place.store, **options)
    homes = {actor["name"]: _address(started, actor["node"]) for actor in started["topology"]["actors"]}
    assert homes["lead"] == place.second.address
    assert {homes["store-0"], homes["store-1"]} == {node.address for node in place.nodes.nodes[2:]}
    yield place
    place.runtime.stop()


class TestStores:
    """Experts that are read from other nodes; one after the other in one deployment."""

    def test_the_very_tokens_of_the_model(self, with_stores: Place) -> None:
        with_stores.serves()

    def test_the_raylet_of_one_of_two_store_nodes_is_killed(self, with_stores: Place) -> None:
        with_stores.struck(lambda: with_stores.nodes.kill_raylet(with_stores.third))
        with_stores.serves()

    def test_without_any_store_a_request_fails_and_names_the_layers(self, with_stores: Place) -> None:
        fourth = with_stores.nodes.nodes[3]
        with pytest.raises(RemoteError, match=r"layers? \d") as failed:
            with_stores.struck(lambda: with_stores.nodes.kill_raylet(fourth), lambda: False)
        assert failed.value.kind == "StoreError"
        for node in (with_stores.third, fourth):
            with_stores.nodes.start(node)
        with_stores.is_well("shard/1", "store/0", "store/1")


def _address(started: dict[str, Any], node: str) -> str:
    return next(load["address"] for load in started["topology"]["loads"] if load["node"] == node)
