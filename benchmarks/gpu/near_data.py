"""Near data: part `ndp` (kernels against memory bandwidth), and a real NDP worker for the decode parts.

The worker's experts and packed bytes are random. Those of a few layers serve all layers in turn: too many bytes for a
CPU cache, and few enough to make in seconds.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.cost import FULL_BITS
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.files import LayerArrays
from tiermoe.actors.store.format import ExpertShape
from tiermoe.actors.store.replicas import ReplicaTables
from tiermoe.cluster.config import load_hardware
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.kernels.pack import PackedShape
from tiermoe.limits import usable_cores
from tiermoe.proto.peers import Directory, PeerLink, ndp_name

if TYPE_CHECKING:
    from .run_parts import Context, Record

WIDTHS: tuple[Literal[1, 2, 3, 4], ...] = (1, 2, 3, 4)
REPEATS = 3
SHAPES = ((2048, 1408), (4096, 14336))  # Qwen1.5-MoE-A2.7B (and DeepSeek-V2-Lite), Mixtral-8x7B
TOY_SHAPES, TOY_BYTES = ((64, 96),), 1 << 20
DISTINCT_LAYERS = 2  # that have experts and replicas of their own, which serve all layers in turn


def run(context: Context, record: Record) -> None:
    """Time the kernels, 1 to 4 bits, on half of the cores and on all: fewer threads may saturate the memory."""
    from ..kernels import measured

    cores = usable_cores()
    shapes, cold_bytes = (TOY_SHAPES, TOY_BYTES) if context.toy else (SHAPES, None)
    for threads in sorted({1} if context.toy else {max(1, cores // 2), max(1, cores - 2), cores}, reverse=True):
        if not record.has_time(context, 6.0, f"near-data kernels on {threads} threads"):
            continue
        report = measured(threads, REPEATS, shapes=shapes, cold_bytes=cold_bytes)
        for hidden, neurons in shapes:
            of = [row for row in report.rows if (row["hidden"], row["intermediate"]) == (hidden, neurons)]
            found = {
                measure: {row["case"]: row["median"] for row in of if row["measure"] == measure}
                for measure in ("gbps", "of_read", "us_per_expert")
            }
            record.row(
                "ndp kernel", threads=threads, hidden=hidden, intermediate=neurons,
                instruction_set=report.settings["instruction_set"], **found,
            )  # fmt: skip


class RandomNdpWorker(NdpWorker):
    """`NdpWorker` on random experts of a model without a store: `layers` layers of experts of `shape`."""

    def __init__(self, settings: NdpSettings, shape: ExpertShape, layers: int, directory: Directory) -> None:
        self._random = shape, layers
        super().__init__(settings, "", directory)

    def _made(self, layer: int, shape: ExpertShape, block: NDArray[np.uint16]) -> LayerArrays:
        """Experts of a layer in bfloat16: a block of small numbers again and again."""
        sizes = {name: np.resize(block, size) for name, size in shape.stacked().items()}
        return LayerArrays(layer, "", "bfloat16", sizes["gate_up"], sizes["down"], None, None)

    def _open(self, store: str, verify: Literal["full", "stamp"]) -> None:
        shape, layers = self._random
        group = self._settings.group_size
        rng = np.random.default_rng(0)
        block = rng.integers(0, 256, 1 << 22, np.uint8)
        numbers = (0.02 * rng.standard_normal((1 << 21) - 1, np.float32)).view(np.uint32) >> 16  # cut off to bfloat16
        whole = [self._made(i, shape, numbers.astype(np.uint16)) for i in range(min(DISTINCT_LAYERS, layers))]
        self._full, self._full_bits = [whole[layer % len(whole)] for layer in range(layers)], FULL_BITS
        self._shape, self._group = shape, group
        self._packed_shapes = {bits: PackedShape(shape.hidden, shape.intermediate, bits, group) for bits in WIDTHS}
        self._replicas = {}
        for bits, packed in self._packed_shapes.items():
            made = [self._layer(packed, shape.num_experts, block) for _ in range(min(DISTINCT_LAYERS, layers))]
            self._replicas[bits] = [made[layer % len(made)] for layer in range(layers)]

    @staticmethod
    def _layer(packed: PackedShape, experts: int, block: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Codes at random, scales 1e-3, offsets 0."""
        out: dict[str, NDArray[Any]] = {}
        for name, (code, size) in packed.tensors().items():
            whole = (experts, *size)
            out[name] = np.resize(block, whole) if code == "U8" else np.full(whole, 1e-3, np.float16)
        return out


def random_tables(layers: int, experts: int) -> ReplicaTables:
    """Losses that fall with the width, more for some experts than for others; equal counts."""
    rng = np.random.default_rng(0)
    losses = rng.random((layers, experts, 1)) * np.array([8.0, 2.0, 0.5, 0.1])
    shape = losses.shape
    return ReplicaTables(
        WIDTHS, losses.astype(np.float32), losses.astype(np.float32), np.zeros(shape, np.bool_),
        np.ones(shape[:2], np.int64), np.ones(shape[:2]),
    )  # fmt: skip


class NearData:
    """One NDP worker for all engines of a shape, in a process that the first engine starts."""

    def __init__(self, shape: ExpertShape, layers: int, threads: int) -> None:
        self.settings = NdpSettings(threads=threads, hardware=asdict(load_hardware("cpu-ndp")))
        arguments = {"settings": self.settings, "shape": shape, "layers": layers}
        self._process = WorkerProcess(
            Role(ndp_name(0), "NDP worker", "benchmarks.gpu.near_data:RandomNdpWorker", arguments, store=None)
        )
        self._started = False

    def link(self) -> PeerLink:
        """The link to the worker; starts it if needed.

        Raises:
            RuntimeFailure: it did not start.
        """
        if not self._started:
            self._process.restart()
            self._started = True
        return self._process.link

    def close(self) -> None:
        """Stop the worker; the next `link` starts another one."""
        self._process.close()
        self._started = False
