"""`tiermoe status` and `tiermoe down`: what runs, and its end."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer
from rich.console import Console

from ...errors import ConfigError, RuntimeFailure, TierMoeError
from ..registry import Entry, Registry
from ..report.output import print_json, stdout
from ..report.status_tables import merged_residency, status_tables
from ..report.tables import results, show
from .options import AsJson, attached

if TYPE_CHECKING:
    from ..attach import Attachment, Sample

Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a Ray cluster; default: that of `tiermoe up` on this machine.")
]
Deployment = Annotated[str | None, typer.Option(help="Id of one deployment; default: all.")]

_END_S = 60.0  # actors, Ray's servers and their files
_POLL_S = 0.1
_RATES_S = 1.0  # between two samples, at least
_START = "start one with `tiermoe up`"


def status_command(address: Address = None, deployment: Deployment = None, as_json: AsJson = False) -> None:
    """Actors, where they run, their health, residency of each layer, counters and what they rise by in a second."""
    entries = Registry().entries()
    addresses = [address] if address is not None else sorted({entry.address for entry in entries})
    if not addresses:
        remedy = f"{_START}, or pass --address HOST:PORT"
        raise RuntimeFailure("no runtime of `tiermoe up` runs on this machine", remedy)
    with Console(stderr=True).status("asking ..."):
        found = [record for where in addresses for record in deployments_at(where)]
    if deployment is not None:
        found = [record for record in found if record["id"].partition(".")[0] == deployment]
    if not found:
        what = f"deployment '{deployment}'" if deployment is not None else "deployment"
        raise RuntimeFailure(f"no {what} runs at {', '.join(addresses)}", _START)
    if as_json:
        print_json({"deployments": found})
        return
    console = results()
    for record in found:
        show(console, *status_tables(record, console.width))


def deployments_at(address: str) -> list[dict[str, Any]]:
    """All that can be known of the deployments in a Ray; what does not answer is named, not waited for.

    Raises:
        RuntimeFailure: the Ray does not answer.
    """
    records: dict[str, dict[str, Any]] = {}
    with attached(address) as attachment:
        before = _samples(attachment)
        for actor in attachment.actors():
            record = records.setdefault(actor.deployment, {"id": actor.deployment, "address": address, "actors": []})
            health = attachment.health(actor) if actor.state == "ALIVE" else {}
            record["actors"].append({k: v for k, v in asdict(actor).items() if k != "deployment"} | {"health": health})
        for name in attachment.deployments():  # also those that have no actor yet
            record = records.setdefault(name, {"id": name, "address": address, "actors": []})
            for key, method in (("plan", "plan"), ("counters", "stats")):
                record[key] = None
                with contextlib.suppress(TierMoeError):  # the lead's row says that it does not answer
                    record[key] = _plain(attachment.ask(name, method))
            record["gpus"] = _gpus(attachment, name)
            record["residency"] = merged_residency([gpu["residency"] for gpu in record["gpus"]])
            record["samples"] = []
        time.sleep(_RATES_S)
        after = _samples(attachment)
        for (name, worker), sample in after.items():
            if name not in records:  # it has just begun
                continue
            rates = sample.since(before[name, worker]) if (name, worker) in before else None
            found = {"name": worker} | {k: v for k, v in asdict(sample).items() if k not in ("deployment", "worker")}
            records[name]["samples"].append(found | {"rates": None if rates is None else asdict(rates)})
    return list(records.values())


def _samples(attachment: Attachment) -> dict[tuple[str, str], Sample]:
    """Of all deployments, by replica group and worker."""
    ids = {name.partition(".")[0] for name in attachment.deployments()}
    found = [sample for name in sorted(ids) for sample in attachment.samples(name)]
    return {(sample.deployment, sample.worker): sample for sample in found}


def _gpus(attachment: Attachment, deployment: str) -> list[dict[str, Any]]:
    """Counters and residency of each GPU, the lead's first; residency is None if it does not answer."""
    try:
        gpus = [dict(gpu) for gpu in attachment.ask(deployment, "shard_stats")]
    except TierMoeError:
        return []  # the lead's row says that it does not answer
    for number, gpu in enumerate(gpus):
        gpu["residency"] = None
        with contextlib.suppress(TierMoeError):
            gpu["residency"] = _plain(
                attachment.ask(deployment, "residency")
                if number == 0
                else attachment.ask_actor(deployment, str(gpu["shard"]), "residency")
            )
    return gpus


def down_command(address: Address = None, deployment: Deployment = None) -> None:
    """End a runtime and everything that belongs to it."""
    entries = [
        entry
        for entry in Registry().entries()
        if address in (None, entry.address) and deployment in (None, entry.deployment)
    ]
    if address is None and not entries:
        what = f"deployment '{deployment}'" if deployment is not None else "runtime of `tiermoe up`"
        print(f"no {what} runs on this machine: nothing to end", file=stdout(), flush=True)
        return
    if len(entries) > 1:
        raise ConfigError(
            f"{len(entries)} runtimes run here",
            f"pass --deployment with one of {', '.join(entry.deployment for entry in entries)}",
        )
    if entries:
        _end_here(entries[0])
    else:
        assert address is not None
        _end_there(address, deployment)


def _end_here(entry: Entry) -> None:
    """Ask the process that started it to end in order, and wait until it has."""
    if (process := entry.process()) is not None:
        Registry().withdraw(entry.deployment)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    end_s = time.monotonic() + _END_S
    while entry.process() is not None:  # not `wait`, which takes one that its parent has not asked after for alive
        if time.monotonic() > end_s:
            raise RuntimeFailure(
                f"deployment {entry.deployment} (pid {entry.pid}) has not ended within {_END_S:g} s",
                f"end it with `kill -9 {entry.pid}`, which also ends its processes and removes its files",
            )
        time.sleep(_POLL_S)
    print(f"deployment {entry.deployment} has ended", file=stdout(), flush=True)


def _end_there(address: str, deployment: str | None) -> None:
    """End a deployment by its actors; the process that started it, wherever it is, notices."""
    with attached(address) as attachment:
        ids = attachment.deployments()
        if not ids or (deployment is not None and deployment not in ids):
            what = f"deployment '{deployment}'" if deployment is not None else "deployment"
            print(f"no {what} runs at {address}: nothing to end", file=stdout(), flush=True)
            return
        chosen = attachment.choose(deployment)
        attachment.end(chosen)
    print(f"deployment {chosen} has ended", file=stdout(), flush=True)


def _plain(answer: Any) -> Any:
    """A worker's answer as JSON values."""
    if isinstance(answer, list):
        return [asdict(item) for item in answer]
    return answer if isinstance(answer, dict) else answer.as_dict()
