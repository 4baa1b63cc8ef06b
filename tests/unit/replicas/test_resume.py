"""Replicas of a store made in several runs: widths added, options changed, runs interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quick import quick
from tiny_models import TEXT, beside, contents

from tiermoe.actors.store.replicas import REPLICA_STAMP_NAME, describe_replicas, read_tables, replica_name
from tiermoe.cluster.jobs.prepare import ensure_replicas, quantize, replica_job, writer
from tiermoe.cluster.jobs.prepare.capture import open_inputs
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas


def test_a_width_that_is_added_keeps_the_others(store: Path, checkpoint: Path, calibration: Path) -> None:
    before, inode = contents(store), (store / replica_name(2, 32, 0)).stat().st_ino
    old = read_tables(describe_replicas(store))  # type: ignore[arg-type]
    add_replicas(store, checkpoint, ReplicaOptions((2, 3), 32), calibration, progress=False)
    view = describe_replicas(store)
    assert view is not None
    assert view.widths == (2, 3, 4)
    assert (store / replica_name(2, 32, 0)).stat().st_ino == inode
    after = contents(store)
    assert all(after[name] == data for name, data in before.items() if name.startswith("replicas-b"))
    assert sorted(name for name in after if name.startswith("losses")) == ["losses-b234-g32.safetensors"]
    tables = read_tables(view)
    for name in ("losses", "rtn_losses", "fallback"):
        assert np.array_equal(getattr(tables, name)[..., [0, 2]], getattr(old, name))
    assert np.array_equal(tables.counts, old.counts)
    assert beside(store) == ["store"]


def test_nothing_is_done_where_all_is_there(
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: object) -> None:
        raise AssertionError("nothing had to be made")

    monkeypatch.setattr(replica_job.ReplicaJob, "make", refuse)
    add_replicas(store, checkpoint, ReplicaOptions((4,), 32), calibration, progress=False)
    assert ensure_replicas(store, checkpoint, (2, 4), 32, progress=False) == store


@pytest.mark.parametrize("change", ["group", "text"])
def test_other_options_replace_the_set(
    store: Path, checkpoint: Path, calibration: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = calibration
    if change == "text":
        text = tmp_path / "other.jsonl"
        text.write_text(json.dumps({"text": TEXT[::-1]}))
    options = ReplicaOptions((2,), 64 if change == "group" else 32)
    before = contents(store)
    add_replicas(store, checkpoint, options, text)
    assert "replacing" in capsys.readouterr().err
    view = describe_replicas(store)
    assert view is not None
    assert view.widths == (2,)
    assert view.manifest.group == options.group
    assert len(contents(store)) == 4
    assert contents(store) != before


def interrupted_at(name: str, module: Any, stop: Callable[..., None], *run: Any) -> None:
    """`add_replicas` with a function of a module replaced by one that interrupts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, stop)
        with pytest.raises(KeyboardInterrupt):
            add_replicas(*run, progress=False)


def stop(*_args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("step", "kept"),
    quick(
        [
            ("capture", True), ("_write_figures", False), ("pack_expert", False), ("_write_tables", True),
            ("write_file", True),
        ],
        [("capture", True), ("pack_expert", False)],
    ),
)  # fmt: skip
def test_an_interrupted_run_resumes(
    made: Path, checkpoint: Path, calibration: Path, tmp_path: Path, step: str, kept: bool
) -> None:
    """Interrupted at the last call of each step; before and after, the store has its old replicas or none."""
    out = Path(shutil.copytree(made, tmp_path / "store"))
    if not kept:
        for name in (*contents(out), REPLICA_STAMP_NAME):
            (out / name).unlink(missing_ok=True)
    whole = Path(shutil.copytree(out, tmp_path / "whole"))
    options = ReplicaOptions((1, 3), 32)
    calls = 0
    module = {"write_file": writer, "capture": quantize, "pack_expert": quantize}.get(step, replica_job)
    real = getattr(module, step)
    with pytest.MonkeyPatch.context() as patch:

        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return real(*args, **kwargs)

        patch.setattr(module, step, count)
        add_replicas(whole, checkpoint, options, calibration, progress=False)
    assert calls

    def stop_at_last(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls -= 1
        if not calls:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    interrupted_at(step, module, stop_at_last, out, checkpoint, options, calibration)
    view = describe_replicas(out)
    assert (view is not None) == kept
    assert view is None or view.widths == (2, 4)
    work = tmp_path / "store.replicas"
    journal = json.loads((work / "journal.json").read_bytes()) if work.exists() else {"finished": []}
    paths = [work / record["file"] for record in journal["finished"] if record["file"].startswith("replicas-b")]
    finished = {path.name: path.stat().st_ino for path in paths if path.exists()}
    add_replicas(out, checkpoint, options, calibration, progress=False)
    assert contents(out) == contents(whole)
    assert not (tmp_path / "store.replicas").exists()
    assert {name: (out / name).stat().st_ino for name in finished} == finished  # taken over, not made again
    expected = {"_write_figures": 3, "pack_expert": 2, "_write_tables": 4}
    assert len(finished) == expected.get(step, 0)


@pytest.mark.parametrize("journal", [True, False])
def test_what_a_finished_run_left_behind_is_removed(
    store: Path, checkpoint: Path, calibration: Path, journal: bool
) -> None:
    """Guards a leak: killed while it removed its work folder, whose activations then lay there for good."""
    work = store.with_name("store.replicas")

    def leave(folder: Path) -> None:
        if not folder.exists():
            return
        if not journal:
            (folder / "journal.json").unlink()
        raise KeyboardInterrupt

    interrupted_at("discard", writer, leave, store, checkpoint, ReplicaOptions((3,), 32), calibration)
    whole = contents(store)
    assert work.exists()
    add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert not work.exists()
    assert contents(store) == whole


def test_unfinished_work_on_other_widths_stays_and_damage_is_made_again(
    store: Path, checkpoint: Path, calibration: Path
) -> None:
    reference = Path(shutil.copytree(store, store.with_name("reference")))
    add_replicas(reference, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    interrupted_at("_write_tables", replica_job, stop, store, checkpoint, ReplicaOptions((3,), 32), calibration)
    add_replicas(store, checkpoint, ReplicaOptions((2,), 32), calibration, progress=False)  # nothing to do
    work = store.with_name("store.replicas")
    assert (work / replica_name(3, 32, 0)).exists()
    assert len(open_inputs(work, 0).hidden) > 0
    for name in (replica_name(3, 32, 1), "inputs-000.safetensors", "figures-b3-000.f32"):
        data = bytearray((work / name).read_bytes())
        data[-1] ^= 1
        (work / name).write_bytes(data)
    add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert contents(store) == contents(reference)
