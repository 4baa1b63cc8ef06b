"""`tiermoe bench kernel --threads`: what it measures, and what it refuses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from typer.testing import CliRunner

from tiermoe.cluster.jobs.bench import command, kernel_threads
from tiermoe.cluster.jobs.bench.kernel_threads import BITS, bench_kernel_threads
from tiermoe.errors import ConfigError
from tiermoe.kernels.pack import PackedShape

_SHAPE = (64, 48)


def test_each_width_is_set_against_the_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, int]] = []
    whole = kernel_threads._cpu.read_bytes
    monkeypatch.setattr(
        kernel_threads._cpu, "read_bytes", lambda address, size: read.append((address, size)) or whole(address, size)
    )
    report = bench_kernel_threads(2, 2, 32, shapes=[_SHAPE], cold_bytes=1 << 20)
    values = {(row["case"], row["measure"]): row for row in report.rows}
    cases = ["1 bit", "2 bits", "3 bits", "4 bits"]
    assert set(values) == {("read", "gbps")} | {(c, m) for c in cases for m in ("gbps", "us_per_expert", "of_read")}
    bandwidth = values["read", "gbps"]["median"]
    for case, bits in zip(cases, BITS, strict=True):
        gbps, of_read = values[case, "gbps"], values[case, "of_read"]["median"]
        assert of_read == gbps["median"] / bandwidth
        size = PackedShape(*_SHAPE, bits, 32).nbytes()
        seconds = [us * 1e-6 for us in values[case, "us_per_expert"]["values"]]
        np.testing.assert_allclose(gbps["values"], [size / s / 1e9 for s in seconds])
    assert report.settings["threads"] == 2
    assert report.settings["experts_per_call"] == 8
    # the pieces are the block, three times: a round to warm up and two that count
    starts = sorted(set(read))
    assert len(starts) == 8
    assert len(read) == 24
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(starts))
    assert sum(size for _, size in starts) == 1 << 20


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"group": 48}, "no group of 48"),
        ({"instruction_set": "vliw"}, "no vliw"),
        ({"cores": [1023, 1022]}, "2 threads on cores"),
        ({"cold_bytes": 4096}, "do not fit in 4096 bytes"),
    ],
)
def test_what_cannot_be_measured_is_refused(given: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        bench_kernel_threads(2, 1, **{"shapes": [_SHAPE], "cold_bytes": 1 << 20} | given)  # type: ignore[arg-type]


def test_the_command_refuses_a_comparison_on_many_threads() -> None:
    result = CliRunner().invoke(command.bench_app, ["kernel", "--threads", "2", "--ggml", "none.so"])
    assert isinstance(result.exception, ConfigError)
