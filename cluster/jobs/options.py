"""The options that say what a runtime is, shared by `tiermoe run` and `tiermoe up`, and the checks before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...actors.policies.sharding import owned_experts
from ...actors.settings import EngineSettings, budget_bytes
from ...actors.store.format import read_manifest
from ...errors import BudgetError, ConfigError, RequestError
from ..config import RunConfig, check_model_dir, engine_settings, load_run_config
from ..host import has_gpu
from ..yaml_file import UNPREFIXED

Model = Annotated[str | None, typer.Option(help="Checkpoint folder; default: the model of the project.")]
Config = Annotated[str | None, typer.Option(help="YAML file, or a name in configs/clusters.")]
Policy = Annotated[str | None, typer.Option(help="Name in configs/policies, or a YAML file. (next-gate)")]
Budget = Annotated[str | None, typer.Option(help="Device memory for experts: 0.25, 25%, 512MiB. (0.25)")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda. (auto)")]
Dtype = Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. (auto)")]
Threads = Annotated[int | None, typer.Option(help="Threads of the worker. (cores - 1; on a GPU at most 4)")]
LinkGbps = Annotated[float | None, typer.Option(help="Emulated link, 1e9 bytes/s; CPU only. (16)")]
LinkLatency = Annotated[float | None, typer.Option(help="Emulated link latency; CPU only. (10)")]
NdpThreads = Annotated[int | None, typer.Option(help="Threads of the NDP worker. (1; beside a GPU what is left)")]
NdpHardware = Annotated[str | None, typer.Option(help="Modelled NDP device, configs/hardware. (paper-ndp)")]
NdpPace = Annotated[bool | None, typer.Option(help="Answer no sooner than the modelled NDP device would.")]
Shards = Annotated[int | None, typer.Option(help="GPUs, or CPU stand-ins, that share the experts. (1)")]
NdpWorkers = Annotated[str | None, typer.Option(help="NDP workers, or per-node; for policies that use them. (1)")]
Store = Annotated[str | None, typer.Option(help="Folder of the expert store. (in the cache)")]


def runtime_options(
    *,
    link_gbps: float | None,
    link_latency_us: float | None,
    ndp_threads: int | None,
    ndp_hardware: str | None,
    ndp_pace: bool | None,
    shards: int | None,
    ndp_workers: str | None,
    **plain: str | int | None,
) -> dict[str, Any]:
    """The options by configuration key, nested for sections; None where not given."""
    return plain | {
        "link": {"gbps": link_gbps, "latency_us": link_latency_us},
        "ndp": {"threads": ndp_threads, "hardware": ndp_hardware, "pace": ndp_pace},
        "cluster": {"shards": shards, "ndp_workers": ndp_workers},
    }


def checked_config(file: str | None, options: Mapping[str, Any]) -> RunConfig:
    """The configuration of a file and options.

    Raises:
        ConfigError: malformed, or an emulated link for a real device.
    """
    config = load_run_config(file, options)
    if config.device == "cuda" and any(value is not None for value in options["link"].values()):
        raise ConfigError(
            "--link-gbps and --link-latency-us emulate a link, but device is cuda",
            "leave them out, or use --device cpu",
        )
    return config


def refuse_runtime_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a runtime for one that runs already; `model` may name the tokenizer's folder.

    Raises:
        RequestError: one is given; the message names it.
    """
    for name, value in options.items():
        if isinstance(value, Mapping):
            prefix = "" if name in UNPREFIXED else f"{name}-"
            refuse_runtime_options({f"{prefix}{key.replace('_', '-')}": inner for key, inner in value.items()})
        elif value is not None and name != "model":
            raise RequestError(
                f"--{name} is a matter of the runtime, which runs already", "leave it out, or run without --attach"
            )


def checked_settings(config: RunConfig, *, trace: bool = False) -> EngineSettings:
    """What the worker needs, after all checks that need no process.

    Raises:
        TierMoeError: the first thing that is wrong, with its remedy.
    """
    settings = engine_settings(config, trace=trace)
    check_model_dir(config.model_dir)
    if config.device == "cuda" and config.ray.address is None and not has_gpu():
        raise ConfigError("this machine has no CUDA device", "use --device cpu, or join a cluster that has one")
    return settings


def prepared_for(config: RunConfig, settings: EngineSettings, *, progress: bool) -> Path:
    """The expert store of the configured model, made where there is none, with the replicas that the policy needs.

    Raises:
        TierMoeError: the checkpoint, the store or the budget was refused.
    """
    from .prepare import ensure_prepared, ensure_replicas

    out_dir = Path(config.store).expanduser() if config.store is not None else None
    store = ensure_prepared(config.model_dir, out_dir, progress=progress)
    check_budget(settings, store)
    if widths := settings.policy.replica_widths:
        ensure_replicas(store, config.model_dir, widths, config.ndp.group_size, progress=progress)
    return store


def check_budget(settings: EngineSettings, store: Path) -> None:
    """Refuse a budget that the worker would refuse, before Ray starts.

    A dtype that only the worker's device decides is taken for the smaller one, and the worker has the last word.

    Raises:
        BudgetError: it holds no expert, or not all that a GPU owns where the policy keeps all.
    """
    manifest = read_manifest(store)
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if settings.device == "cpu" else "bfloat16")
    slot_bytes = manifest.experts.nbytes(4 if dtype == "float32" else 2)
    layers, each, shards = len(manifest.layers), manifest.experts.num_experts, settings.shards
    experts = layers * each
    held = budget_bytes(settings.budget, slot_bytes, experts)
    most = max(owned_experts(layers, each, shards.count, shards.ownership))
    if settings.policy.preload == "all" and held < most * slot_bytes:
        where = "" if shards.count == 1 else f" on the fullest of {shards.count} GPUs"
        raise BudgetError(
            f"policy '{settings.policy.name}' keeps all experts resident, {most * slot_bytes} bytes in {dtype}{where}; "
            f"the budget is {held}",
            f"pass --budget {math.ceil(1e4 * most / experts) / 1e4}, or choose a policy that loads on demand",
        )
