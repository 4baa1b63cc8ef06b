"""Expert slots and KV cache in one memory: the rule, memory that comes and goes, caches that are resized, serving."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SLOT_BYTES, Fixture, GatedDevice, Rig
from channel_peer import wait_until
from fake_gpu import FakeGpu, Hazard
from hypothesis import given
from hypothesis import strategies as st
from serving import greedy, policy, prepared, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.budget import MARGIN_BYTES, MARGIN_SHARE, AutoBudget, Shares, SharingRule
from tiermoe.actors.engine import make_device as devices
from tiermoe.actors.engine.cache.device import HostArena
from tiermoe.actors.engine.cuda.arena import CudaArena, Pages
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.serving import steps
from tiermoe.actors.engine.serving.shared_memory import SectorPool, SharedMemory
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.residency import ResidencyError, State
from tiermoe.actors.settings import KvSettings, shared_bytes
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import ExpertShape
from tiermoe.cluster.config import load_policy
from tiermoe.errors import BudgetError

PAGE = mmap.PAGESIZE
SHARES = Shares(slot_bytes=100, least_slots=3, most_slots=10, block_bytes=30, least_blocks=4, most_blocks=20)
PATIENCE, KEEP = SharingRule.PATIENCE, SharingRule.KEEP


# -- the rule ------------------------------------------------------------------------------------------------------


# blocks that are there, then (demand, forward, blocks that the prefix cache holds) -> blocks that are to be there
RULE: dict[str, tuple[int, list[tuple[int, int, int, int]]]] = {
    "at once, in steps of two": (4, [(4, 0, 0, 4), (5, 0, 0, 6), (7, 0, 0, 8), (99, 0, 0, 20)]),
    "back once idle for a while, to the greatest demand meanwhile": (
        20, [(3, 10, 0, 20), (9, 12, 0, 20), (0, 10 + PATIENCE, 0, 10)]),
    "a moment of demand begins the wait anew; less than two steps below": (
        12, [(0, 0, 0, 12), (9, PATIENCE - 1, 0, 12), (0, PATIENCE, 0, 12), (0, 2 * PATIENCE, 0, 4)]),
    "what the prefix cache holds stays": (20, [(0, 0, 9, 20), (0, PATIENCE, 9, 10)]),
    "and longer": (10, [*((0, forward, 9, 10) for forward in (0, PATIENCE, 2 * PATIENCE, KEEP - 1)), (0, KEEP, 9, 4)]),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE)
def test_blocks_come_at_once_and_go_once_idle(case: str) -> None:
    there, asked = RULE[case]
    rule = SharingRule(SHARES)
    rule.settled(there)
    for demand, forward, held, wanted in asked:
        if forward != asked[0][1]:
            assert rule.is_due(forward) == (wanted < there)
        assert rule.wanted(demand, forward, held) == wanted
    rule.settled(wanted)
    assert not rule.is_due(10_000)  # asked anew


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(1, 200)), max_size=40))
def test_demand_is_met_within_the_bounds(steps: list[tuple[int, int, int]]) -> None:
    rule, forward = SharingRule(SHARES), 0
    for demand, held, passed in steps:
        forward += passed
        wanted = rule.wanted(demand, forward, held)
        assert 4 <= wanted <= 20
        assert wanted >= min(demand, 20)
        assert 3 <= SHARES.slots(wanted) <= 10
        if wanted != rule.blocks:
            rule.settled(wanted)


# -- memory that comes and goes ------------------------------------------------------------------------------------


def in_memory(tensor: torch.Tensor) -> int:
    """Bytes of a range that have physical memory."""
    pages = -(-tensor.nbytes // PAGE)
    found = (ctypes.c_ubyte * pages)()
    code = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(pages * PAGE), found
    )
    assert code == 0
    return sum(byte & 1 for byte in found) * PAGE


def test_host_memory_is_given_back() -> None:
    arena = HostArena(10 * PAGE + 7)
    assert arena.tensor.numel() == 10 * PAGE + 7
    address = arena.tensor.data_ptr()
    assert in_memory(arena.tensor) == 0
    arena.resize(10 * PAGE + 7)
    arena.tensor.fill_(3)
    assert in_memory(arena.tensor) == 11 * PAGE
    arena.resize(4 * PAGE - 5)
    assert in_memory(arena.tensor) == 4 * PAGE
    assert arena.tensor.data_ptr() == address
    assert int(arena.tensor[: 4 * PAGE].sum()) == 3 * 4 * PAGE
    arena.resize(6 * PAGE)
    arena.tensor[: 6 * PAGE].fill_(1)
    assert in_memory(arena.tensor) == 6 * PAGE
    arena.close()
    assert in_memory(arena.tensor) == 0
    arena.close()


@pytest.fixture
def gpu() -> FakeGpu:
    made = FakeGpu()
    made.pages.granularity = PAGE
    return made


def test_pages_of_one_range_go_to_the_next(gpu: FakeGpu) -> None:
    """The driver is not asked for what is there: no other process takes it in between."""
    pages = Pages(gpu.pages)
    slots, blocks = CudaArena(pages, 8 * PAGE), CudaArena(pages, 8 * PAGE)
    gpu.memory, gpu.others = 20 * PAGE, 10 * PAGE
    slots.resize(8 * PAGE)
    slots.tensor.fill_(5)
    assert (gpu.pages.created, gpu.free_bytes()) == (9, PAGE)
    gpu.others = 11 * PAGE  # another process takes the rest
    with pytest.raises(torch.OutOfMemoryError):
        blocks.resize(4 * PAGE)
    assert len(gpu.pages.mapped) == 9
    slots.resize(5 * PAGE - 1)
    blocks.resize(4 * PAGE)
    assert (gpu.pages.created, len(gpu.pages.mapped)) == (9, 9)
    assert int(slots.tensor[: 5 * PAGE].sum()) == 5 * 5 * PAGE  # what stays keeps its bytes
    slots.close()
    blocks.close()
    pages.close()
    assert (gpu.pages.created, gpu.free_bytes()) == (0, 9 * PAGE)


def test_memory_that_is_in_use_does_not_go(gpu: FakeGpu) -> None:
    device = CudaDevice(gpu)
    arena = device.arena(4 * PAGE)
    arena.resize(4 * PAGE)
    gpu.idle = True
    gpu.kernel([arena.tensor[3 * PAGE :]], lambda: None)
    with pytest.raises(Hazard, match="may still use"):
        arena.resize(PAGE)
    device.settle()
    arena.resize(PAGE)
    with pytest.raises(Hazard, match="not there"):
        gpu.kernel([arena.tensor[3 * PAGE :]], lambda: None)
    gpu.hazards.clear()
    device.close()


class Paged:
    """transformers' cache of eight sectors of one block each, as far as memory that is shared asks it."""

    num_sectors = num_blocks = 8
    bytes_per_sector = PAGE

    def __init__(self) -> None:
        ledger = SimpleNamespace(cached_blocks={}, hash_to_block={}, block_to_hash={})
        self.pool: Any = None
        self.ledger, self.cache_tensor = ledger, None
        self.cache_allocators = {"full": SimpleNamespace(
            index=0, tokens_per_page=4, blocks_per_sector=1, ledger=ledger, block_table={},
            register_cache_tensor=self.register,
        )}  # fmt: skip

    def register(self, nbytes: int, total: int, tensor: torch.Tensor, pool: SectorPool) -> None:
        pool.set_blocks_per_sector(0, 1)

    def hold(self, blocks: int) -> list[int]:
        """A request's blocks."""
        for _ in range(blocks):
            self.pool.allocate_sector(0)
        return self.pool.get_free_blocks(0, blocks)

    def keep(self, block: int) -> None:
        """Only the prefix cache holds it any more."""
        self.ledger.cached_blocks[block] = None
        self.ledger.block_to_hash[block], self.ledger.hash_to_block[block] = block, block


