"""The micro-benchmarks: options made from the registry, and what `scale` and `kernel` decide."""

from __future__ import annotations

import pytest

from tiermoe.benchmarks import serving
from tiermoe.benchmarks.cases import Scale, Ttft
from tiermoe.benchmarks.kernels import FULL, PUBLISHED, measured
from tiermoe.benchmarks.serving import VARIANTS, Variant, scale, ttft
from tiermoe.errors import CheckpointError, ConfigError

_TWO = Variant(2, "per-GPU")


def test_budgets_are_equal_in_total_or_each() -> None:
    budgets = {(v.gpus, v.equal): v.config(Scale(budget="0.125", ownership="expert")) for v in VARIANTS}
    assert {k: float(c.budget) for k, c in budgets.items()} == {
        (1, "total"): 0.125,
        (2, "total"): 0.0625, (4, "total"): 0.03125,
        (2, "per-GPU"): 0.125, (4, "per-GPU"): 0.125,
    }  # fmt: skip
    assert all(c.cluster.shards == k[0] and c.cluster.ownership == "expert" for k, c in budgets.items())


@pytest.mark.slow
def test_one_and_two_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "VARIANTS", (VARIANTS[0], _TWO))
    report = scale(Scale(repeats=1, budget="0.25", batch=(1, 2), prompts=2), None)
    assert [(row["batch"], row["gpus"]) for row in report.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    one, two = report.rows[:2]
    assert sum(two["needed"]) == one["needed"][0]  # one request after another: the same routing, shared out
    for one, two in zip(report.rows[::2], report.rows[1::2], strict=True):
        assert len(two["bytes_loaded"]) == 2
        assert one["shard_wait_s"] == 0 < two["shard_wait_s"]
        assert two["recomputed"] == 0
        busy_s = sum(one["spread"]["link_path_s"]["values"])
        slot = 196608  # bytes; on demand each copy is on a forward's way, at 2 GB/s after 10 us
        assert busy_s == pytest.approx(one["bytes_loaded"][0] / slot * (10e-6 + slot / 2e9))
        assert two["link_path_s"] > 0
    assert [len(one["spread"]["io_path_s"]["values"]) for one in report.rows[::2]] == [2, 1]
    assert len(report.bars) == 4
    assert report.executor == "emulated"


@pytest.mark.slow
def test_a_long_prompt_is_measured_beside_what_the_link_must_carry() -> None:
    report = ttft(Ttft(repeats=2, prompt_tokens=64, policy=("on-demand",), link_gbps=2.0), None)
    found = {(row["case"], row["measure"]): row for row in report.rows}
    slot, experts = 196608, 512  # bytes, and experts of the model
    for loaded, floor_s in zip(*(found["on-demand", m]["values"] for m in ("loaded_of_model", "floor_s")), strict=True):
        assert loaded >= 0.75  # nearly every expert, of which a quarter can be there
        assert floor_s == pytest.approx(loaded * experts * (10e-6 + slot / 2e9))
    assert found["all-resident", "floor_s"]["maximum"] == 0
    prompts = [found[case, "ttft_s"]["values"] for case in ("on-demand", "all-resident")]
    ratios = [a / b for a, b in zip(*prompts, strict=True)]
    (bar,) = report.bars
    assert bar.value == pytest.approx(sum(ratios) / 2)  # the median of two
    with pytest.raises(CheckpointError, match="held-out tokens"):
        ttft(Ttft(repeats=5000), None)


_SHAPE = (64, 48)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"group": 48}, "no group of 48"),
        ({"instruction_set": "vliw"}, "no vliw"),
        ({"cold_bytes": 4096}, "does not fit in 4096"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        measured(2, 1, **{"shapes": [_SHAPE], "cold_bytes": 1 << 20} | given)  # type: ignore[arg-type]


def test_kernels_of_each_form_are_measured() -> None:
    report = measured(1, 1, shapes=[(256, 256), (256, 128)], cold_bytes=4 << 20, published=True)
    assert {row["case"] for row in report.rows} == {
        "read", "1 bit", "2 bits", "3 bits", "4 bits", "8 bits", *PUBLISHED, *(f"full {dtype}" for dtype in FULL),
    }  # fmt: skip
    assert {row["measure"] for row in report.rows} == {"gbps", "us_per_expert", "gweights_per_s", "of_read"}
    assert {row["intermediate"] for row in report.rows if row["case"] == "q4_k"} == {256}  # its blocks are of 256
    assert len(report.bars) == 6
