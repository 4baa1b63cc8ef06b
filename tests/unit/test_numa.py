"""The memory node near a GPU, by a tree of files as Linux has it, and what a worker asks of the kernel for it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_gpu import FakeGpu

from tiermoe.actors import gpu_driver, numa
from tiermoe.actors.engine import make_device
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.numa import MemoryNode, bring, gpu_nodes, keep_to, memory_nodes, node_of, words
from tiermoe.actors.settings import CopySettings
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.topology.inputs import local_notes

FIRST, SECOND = MemoryNode(0, frozenset({0, 1, 4, 5})), MemoryNode(1, frozenset({2, 3, 6, 7}))
GPUS = {"0000:3b:00.0": "0", "0000:86:00.0": "1", "0000:87:00.0": "-1", "0000:af:00.0": "2"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two sockets, a node without cores, and four GPUs."""
    monkeypatch.setattr(gpu_driver, "ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    files = {
        "sys/devices/system/node/node0/cpulist": "0-1,4-5\n", "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
        "sys/devices/system/node/node2/cpulist": "\n", "sys/devices/system/node/possible": "0-2\n",
    }  # fmt: skip
    for bus, node in GPUS.items():
        files[f"sys/bus/pci/devices/{bus}/numa_node"] = f"{node}\n"
        files[f"proc/driver/nvidia/gpus/{bus}/information"] = "Model: any\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


class Kernel:
    """What is asked of it, of a process with four threads."""

    def __init__(self, patch: pytest.MonkeyPatch, affinity: frozenset[int], mode: int = 0, refused: str = "") -> None:
        self.mode, self.refused, self.calls = mode, refused, list[tuple[Any, ...]]()
        self.bound = dict[int, frozenset[int]]()
        patch.setattr(numa, "_call", self._call)
        patch.setattr(numa, "_tasks", lambda: [11, 12, 13, 14])
        patch.setattr(os, "sched_getaffinity", lambda task: set(affinity))
        patch.setattr(os, "sched_setaffinity", self._bind)

    def _call(self, name: str, *given: Any) -> None:
        if name == self.refused:
            raise OSError(1, "Operation not permitted")
        if name == "get_mempolicy":
            given[0]._obj.value = self.mode
        elif name == "set_mempolicy":
            self.calls.append((name, given[0].value, list(given[1])[:2]))
        else:
            at, nbytes, mode, mask, _, flags = given
            self.calls.append((name, at.value, nbytes.value, mode.value, list(mask)[:2], flags.value))

    def _bind(self, task: int, cores: frozenset[int]) -> None:
        if task == 13:
            raise ProcessLookupError  # it has ended
        self.bound[task] = frozenset(cores)


def test_nodes_of_the_machine_and_of_its_gpus(root: Path) -> None:
    assert memory_nodes() == {0: FIRST, 1: SECOND, 2: MemoryNode(2, frozenset())}
    assert [node_of(bus) for bus in GPUS] == [FIRST, SECOND, None, None]  # not said; a node without cores
    assert node_of("0000:3B:00.0") == FIRST
    assert node_of("0000:00:00.0") is None
    assert words(FIRST) == "node 0 (cores 0-1,4-5)"
    assert words(MemoryNode(3, frozenset({9}))) == "node 3 (cores 9)"


