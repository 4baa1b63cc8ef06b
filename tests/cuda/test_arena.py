"""Device memory page by page (`CudaArena`): values stay, pages change hands, and KV cache and expert slots share it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from channel_peer import wait_until
from serving import greedy, prepared, reference_greedy, serving

from tiermoe.actors.budget import MARGIN_BYTES, MARGIN_SHARE, AutoBudget, Budget
from tiermoe.actors.engine.cuda.arena import CudaArena, CudaDriver, Pages
from tiermoe.actors.settings import EngineSettings, KvSettings
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.bench.serving import heldout_prompts

MiB = 1 << 20


@pytest.fixture
def pages(gpu: torch.device) -> Iterator[Pages]:
    with closing(Pages(CudaDriver(gpu))) as made:
        yield made


def test_values_stay_while_pages_come_and_go(pages: Pages, gpu: torch.device) -> None:
    page = pages.driver.granularity
    with closing(CudaArena(pages, 64 * page)) as one, closing(CudaArena(pages, 64 * page)) as other:
        assert one.tensor.device == gpu
        assert (one.tensor.dtype, one.tensor.shape) == (torch.uint8, (64 * page,))
        one.resize(10 * page)
        one.tensor[: 10 * page].random_()
        kept = one.tensor[: 3 * page].clone()
        torch.cuda.synchronize(gpu)
        before = torch.cuda.mem_get_info(gpu)[0]
        one.resize(3 * page)
        other.resize(8 * page)  # its seven more are those that the first gave back
        assert torch.cuda.mem_get_info(gpu)[0] == before
        other.tensor[: 8 * page].fill_(7)
        assert torch.equal(one.tensor[: 3 * page], kept)
        one.resize(64 * page)
        one.tensor[3 * page :].copy_(torch.ones(61 * page, dtype=torch.uint8, pin_memory=True), non_blocking=True)
        assert torch.equal(one.tensor[: 3 * page], kept)
        assert int(one.tensor[3 * page :].sum(dtype=torch.int64)) == 61 * page
        assert int(other.tensor[: 8 * page].sum(dtype=torch.int64)) == 7 * 8 * page
        torch.cuda.synchronize(gpu)


def test_without_memory_nothing_changes(pages: Pages, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's own refusal, of a page larger than the GPU: filling one page by page would take minutes."""
    page = pages.driver.granularity
    with closing(CudaArena(pages, 8 * page)) as arena:
        arena.resize(2 * page)
        arena.tensor[: 2 * page].fill_(5)
        torch.cuda.synchronize(gpu)
        whole = torch.cuda.get_device_properties(gpu).total_memory
        monkeypatch.setattr(pages.driver, "_granularity", -(-2 * whole // page) * page)
        with pytest.raises(torch.OutOfMemoryError, match="no memory left"):
            pages.driver.create()
        monkeypatch.undo()
        arena.resize(8 * page)
        assert int(arena.tensor[: 2 * page].sum(dtype=torch.int64)) == 5 * 2 * page
        torch.cuda.synchronize(gpu)


def test_speed_of_its_memory_and_of_a_resize(pages: Pages, gpu: torch.device, record_property: Any) -> None:
    """Printed and recorded, for no clock fails a test: a copy beside torch's own memory; 512 MiB come and go."""
    nbytes = 512 * MiB

    def seconds(act: Any) -> float:
        torch.cuda.synchronize(gpu)
        begin_s = time.perf_counter()
        act()
        torch.cuda.synchronize(gpu)
        return time.perf_counter() - begin_s

    with closing(CudaArena(pages, nbytes)) as arena:
        new_s = seconds(lambda: arena.resize(nbytes))
        away_s, back_s = [], []
        for _ in range(3):
            away_s.append(seconds(lambda: arena.resize(1)))
            back_s.append(seconds(lambda: arena.resize(nbytes)))
        own = torch.empty(nbytes, dtype=torch.uint8, device=gpu).random_()
        there = torch.empty_like(own)
        ours_s = min(seconds(lambda: arena.tensor.copy_(own)) for _ in range(5))
        theirs_s = min(seconds(lambda: there.copy_(own)) for _ in range(5))
        assert torch.equal(arena.tensor, own)
        for name, value in (
            ("copy_gbps", 2 * nbytes / ours_s / 1e9), ("torch_copy_gbps", 2 * nbytes / theirs_s / 1e9),
            ("map_ms", min(back_s) * 1e3), ("unmap_ms", min(away_s) * 1e3), ("create_ms", new_s * 1e3),
        ):  # fmt: skip
            print(f"{name}: {value:.3g}")
            record_property(name, value)


def test_kv_cache_and_experts_share_it(
    gpu: torch.device, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`budget: auto` on the default model: requests take pages of slots, which come back; tokens stay."""
    pytest.importorskip("transformers.generation.continuous_batching.cache_allocators")  # of 5.20 and later
    from transformers import AutoModelForCausalLM

    from tiermoe.actors.engine.serving.shared_memory import SharingRule

    monkeypatch.setattr(SharingRule, "PATIENCE", 1 << 30)
    monkeypatch.setattr(SharingRule, "KEEP", 1 << 30)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    store = prepared(default_model_dir(), tmp_path_factory.mktemp("shared") / "store")
    slot, token, limit = 3 * 256 * 64 * 4, 16 * 2 * 2 * 32 * 4, 1024
    kv = token * limit
    auto = AutoBudget(
        free=int((kv + MARGIN_BYTES + 32.5 * slot) / (1 - MARGIN_SHARE)), final=True, kv=kv, slot=slot, most=512 * slot,
        tokens=limit, chunk=64,
    )  # fmt: skip
    config = EngineSettings(
        policy=load_policy("next-gate"), budget=Budget(auto=auto), device=gpu.type, dtype="float32",
        integrity_checks=True,
        kv=KvSettings(page_size=16, tokens=limit, max_batch_tokens=64, max_num_seqs=12),
    )  # fmt: skip
    prompts = heldout_prompts(default_model_dir(), 6, 40)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).to(gpu).eval()
    expected = reference_greedy(model, prompts, 24)
    with serving(store, config) as worker:
        most = worker.stats().slots
        assert worker.stats().shared is not None, worker.plan()["notes"]
        for _ in range(2):
            assert greedy(worker, [*prompts, *prompts], 24) == [*expected, *expected]
            assert worker.stats().slots < most
            rule: Any = worker.batcher._manager.memory.rule
            rule.PATIENCE, rule.KEEP = 3, 6
            wait_until(lambda: worker.stats().slots == most, 30.0)
            del rule.PATIENCE, rule.KEEP
            worker.engine.cache.check_integrity()
