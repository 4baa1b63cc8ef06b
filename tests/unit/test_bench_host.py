"""`bench host`: the parts of a step add up, the table of one preset, and the page."""

from __future__ import annotations

import pytest

from tiermoe.actors.engine import engine, make_device
from tiermoe.actors.engine.executors import executor_of
from tiermoe.benchmarks import host as host_bench
from tiermoe.benchmarks.cases import Host, HostDevice
from tiermoe.benchmarks.host import host


@pytest.mark.slow
def test_the_parts_of_a_token_are_its_measured_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """In native calls and in Python; also that nothing stays replaced: the second preset runs on the same classes."""
    monkeypatch.setattr(host_bench, "MAX_TOKENS", 20)
    native, python = "on-demand", "hobbit"  # whose replicas run by Python's kernels
    report = host(Host(preset=(native, python), batch=(2,), repeats=1, ray=False), None)
    assert {row["batch"] for row in report.rows} == {2}
    for preset in (native, python):
        table = {(row["per"], row["part"]): row[preset] for row in report.rows}
        for part in ("schedule", "announce", "dense", "sample", "deliver", "manager", "layers, kernels"):
            assert table["token", part] > 0, part
            assert table["token, CPU", part] > 0, part
        for part in ("native", "kernels", "other"):  # of every layer, whatever misses
            assert table["layer, by part", part] > 0, (preset, part)
        assert table["token", "layers, waits for copies"] > 0 or preset == python  # whose replicas may come in time
        assert ("layer, by part, CPU", "copies") not in table  # the thread sleeps
        assert abs(table["token", "rest"]) < 0.1 * table["token", "measured"]
    assert report.bars == []  # of batch 1 only


@pytest.mark.slow
def test_a_layer_beside_a_gpu_is_timed_without_kernels_and_copies() -> None:
    """Also that the engine is its own again: a worker of the CPU runs natively after it."""
    report = host(Host(preset=("on-demand",), batch=(1,), repeats=1, device=HostDevice.FAKE_GPU), None)
    table = {(row["per"], row["part"]): row["on-demand"] for row in report.rows}
    assert (report.name, report.executor) == ("host-gpu", "fake GPU: kernels and copies take no time")
    for late in ("layer", "layer, loads awaited"):
        parts = ("read", "native", "kernels", "other")
        assert all(table[f"{late}, by part", part] > 0 for part in parts)
        assert table[late, "host"] > 0
        assert table[f"{late}, CPU", "host"] > 0
    calls = "calls of Python, number"
    assert table["layer, loads awaited", calls] > table["layer", calls]  # more launches
    assert [bar.limit for bar in report.bars] == [40.0]
    assert make_device.make_device.__module__ == make_device.__name__
    assert engine.executor_of is executor_of
