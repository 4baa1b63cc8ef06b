"""`tiermoe doctor`: what this machine is, how fast it moves bytes, and what would fit."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...actors.store.disk import read_gbps, weights_in
from ...errors import CheckpointError, ConfigError
from ...limits import Memory, cores, cores_words, memory, memory_words
from ..checkpoints.hub import headers, locate
from ..checkpoints.weight_files import gguf_in
from ..config import check_model_dir, default_model_dir
from ..host import cpu, shown, versions
from ..report.files import check_writable, writing
from ..report.output import print_json
from ..report.tables import facts, progress_on, results, show, size
from ..topology.inputs import ROUTED
from ..topology.machine_costs import cache_file, write_costs
from .devices import Device, devices, host_copy_gbps
from .options import AsJson, Model

_AGENT_PORT = 52365  # of Ray's agents, unless a node is given another one
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def routed_expert_elements(model_dir: Path) -> int:
    """Numbers in the routed experts of a checkpoint; reads its headers only.

    Raises:
        CheckpointError: no safetensors or GGUF file, or one whose header cannot be read.
    """
    if gguf_in(model_dir):
        from ..checkpoints.gguf_header import gguf_files, read_experts, typed_tensors

        tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = typed_tensors(read_experts(gguf_files(model_dir)))
    else:
        tensors = headers(model_dir)
    if tensors is None:
        raise CheckpointError(f"'{shown(model_dir)}' has no safetensors file", "download the checkpoint as safetensors")
    return sum(math.prod(shape) for name, (_, shape) in tensors.items() if ROUTED.search(name))


def job_agent_port_taken(port: int = _AGENT_PORT) -> bool:
    """Whether a Ray of this machine has the port by which its job server starts jobs, so that another one lacks it."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def examine(model_dir: Path) -> tuple[dict[str, Any], ConfigError | None]:
    """All that the command prints, without devices if this machine's GPU is refused, and that refusal.

    Takes a few seconds and half a gigabyte.

    Raises:
        CheckpointError: a model other than the absent default one was given and cannot be read.
    """
    host = memory()
    found, refusal = list[Device](), None
    try:
        found = devices()
    except ConfigError as error:
        refusal = error
    report: dict[str, Any] = {
        "cpu": cpu() | {"cores_from": cores()[1]},
        "memory": {
            "total_bytes": host.total, "total_from": host.total_from, "free_bytes": host.free,
            "free_from": host.free_from, "copy_gbps": host_copy_gbps(),
        },
        "devices": [asdict(device) for device in found],
        "versions": versions(),
        "unusable_gpu": None if refusal is None else str(refusal),
        "job_agent_port_taken": job_agent_port_taken(),
        "disk": None,
        "model": None,
    }
    if model_dir == default_model_dir() and not model_dir.is_dir():
        return report, refusal
    check_model_dir(model_dir)
    if (file := weights_in([model_dir])) is not None:
        gbps, direct = read_gbps(file)
        report["disk"] = {"file": str(shown(file)), "gbps": gbps, "direct": direct}
    elements = routed_expert_elements(model_dir)
    needs = {dtype: elements * each for dtype, each in _ITEM_BYTES.items()}
    free = max((device.free_bytes for device in found), default=0)
    report["model"] = {
        "path": str(shown(model_dir)),
        "expert_bytes": needs,
        "share_that_fits": {dtype: min(1.0, free / need) if need else 1.0 for dtype, need in needs.items()},
    }
    return report, refusal


def doctor_command(
    model: Model = None,
    save: Annotated[
        bool, typer.Option("--save", help="Also measure the host time of a step; `replay --machine this` reads it.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the figures of --save to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine and say what would fit."""
    if out is not None and not save:
        raise ConfigError("--out is given without --save", "add --save, or leave it out")
    if out is not None:
        check_writable(out, "--out")
    console = Console(stderr=True)
    with console.status("measuring ..."):
        report, refusal = examine(locate(model))
    if save and refusal is None:
        report["costs"] = _saved(console, out)
    if as_json:
        print_json(report)
    else:
        show(results(), facts("This machine", _rows(report)))
    if refusal is not None:
        raise refusal


def _saved(console: Console, out: Path | None) -> dict[str, Any]:
    """Measure the costs of a step and write them; as the JSON object has them."""
    from .measure_machine import measure_machine  # torch

    with progress_on(console) as progress:
        costs = measure_machine(progress)
    for path in (cache_file(), *(() if out is None else (out,))):
        with writing(path, "free the disk, or change its rights"):
            write_costs(costs, path)
        console.print(f"written: {path}", highlight=False, soft_wrap=True)
    return costs.model_dump(mode="json")


def _free(host: dict[str, Any]) -> str:
    return memory_words(Memory(host["total_bytes"], host["total_from"], host["free_bytes"], host["free_from"]))


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    chip, host, model = report["cpu"], report["memory"], report["model"]
    rows = [
        ("cpu", f"{chip['model']}, {chip['physical_cores']} physical cores"),
        ("usable cores", cores_words(chip["cores"], chip["cores_from"])),
        ("instruction sets", " ".join(chip["instruction_sets"]) or "none that matter here"),
        ("host memory", f"{_free(host)}, copy {host['copy_gbps']:.1f} GB/s (one thread, measured)"),
    ]  # fmt: skip
    if (disk := report["disk"]) is not None:
        how = "past the page cache" if disk["direct"] else "through the page cache, for want of direct reads"
        rows.append(("disk", f"{disk['gbps']:.2f} GB/s, {how} (measured on {disk['file']})"))
    for device in report["devices"]:
        rows.append(("device", f"{device['name']}, {size(device['free_bytes'])} free"))
        speed = f"{device['link_gbps']:.1f} GB/s"
        here = f"none: experts run where the store maps them; a stand-in (--emulate) copies {speed} at most"
        rows.append(("link", here if device["link"] is None else f"{speed}, {device['link']}"))
        if device["memory_node"] is not None:
            rows.append(("near", f"memory {device['memory_node']}: a worker's threads and pages keep to it"))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in report["versions"].items())))
    if report["job_agent_port_taken"]:
        needs = "another Ray here needs --dashboard-agent-listen-port=PORT, else `ray job submit` finds no agent"
        rows.append(("Ray jobs", f"port {_AGENT_PORT} is taken: {needs}"))
    if (costs := report.get("costs")) is not None:
        rows.append(("experts' kernels", f"{costs['expert_us']:.0f} us and {costs['expert_gbps']:.1f} GB/s each"))
        rows.append(("copies", f"{costs['copy_us']:.0f} us and {costs['copy_gbps']:.1f} GB/s each, "
                               f"waits end {costs['wait_us']:.0f} us later"))  # fmt: skip
        rows.append(("dense part", f"{costs['dense_layer_us']:.0f} us a layer and {costs['dense_gbps']:.1f} GB/s"))
        for name, policy in costs["policies"].items():
            step, layer, miss, load = (f"{policy[f'{key}_us']:.0f} us" for key in ("step", "layer", "miss", "load"))
            rows.append((f"host, {name}", f"{step} a step, {layer} a layer, {miss} a layer that misses, {load} a load"))
    if model is None:
        rows.append(("model", "none: make the default one with `make train-default-model`"))
        return rows
    rows.append(("model", model["path"]))
    for dtype, need in model["expert_bytes"].items():
        fits = model["share_that_fits"][dtype]
        share = "all" if fits >= 1 else f"{fits:.1%}"
        rows.append((f"experts {dtype}", f"{size(need)}; the free device memory holds {share} of them"))
    return rows
