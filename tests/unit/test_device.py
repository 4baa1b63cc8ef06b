"""The CPU stand-in's link, and which device one gets."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from tiermoe.actors.engine.cache import device as cpu_device
from tiermoe.actors.engine.cache.device import Copied, CpuDevice, make_device
from tiermoe.actors.settings import CopySettings, LinkSettings
from tiermoe.errors import ConfigError


class Clock:
    """`time` for the device: passes only when slept."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(cpu_device, "time", clock)
    return clock


def copy(device: CpuDevice, nbytes: int = 4000) -> Copied:
    source = torch.arange(nbytes // 4, dtype=torch.float32)
    return device.copy((torch.empty_like(source),), (source,), None)


def test_a_copy_takes_latency_and_bytes_over_bandwidth(clock: Clock) -> None:
    copied = copy(CpuDevice(LinkSettings(gbps=0.001, latency_us=500)), 4000)
    assert copied.start_s == 100.0
    assert copied.end_s - copied.start_s == pytest.approx(0.0005 + 4000 / 1e6)
    assert clock.now_s == pytest.approx(copied.end_s)
    assert copied.event is None


def test_copies_follow_each_other_without_overlap(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001))
    first, second = copy(device), copy(device)
    assert second.start_s == pytest.approx(first.end_s)
    clock.now_s += 5.0
    third = copy(device)
    assert third.start_s == pytest.approx(second.end_s + 5.0)  # an idle link starts at once
    assert third.end_s == pytest.approx(third.start_s + 0.004)


def test_all_tensors_of_an_expert_share_one_latency(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001, latency_us=1000))
    source = (torch.zeros(10), torch.zeros(30))
    copied = device.copy(tuple(map(torch.empty_like, source)), source, None)
    assert copied.end_s - copied.start_s == pytest.approx(0.001 + 160 / 1e6)


def test_the_link_carries_the_bytes_of_the_slot(clock: Clock) -> None:
    device = CpuDevice(LinkSettings(gbps=0.001))
    source = torch.zeros(100, dtype=torch.bfloat16)
    copied = device.copy((torch.empty(100),), (source,), None)
    assert copied.end_s - copied.start_s == pytest.approx(400 / 1e6)


def test_no_rate_no_wait(clock: Clock) -> None:
    copy(CpuDevice(LinkSettings()))
    assert clock.slept_s == 0.0
    copy(CpuDevice(LinkSettings(latency_us=7)))
    assert clock.slept_s == pytest.approx(7e-6)


def test_the_real_clock_is_never_faster_than_the_link() -> None:
    device, copies, nbytes = CpuDevice(LinkSettings(gbps=0.01, latency_us=200)), 5, 40_000
    began_s = time.perf_counter()
    spans = [copy(device, nbytes) for _ in range(copies)]
    each_s = 200e-6 + nbytes / 0.01e9
    assert time.perf_counter() - began_s >= copies * each_s
    assert all(span.end_s - span.start_s >= each_s * 0.999 for span in spans)
    assert all(later.start_s >= earlier.end_s for earlier, later in pairwise(spans))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_widening_is_exact(stored: torch.dtype) -> None:
    source = torch.randn(64, generator=torch.Generator().manual_seed(0)).to(stored)
    slot = torch.full((64,), float("nan"))
    CpuDevice(LinkSettings()).copy((slot,), (source,), None)
    assert torch.equal(slot.to(stored), source)
    assert torch.equal(slot, source.float())


def test_a_tensor_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        CpuDevice(LinkSettings()).copy((torch.zeros(2),), (torch.zeros(2), torch.zeros(2)), None)


def test_the_cpu_does_not_claim_what_it_cannot() -> None:
    device = CpuDevice(LinkSettings())
    assert (device.executor, device.torch_device, device.mark_use()) == ("emulated", torch.device("cpu"), None)
    assert device.pin([], CopySettings()) == ([], None)


@pytest.mark.parametrize("kind", ["cpu", "auto"])
def test_without_cuda(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(make_device(kind, LinkSettings()), CpuDevice)
    with pytest.raises(ConfigError, match="--device cpu"):
        make_device("cuda", LinkSettings())
