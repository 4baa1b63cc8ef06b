"""`plan` counts the bytes that a run takes: of the checkpoint, of its store, and of the worker that maps it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published import RELEASES, write
from serving import serving
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.prepare import ensure_prepared
from tiermoe.cluster.topology.estimate import make_plan
from tiermoe.cluster.topology.inputs import facts_of_checkpoint, facts_of_store, local_ray, this_machine

_FORMS = {release.name: release for release in RELEASES if release.quantize is not None}


def _checkpoint(name: str, folder: Path) -> Path:
    return write(_FORMS[name], folder)[0] if name in _FORMS else save_tiny_checkpoint(name, folder / "plain")


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2", *list(_FORMS)[:2]])
def test_plan_and_run_count_the_same_bytes(name: str, tmp_path: Path) -> None:
    model = _checkpoint(name, tmp_path)
    store = ensure_prepared(model, tmp_path / "store", progress=False)
    config = load_run_config(None, {"model": str(model), "policy": "on-demand", "budget": 0.5, "threads": 1})
    settings = engine_settings(config)
    nodes = this_machine(local_ray(config, settings))
    plans = [
        make_plan(config, settings, facts, nodes, "this machine")
        for facts in (facts_of_checkpoint(model), facts_of_store(store, model))
    ]
    with serving(ExpertStore(str(store)), settings) as worker:
        run: dict[str, Any] = worker.plan()
    for planned in plans:
        lead = planned.topology.lead.nbytes
        assert planned.spec.slot_bytes == run["slot_bytes"]
        assert lead.slots == run["slots"] * run["slot_bytes"]
        if not planned.facts.dense_estimated:
            assert lead.dense == pytest.approx(run["dense_bytes"], rel=1e-4)  # with the buffers of a router
        else:
            assert lead.dense == pytest.approx(run["dense_bytes"], rel=0.02)  # without norms and biases
    plain = {"source": "", "dense_elements": 0, "dense_estimated": False, "form_bytes": 0}
    first, second = (replace(found.facts, **plain) for found in plans)
    assert first == second
    assert json.dumps(plans[1].as_dict())
