"""Golden figures: what every preset does on one small workload, and every name that users see, as frozen JSON.

A refactoring changes none of them. A change on purpose says so in its commit and renews that figure only:

    python -m pytest tests/golden -m "slow or not slow" --renew=emulated/moepic
    python -m pytest tests/golden -m "slow or not slow" --renew=decisions,cli    # whole files
    python -m pytest tests/golden -m slow --renew=emulated/hobbit@GenuineIntel   # of one kind of CPU

`golden_rig` and `decision_rig` run the presets; they are the only files that name modules of the product.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decision_rig
import golden_rig as rig
import pytest
from commands import Command
from golden_rig import PRESETS, ExpertStore

FIRST = {"activeevict", "buddymoe", "fmoe", "moepic"}  # in `make test`: lossy ones, and one of maps and of splits
StoreOf = Callable[[str], ExpertStore]
_CPU = dict(
    line.partition(":")[::2] for line in Path("/proc/cpuinfo").read_text().replace("\t", "").splitlines() if ":" in line
)
_MAKER = _CPU.get("vendor_id", "").strip()  # GenuineIntel, AuthenticAMD
_KINDS = [_MAKER] if "avx512f" in _CPU.get("flags", "").split() else [f"{_MAKER}-avx2", _MAKER]  # the closest first


class Golden:
    """The frozen figures of one file, by name.

    Args:
        renew: "FILE", "FILE/NAME", several with commas, or "all".
    """

    def __init__(self, renew: str | None) -> None:
        self._renew = [] if renew is None else renew.split(",")

    def renews(self, file: str, name: str) -> bool:
        return any(wanted in ("all", file, f"{file}/{name}") for wanted in self._renew)

    def read(self, file: str) -> dict[str, Any]:
        path = rig.FOLDER / f"{file}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def write(self, file: str, figures: dict[str, Any]) -> None:
        """One line for each part of each figure, so that a difference is a line."""
        parts = []
        for name, figure in sorted(figures.items()):
            if isinstance(figure, dict):
                inner = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in figure.items())
                parts.append(f"  {json.dumps(name)}: {{\n{inner}\n  }}")
            else:
                parts.append(f"  {json.dumps(name)}: {json.dumps(figure)}")
        (rig.FOLDER / f"{file}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")

    def expected(self, file: str, name: str, found: Any) -> Any:
        """What is frozen, for this kind of CPU if there is such; where it is to be renewed that is what was found.

        Between makers, and between sums of eight and of sixteen numbers at a time, the last bits differ, and with them
        the tokens on experts of 2 to 4 bits.
        """
        frozen, named = self.read(file), [f"{name}@{kind}" for kind in _KINDS]
        name = next((own for own in named if own in frozen or f"{file}/{own}" in self._renew), name)
        if self.renews(file, name):
            self.write(file, self.read(file) | {name: found})
        frozen = self.read(file)
        assert name in frozen, f"nothing is frozen for {name}: run with --renew={file}/{name} and commit it"
        return frozen[name]

    def check(self, file: str, name: str, found: Any) -> None:
        found = json.loads(json.dumps(found))
        assert found == self.expected(file, name, found)

    def check_none_lost(self, file: str, name: str, found: list[str]) -> None:
        """Names may come, and none may go."""
        lost = set(self.expected(file, name, found)) - set(found)
        assert not lost, f"{name} lost {sorted(lost)}"


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.config.getoption("--renew"))


@pytest.fixture(scope="session")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> StoreOf:
    """By preset, with the replicas that it needs; made once for all that need the same."""
    made = functools.cache(lambda widths: rig.golden_store(tmp_path_factory.mktemp("golden"), widths))
    return lambda preset: made(rig.replica_widths(preset))


@pytest.fixture(scope="session")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decision_rig.frozen_trace(tmp_path_factory.mktemp("golden") / "trace")


@pytest.mark.parametrize("file", ["emulated", "decisions"])
def test_every_preset_is_frozen(file: str, golden: Golden) -> None:
    def preset(name: str) -> str:
        return name.split("@")[0].split(" ")[0]

    wanted = list(PRESETS)
    frozen = golden.read(file)
    if golden.renews(file, "") and {preset(name) for name in frozen} - set(wanted):
        golden.write(file, {name: figure for name, figure in frozen.items() if preset(name) in wanted})
    assert sorted({preset(name) for name in golden.read(file)}) == wanted or golden.renews(file, "")


def test_lossless_presets_are_frozen_with_one_output(golden: Golden) -> None:
    """The model's own: tests/e2e/test_identity.py compares those of each mechanism with transformers'."""
    frozen = golden.read("emulated")
    lossless = [name for name in frozen if rig.is_lossless(name.split("@")[0])]
    assert len(lossless) > 30
    assert [name for name in lossless if frozen[name]["tokens"] != frozen["on-demand"]["tokens"]] == []


@pytest.mark.parametrize(
    "preset", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_emulated(preset: str, golden: Golden, store_of: StoreOf) -> None:
    """Tokens, bytes by cause, hits and the order of loads on a link whose clock layers move."""
    golden.check("emulated", preset, rig.run_emulated(store_of(preset), preset))


@pytest.mark.parametrize("batch", decision_rig.BATCHES)
@pytest.mark.parametrize(
    "script", [name if name == "slow" else pytest.param(name, marks=pytest.mark.slow) for name in decision_rig.SCRIPTS]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_decisions(preset: str, script: str, batch: int, golden: Golden, trace: Path) -> None:
    """What runs where, what is loaded, evicted and prefetched, on a link and on peers that a script moves.

    `python tests/decision_rig.py PRESET SCRIPT BATCH` prints the whole log, to compare two versions.
    """
    if not decision_rig.runs_on(preset, script):
        assert f"{preset} {script} {batch}" not in golden.read("decisions")
        return
    log, counters = decision_rig.decide(trace, preset, script, batch)
    golden.check("decisions", f"{preset} {script} {batch}", log.frozen() | {"counters": counters})


def test_http(golden: Golden) -> None:
    document, metrics = asyncio.run(rig.openapi_and_metrics())
    found = rig.http_figures(document, metrics)
    for name in ("paths", "schemas", "metrics", "series", "openapi_sha256"):  # the hash last: the others say more
        golden.check("http", name, found[name])


def test_command_line(golden: Golden) -> None:
    """No command and no option is lost."""
    found = rig.command_line()
    frozen = golden.read("cli")
    if golden.renews("cli", ""):
        golden.write("cli", found)
        frozen = found
    assert not set(frozen) - set(found)
    for path in frozen:
        golden.check_none_lost("cli", path, found[path])


REPORTS = {
    "plan": ("plan", "--config", "laptop", "--policy", "next-gate"),
    "plan-ndp": ("plan", "--config", "laptop", "--policy", "context-ndp-2bit"),
    "plan-cluster": ("plan", "--config", "multi-node", "--nodes", "NODES"),
    "replay": ("replay", "TRACE", "--policy", "moepic"),
    "replay-recall": ("replay", "TRACE", "--recall"),
}
NODES = """
nodes:
  - {id: g, address: 10.0.0.1, resources: {CPU: 5, GPU: 1, memory: 64GB}}
  - {id: h, address: 10.0.0.2, resources: {CPU: 5, GPU: 1, memory: 64GB}}
  - {id: m, address: 10.0.0.3, resources: {CPU: 20, ndp: 1, store: 1, memory: 256GB}}
