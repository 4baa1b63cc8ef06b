"""`bench gpu-estimates`: what a token takes on a GPU, from bytes, launches and the host's time. Nothing is measured.

    token = layers x (dense + experts + host) + head + step + copies
    dense     bytes / bandwidth, and the small kernels between the products
    experts   bytes of K experts / bandwidth, and three launches' kernels
    host      of a layer, bare on the device's time line
    copies    bytes of the experts that are not resident / link

The floor is the bytes alone, at the memory's bandwidth. Inputs and where they come from: estimates.yaml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tiermoe.cluster.jobs.bench.metrics import Report, fill_page, markdown
from tiermoe.cluster.simulate.shapes import ModelShape, shape_named
from tiermoe.cluster.yaml_file import read_yaml

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..cases import GpuEstimates

_DENSE_ITEM = 2  # bytes of a weight of the dense part
_MEMORY_SHARE, _KV_GB = 0.93, 1.0  # of the device for weights and KV cache, of which the cache takes
_EXPERT_KERNELS = 4  # reading the routing, the table, the sum, and what two products have beyond their bytes


@dataclass(frozen=True)
class Machine:
    """Of estimates.yaml."""

    bandwidth: float
    memory_gb: float
    dense: float
    experts: float
    small_us: float
    link_gbps: float
    step_ms: float
    host: float

    @property
    def gbps(self) -> float:
        return 1e3 * self.bandwidth


@dataclass(frozen=True)
class Model:
    """Of estimates.yaml."""

    shape: ModelShape
    dense_weights: float
    head_weights: float
    kernels: int
    products: int
    expert_bits: float

    @property
    def expert_bytes(self) -> float:
        return 3 * self.shape.hidden * self.shape.intermediate * self.expert_bits / 8

    @property
    def dense_gb(self) -> float:
        """Dense weights of all layers, and of logits and embeddings."""
        return _DENSE_ITEM * (self.shape.layers * self.dense_weights + 2 * self.head_weights) / 1e9

    @property
    def experts_gb(self) -> float:
        return self.shape.moe_layers * self.shape.experts * self.expert_bytes / 1e9


@dataclass(frozen=True)
class Token:
    """The estimated parts of a token, in microseconds of a layer and milliseconds."""

    dense_us: float
    experts_us: float
    head_ms: float
    floor_ms: float
    model: Model
    machine: Machine

    @staticmethod
    def of(model: Model, machine: Machine) -> Token:
        """Of a model on a machine."""
        shape, per_us = model.shape, machine.gbps * 1e3  # bytes in a microsecond
        dense, head = (_DENSE_ITEM * weights for weights in (model.dense_weights, model.head_weights))
        experts = shape.top_k * model.expert_bytes
        small = (model.kernels - model.products) * machine.small_us
        return Token(
            dense / per_us / machine.dense + small,
            experts / per_us / machine.experts + _EXPERT_KERNELS * machine.small_us,
            head / per_us / machine.dense * 1e-3,
            (shape.layers * dense + shape.moe_layers * experts + head) / per_us * 1e-3, model, machine,
        )  # fmt: skip

    def ms(self, host_us: float, resident: float, layers: int | None = None) -> float:
        """A token's milliseconds where this share of the experts is resident. layers: of them; None: all."""
        given, shape = inputs(), self.model.shape
        count = shape.layers if layers is None else layers
        layer_us = self.dense_us + self.experts_us + host_us * self.machine.host
        copied = float(np.interp(resident, list(given["copied"]), list(given["copied"].values())))
        copies_gb = count * shape.top_k * self.model.expert_bytes * copied / 1e9
        copies_ms = 1e3 * copies_gb / self.machine.link_gbps / given["link_share"]
        return count * layer_us * 1e-3 + self.head_ms + self.machine.step_ms + copies_ms

    @property
    def resident(self) -> float:
        """The share of the experts that the device holds."""
        room = _MEMORY_SHARE * self.machine.memory_gb - _KV_GB - self.model.dense_gb
        return float(np.clip(room / self.model.experts_gb, 0.0, 1.0))

    def prompt_s(self) -> float:
        """Seconds of the copies of a long prompt, which needs all experts once."""
        absent = (1 - self.resident) * self.model.experts_gb
        return float(absent / self.machine.link_gbps / inputs()["link_share"])


def inputs() -> dict[str, Any]:
    """estimates.yaml; numbers are floats."""
    found = read_yaml(Path(__file__).with_name("estimates.yaml"))
    return found | {"copied": {float(share): float(copied) for share, copied in found["copied"].items()}}


def models() -> dict[str, Model]:
    return {name: Model(**_floats(of)) for name, of in inputs()["models"].items()}


def machines() -> dict[str, Machine]:
    return {name: Machine(**of) for name, of in inputs()["machines"].items()}


def _floats(of: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {name: float(of[name]) for name in ("dense_weights", "head_weights", "expert_bits")}
    return {**of, **numbers, "shape": shape_named(of["shape"])}


def estimates(options: GpuEstimates, progress: Progress | None) -> Report:
    """A row for each model and machine."""
    host_us = inputs()["host_us"]
    report = Report("gpu-estimates", "estimated", settings=options.settings() | inputs())
    for name, model in models().items():
        for on, machine in machines().items():
            token = Token.of(model, machine)
            measured, aimed = (token.ms(host_us[kind], token.resident) for kind in ("measured", "aimed"))
            report.rows.append({
                "model": name, "machine": on, "resident": round(token.resident, 2), "dense_us": round(token.dense_us),
                "experts_us": round(token.experts_us), "host_us": round(host_us["measured"] * machine.host),
                "head_ms": round(token.head_ms, 2), "ms": round(measured, 1), "ms_aimed": round(aimed, 1),
                "floor_ms": round(token.floor_ms, 1), "prompt_s": round(token.prompt_s(), 2),
            })  # fmt: skip
    return report


def expected(report: Report) -> list[str]:
    """A table of milliseconds a token, of each model on each machine, with the experts that it holds."""
    names = list(dict.fromkeys(row["machine"] for row in report.rows))
    cells = {(row["model"], row["machine"]): f"{row['ms']:g} ({row['resident']:.0%})" for row in report.rows}
    of = dict.fromkeys(row["model"] for row in report.rows)
    return markdown(("ms a token, *estimated*", *names), [[model, *(cells[model, on] for on in names)] for model in of])


def write_page(page: Path, report: Report) -> None:
    """Fill the table `rows` of a page, and `expected` of the users' page, docs/gpu.md."""
    rows = markdown(list(report.rows[0]), [list(map(str, row.values())) for row in report.rows])
    for file in (page, page.parent.parent / "gpu.md"):
        if file.exists():
            fill_page(file, {"rows": rows, "expected": expected(report)}.__getitem__)
