"""`bench host`: the parts of a step add up, the table of one preset, and the page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from serving import prepared

from tiermoe.actors.engine import engine, make_device
from tiermoe.actors.engine.executors import executor_of
from tiermoe.actors.engine.model.published_linear import bytes_of
from tiermoe.benchmarks import host as host_bench
from tiermoe.benchmarks.cases import Host, HostDevice
from tiermoe.benchmarks.host import LIMITS_GPU_US, LIMITS_US, HostCase, cases_of, host
from tiermoe.benchmarks.requantized import Published, requantized
from tiermoe.cluster.config import default_model_dir
from tiermoe.errors import ConfigError


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
    forms = (Published.BF16, Published.MXFP4)
    asked = Host(preset=("on-demand",), form=forms, batch=(1,), repeats=1, device=HostDevice.FAKE_GPU)
    report = host(asked, None)
    table = {(row["per"], row["part"]): row["on-demand"] for row in report.rows}
    assert (report.name, report.executor) == ("host-gpu", "fake GPU: kernels and copies take no time")
    for late in ("layer", "layer, loads awaited"):
        parts = ("read", "native", "kernels", "other")
        assert all(table[f"{late}, by part", part] > 0 for part in parts)
        assert table[late, "host"] > 0
        assert table[f"{late}, CPU", "host"] > 0
    calls = "calls of Python, number"
    assert table["layer, loads awaited", calls] > table["layer", calls]  # more launches
    assert [bar.limit for bar in report.bars] == [40.0, 55.0]
    rows = {(row["per"], row["part"]): row for row in report.rows}
    for column in ("on-demand", "on-demand, mxfp4"):  # five launches, and those of experts that come later
        assert 5 <= rows["layer", "launches, number"][column] < rows["layer, loads awaited", "launches, number"][column]
    assert make_device.make_device.__module__ == make_device.__name__
    assert engine.executor_of is executor_of


@pytest.mark.slow
def test_messages_to_peers_are_apart() -> None:
    """A shard of its own process, and an NDP worker whose planned layers run natively beside it."""
    asked = Host(preset=("on-demand",), shards=(2,), batch=(1,), repeats=1, device=HostDevice.FAKE_GPU)
    planned = Host(preset=("auto",), batch=(1,), repeats=1, device=HostDevice.FAKE_GPU)
    for options, column in ((asked, "on-demand, 2 shards"), (planned, "auto, planned")):
        report = host(options, None)
        table = {(row["per"], row["part"]): row[column] for row in report.rows}
        assert table["layer", "host"] > 0
        messages = [table.get(("layer, by part", part), 0.0) for part in ("send", "join")]
        # what is planned may load every expert: copies take no time here
        assert min(messages) > 0 or column == "auto, planned"
        if min(messages) > 0:
            assert table["layer", "host"] < sum(messages) + sum(
                table["layer, by part", part] for part in ("read", "native", "kernels", "other")
            )
        assert [bar.limit for bar in report.bars] == [70.0]


def test_without_presets_the_cases_are_those_of_the_bars() -> None:
    assert [str(case) for case in cases_of(Host(device=HostDevice.FAKE_GPU))] == [
        "all-resident", "all-resident, fp8", "all-resident, mxfp4", "on-demand", "on-demand, fp8", "on-demand, mxfp4",
        "next-gate", "moepic", "activeevict", "auto", "context-ndp-full", "context-ndp-3bit", "on-demand, 2 shards",
    ]  # fmt: skip
    judged = {limit.partition(", planned")[0] for limit in LIMITS_GPU_US}
    assert {str(case) for case in cases_of(Host(device=HostDevice.FAKE_GPU))} == judged
    assert {str(case) for case in cases_of(Host())} <= {limit.partition(", planned")[0] for limit in LIMITS_US}
    asked = Host(preset=("auto", "on-demand"), form=(Published.FP8,), shards=(1, 2))
    assert list(map(str, cases_of(asked))) == [
        "auto, fp8", "auto, fp8, 2 shards", "on-demand, fp8", "on-demand, fp8, 2 shards"
    ]  # fmt: skip


def test_forms_are_of_the_default_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--form is of the default model"):
        HostCase("on-demand", Published.FP8).run_of(Host(model="another"), tmp_path)


@pytest.mark.parametrize(
    ("form", "kind", "error"), [(Published.FP8, "fp8_block", 0.07), (Published.MXFP4, "mxfp4", 0.25)]
)
def test_the_default_model_in_a_published_form(form: Published, kind: str, error: float, tmp_path: Path) -> None:
    """Prepared as such, with the error that rounding to the form has at most."""
    written = requantized(form, tmp_path / "model")
    store = prepared(written, tmp_path / "store").describe()
    published = store.manifest.published
    assert published is not None
    assert {matrix.kind for matrix in published.forms[0].matrices.values()} == {kind}
    plain = load_file(default_model_dir() / "model.safetensors")["model.layers.3.mlp.experts.5.up_proj.weight"].float()
    found = load_file(written / "model.safetensors")
    matrix = published.forms[0].matrices["up"]
    names = {"weight": "weight", "scale": "weight_scale_inv"} if form is Published.FP8 else {
        "weight": "weight_packed", "scale": "weight_scale"
    }  # fmt: skip
    parts = {part: found[f"model.layers.3.mlp.experts.5.up_proj.{name}"] for part, name in names.items()}
    values = matrix.dequantize({part: bytes_of(t, matrix.parts()[part][0]).numpy() for part, t in parts.items()})
    assert float((torch.from_numpy(values) - plain).abs().max() / plain.abs().max()) < error