"""


@pytest.mark.parametrize("name", REPORTS)
def test_json_keys(name: str, golden: Golden, trace: Path, tmp_path: Path, command: Command) -> None:
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text(NODES)
    args = [{"TRACE": trace, "NODES": nodes}.get(arg, arg) for arg in REPORTS[name]]
    golden.check_none_lost("json_keys", name, sorted(rig.keys_of(command.json(*args))))


@pytest.mark.parametrize("preset", ["fmoe", pytest.param("hobbit", marks=pytest.mark.slow), "moepic"])
def test_json_keys_of_a_worker(preset: str, golden: Golden, store_of: StoreOf) -> None:
    """The plan and the counters, which `run`, `status` and the benchmarks print."""
    with rig.emulated(store_of(preset), rig.golden_settings(preset)) as worker:
        rig.greedy(worker, rig.workload()[:1], 4)
        record = {"plan": worker.plan(), "counters": worker.stats().as_dict(), "gpus": worker.shard_stats()}
    golden.check_none_lost("json_keys", f"worker-{preset}", sorted(rig.keys_of(record)))


@pytest.mark.slow
def test_json_keys_of_a_benchmark(golden: Golden, command: Command) -> None:
    found = command.json("bench", "core", "--preset", "on-demand", "--order", "lru", "--repeats", "1")
    golden.check_none_lost("json_keys", "bench-core", sorted(rig.keys_of(found)))


TIERMOE = Path(sys.executable).with_name("tiermoe")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    return variables | {"XDG_RUNTIME_DIR": str(tmp_path)}


@pytest.fixture
def runtime(environment: dict[str, str]) -> Iterator[None]:
    command = [TIERMOE, "up", "--threads", "1", "--device", "cpu"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("is ready at" in line for line in process.stdout)
            yield
        finally:
            process.terminate()


@pytest.mark.nodes
@pytest.mark.usefixtures("runtime")
def test_json_keys_of_status(golden: Golden, environment: dict[str, str]) -> None:
    golden.check_none_lost("json_keys", "status", _keys_printed(environment, "status", "--json"))


@pytest.mark.nodes
def test_json_keys_of_run(golden: Golden, environment: dict[str, str]) -> None:
    found = _keys_printed(
        environment, "run", "def f(x):", "--device", "cpu", "--policy", "next-gate", "--max-tokens", "4", "--json"
    )  # fmt: skip
    golden.check_none_lost("json_keys", "run", found)


def _keys_printed(environment: dict[str, str], *args: str) -> list[str]:
    done = subprocess.run([TIERMOE, *args], env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(rig.keys_of(json.loads(done.stdout)))
