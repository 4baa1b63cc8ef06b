"""Expert parallelism with shards in this process: exact, balanced, and missed by nobody when one dies.

What the lead knows of other shards' caches: packed bits, prefetches since, shards that are lost or new.

Buddies over two GPUs in this process, with integrity checks: what the lead decides by, and what shards do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import virtual_cache
from fake_gpu import FakeGpu
from quick import quick
from serving import Group, Tiny, add_random_profile, greedy, policy, prepared, serving_group, settings

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.executors import CpuExecutor
from tiermoe.actors.engine.model.model import MoeBlock
from tiermoe.actors.engine.peers import shard as shard_module
from tiermoe.actors.engine.peers.shards import PeerCaches, ShardResidency, owners
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policies.routing import Rerouted, RerouteView
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, LinkSettings, ShardSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore
from tiermoe.errors import ConfigError, RuntimeFailure
from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthRequest, PlacementCommand, PrefetchCommand
from tiermoe.proto.peers import LocalDirectory

_PROMPTS, _NEW = Tiny.PROMPTS, Tiny.TOKENS


@pytest.fixture(scope="module")
def olmoe(tiny: Callable[[str], Tiny]) -> Tiny:
    return tiny("olmoe")


def _settings(count: int, budget: float = 0.25, prefetch: str = "none", **shards: object) -> EngineSettings:
    return settings(budget, prefetch, shards=ShardSettings(count=count, **shards))  # type: ignore[arg-type]


# qwen2_moe: shared experts. gpt_oss: biases and a gating of its own. nemotron_h: no gate. lfm2_moe: served serially.
@pytest.mark.parametrize("model_type", ["qwen2_moe", "gpt_oss", "nemotron_h", "lfm2_moe"])
def test_same_tokens(model_type: str, tiny: Callable[[str], Tiny]) -> None:
    model = tiny(model_type)
    with serving_group(model.store, _settings(2, prefetch="next-gate")) as group:
        assert greedy(group.lead, _PROMPTS, _NEW) == model.expected
        assert group.lead.stats().total().shard_tokens > 0
        assert group.lead.stats().shard_losses == 0


@pytest.mark.parametrize(
    ("count", "ownership", "transport"),  # every two of their values together
    quick(
        [(2, "layer-expert", "shm"), (3, "expert", "shm"), (3, "layer-expert", "grpc"), (2, "expert", "grpc")],
        fast=[(2, "layer-expert", "shm"), (2, "expert", "grpc")],
    ),
)
def test_each_gpu_holds_what_it_owns(count: int, ownership: str, transport: str, olmoe: Tiny) -> None:
    config = _settings(count, ownership=ownership, transport=transport)
    with serving_group(olmoe.store, config) as group:
        assert greedy(group.lead, _PROMPTS, _NEW) == olmoe.expected
        engine = group.lead.engine
        owner = owners(len(engine.layers), engine.experts, config.shards)
        caches = [engine.cache, *(shard.engine.cache for shard in group.shards)]
        for i, cache in enumerate(caches):
            assert {owner[key] for key in cache.residency.held()} == {i}
            assert cache.stats.expert_bytes_peak <= cache.stats.expert_budget_bytes
            assert cache.live_stats().total().bytes_loaded > 0
        assert {peer.transport for peer in engine.shards.peers.values()} == {transport}


def test_pairs_are_computed_once_by_their_owner(olmoe: Tiny) -> None:
    slow = _settings(2).model_copy(update={"link": LinkSettings(latency_us=10.0)})
    with serving_group(olmoe.store, slow) as group:
        before = group.shards[0].engine.pairs
        greedy(group.lead, _PROMPTS, _NEW)
        total = group.lead.stats().total()
        assert total.shard_tokens == group.shards[0].engine.pairs - before
        assert total.shard_calls > 0
        assert total.io_path_s >= total.blocked_io_s
        lead, other = group.lead.shard_stats()
        assert lead["misses"] == total.misses
        # by the links' own clock; on demand every copy of a layer lands in its own pass
        assert total.link_s == pytest.approx(10e-6 * total.misses)
        assert total.link_s < total.link_path_s < total.link_s + other["link_s"]
        assert other["misses"] == group.shards[0].engine.stats().total().misses
        assert (lead["shard"], other["shard"]) == ("shard/0", "shard/1")


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_what_the_lead_sent_is_what_the_shards_received(transport: str, olmoe: Tiny) -> None:
    with serving_group(olmoe.store, _settings(3, transport=transport)) as group:
        greedy(group.lead, _PROMPTS, _NEW)
        lead = group.lead.sample()
        shards = {f"shard/{i}": shard.sample().counters for i, shard in enumerate(group.shards, start=1)}
        assert set(lead.peers) == set(shards)
        for name, there in shards.items():
            here = lead.peers[name]
            assert here["rows_sent"] == here["rows_received"] == there["rows"] > 0
            for way, back in (("sent", "received"), ("received", "sent")):
                assert here[f"messages_{way}"] == there[f"messages_{back}"] > 0
                assert here[f"bytes_{way}"] == there[f"bytes_{back}"] > 0
            assert 0 < there["busy_s"] < there["answering_s"]
        total = group.lead.stats().total()
        assert (lead.counters["hits"], lead.counters["misses"]) == (total.hits, total.misses)
        assert lead.counters["step_s"] > lead.counters["shard_wait_s"] > 0
        assert all(peer["waited_s"] > 0 for peer in lead.peers.values())  # of its start, too
        steps = total.forwards // len(group.lead.engine.layers)
        assert lead.counters["steps"] in (steps, steps + 1)  # that of the start's own request may end after the reset


def test_every_gpu_preloads_what_it_owns(olmoe: Tiny) -> None:
    config = settings(1.0, policy=policy(preload="all"), shards=ShardSettings(count=2))
    with serving_group(olmoe.store, config) as group:
        assert greedy(group.lead, _PROMPTS, _NEW) == olmoe.expected
        assert [s["slots"] for s in group.lead.shard_stats()] == [8, 8]
        assert [s["bytes_loaded"] for s in group.lead.shard_stats()] == [0, 0]


def test_prefetches_go_to_the_owner(olmoe: Tiny) -> None:
    with serving_group(olmoe.store, _settings(2, prefetch="next-gate")) as group:
        assert greedy(group.lead, _PROMPTS[:1], _NEW) == olmoe.expected[:1]
        lead, other = group.lead.shard_stats()
        assert lead["bytes_loaded_prefetch"] > 0
        assert other["bytes_loaded_prefetch"] > 0
        assert other["late_commands"] == 0


def test_a_lost_shard_is_replaced_by_the_lead_and_rejoins(olmoe: Tiny) -> None:
    with serving_group(olmoe.store, _settings(2)) as group:
        shards = group.lead.engine.shards
        (peer,) = shards.peers.values()
        group.shards[0].close()
        assert greedy(group.lead, _PROMPTS[:1], _NEW) == olmoe.expected[:1]
        stats = group.lead.stats()
        assert stats.shard_losses == 1
        assert stats.shard_last_failure is not None
        assert group.lead.shard_stats()[1]["state"] == "lost"
        assert group.lead.health()["shard/1"] == "lost"
        asked = stats.total().shard_calls
        group.shards[0] = group.start_shard(1)
        try:
            assert peer.wait_until_found(10.0)
            assert greedy(group.lead, _PROMPTS[1:], _NEW) == olmoe.expected[1:]
            assert stats.total().shard_calls > asked
        finally:
            group.shards[0].close()


def test_an_answer_that_fails_is_recomputed(olmoe: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_group(olmoe.store, _settings(2)) as group:
        engine, failed = group.shards[0].engine, []

        def broken(batch: ExpertBatch) -> object:
            monkeypatch.undo()
            failed.append(len(batch.rows))
            raise RuntimeFailure("no", "none")

        monkeypatch.setattr(engine, "run", broken)
        assert greedy(group.lead, _PROMPTS, _NEW) == olmoe.expected
        stats = group.lead.stats()
        assert stats.total().shard_recomputed == failed[0] > 0
        assert (stats.shard_refusals, stats.shard_losses) == (1, 0)


@pytest.fixture
def shard(olmoe: Tiny) -> ShardWorker:
    return ShardWorker(_settings(2, budget=0.5), 1, olmoe.store.describe().path, LocalDirectory())


def _batch(layer: int, experts: list[int], hidden: np.ndarray) -> ExpertBatch:
    n = len(experts)
    return ExpertBatch(
        layer, np.array(experts, np.int32), np.zeros(n, np.uint8), np.arange(n + 1, dtype=np.int32),
        np.zeros(n, np.int32), np.full(n, 0.5, np.float32), hidden,
    )  # fmt: skip


def _command(iteration: int, layer: int, keys: list[int]) -> PrefetchCommand:
    priorities = np.arange(len(keys), 0, -1, dtype=np.float32)
    return PrefetchCommand(iteration, layer, np.array(keys, np.int32), priorities)


def test_late_commands_are_dropped_and_counted(shard: ShardWorker) -> None:
    try:
        engine, hidden = shard.engine, np.ones((1, 32), np.float32)
        state = engine.cache.residency.held
        shard.handle(_command(4, 0, [9]))  # iteration 4 is at layer 0, and wants expert 1 of layer 1
        assert set(state()) == {9}
        shard.handle(_batch(0, [1], hidden))
        shard.handle(_batch(1, [3], hidden))
        shard.handle(_command(4, 0, [13]))  # layer 1 has run
        shard.handle(_command(3, 0, [13]))  # another iteration, long ago
        assert engine.late_commands == 2
        assert 13 not in set(state())
        shard.handle(_command(5, 0, [13]))
        shard.handle(HealthRequest())
        shard.handle(_command(0, 0, [15]))  # a new lead counts anew
        assert {13, 15} <= set(state())
        assert engine.late_commands == 2
        engine.cache.check_integrity()
    finally:
        shard.close()


def test_a_shard_computes_on_its_own_gpu(olmoe: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against kernels and copies on the machine's first GPU, the current one of a channel's new thread."""
    gpu = FakeGpu()
    gpu.eager = True
    monkeypatch.setattr(shard_module, "make_device", lambda *_: CudaDevice(gpu))
    made = ShardWorker(_settings(2, budget=0.5), 1, olmoe.store.describe().path, LocalDirectory())
    monkeypatch.undo()
    hidden = np.ones((1, 32), np.float32)
    with closing(made) as shard:
        entered = gpu.calls.get("enter", 0)
        found = shard.handle(_batch(0, [1], hidden))
        assert gpu.calls["enter"] == entered + 1
        assert isinstance(found, ExpertResult)
        assert np.any(found.partial)
        for command in (_command(4, 0, [9]), PlacementCommand(np.array([11], np.int32), True, False)):
            entered = gpu.calls["enter"]
            shard.handle(command)  # which may be the first that a thread is given
            assert gpu.calls["enter"] == entered + 1
        assert {9, 11} <= set(shard.engine.cache.residency.held())