def test_one_last_block_of_the_prefix_cache_stays_and_then_leaves() -> None:
    """It kept all blocks for good: fewer of them would have sufficed, but for where this one lies."""
    cached, paged = Fixture(2, GatedDevice(), most=6), Paged()
    memory = SharedMemory(cached.cache, cached.cache.resize)
    memory.adopt(paged)
    idle = SimpleNamespace(active_requests={}, waiting_requests={}, max_requests_per_batch=4, safety_margin=0)
    request = SimpleNamespace(request_id="a", initial_tokens=[0] * 20, generated_tokens=[])  # five, and one more
    memory.fit(SimpleNamespace(**vars(idle) | {"active_requests": {"a": request}}))
    assert paged.num_sectors == 6
    blocks = paged.hold(6)
    paged.keep(blocks[-1])
    paged.pool.free_blocks(0, blocks[:-1])
    for moment in range(KEEP + 2):
        memory.fit(idle)
        assert (paged.num_sectors == 6) == (moment < KEEP), moment
        memory.stepped()
    assert (paged.num_sectors, paged.ledger.cached_blocks) == (2, {})
    assert sorted(paged.pool.free_sectors) == [2, 3]
    cached.cache.close()


# -- caches that are resized ---------------------------------------------------------------------------------------


@pytest.fixture
def cached() -> Iterator[Fixture]:
    """A cache of two slots, which may have six."""
    made = Fixture(2, GatedDevice(), most=6)
    made.cache.resize(6)
    yield made
    for _ in range(50):
        made.device.go.release()  # type: ignore[attr-defined]
    made.cache.close()


