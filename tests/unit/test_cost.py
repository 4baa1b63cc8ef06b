"""The model of the near-data device: its arithmetic on round numbers, its profile, and the paper's own figures."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.cost import (
    BatchCosts,
    CostError,
    Link,
    NdpDevice,
    SplitCosts,
    Work,
    expert_cost,
    load_s,
    packed_bytes,
    split_costs,
)
from tiermoe.cluster.yaml_file import read_yaml
from tiermoe.kernels.pack import PackedShape

HARDWARE = Path(__file__).resolve().parents[2] / "configs" / "hardware"
PAPER = NdpDevice.from_dict(read_yaml(HARDWARE / "paper-ndp.yaml"))
MIXTRAL = (4096, 14336)

# 1 GB/s; 1e9 multiply-accumulates per second at 16 bits; a link of 1 GB/s and 1 us
UNIT: dict[str, Any] = {
    "name": "unit",
    "memory_gbps": 1.0,
    "capacity_bytes": 1000,
    "arrays": 1,
    "array_rows": 1,
    "array_cols": 1,
    "clock_ghz": 1.0,
    "narrowest_bits": 1,
    "link_gbps": 1.0,
    "link_latency_us": 1.0,
}
DEVICE = NdpDevice(**UNIT)


@pytest.mark.parametrize(
    ("hidden", "neurons", "bits", "group"),
    [(64, 32, 4, 32), (256, 128, 3, 64), *((*MIXTRAL, bits, 128) for bits in (1, 2, 3, 4, 8))],
)
def test_packed_bytes_are_those_of_the_packed_store(hidden: int, neurons: int, bits: int, group: int) -> None:
    """The policies may not import kernels, so the two formulas are held together here."""
    assert packed_bytes(hidden, neurons, bits, group) == PackedShape(hidden, neurons, bits, group).nbytes()
    assert packed_bytes(hidden, neurons, 16, group) == 2 * 3 * hidden * neurons
    # the last group and the last byte may be short: 297 bits are 37.1 bytes
    assert packed_bytes(33, 1, 3, 32) == 38 + 4 * (2 * 1 * 2 + 33 * 1)


class TestExpertCost:
    def test_memory_and_compute_overlap(self) -> None:
        # 3 * 10 * 10 weights: 600 bytes in 600 ns; 300 multiply-accumulates in 300 ns
        assert astuple(expert_cost(DEVICE, Work(10, 10, rows=1))) == pytest.approx((600e-9, 300e-9, 600e-9))
        assert astuple(expert_cost(DEVICE, Work(10, 10, rows=4))) == pytest.approx((600e-9, 1200e-9, 1200e-9))


def message_s(device: NdpDevice, shape: tuple[int, int], bits: int, rows: int, group: int, nbytes: int) -> float:
    """Of one expert; each way so many bytes."""
    return BatchCosts(device, *shape, 16, group).total_s([(bits, rows)], nbytes, nbytes)


class TestBatchCosts:
    def test_experts_run_one_after_another_between_two_crossings_of_the_link(self) -> None:
        costs = BatchCosts(DEVICE, 10, 10, 16, None)
        one_s, four_s = (expert_cost(DEVICE, Work(10, 10, rows)).total_s for rows in (1, 4))
        for experts, seconds in (([], 0.0), ([(0, 0)], 0.0), ([(0, 1), (0, 4), (0, 1), (0, 0)], 2 * one_s + four_s)):
            for _ in range(2):  # known by then
                found = costs.total_s(experts, 100, 300)
                assert found == pytest.approx(seconds and seconds + 2e-6 + 400e-9)
        assert costs.expert_s(3, 1) == expert_cost(DEVICE, Work(10, 10, 1, 3)).total_s
        assert BatchCosts(DEVICE, 10, 10, 4, 5).expert_s(0, 1) == expert_cost(DEVICE, Work(10, 10, 1, 4)).total_s

    @settings(max_examples=60, deadline=None)
    @given(rows=st.integers(1, 64), bits=st.sampled_from([1, 2, 3, 4, 8]), narrowest=st.sampled_from([1, 4, 16]))
    def test_more_work_never_takes_less(self, rows: int, bits: int, narrowest: int) -> None:
        device = replace(PAPER, narrowest_bits=narrowest)

        def total(rows: int, bits: int) -> float:
            return message_s(device, (256, 512), bits, rows, 64, rows * 512)

        assert total(rows, bits) < total(rows + 1, bits)
        assert total(rows, bits) <= total(rows, bits + 1)
        assert total(rows, 8) <= total(rows, 16)


class TestPaper:
    """Section 5.2: NDP-side latency falls by approximately 5x at 3 bits and 8x at 2 bits."""

    @staticmethod
    def speedup(bits: int, rows: int = 1, profile: NdpDevice = PAPER) -> float:
        row_bytes = 2 * MIXTRAL[0] * rows
        full_s, narrow_s = (message_s(profile, MIXTRAL, width, rows, 128, row_bytes) for width in (16, bits))
        return full_s / narrow_s

    @pytest.mark.parametrize("rows", [1, 4, 16])
    def test_about_5x_at_3_bits_and_8x_at_2(self, rows: int) -> None:
        assert self.speedup(3, rows) == pytest.approx(5, rel=0.1)
        assert self.speedup(2, rows) == pytest.approx(8, rel=0.2)  # scales and offsets weigh more here

    def test_near_data_beats_the_load(self) -> None:
        assert load_s(packed_bytes(*MIXTRAL, 16, None), PAPER.link) == pytest.approx(14e-3, rel=0.01)
        assert message_s(PAPER, MIXTRAL, 16, 1, 128, 8192) < 1e-3


def test_split_costs() -> None:
    costs = split_costs(DEVICE, [Work(10, 10, 1), Work(10, 10, 4)], [1.0, 2.0], 5.0, row_bytes=50)
    assert (costs.gpu_s, costs.load_s) == ((1.0, 2.0), 5.0)
    assert costs.ndp_s == pytest.approx((0.6e-6 + 0.1e-6, 1.2e-6 + 0.4e-6))
    assert costs.ndp_once_s == pytest.approx(2e-6)
    for gpu_s, ndp_s, one in (((1.0,), (), 1.0), ((-1.0,), (1.0,), 1.0), ((1.0,), (1.0,), float("inf"))):
        with pytest.raises(CostError, match=r"one of each|give seconds"):
            SplitCosts(gpu_s, ndp_s, one)


class TestProfile:
    def test_every_file_is_one(self) -> None:
        profiles = [NdpDevice.from_dict(read_yaml(path)) for path in sorted(HARDWARE.glob("*-ndp.yaml"))]
        assert PAPER in profiles
        assert (PAPER.memory_gbps, PAPER.capacity_bytes, PAPER.link) == (512, 512 * 10**9, Link(25, 1))
        assert PAPER.macs_per_s(16) == 1.024e12

    def test_the_stand_in_is_the_paper_device_slowed_down(self) -> None:
        stand_in = NdpDevice.from_dict(read_yaml(HARDWARE / "cpu-ndp.yaml"))
        for work in (Work(*MIXTRAL, 1), Work(*MIXTRAL, 9), Work(*MIXTRAL, 1, 3, 128), Work(*MIXTRAL, 64, 1, 32)):
            assert expert_cost(stand_in, work).total_s == pytest.approx(256 * expert_cost(PAPER, work).total_s)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("name", ""),
            ("name", 3),
            ("memory_gbps", 0),
            ("memory_gbps", float("nan")),
            ("memory_gbps", float("inf")),
            ("memory_gbps", "512"),
            ("memory_gbps", True),
            ("link_latency_us", -0.1),
            ("arrays", 0),
            ("arrays", 1.5),
            ("capacity_bytes", True),
            ("narrowest_bits", 17),
            ("narrowest_bits", 0),
        ],
    )
    def test_refusals(self, key: str, value: object) -> None:
        with pytest.raises(CostError, match=f"{key} is .*; give"):
            NdpDevice.from_dict({**UNIT, key: value})