def test_a_batch_for_another_model_is_refused(shard: ShardWorker) -> None:
    try:
        for batch in (
            _batch(2, [1], np.ones((1, 32), np.float32)),
            _batch(0, [8], np.ones((1, 32), np.float32)),
            _batch(0, [1], np.ones((1, 31), np.float32)),
        ):
            with pytest.raises(Exception, match="use the lead's store"):
                shard.handle(batch)
        with pytest.raises(ConfigError, match="does not answer"):
            shard.handle(_command_of_another_kind())
        shard.engine.cache.check_integrity()
    finally:
        shard.close()


def _command_of_another_kind() -> object:
    from tiermoe.proto.messages import StoreRequest

    return StoreRequest(0, np.zeros(1, np.int32))


def test_sums_follow_the_norm_after_each_expert(olmoe: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tiny model has one; a shard must apply it before the weights."""
    build = shard_module.build_blocks

    def with_norm(*args: Any) -> list[MoeBlock]:
        return [replace(block, post=torch.nn.LayerNorm(32)) for block in build(*args)]

    monkeypatch.setattr(shard_module, "build_blocks", with_norm)
    worker = ShardWorker(_settings(2, budget=0.5), 1, olmoe.store.describe().path, LocalDirectory())
    try:
        pairs = [(1, 0, 0.5), (1, 2, 0.25), (3, 1, 1.0), (3, 2, 2.0)]
        _check_sums(worker, 3, pairs, lambda y: torch.nn.functional.layer_norm(y, (32,)))
    finally:
        worker.close()


# one row; a row without experts, and one twice through the same; more rows of an expert than native kernels take
@pytest.mark.parametrize(("rows", "pairs"), [
    (1, [(5, 0, 0.5), (1, 0, 0.25)]), (4, [(1, 3, 0.5), (1, 3, 0.25), (7, 0, 1.0), (3, 3, 2.0), (3, 2, 1.0)]),
    (20, [(3, row, 0.1 * row) for row in range(20)] + [(1, 7, 1.0)]), (2, []),
])  # fmt: skip
def test_sums_of_rows_with_different_numbers_of_experts(
    rows: int, pairs: list[tuple[int, int, float]], olmoe: Tiny
) -> None:
    worker = ShardWorker(_settings(2, budget=0.5), 1, olmoe.store.describe().path, LocalDirectory())
    try:
        assert isinstance(worker.engine._layers[0].executor, CpuExecutor)
        _check_sums(worker, rows, pairs, lambda y: y)
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("rows", "whole_layers", "held"), [(64, True, {9, 11, 13, 15}), (63, True, set()), (64, False, set())]
)
def test_a_shard_streams_its_part_of_the_next_layer_where_a_pass_sweeps(
    rows: int, whole_layers: bool, held: set[int], olmoe: Tiny
) -> None:
    config = settings(
        1.0, policy=policy("next-gate", whole_layers=whole_layers), shards=ShardSettings(count=2, ownership="expert")
    )
    worker = ShardWorker(config, 1, olmoe.store.describe().path, LocalDirectory())
    try:
        _check_sums(worker, rows, [(e, row, 0.5) for e in (1, 3, 5, 7) for row in range(rows)], lambda y: y)
        assert set(worker.engine.cache.residency.held()) == {1, 3, 5, 7} | held
        worker.engine.cache.check_integrity()
    finally:
        worker.close()


def test_long_prompts_stream_on_every_gpu(tiny: Callable[[str], Tiny]) -> None:
    """Each queues its own part, and the tokens are those without prefetch."""
    model, prompt, found = tiny("hunyuan_v1_moe"), (_PROMPTS[0] * 200)[:200], list[list[int]]()  # two of four experts
    for prefetch in ({"prefetch": "none"}, {"prefetch": "next-gate", "whole_layers": True}):
        config = settings(1.0, policy=policy(**prefetch), shards=ShardSettings(count=2))  # type: ignore[arg-type]
        with serving_group(model.store, config) as group:
            lead, other = group.lead.engine, group.shards[0].engine
            found += greedy(group.lead, [prompt], 2)
            if prefetch["prefetch"] == "none":
                continue
            queued = [engine.stats().prefetch_sources["next-gate"].queued for engine in (lead, other)]
            assert queued[0] > 0
            assert queued[1] > 0
    assert found[0] == found[1]


def _check_sums(
    worker: ShardWorker, rows: int, pairs: list[tuple[int, int, float]], norm: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Of layer 0, against torch. pairs: expert, row and weight, by expert."""
    hidden = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1))
    experts = list(dict.fromkeys(expert for expert, *_ in pairs))
    counts = [sum(own == expert for own, *_ in pairs) for expert in experts]
    batch = ExpertBatch(
        0, np.array(experts, np.int32), np.zeros(len(experts), np.uint8), np.cumsum([0, *counts], dtype=np.int32),
        np.array([row for _, row, _ in pairs], np.int32), np.array([weight for *_, weight in pairs], np.float32),
        hidden.numpy(),
    )  # fmt: skip
    found = torch.tensor(worker.engine.run(batch).partial)
    gate_up, down = worker.engine.cache.where.weights[0].tensors
    expected = torch.zeros(rows, 32)
    for expert, row, weight in pairs:
        pre = gate_up[expert].float() @ hidden[row]  # [I, 2]
        y = (torch.nn.functional.silu(pre[:, 0]) * pre[:, 1]) @ down[expert].float()
        expected[row] += weight * norm(y)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_does_not_go_together_is_refused(olmoe: Tiny, tmp_path: Path) -> None:
    view = olmoe.store.describe()
    with pytest.raises(ConfigError, match="besides the lead"):
        GpuWorker(_settings(2), view).start()
    ndp = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="monde"))
    with pytest.raises(ConfigError, match="link of one GPU"):
        GpuWorker(settings(0.5, policy=ndp, shards=ShardSettings(count=2)), view).start()
    for index in (0, 2):
        with pytest.raises(ConfigError, match="no shard worker"):
            ShardWorker(_settings(2), index, view.path, LocalDirectory())
    small = settings(0.25, policy=policy(preload="all"), shards=ShardSettings(count=2))
    with pytest.raises(ConfigError, match="keeps every expert on 2 GPUs"):
        ShardWorker(small, 1, view.path, LocalDirectory())