def check_weights(fixture: Fixture) -> None:
    fixture.cache.check_integrity()
    for key in fixture.resident():
        fixture.check_slot(key)


def test_experts_leave_in_order_of_eviction_and_the_others_move(cached: Fixture) -> None:
    cached.forward(0, 0, 1, 2, 3)  # slots 0 to 3
    cached.forward(1, 0, 1)  # keys 4 and 5 in slots 4 and 5
    cached.forward(0, 1)
    assert (cached.stats.slots, cached.stats.expert_bytes_peak) == (6, 6 * SLOT_BYTES)
    cached.cache.resize(3)
    assert cached.resident() == {4, 5, 1}  # used last
    assert {cached.residency.slot(key) for key in (4, 5, 1)} == {0, 1, 2}
    check_weights(cached)
    assert (cached.stats.slots, cached.residency.free_slots) == (3, 0)
    cached.cache.resize(5)
    cached.forward(0, 0, 2)
    assert cached.resident() == {4, 5, 1, 0, 2}
    check_weights(cached)
    assert cached.stats.expert_bytes_peak == 6 * SLOT_BYTES


def test_copies_into_slots_that_go_are_waited_for_or_cancelled(cached: Fixture) -> None:
    device = cached.device
    assert isinstance(device, GatedDevice)
    device.held = True
    assert cached.cache.prefetch([0, 1, 2, 3, 4]) == 5
    device.await_start()  # the copy into slot 0 is under way; nobody waits for it
    cached.cache.resize(3)
    assert [cached.residency.state(key) for key in range(5)] == [State.LOADING] * 3 + [State.ABSENT] * 2
    for _ in range(3):
        device.go.release()
    cached.settle()
    assert cached.resident() == {0, 1, 2}
    cached.cache.resize(6)
    while not device.started.empty():
        device.started.get()
    cached.cache.prefetch([5])
    device.await_start()
    cached.release_when_awaited(5)  # into slot 3, begun: it is waited for, and moves
    cached.cache.resize(3)
    assert 5 in cached.resident()
    check_weights(cached)


def test_a_pinned_expert_keeps_its_slot(cached: Fixture) -> None:
    cached.forward(0, 0, 1, 2, 3)
    plan = cached.begin(0, 3)
    with pytest.raises(ResidencyError, match="expert 3 cannot move from slot 3"):
        cached.cache.resize(2)
    assert (cached.residency.slots, cached.residency.state(3)) == (6, State.RESIDENT)
    check_weights(cached)
    cached.end(plan)
    cached.cache.resize(2)
    check_weights(cached)