@pytest.mark.parametrize(
    ("visible", "found"),
    [
        (None, [FIRST, SECOND, None, None]), ("1", [SECOND]), ("1, 0", [SECOND, FIRST]), ("", []), ("-1", []),
        ("GPU-5a", [FIRST, SECOND, None, None]), ("9", [FIRST, SECOND, None, None]),  # not known which
    ],
)  # fmt: skip
def test_gpus_that_the_environment_shows(root: Path, visible: str | None, found: list[MemoryNode | None]) -> None:
    assert gpu_nodes({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == found


def test_a_machine_of_one_node_says_nothing(root: Path) -> None:
    for number in (1, 2):
        (root / f"sys/devices/system/node/node{number}/cpulist").unlink()
    assert node_of("0000:3b:00.0") is None
    for file in root.glob("sys/devices/system/node/*/cpulist"):
        file.unlink()
    assert memory_nodes() == {}


@pytest.mark.parametrize(
    ("affinity", "mode", "refused", "problem"),
    [
        (frozenset(range(8)), 0, "", None),
        (frozenset({3, 4}), 0, "", None),
        (frozenset({0, 4}), 0, "", "no core of node 1"),
        (frozenset(range(8)), 3, "", "a memory policy of its own"),  # numactl --interleave
        (frozenset(range(8)), 0, "set_mempolicy", "refuses a memory policy: Operation not permitted"),
    ],
)
def test_a_worker_keeps_to_a_node(
    affinity: frozenset[int], mode: int, refused: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has bound the process himself wins, and a container's filter of system calls is no error."""
    kernel = Kernel(monkeypatch, affinity, mode, refused)
    said = keep_to(SECOND)
    if problem is not None:
        assert said is not None
        assert problem in said
        assert (kernel.calls, kernel.bound) == ([], {})
        return
    assert said is None
    assert kernel.calls == [("set_mempolicy", 1, [2, 0])]
    assert kernel.bound == dict.fromkeys((11, 12, 14), affinity & SECOND.cores)


@pytest.mark.parametrize(("bus", "refused", "near"), [(0, "", FIRST), (1, "get_mempolicy", None), (2, "", None)])
def test_the_device_of_a_gpu_keeps_to_its_node(
    root: Path, bus: int, refused: str, near: MemoryNode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernel(monkeypatch, frozenset(range(8)), refused=refused)
    gpu: Any = FakeGpu()
    gpu.bus = lambda: list(GPUS)[bus]
    monkeypatch.setattr(make_device, "cuda_usable", lambda required: True)
    monkeypatch.setattr(make_device, "runtime_of", lambda device: gpu)
    device = make_device.make_device("cuda", CopySettings())  # type: ignore[arg-type]  # no link is read
    assert isinstance(device, CudaDevice)
    assert device.near == near


@pytest.mark.parametrize("refused", ["", "mbind"])
def test_pages_move_before_they_are_pinned(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(monkeypatch, SECOND.cores, refused=refused)
    gpu = FakeGpu(pin_all=False)
    registered, register = list[int](), gpu.register

    def noted(address: int, nbytes: int) -> str | None:
        registered.append(len(kernel.calls))
        return register(address, nbytes)

    monkeypatch.setattr(gpu, "register", noted)
    tensors = tuple(torch.ones(5000) for _ in range(2))
    _, report = CudaDevice(gpu, near=SECOND).pin([LayerWeights(tensors)], CopySettings())
    assert report is not None
    assert report.registered == 2 * 20_000
    assert set(registered) == {0 if refused else 2}
    for call, tensor in zip(kernel.calls, tensors, strict=not refused):
        _, first, nbytes, mode, mask, flags = call
        assert first % 4096 == nbytes % 4096 == 0
        assert first <= tensor.data_ptr() < tensor.data_ptr() + tensor.nbytes <= first + nbytes
        assert (mode, mask, flags) == (1, [2, 0], 2)


def test_the_kernel_of_this_machine_takes_the_calls() -> None:
    """Whatever it has: moving pages to the node where they are."""
    nodes = memory_nodes()
    if not nodes:
        pytest.skip("this machine does not say what nodes it has")
    page = ctypes.create_string_buffer(3 << 12)
    first = -(-ctypes.addressof(page) // 4096) * 4096
    assert bring([(first, first + 4096)], nodes[min(nodes)]) in (True, False)  # a container may refuse it
    assert not bring([(first + 1, first + 4096)], nodes[min(nodes)])  # no page begins there


@pytest.mark.parametrize(
    ("given", "gpus"),
    [({}, [0]), ({"cluster": {"shards": 2}}, [0, 1]), ({"device": "cpu"}, []), ({"cluster": {"replicas": 4}}, [0, 1])],
)
def test_the_plan_names_the_nodes(root: Path, given: dict[str, Any], gpus: list[int]) -> None:
    config = load_run_config(None, {"device": "cuda", "threads": 1, "policy": "on-demand"} | given)
    said = [note for note in local_notes(config, engine_settings(config)) if "memory node" in note]
    assert [note.partition(" keep ")[0] for note in said] == [
        f"threads and pages of the worker on GPU {gpu}" for gpu in gpus
    ]
    assert not gpus or said[0].endswith("node 0 (cores 0-1,4-5)")
