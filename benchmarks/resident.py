"""`resident`: host memory of a machine without a GPU that serves, over the model's bytes."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.config import engine_settings, load_run_config, on_this_machine
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.local import LocalWorker
from tiermoe.cluster.topology.inputs import facts_of_store
from tiermoe.errors import ConfigError, RuntimeFailure

from .random_model import NAMES, NamedModel

if TYPE_CHECKING:
    from rich.progress import Progress

    from .cases import Resident

MOST = 1.2  # resident bytes over those of the model: the bar
_PROMPTS, _PROMPT, _TOKENS = 6, 300, 24  # which use nearly every expert


def resident(options: Resident, progress: Progress | None) -> Report:
    """Resident pages of the lead's process as Linux counts them: private ones, and shared ones such as of mapped files.

    Bar: pages of the model and of serving it, over the model's bytes, at most 1.2. The libraries, which a larger model
    does not add to, and the KV cache, whose size is chosen, are rows of their own.

    Raises:
        ConfigError: not on Linux. RuntimeFailure: a request failed.
    """
    named = options.model in NAMES
    model = str(NamedModel(str(options.model), layers=options.layers).made()) if named else options.model
    found = _measured(model)
    report = Report("resident", "real", settings=options.settings())
    report.rows = [{"case": name, "measure": "bytes", "median": value} for name, value in found.items()]
    served = found["resident"] - found["libraries"] - found["KV cache"]
    report.figures = {"ratio": served / found["model"], "ratio_of_all": found["resident"] / found["model"]}
    report.bars = [Bar("resident, less libraries and KV cache, over the model", report.figures["ratio"], "<=", MOST)]
    return report


def _measured(model: str | None) -> dict[str, Any]:
    """Serve a model and use its experts: bytes by name."""
    config = on_this_machine(load_run_config(None, {"model": model, "threads": 1, "device": "cpu"}))
    settings = engine_settings(config)
    store = prepared_store(config, settings)
    facts, manifest = facts_of_store(store, config.model_dir), read_manifest(store)
    with closing(LocalWorker(settings, store, 0)) as worker:
        worker.warm()
        libraries = _resident()
        worker.start()
        chance, vocabulary = random.Random(0), worker.batcher.streams.vocabulary
        sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
        for number in range(_PROMPTS):
            prompt = tuple(chance.randrange(3, vocabulary) for _ in range(_PROMPT))
            for event in worker.submit(GenerationRequest(f"r{number}", prompt, sampling)):
                if event.error is not None:
                    raise RuntimeFailure(f"a request failed: {event.error}", "measure again")
        return {
            "model": facts.all_bytes + manifest.dense.nbytes, "libraries": libraries,
            "KV cache": facts.kv_bytes(4, settings.kv), "resident": _resident(),
        }  # fmt: skip


def _resident() -> int:
    path = Path("/proc/self/smaps_rollup")
    if not path.is_file():
        raise ConfigError("resident memory is read from /proc", "measure it on Linux")
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("Rss:")]
    return int(line.split()[1]) << 10