def test_a_shard_of_another_group_is_not_taken(olmoe: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiermoe.actors.engine.peers.shards._START_S", 0.5)
    config = _settings(2)
    group = Group(_settings(3), olmoe.store.describe().path)
    shard = group.start_shard(1)
    try:
        from tiermoe.proto.peers import PeerLink

        lead = GpuWorker(config, olmoe.store.describe(), shards=[PeerLink(group.board, name="shard/1")])
        with pytest.raises(RuntimeFailure, match="has count 3, this side 2"):
            lead.start()
    finally:
        shard.close()


L, E, G = 2, 6, 3


def holding(*keys: int) -> ExpertCache:
    found = virtual_cache(L, E, slots=4)
    found.core.preload(keys)
    return found


def told(*keys: int, resting: bool = False) -> Any:
    """What a shard tells that holds these."""
    return ShardResidency.encode(holding(*keys).residency, resting)


@pytest.mark.parametrize("resting", [False, True])
def test_an_encoded_residency_is_decoded(resting: bool) -> None:
    cache = holding(1, 7, 11)
    packed = ShardResidency.encode(cache.residency, resting)
    assert packed.nbytes == 2
    held = ShardResidency.decode(packed, L * E)
    assert np.flatnonzero(held.here).tolist() == [1, 7, 11]
    assert (held.vacant, held.resting) == (True, resting)
    cache.prefetch([2])  # on its way
    cache.core.leave([7], 1)
    cache.prefetch([3])
    held = ShardResidency.decode(ShardResidency.encode(cache.residency, resting), L * E)
    assert np.flatnonzero(held.here).tolist() == [1, 2, 3, 11]
    assert not held.vacant
    cache.check_integrity()
    assert ShardResidency.decode(packed, 4 * L * E) is None
    assert ShardResidency.decode(np.zeros(0, np.uint8), L * E) is None


class _Peer:
    def __init__(self) -> None:
        self.available, self.connections, self.resident, self.asked = True, 1, None, set()


class _Shards:
    def __init__(self) -> None:
        self.peers = {"shard/1": _Peer(), "shard/2": _Peer()}

    def owner_of(self, key: int) -> int:
        return key % G


@pytest.fixture
def shards() -> Any:
    return _Shards()


def _seen(caches: PeerCaches, layer: int, *own: int) -> tuple[list[int], list[int], list[bool]]:
    view = caches.join(layer, RerouteView(np.isin(np.arange(E), own), 1, 2, 0))
    return np.flatnonzero(view.available).tolist(), view.shard_of.tolist(), view.filling.tolist()


def test_the_view_joins_what_each_shard_holds_of_its_own(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    assert _seen(caches, 0, 0) == ([0], [0, 1, 2] * 2, [False, True, True])  # nothing told yet
    one.resident = told(1, 7, 10)  # 7 and 10 are experts 1 and 4 of layer 1
    two.resident = told(2, 8, 11, 5)
    assert _seen(caches, 0, 0, 4) == ([0, 1, 2, 5], [0, 1, 2] * 2, [False, True, False])  # 4 is not run on the lead
    assert _seen(caches, 1) == ([1, 2, 4, 5], [0, 1, 2] * 2, [False, True, False])
    two.resident = told(2)
    assert _seen(caches, 1) == ([1, 4], [0, 1, 2] * 2, [False, True, False])  # it was full once


def test_what_each_owner_holds_is_known_by_expert(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    keys = [0, 1, 4, 7, 2, 5, 11]
    assert caches.hold(keys) == [False] * 7  # nothing told yet
    one.resident = told(1, 7)
    two.resident = told(2, resting=True)
    one.asked, two.asked = {4}, {5}  # shard 2 rests
    assert caches.hold(keys) == [False, True, True, True, True, False, False]


def test_prefetches_since_the_last_answer_are_on_their_way(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    one.resident, two.resident = told(1), told(2, resting=True)
    one.asked, two.asked = {4, 10}, {5, 11}  # experts 4 and 5 of both layers; shard 2 rests
    assert _seen(caches, 0)[0] == [1, 2, 4]
    assert _seen(caches, 1)[0] == [4]


def test_experts_of_a_lost_shard_are_where_the_lead_has_them(shards: Any) -> None:
    caches, (one, two) = PeerCaches(shards, L, E), shards.peers.values()
    one.resident = told(1, 4, 7, 10)
    two.resident = told(2, 5, 8, 11)
    assert _seen(caches, 0, 0)[2] == [False, False, False]
    one.available = False
    assert _seen(caches, 0, 0, 4) == ([0, 2, 4, 5], [0, 0, 2] * 2, [False, False, False])
    one.available, one.connections, one.resident, one.asked = True, 2, None, set()  # restarted: empty, it seems
    assert _seen(caches, 0, 0, 4) == ([0, 2, 5], [0, 1, 2] * 2, [False, True, False])
    one.resident = told(1)
    assert _seen(caches, 0, 0)[2] == [False, True, False]


def test_residency_bits_of_another_model_are_ignored(shards: Any) -> None:
    caches, (one, _) = PeerCaches(shards, L, E), shards.peers.values()
    one.resident = np.full(9, 255, np.uint8)
    assert _seen(caches, 0) == ([], [0, 1, 2] * 2, [False, True, True])


_LOSSY_NEW = 16


@pytest.fixture(scope="module")
def store(olmoe: Tiny, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """2 layers of 8 experts, of which a token takes 2."""
    out = prepared(olmoe.checkpoint, tmp_path_factory.mktemp("shard-substitution") / "store")
    add_random_profile(Path(out.describe().path), 2)
    return out


def _lossy_settings(
    prefetch: str = "none", on_miss: str = "substitute", shards: int = 2, **options: Any
) -> EngineSettings:
    policy = PolicySettings(
        name="test", lossless=False, prefetch={"kind": prefetch}, on_miss=on_miss,  # type: ignore[arg-type]
        substitution=dict(**options),
    )  # fmt: skip
    return settings(0.25, policy=policy, shards=ShardSettings(count=shards))


class _Watched:
    """Every decision of the lead's rule."""

    def __init__(self, group: Group) -> None:
        self.moves: list[tuple[int, int]] = []  # shard of the replaced expert, and of its buddy
        engine = group.lead.engine
        rule = engine.layers[0].hooks.reroute[0].rule
        owner = np.array(owners(len(engine.layers), engine.experts, group.settings.shards))
        decide = rule.reroute

        def reroute(layer: int, ids: Any, weights: Any, probabilities: Any, view: RerouteView) -> Rerouted:
            found = decide(layer, ids, weights, probabilities, view)
            changed = found.ids != ids
            for before, after in zip(ids[changed].tolist(), found.ids[changed].tolist(), strict=True):
                assert not view.available[before]
                assert view.available[after]
                base = layer * engine.experts
                self.moves.append((int(owner[base + before]), int(owner[base + after])))
            return found

        rule.reroute = reroute


@pytest.mark.parametrize("prefetch", ["none", "next-gate"])
def test_buddies_across_shards(store: ExpertStore, prefetch: str) -> None:
    with serving_group(store, _lossy_settings(prefetch)) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _LOSSY_NEW)
        stats = group.lead.stats()
        assert stats.substitutions == len(watched.moves) > 0
        assert {(0, 1), (1, 0)} <= set(watched.moves)
        assert stats.shard_refusals == stats.shard_losses == 0
        # what the lead was told is what the shard holds: it has answered last, and nothing was asked of it since
        (peer,) = group.lead.engine.shards.peers.values()
        if prefetch == "none":
            held = np.unpackbits(peer.resident, count=16).nonzero()[0].tolist()
            assert held == sorted(group.shards[0].engine.cache.residency.held())


def test_less_is_loaded_than_without_buddies(store: ExpertStore) -> None:
    """The lead's view is exact without prefetch: a shard loads only while it fills its cache."""
    loaded = {}
    for on_miss in ("load", "substitute"):
        with serving_group(store, _lossy_settings(on_miss=on_miss)) as group:
            greedy(group.lead, _PROMPTS, _LOSSY_NEW)
            loaded[on_miss] = [part["misses"] for part in group.lead.shard_stats()]
    assert all(few < many for few, many in zip(loaded["substitute"], loaded["load"], strict=True))
    assert loaded["substitute"][1] <= 8  # its slots, and those of the one layer in which it filled the last


def test_at_kappa_1_buddies_are_on_the_lead(store: ExpertStore) -> None:
    with serving_group(store, _lossy_settings(kappa=1.0)) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _LOSSY_NEW)
        assert {there for _, there in watched.moves} == {0}


def test_a_shard_is_lost_and_comes_back(store: ExpertStore) -> None:
    with serving_group(store, _lossy_settings("next-gate")) as group:
        watched = _Watched(group)
        greedy(group.lead, _PROMPTS, _LOSSY_NEW)
        (peer,) = group.lead.engine.shards.peers.values()
        group.shards[0].close()
        greedy(group.lead, _PROMPTS[:1], 2)  # notices
        watched.moves.clear()
        greedy(group.lead, _PROMPTS, _LOSSY_NEW)
        assert group.lead.stats().shard_losses == 1
        group.shards[0] = group.start_shard(1)
        try:
            assert peer.wait_until_found(10.0)
            assert peer.resident is None
            greedy(group.lead, _PROMPTS, _LOSSY_NEW)
            assert group.shards[0].engine.stats().total().misses > 0  # it fills its cache again
            assert (0, 1) in watched.moves
        finally:
            group.shards[0].close()


def test_dropping_and_random_replacement_run_over_shards(store: ExpertStore) -> None:
    for on_miss in ("drop", "random"):
        with serving_group(store, _lossy_settings(on_miss=on_miss)) as group:
            greedy(group.lead, _PROMPTS, _LOSSY_NEW)
            stats = group.lead.stats()
            assert (stats.dropped > 0, stats.substitutions > 0) == (on_miss == "drop", on_miss == "random")