@pytest.mark.parametrize("seed", range(6))
def test_slots_of_a_gpu_go_once_nothing_uses_them(seed: int) -> None:
    """Kernels and copies of a fake GPU run late and in any order; memory that goes under them is a hazard."""
    shape = ExpertShape(num_experts=EXPERTS, hidden=64, intermediate=16, gates=2, has_bias=False)
    rig, rng = Rig(2, seed, most=8, shape=shape), random.Random(seed)
    pages = rig.gpu.pages
    for _ in range(25):
        slots = rng.randint(2, 8)
        rig.cache.resize(slots)
        assert len(pages.mapped) == sum(-(-slots * n // PAGE) for n in (4096, 2048))
        for _ in range(rng.randint(0, 3)):
            guesses = rng.sample(range(KEYS), 2)
            rig.forward(rng.randrange(LAYERS), rng.sample(range(EXPERTS), rng.randint(1, 2)), guesses)
    rig.cache.resize(2)
    rig.finish()
    assert pages.created == 0
    assert not rig.gpu.hazards


def test_without_room_slots_stay_as_they_are() -> None:
    shape = ExpertShape(num_experts=EXPERTS, hidden=64, intermediate=16, gates=2, has_bias=False)
    rig = Rig(2, most=8, shape=shape)
    rig.gpu.memory = rig.gpu.pages.created * PAGE + 3 * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        rig.cache.resize(8)
    assert (rig.residency.slots, len(rig.gpu.pages.mapped)) == (2, 3)
    rig.forward(0, [0, 1])
    rig.finish()


# -- serving -------------------------------------------------------------------------------------------------------

SLOT, KV_BYTES, LIMIT = 3 * 32 * 24 * 4, 2 * 2 * 2 * 8 * 4, 192  # of an expert; of a token
KV = KvSettings(page_size=16, tokens=LIMIT, max_batch_tokens=32, max_num_seqs=8)
OTHERS = ("next-gate", "activeevict-lossless", "moe-infinity")
LONGEST = [(5 * j) % 125 + 3 for j in range(LIMIT - 2)]
PROMPTS = [[(7 * i + 3 * j) % 125 + 3 for j in range(20 + 9 * i)] for i in range(5)]


def auto(slots: int) -> AutoBudget:
    """`budget: auto` that leaves so many slots beside the whole KV cache, on the stand-in."""
    kv = KV_BYTES * LIMIT
    free = int((kv + MARGIN_BYTES + (slots + 0.5) * SLOT) / (1 - MARGIN_SHARE))
    return AutoBudget(free=free, final=True, kv=kv, slot=SLOT, most=16 * SLOT, tokens=LIMIT, chunk=32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_checkpoint("qwen3_moe", folder / "model")
    return prepared(folder / "model", folder / "store")


def run(worker: GpuWorker, *prompts: list[int], tokens: int = 12) -> list[list[int]]:
    return greedy(worker, prompts, tokens)


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments without work are short, and blocks go back in `rest` only."""
    monkeypatch.setattr(steps, "_IDLE_S", 0.005)
    monkeypatch.setattr(SharingRule, "PATIENCE", 1 << 30)
    monkeypatch.setattr(SharingRule, "KEEP", 1 << 30)


def rest(worker: GpuWorker, slots: int) -> None:
    """Blocks have been idle for long enough, until experts have so many slots."""
    rule: Any = worker.batcher._manager.memory.rule
    rule.PATIENCE, rule.KEEP = 3, 6
    wait_until(lambda: worker.stats().slots >= slots, 30.0)
    del rule.PATIENCE, rule.KEEP
    worker.engine.cache.check_integrity()


@pytest.fixture(scope="module")
def alone(store: ExpertStore) -> dict[int, list[int]]:
    """By prompt's length the tokens of each prompt alone, with a KV cache of its own."""
    with serving(store, settings(0.25, kv=KV)) as worker:
        found = {len(prompt): run(worker, prompt)[0] for prompt in PROMPTS}
        return found | {LIMIT - 2: run(worker, LONGEST, tokens=2)[0]}


def check(worker: GpuWorker, alone: dict[int, list[int]], count: int = len(PROMPTS)) -> None:
    """So many prompts together give each its tokens."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    assert run(worker, *prompts) == [alone[len(prompt)] for prompt in prompts]


def test_requests_take_the_memory_of_slots_and_give_it_back(
    store: ExpertStore, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with serving(store, settings(auto(1), kv=KV)) as worker:
        memory = worker.batcher._manager.memory
        shares, blocks, slots = memory.rule.shares, memory._arena.tensor, worker.engine.cache.pool.gate_up
        most, shared = shares.slots(shares.least_blocks), worker.stats().shared
        assert (worker.plan()["slots"], shared.slots_least, shared.slots_most) == (most, 1, most)
        assert most > 3
        check(worker, alone, 1)
        filled = in_memory(slots)
        check(worker, alone)  # the KV cache needs all of it
        grown = worker.stats()
        assert (grown.slots, grown.shared.kv_tokens, grown.shared.kv_tokens_most) == (1, LIMIT, LIMIT)
        assert in_memory(slots) < filled  # the kernel has it again
        held = in_memory(blocks)
        rest(worker, most)
        assert worker.stats().shared.to_experts >= 1
        assert in_memory(blocks) <= (2 + shares.least_blocks) * shares.block_bytes + PAGE < held
        check(worker, alone, 12)  # more than the memory holds: some wait
        rest(worker, most)
        assert run(worker, LONGEST, tokens=2) == [alone[LIMIT - 2]]  # of the limit's length, while slots had the memory
        stats = worker.stats()
        assert stats.slots == 1
        assert stats.expert_bytes_peak == stats.expert_budget_bytes == most * SLOT
        worker.batcher.close()
        memory.close()  # as where requests cannot be batched
        assert (stats.slots, stats.shared, stats.expert_budget_bytes // SLOT, in_memory(blocks)) == (1, None, 1, 0)


def made_gpu(monkeypatch: pytest.MonkeyPatch, memory: int) -> FakeGpu:
    """A GPU for workers, with so much memory beside that of another process."""
    gpu = FakeGpu(pin_all=False)
    gpu.eager, gpu.pages.granularity = True, PAGE
    gpu.memory = gpu.others + memory
    monkeypatch.setattr(devices, "make_device", lambda *_: CudaDevice(gpu, staging_bytes=1 << 16))
    return gpu


TAKEN = 4 * SLOT + KV_BYTES * (LIMIT + 2 * 16)  # by four slots and the whole KV cache


def test_on_a_gpu_beside_other_processes(
    store: ExpertStore, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages go from slots to blocks and back; the rest of the GPU is another process's."""
    hurry(monkeypatch)
    gpu = made_gpu(monkeypatch, TAKEN + 3 * PAGE)  # each of three ranges may end within a page
    with serving(store, settings(auto(4), kv=KV)) as worker:
        most = worker.stats().shared.slots_most
        assert most > 6
        for _ in range(2):
            check(worker, alone)
            assert worker.stats().slots == 4
            rest(worker, most)
        assert run(worker, LONGEST, tokens=2) == [alone[LIMIT - 2]]
        assert worker.stats().shared.to_kv >= 3
    assert gpu.pages.most <= TAKEN + 3 * PAGE
    assert gpu.pages.created == 0
    assert not gpu.hazards


def test_too_little_memory_is_refused_at_the_start(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process took some since the worker asked: no request is to find out."""
    gpu = made_gpu(monkeypatch, TAKEN - 2 * PAGE)
    with (
        pytest.raises(BudgetError, match=r"no room for a KV cache of 56\.0+ KiB"),
        serving(store, settings(auto(4), kv=KV)),
    ):
        pass
    assert gpu.pages.created == 0


@pytest.mark.parametrize("name", ["auto", *[pytest.param(n, marks=pytest.mark.slow) for n in OTHERS]])
def test_every_kind_of_policy_keeps_its_tokens(
    name: str, store: ExpertStore, alone: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    with serving(store, settings(auto(4), kv=KV, policy=load_policy(name))) as worker:
        most = worker.stats().shared.slots_most
        for _ in range(2):
            check(worker, alone)
            assert worker.stats().slots < most
            rest(worker, most)
            check(worker, alone, 1)


def test_what_has_its_memory_apart() -> None:
    split = policy().model_copy(update={"split": load_policy("moepic").split})
    assert shared_bytes(settings(auto(4))) == KV_BYTES * LIMIT
    for apart in (
        settings(0.25), settings(auto(4), kv=KV.model_copy(update={"elastic": False})),
        settings(auto(4), kv=KV.model_copy(update={"batching": "serial"})), settings(auto(4), policy=split),
        settings(auto(4), policy=policy().model_copy(update={"evict_writeback": True})),
    ):  # fmt: skip
        assert shared_bytes(apart) == 0
