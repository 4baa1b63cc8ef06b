"""`tiermoe bench` of single parts: kernels, channels, the matcher; and of all that needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ....errors import ConfigError
from .finish import Check, Json, Model, Out, Repeats, finish


def gpu(
    out: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = Path("docs/results"),
    parts: Annotated[str, typer.Option(help="Only these, separated by commas; see docs/gpu.md.")] = "",
    seconds: Annotated[float, typer.Option(help="For all parts together.")] = 445.0,
    device: Annotated[str, typer.Option(help="cuda; cpu: the stand-in, to try the script.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="real; toy: seconds of work.")] = "real",
) -> None:
    """Every check and measurement that needs a GPU, in under eight minutes; exits with 1 when a check fails."""
    from .gpu.__main__ import main

    given = ["--out", str(out), "--parts", parts, "--seconds", str(seconds), "--device", device, "--sizes", sizes]
    raise typer.Exit(main(given))


def quantize(model: Model = None, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Error of quantized experts on held-out inputs: GPTQ against round-to-nearest, torchao and HQQ."""
    from .quantize import bench_quantize

    finish(lambda progress: bench_quantize(model, progress), as_json, check, out)


def channel(repeats: Repeats = 7, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Round trips between two processes: shared memory, gRPC, a bare gRPC stream, a Ray actor call."""
    from .channel import bench_channel

    finish(lambda progress: bench_channel(repeats, progress), as_json, check, out)


def transfer(repeats: Repeats = 7, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Experts from another node's store: our channel and Ray object refs, against a copy in memory."""
    from .transfer import bench_transfer

    finish(lambda progress: bench_transfer(repeats, progress), as_json, check, out)


def kernel(
    repeats: Repeats = 7,
    group: Annotated[int, typer.Option(help="Quantization group: 32, 64 or 128.")] = 64,
    instruction_set: Annotated[str | None, typer.Option(help="Of our kernels; default: the best here.")] = None,
    ggml: Annotated[Path | None, typer.Option(help="libggml-cpu*.so; default: that of an installed wheel.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="1 to 4 bits on so many cores against their bandwidth alone.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Packed experts on one core against memory bandwidth, torch and ggml; or on many against bandwidth."""
    from .kernel import bench_kernel
    from .kernel_threads import bench_kernel_threads

    if threads is not None:
        if ggml is not None:
            raise ConfigError("--ggml is compared with on one thread", "leave out --ggml, or --threads")
        finish(
            lambda progress: bench_kernel_threads(threads, repeats, group, instruction_set, progress),
            as_json, check, out,
        )  # fmt: skip
        return
    finish(lambda progress: bench_kernel(repeats, group, instruction_set, ggml, progress), as_json, check, out)


def matcher(repeats: Repeats = 5, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Expert maps: time of a search and an update, memory, and what publishing costs the lead."""
    from .matcher import bench_matcher

    finish(lambda progress: bench_matcher(repeats, progress), as_json, check, out)


def substitute(repeats: Repeats = 9, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Buddy substitution: microseconds to decide one layer."""
    from .substitute import bench_substitute

    finish(lambda progress: bench_substitute(repeats, progress), as_json, check, out)
