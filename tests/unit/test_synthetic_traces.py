"""Synthetic traces: the calibration of the families, what their layers tell of each other, and traces on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import Command

from tiermoe.cluster.simulate.shapes import shapes
from tiermoe.cluster.simulate.statistics import map_recall, routing_of
from tiermoe.cluster.simulate.synthetic import CALIBRATIONS, FAMILIES, SCRIPTS, Generator, Part, calibrated
from tiermoe.cluster.simulate.trace import Trace


@pytest.mark.slow
@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_family_is_as_published(name: str) -> None:
    found = calibrated(name, 0)
    targets = CALIBRATIONS[name].targets
    off = {key: (found[key], t.value) for key, t in targets.items() if abs(found[key] - t.value) > t.tolerance}
    assert not off
    for distance, recall in enumerate(FAMILIES[name].recalls[: CALIBRATIONS[name].layers - 1], start=1):
        assert found[f"next router {distance}"] == pytest.approx(recall, abs=0.02)


def test_one_seed_gives_one_routing() -> None:
    ids = [
        np.concatenate([rows.ids for rows in Generator(FAMILIES["flat"], 2, 8, 2, seed).requests(2, 12)])
        for seed in (0, 0, 1)
    ]
    assert (ids[0] == ids[1]).all()
    assert (ids[0] != ids[2]).any()
    assert all(len(set(row)) == 2 for row in ids[0].reshape(-1, 2).tolist())


# experts in use by a prompt and an answer of 20 tokens each, of 16 experts, top-2; changes of the set in the answer
@pytest.mark.parametrize(
    ("name", "prompt", "answer", "changes"),
    [
        ("phases", 3, 15, 4), ("bursts", 8, 8, 3), ("unlike-prompt", 4, 4, 0), ("alternate", 4, 4, 19),
        ("cycle", 12, 12, 19),
    ],
)  # fmt: skip
def test_a_script_says_which_experts_are_in_use(name: str, prompt: int, answer: int, changes: int) -> None:
    in_use = SCRIPTS[name](Part(40, 20, 16, 2), np.random.default_rng(0)) > 0
    assert in_use[:20].any(axis=0).sum() == pytest.approx(prompt, abs=2)
    assert in_use[20:].any(axis=0).sum() == pytest.approx(answer, abs=3)
    assert (in_use[21:] != in_use[20:-1]).any(axis=1).sum() == changes
    if name == "unlike-prompt":
        assert not (in_use[:20].any(axis=0) & in_use[20:].any(axis=0)).any()


@pytest.mark.parametrize("name", ["hot", "zipf"])
def test_few_experts_are_used_most(name: str) -> None:
    ids = next(Generator(FAMILIES[name], 1, 16, 4, prompt=8).requests(1, 128)).ids
    uses = np.sort(np.bincount(ids.reshape(-1), minlength=16))[::-1]
    assert uses[:2].sum() > 0.35 * uses.sum()


def test_similar_trajectories_predict_later_layers() -> None:
    """Maps find more than chance: the layers read one state."""
    generator = Generator(FAMILIES["flat"], 14, 32, 4)
    ids = np.concatenate([rows.ids for rows in generator.requests(6, 128)]).transpose(1, 0, 2)
    request = np.repeat(np.arange(6), 128)
    found = map_recall(ids, request, 32)
    assert found is not None
    assert found > 2 * 4 / 32
    assert map_recall(ids[:3], request, 32) is None


def test_a_synthetic_trace_on_disk(tmp_path: Path, command: Command) -> None:
    args = ["trace", "make", tmp_path / "t", "--family", "sticky", "--shape", "mixtral-8x7b", "--requests", "3"]
    record = command.json(*args, "--prompt-tokens", "9", "--max-tokens", "4", "--distances", "2")
    assert record["figures"]["next router 1"] > record["figures"]["next router 2"] > 0.5
    trace = Trace(tmp_path / "t")
    header, shape = trace.header, shapes()["mixtral-8x7b"]
    assert (header.layers, header.experts, header.top_k) == (32, 8, 2)
    assert header.slot_bytes == shape.expert_bytes == 3 * 4096 * 14336 * 2
    assert header.origin == "synthetic, sticky, seed 0"
    routing = routing_of(header, trace.requests())
    assert (routing.decode.sum(), len(routing.decode)) == (12, 39)
    for wrong, message in ((["--family", "x"], "--family is 'x'"), (["--shape", "x"], "--shape is 'x'")):
        args = ["trace", "make", tmp_path / "u", "--family", "flat", "--shape", "phi-3.5-moe", *wrong]
        assert message in command.refusal(*args)
    assert not (tmp_path / "u").exists()
