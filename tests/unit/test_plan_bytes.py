"""`plan` counts the bytes that a run takes: of the checkpoint, of its store, and of the worker that maps it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from published import RELEASES, SIZES, all_forms, write, write_gguf
from quick import quick
from serving import serving
from tiny_models import save_tiny_checkpoint
from typer.testing import CliRunner

from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.cli import app
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.jobs.prepare import ensure_prepared
from tiermoe.cluster.report.tables import size
from tiermoe.cluster.topology.estimate import make_plan
from tiermoe.cluster.topology.inputs import facts_of_checkpoint, facts_of_store, local_ray, this_machine

_FORMS = {release.name: release for release in RELEASES if release.quantize is not None}


def _checkpoint(name: str, folder: Path) -> Path:
    return write(_FORMS[name], folder)[0] if name in _FORMS else save_tiny_checkpoint(name, folder / "plain")


@pytest.mark.parametrize(
    "name", quick(["qwen3_moe", "gpt_oss", "deepseek_v2", *list(_FORMS)[:2]], fast=["deepseek_v2", next(iter(_FORMS))])
)
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
            # with the buffers of a router, of which DeepSeek-V4's tables of experts by token are the largest
            assert lead.dense == pytest.approx(run["dense_bytes"], rel=2e-3 if "V4" in name else 1e-4)
        else:
            assert lead.dense == pytest.approx(run["dense_bytes"], rel=0.02)  # without norms and biases
    plain = {"source": "", "dense_elements": 0, "dense_estimated": False}
    first, second = (replace(found.facts, **plain) for found in plans)
    assert first == second
    assert json.dumps(plans[1].as_dict())


def _of_mixed_kinds(case: str, folder: Path) -> Path:
    """FP8 with a layer that is left in bfloat16; a GGUF with a form of its own for each matrix of experts."""
    if case == "fp8":
        release = _FORMS["Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"]
        return write(replace(release, kept=r"layers\.1\.mlp\.experts"), folder)[0]
    plain = save_tiny_checkpoint("olmoe", folder / "plain", **{**SIZES, "head_dim": 64, "num_hidden_layers": 3})
    file, _ = write_gguf(plain, folder / "gguf", "olmoe", all_forms)
    shutil.copy(plain / "config.json", file.parent)
    return locate(str(file.parent))


@pytest.mark.parametrize("case", ["fp8", "gguf"])
def test_layers_of_mixed_kinds_are_counted_one_by_one(case: str, tmp_path: Path) -> None:
    model = _of_mixed_kinds(case, tmp_path)
    before = facts_of_checkpoint(model)
    store = ensure_prepared(model, tmp_path / "store", progress=False)
    after = facts_of_store(store, model)
    layers = read_manifest(store).layers
    written = sum(layer.nbytes for layer in layers if not layer.mapped)
    for found in (before, after):
        assert (found.form, found.form_bytes, found.form_width) == (after.form, after.form_bytes, after.form_width)
        assert found.layer_form_bytes == after.layer_form_bytes
        assert len(set(found.layer_form_bytes)) > 1
        assert found.mapped_bytes == after.mapped_bytes
        assert found.all_bytes - found.mapped_bytes == pytest.approx(written, abs=4096)  # with the files' headers
    assert before.store_bytes == pytest.approx(after.store_bytes, rel=0.02)
    disk = sum(path.stat().st_size for path in store.glob("*.safetensors"))
    assert after.store_bytes == pytest.approx(disk, abs=20_000)
    assert before.mapped_bytes == before.all_bytes
    run = CliRunner().invoke(app, ["plan", "--model", str(model), "--policy", "next-gate"])
    flat = " ".join(run.stdout.split())
    assert f"{size(before.store_bytes)} on disk; {size(before.mapped_bytes)} of experts stay in the checkpoint" in flat
