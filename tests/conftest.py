"""For every test: one thread per process, and the helpers of this folder importable."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# before torch is imported anywhere; two busy cores are slower with two threads a process than with one
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray starts its workers at niceness 15, where the tests beside them leave them hardly any time
os.environ.setdefault("RAY_worker_niceness", "0")
# before triton is imported anywhere: where there is no GPU its kernels are interpreted
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The tests start hundreds of processes: each would compile the package anew, and pytest rewrite every file of tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A suite that a shell started in the background ignores SIGINT, and so would the programs that it interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent))

# beside tests/cluster and tests/multinode
_STARTS_RAY = ("e2e/test_api", "e2e/test_cli", "e2e/test_readme", "e2e/test_write_a_policy", "install/test_wheel")


@pytest.fixture(scope="session", autouse=True)
def _patient_channels() -> Iterator[float]:
    """Channels of this process bear a full machine, which may be silent for seconds. Tests of liveness give their own.

    A killed or closed peer is lost at once as ever. The value: the usual liveness.
    """
    from tiermoe.proto import options

    usual_s = options.LIVENESS_S
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "LIVENESS_S", 30.0)
        yield usual_s


@pytest.fixture
def usual_liveness(_patient_channels: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that stop a peer: channels of this process lose it as soon as a user's would."""
    from tiermoe.proto import options

    monkeypatch.setattr(options, "LIVENESS_S", _patient_channels)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """`commands.Command`: `tiermoe ARGS` in this process."""
    from commands import Command

    return Command(capsys)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-cpu", action="store_true", help="tests/cuda/test_identity.py on the CPU stand-in: to try the test itself"
    )
    parser.addoption("--cold", action="store_true", help="README's commands: with an empty cache, each within a minute")
    parser.addoption("--fuzz-cases", type=int, default=80, help="tests/e2e/test_fuzz.py: requests of each kind")
    parser.addoption(
        "--fuzz-part", type=int, default=0, help="tests/e2e/test_fuzz.py: parts, each with requests of its own"
    )
    parser.addoption("--renew", help="tests/golden: freeze these anew: FILE, FILE/NAME, several with commas, or all")


def pytest_configure(config: pytest.Config) -> None:
    """Tests may be run without pytest-timeout, as on a bare GPU machine: its marks then say nothing."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): of pytest-timeout, which is not installed")
    with contextlib.suppress(ImportError):  # the same
        import hypothesis

        if not config.getoption("--hypothesis-profile", None):  # else hypothesis has loaded that one
            hypothesis.settings.register_profile("tests", deadline=None)  # which a busy machine exceeds now and then
            hypothesis.settings.load_profile("tests")
    config.pluginmanager.register(_RootIsAFolder())
    # pytest-xdist would begin with the group of the most tests; in the order of collection the longest one begins
    config.option.loadscopereorder = False


class _RootIsAFolder:
    """The clone is the package `tiermoe` by the installation's mapping only, whatever its folder is called.

    pytest takes a folder with `__init__.py` for a package, which it imports under the folder's name before the first
    test: every test of `tiermoe-main`, as a downloaded archive unpacks, then ended in an error. A plugin and not a hook
    of this file: pytest asks a conftest.py about folders below its own only.
    """

    @pytest.hookimpl(tryfirst=True, optionalhook=True)  # optional: a bare GPU machine may have an older pytest
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path.samefile(_ROOT) else None


@pytest.hookimpl(tryfirst=True)  # xdist's own hook, which reads the marks, is registered later and would come first
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist and `--dist loadgroup`: a file stays together, and all that starts Ray stays on one worker.

    Tests of what Ray leaves behind look at the whole machine, and two clusters at once are more than two cores bear.
    Those that are marked `nodes` mostly wait, and look at what is theirs: alone they are two files at a time, too.
    """
    if not (config.pluginmanager.hasplugin("xdist") or hasattr(config, "workerinput")):  # a worker has the latter only
        return
    apart = config.option.markexpr == "nodes"
    for item in items:
        path = item.path
        folder = path.parent.name
        starts = folder in ("cluster", "multinode", "chaos") or f"{folder}/{path.stem}" in _STARTS_RAY
        ray = starts and not apart
        item.add_marker(pytest.mark.xdist_group("ray" if ray else str(path)))


def pytest_collection_finish() -> None:
    _keep_what_is_there()


@pytest.hookimpl(trylast=True)  # once the file's fixtures are gone
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """What is imported by now stays: transformers collects garbage at each end of its batching, some hundred times.

    Each such collection then looks at what the tests of a file have made, and not at a million objects of libraries,
    of which tests import more as they go.
    """
    gc.collect()
    gc.freeze()
