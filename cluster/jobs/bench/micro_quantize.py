"""Micro-benchmark `quantize`: error of a quantized expert's output, GPTQ against quantizers without inputs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ....errors import CheckpointError
from ..prepare import ensure_prepared, ensure_replicas
from .metrics import Bar, Report
from .serving import run_config

if TYPE_CHECKING:
    from .micro import Quantize

WIDTHS, GROUP = (1, 2, 3, 4, 8), 64
ROWS = 1024  # held-out rows of an expert, evenly spaced
MIN_SHARE, MIN_MONOTONE = 0.95, 0.98

Dequantize = Callable[[Any, int], Any]  # weights float32 [N, I], bits -> dequantized weights, the same shape


def quantize(options: Quantize, progress: Progress | None) -> Report:
    """Mean squared error of whole experts' outputs on held-out inputs, for every expert and width.

    The inputs are those that the router sends to each expert on the model's held-out passages. Compared: the store's
    GPTQ replicas; round-to-nearest with least squares scales (the fallback), and with plain minimum and maximum;
    torchao's affine quantization and HQQ where installed.

    Bars: GPTQ's error below each other's for at least 95% of experts at every width, and falling with the width for at
    least 98% of experts.

    Raises:
        CheckpointError: the model ships no held-out text.
    """
    model_dir = run_config(options.model).model_dir
    text = model_dir / "heldout"
    if not text.is_dir():
        raise CheckpointError(f"'{model_dir}' ships no held-out passages", "use the default model")
    store = ensure_replicas(ensure_prepared(model_dir, progress=False), model_dir, WIDTHS, GROUP, progress=False)
    others = _quantizers()
    losses, power, tokens = _measure(store, model_dir, text, others, progress)
    report = Report("quantize", "real")
    report.settings = {
        "model": model_dir.name, "group": GROUP, "heldout_tokens": tokens, "rows_per_expert": ROWS,
        "measured_on": "held-out expert inputs",
        **{name: version(name) if name in others else "not installed" for name in ("torchao", "hqq")},
    }  # fmt: skip
    for bits in WIDTHS:
        for name, by_width in losses.items():
            loss = by_width[bits]
            below = float((losses["gptq"][bits] < loss).mean()) if name != "gptq" else None
            report.rows.append({
                "case": name, "bits": bits, "experts": int(loss.size), "mse_mean": float(loss.mean()),
                "relative_mean": float((loss / power).mean()), "relative_worst": float((loss / power).max()),
                "gptq_below_share": below,
            })  # fmt: skip
    for name in losses:
        if name != "gptq":
            worst = min(row["gptq_below_share"] for row in report.rows if row["case"] == name)
            report.bars.append(Bar(f"experts with GPTQ below {name}, worst width", worst, ">=", MIN_SHARE))
    falling = np.stack([losses["gptq"][bits] for bits in WIDTHS])
    share = float((np.diff(falling, axis=0) < 0).all(axis=0).mean())
    report.bars.append(Bar("experts whose error falls with every width", share, ">=", MIN_MONOTONE))
    return report


def _measure(
    store: Path, model_dir: Path, text: Path, others: Mapping[str, Dequantize], progress: Progress | None
) -> tuple[dict[str, dict[int, np.ndarray]], np.ndarray, int]:
    """Losses [L * E] by quantizer and width, the mean square of the outputs [L * E], and the tokens run."""
    import torch

    from ....actors.engine.cache.sources import host_weights
    from ....actors.store.files import ExpertStore
    from ....actors.store.replicas import describe_replicas, open_replicas
    from ..prepare.calibration import read_windows
    from ..prepare.capture import capture, load_model, open_inputs
    from ..prepare.quantize import Matrices, expert_outputs, expert_rows, output_losses, unpacked

    progress = progress or Progress(disable=True)
    torch.set_num_threads(1)
    opened = ExpertStore(store, verify="stamp")
    view = describe_replicas(store, verify="stamp")
    assert view is not None  # ensured above
    windows = read_windows(text, model_dir, Console(quiet=True))
    network, blocks = load_model(store, opened.manifest)
    found: dict[str, dict[int, list[np.ndarray]]] = {name: {b: [] for b in WIDTHS} for name in ("gptq", *others)}
    power: list[float] = []
    with tempfile.TemporaryDirectory(prefix="tiermoe-bench-") as folder:
        run = progress.add_task("running the held-out text", total=windows.tokens)
        capture(network, blocks, opened.layers, windows, Path(folder), lambda n: progress.advance(run, n))
        task = progress.add_task("comparing", total=len(blocks) * len(WIDTHS))
        for layer, block in enumerate(blocks):
            activation = block.activation or ""
            inputs = open_inputs(Path(folder), layer)
            full = Matrices.of(*host_weights([opened.layers[layer]])[0].tensors[:2])
            rows = [expert_rows(inputs, expert, ROWS) for expert in range(len(full.down))]
            outputs = expert_outputs(full, rows, activation)
            power += [float(y.square().mean()) for y in outputs]
            packed = open_replicas(view, [layer])
            for bits in WIDTHS:
                replicas = unpacked(packed[bits][0], view.shapes[bits])
                found["gptq"][bits].append(output_losses(replicas, rows, outputs, activation))
                for name, dequantize in others.items():
                    lossy = Matrices(_each(dequantize, full.gate_up, bits), _each(dequantize, full.down, bits))
                    found[name][bits].append(output_losses(lossy, rows, outputs, activation))
                progress.advance(task)
    losses = {name: {bits: np.concatenate(v) for bits, v in widths.items()} for name, widths in found.items()}
    return losses, np.array(power), windows.tokens


def _each(dequantize: Dequantize, matrices: Any, bits: int) -> Any:
    return dequantize(matrices.flatten(0, 1), bits).view_as(matrices)


def _quantizers() -> dict[str, Dequantize]:
    """Our own round-to-nearest, and torchao and HQQ where installed."""
    from ....kernels.quantize import round_to_nearest

    found: dict[str, Dequantize] = {
        "rtn": lambda w, bits: round_to_nearest(w.unsqueeze(0), bits, GROUP).dequantized()[0],
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
