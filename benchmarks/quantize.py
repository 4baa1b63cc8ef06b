"""Micro-benchmark `quantize`: error of a quantized expert's output by method and width, and speed of the methods."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tiermoe.cluster.host import usable_cores
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.cluster.jobs.bench.serving import run_config
from tiermoe.cluster.jobs.prepare import ensure_prepared
from tiermoe.errors import CheckpointError

if TYPE_CHECKING:
    from .cases import Quantize

WIDTHS, GROUP = (1, 2, 3, 4, 8), 64
ROWS = 256  # held-out rows of an expert, evenly spaced
MIN_SHARE, MIN_MONOTONE = 0.95, 0.98
SPEED_SHAPE = 2048, 768  # of the expert that is timed: Qwen3-30B-A3B's
SPEED_EXPERTS, SPEED_ROWS = 4, 1024
MIN_MB_PER_S, MAX_EXPERT_S = 200.0, 1.0

Dequantize = Callable[[Any, int], Any]  # weights float32 [N, I], bits -> dequantized weights, the same shape


def quantize(options: Quantize, progress: Progress | None) -> Report:
    """Mean squared error of whole experts' outputs on held-out inputs, for every expert and width.

    The inputs are those that the router sends to each expert on the model's held-out passages. Compared: the data-free
    method and GPTQ on the model's calibration text, as `tiermoe prepare` makes replicas; round-to-nearest by minimum
    and maximum; torchao's affine quantization and HQQ where installed. `mb_per_s`: bf16 bytes of experts of 2048 x 768
    that become packed replicas of one width in a second, on all cores. `expert_s`: GPTQ of one, with 1024 rows.

    Bars: GPTQ's error below each other's for at least 95% of experts at every width, and falling with the width for at
    least 98% of experts; data-free at least 200 MB/s at every width; GPTQ of an expert within a second.

    Raises:
        CheckpointError: the model ships no held-out or no calibration text.
    """
    model_dir = run_config(options.model).model_dir
    for name in ("heldout", "calibration"):
        if not (model_dir / name).is_dir():
            raise CheckpointError(f"'{model_dir}' ships no {name} text", "use the default model")
    store = ensure_prepared(model_dir, progress=False)
    others = _quantizers()
    speed = _speeds(options.repeats, progress)
    losses, power, tokens = _measure(store, model_dir, options, others, progress)
    report = Report("quantize", "real")
    report.settings = {
        "model": model_dir.name, "group": GROUP, "heldout_tokens": tokens, "rows_per_expert": ROWS,
        "calibration_tokens": options.calibration_tokens, "cores": usable_cores(), "repeats": options.repeats,
        "timed_expert": list(SPEED_SHAPE), "measured_on": "held-out expert inputs",
        **{name: version(name) if name in others else "not installed" for name in ("torchao", "hqq")},
    }  # fmt: skip
    for bits in WIDTHS:
        for name, by_width in losses.items():
            loss = by_width[bits]
            below = float((losses["gptq"][bits] < loss).mean()) if name != "gptq" else None
            report.rows.append({
                "case": name, "bits": bits, "experts": int(loss.size), "mse_mean": float(loss.mean()),
                "relative_mean": float((loss / power).mean()), "relative_worst": float((loss / power).max()),
                "gptq_below_share": below, **speed.get((name, bits), {}),
            })  # fmt: skip
    for name in losses:
        if name != "gptq":
            worst = min(row["gptq_below_share"] for row in report.rows if row["case"] == name)
            report.bars.append(Bar(f"experts with GPTQ below {name}, worst width", worst, ">=", MIN_SHARE))
    falling = np.stack([losses["gptq"][bits] for bits in WIDTHS])
    share = float((np.diff(falling, axis=0) < 0).all(axis=0).mean())
    report.bars.append(Bar("experts whose error falls with every width", share, ">=", MIN_MONOTONE))
    slowest = min(speed["data-free", bits]["mb_per_s"] for bits in WIDTHS)
    report.bars.append(Bar("data-free, MB/s of bf16 weights, slowest width", slowest, ">=", MIN_MB_PER_S))
    longest = max(speed["gptq", bits]["expert_s"] for bits in WIDTHS)
    report.bars.append(Bar("GPTQ of a 2048 x 768 expert, seconds, slowest width", longest, "<=", MAX_EXPERT_S))
    return report


def _speeds(repeats: int, progress: Progress | None) -> dict[tuple[str, int], dict[str, float]]:
    """By method and width: `mb_per_s` of the data-free method, `expert_s` of GPTQ; medians, widths in turn."""
    import torch

    from tiermoe.cluster.jobs.prepare.capture import LayerInputs
    from tiermoe.cluster.jobs.prepare.quantize import widths_of
    from tiermoe.kernels.fit import fit_layer
    from tiermoe.kernels.packed_ffn import Threads

    progress = progress or Progress(disable=True)
    torch.set_num_threads(usable_cores())
    hidden, neurons = SPEED_SHAPE
    made = torch.Generator().manual_seed(0)
    gate_up = (0.02 * torch.randn(SPEED_EXPERTS, neurons, 2, hidden, generator=made)).bfloat16()
    down = (0.02 * torch.randn(SPEED_EXPERTS, neurons, hidden, generator=made)).bfloat16()
    stored = gate_up.view(torch.uint16).numpy(), down.view(torch.uint16).numpy()
    mega = sum(array.nbytes for array in stored) / 1e6
    inputs = LayerInputs(
        torch.randn(SPEED_ROWS, hidden, generator=made).numpy(), np.zeros((SPEED_ROWS, 1), np.int32),
        np.ones((SPEED_ROWS, 1), np.float32),
    )
    threads = Threads(usable_cores())
    taken: dict[tuple[str, int], list[float]] = {}
    for _ in progress.track(range(repeats), description="timing the methods"):
        for bits in WIDTHS:
            begin_s = time.perf_counter()
            fit_layer(*stored, "bfloat16", (bits,), GROUP, threads)
            fitted_s = time.perf_counter()
            for result in widths_of(gate_up[:1], down[:1], inputs, "silu", (bits,), GROUP, False):
                result.packed()
            taken.setdefault(("data-free", bits), []).append(fitted_s - begin_s)
            taken.setdefault(("gptq", bits), []).append(time.perf_counter() - fitted_s)
    return {
        (name, bits): {"mb_per_s": mega / median(times)} if name == "data-free" else {"expert_s": median(times)}
        for (name, bits), times in taken.items()
    }


def _measure(
    store: Path, model_dir: Path, options: Quantize, others: Mapping[str, Dequantize], progress: Progress | None
) -> tuple[dict[str, dict[int, np.ndarray]], np.ndarray, int]:
    """Losses [L * E] by quantizer and width, the mean square of the outputs [L * E], and the held-out tokens run."""
    import torch

    from tiermoe.actors.engine.cache.sources import host_weights
    from tiermoe.actors.store.files import ExpertStore
    from tiermoe.cluster.jobs.prepare.calibration import read_windows
    from tiermoe.cluster.jobs.prepare.capture import capture, load_model, open_inputs
    from tiermoe.cluster.jobs.prepare.quantize import (
        Matrices,
        expert_outputs,
        expert_rows,
        output_losses,
        unpacked,
        widths_of,
    )
    from tiermoe.kernels.fit import fit_layer
    from tiermoe.kernels.pack import PackedShape
    from tiermoe.kernels.packed_ffn import Threads

    progress = progress or Progress(disable=True)
    torch.set_num_threads(usable_cores())
    threads = Threads(usable_cores())
    opened = ExpertStore(store, verify="stamp")
    most = {"heldout": options.heldout_tokens, "calibration": options.calibration_tokens}
    texts = {name: read_windows(model_dir / name, model_dir, Console(quiet=True), n) for name, n in most.items()}
    network, blocks = load_model(store, opened.manifest)
    found: dict[str, dict[int, list[np.ndarray]]] = {
        name: {b: [] for b in WIDTHS} for name in ("gptq", "data-free", *others)
    }
    power: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tiermoe-bench-") as folder:
        inputs = {name: Path(folder) / name for name in texts}
        run = progress.add_task("running the texts", total=sum(windows.tokens for windows in texts.values()))
        for name, windows in texts.items():
            inputs[name].mkdir()
            capture(network, blocks, opened.layers, windows, inputs[name], lambda n: progress.advance(run, n))
        task = progress.add_task("comparing", total=len(blocks))
        for layer, block in enumerate(blocks):
            activation, arrays = block.activation or "", opened.layers[layer]
            gate_up, down = host_weights([arrays])[0].tensors[:2]
            full, heldout = Matrices.of(gate_up, down), open_inputs(inputs["heldout"], layer)
            rows = [expert_rows(heldout, expert, ROWS) for expert in range(len(full.down))]
            outputs = expert_outputs(full, rows, activation)
            power += [float(y.square().mean()) for y in outputs]

            def record(name: str, bits: int, lossy: Matrices) -> None:
                found[name][bits].append(output_losses(lossy, rows, outputs, activation))  # noqa: B023

            calibrated = open_inputs(inputs["calibration"], layer)
            parts: dict[int, list[Matrices]] = {bits: [] for bits in WIDTHS}
            for result in widths_of(gate_up, down, calibrated, activation, WIDTHS, GROUP, False):
                parts[result.bits].append(result.experts.dequantized())
            fitted, _ = fit_layer(arrays.gate_up, arrays.down, arrays.dtype, WIDTHS, GROUP, threads)
            for each in fitted:
                bits, hidden, neurons = each.bits, full.down.shape[1], full.down.shape[2]
                whole = [torch.cat([getattr(part, name) for part in parts[bits]]) for name in ("gate_up", "down")]
                record("gptq", bits, Matrices(*whole))
                record("data-free", bits, unpacked(each.arrays, PackedShape(hidden, neurons, bits, GROUP)))
                for name, dequantize in others.items():
                    lossy = Matrices(_of(dequantize, full.gate_up, bits), _of(dequantize, full.down, bits))
                    record(name, bits, lossy)
            progress.advance(task)
    losses = {name: {bits: np.concatenate(v) for bits, v in widths.items()} for name, widths in found.items()}
    return losses, np.array(power), texts["heldout"].tokens


def _of(dequantize: Dequantize, matrices: Any, bits: int) -> Any:
    return dequantize(matrices.flatten(0, 1), bits).view_as(matrices)


def _quantizers() -> dict[str, Dequantize]:
    """Round-to-nearest by minimum and maximum, and torchao and HQQ where installed."""
    from tiermoe.kernels.quantize import round_to_nearest

    found: dict[str, Dequantize] = {
        "rtn-minmax": lambda w, bits: round_to_nearest(w.unsqueeze(0), bits, GROUP, search=False).dequantized()[0],
    }
    for name, module, make in (
        ("torchao", "torchao.quantization.quant_primitives", _torchao),
        ("hqq", "hqq.core.quantize", _hqq),
    ):
        try:
            found[name] = make(import_module(module))
        except ImportError:
            continue  # the report's settings say so
    return found


def _torchao(primitives: Any) -> Dequantize:
    """Asymmetric affine quantization with minimum and maximum, as in torchao's weight-only configurations."""
    import torch

    def dequantize(w: Any, bits: int) -> Any:
        block, limits = (1, GROUP), {"quant_min": 0, "quant_max": (1 << bits) - 1}
        scale, zero = primitives.choose_qparams_affine(
            w, primitives.MappingType.ASYMMETRIC, block, torch.uint8, **limits
        )
        codes = primitives.quantize_affine(w, block, scale, zero, torch.uint8, **limits)
        return primitives.dequantize_affine(codes, block, scale, zero, torch.uint8, **limits)

    return dequantize


def _hqq(module: Any) -> Dequantize:
    """Half-quadratic quantization along the input with its own optimiser; scales stay in float32."""
    import torch

    def dequantize(w: Any, bits: int) -> Any:
        codes, meta = module.Quantizer.quantize(
            w.clone(), nbits=bits, group_size=GROUP, axis=1, device="cpu", compute_dtype=torch.float32, bitpack=False
        )
        return ((codes.float() - meta["zero"].float()) * meta["scale"].float()).view_as(w)

    return dequantize
