"""A worker in this process, for jobs that measure: its configuration, and its start without Ray."""

from __future__ import annotations

from typing import Any

from ..checkpoints.hub import located
from ..config import DEFAULT_BUDGET, DEFAULT_POLICY, RunConfig, engine_settings, load_run_config, on_this_machine
from ..topology.decided import decided
from ..topology.inputs import facts_of_store, local_ray, this_machine
from .prepare.needs import check_artifacts, prepared_store


def run_config(model: str | None, file: str | None = None, **options: Any) -> RunConfig:
    """The configuration of a file (None: the defaults) with these options on top, on one thread and one GPU.

    Without the prefix cache, unless `options` say so: a repetition runs its prompts again. Without a budget a quarter
    of the experts, on every device.
    """
    kv = {"prefix_cache": False} | options.pop("kv", {})
    fixed = {"model": model, "threads": 1, "cluster": {"shards": 1}, "kv": kv}
    config = load_run_config(file, fixed | options)
    return located(config if config.budget is not None else config.model_copy(update={"budget": DEFAULT_BUDGET}))


def start_worker(config: RunConfig, *, optional_workers: bool = True) -> Any:
    """A started `LocalWorker` on the prepared store of the configured model, with NDP workers if it needs them.

    optional_workers: also those that the policy can do without, where there is room for them.
    """
    from ..local import LocalWorker

    settings = engine_settings(on_this_machine(config))
    check_artifacts(settings.policy, config)
    store = prepared_store(config, settings)
    if settings.budget.auto is not None or config.policy == DEFAULT_POLICY:
        nodes, facts = this_machine(local_ray(config, settings)), facts_of_store(store, config.model_dir)
        settings, _ = decided(config, settings, facts, nodes, here=True)
    policy = settings.policy
    needed = not config.may_drop_workers(policy) or (optional_workers and settings.host_bytes is None)
    worker = LocalWorker(settings, store, config.ndp_workers(policy) if needed else 0)
    worker.start()
    return worker
