"""The default model is profiled on a little of its text, and substitutes are compared on a little more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tiermoe.actors.policies.buddymoe.buddies import BuddyOptions
from tiermoe.actors.store.artifacts import read_profile
from tiermoe.actors.store.format import read_manifest
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.calibration import read_texts
from tiermoe.cluster.jobs.profile.command import ProfileOptions
from tiermoe.cluster.jobs.profile.job import profile_text
from tiermoe.cluster.jobs.profile.trial import (
    DROP,
    at_random,
    by_router,
    by_table,
    drop,
    own_weight,
    resident_at_random,
    rules,
    substitute,
    trial,
)
from tiermoe.errors import ConfigError

pytestmark = pytest.mark.slow

OPTIONS = EvaluationOptions(documents=1, prefix=16, continuation=32, resamples=50)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    text = folder / "text.txt"
    text.write_text("\n".join(read_texts(default_model_dir() / "calibration"))[:2500])
    made = prepare(default_model_dir(), folder / "store", progress=False)
    profile_text(made, default_model_dir(), text, ProfileOptions(output_tokens=256), progress=False)
    return made


def test_the_profile_of_the_default_model(store: Path) -> None:
    profile = read_profile(store, read_manifest(store))
    assert (profile.layers, profile.experts) == (8, 32)
    assert np.ptp(profile.activations.sum(1)) == 0  # every token picks four experts in every layer
    assert profile.binary.sum((1, 2)).tolist() == (profile.activations.sum(1) * 3).tolist()
    sizes = [profile.buddies(BuddyOptions(alpha=alpha)).sizes for alpha in (0.3, 0.6, 0.95)]
    assert (sizes[0] <= sizes[1]).all()
    assert (sizes[1] <= sizes[2]).all()
    assert sizes[2].max() == 16
    taus = profile.taus(15)
    assert len(taus) == 8
    assert all(0 < tau < 1 for tau in taus)


def test_trial(store: Path) -> None:
    chosen = ["output, own weight", DROP]
    rows = trial(None, (1.0, 0.5), (0,), OPTIONS, store=store, only=chosen)
    assert [(row["rule"], row["rate"]) for row in rows] == [
        ("unchanged", 1.0), *((rule, rate) for rate in (1.0, 0.5) for rule in chosen)
    ]  # fmt: skip
    for row in rows[1:3]:  # all at hand: nothing is substituted
        assert row["nll_nats"] == pytest.approx(rows[0]["nll_nats"], abs=1e-4)
        assert row["kl_nats"] < 1e-4
    for row in rows[3:]:
        assert row["kl_nats"] > 0.01
        assert row["top1_agreement"] < 1
    assert rows[-1]["kl_over_drop"] == 0
    assert set(chosen) < set(rules(read_profile(store, read_manifest(store))))


def test_an_unknown_rule(store: Path) -> None:
    with pytest.raises(ConfigError, match="no rule 'other'"):
        trial(None, (0.5,), (0,), OPTIONS, store=store, only=["other"])


IDS, WEIGHTS = np.array([[0, 1], [2, 3], [0, 2]]), np.array([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75]], np.float32)
CHANCE = np.array([[0.4, 0.3, 0.1, 0.2, 0.0], [0.05, 0.1, 0.4, 0.4, 0.05], [0.2, 0.1, 0.6, 0.1, 0.0]], np.float32)
HELD = np.array([[False, True, False, True, True]])


def test_the_best_resident_expert_that_the_token_does_not_use() -> None:
    scores = np.zeros((1, 5, 5))
    scores[0, 0] = [0, 0.9, 0.8, 0.2, 0.3]
    scores[0, 2] = [0, 0, 0, 0.5, 0.4]
    ids, weights = substitute(HELD, by_table(scores))(0, IDS, WEIGHTS, CHANCE)
    assert ids.tolist() == [[4, 1], [4, 3], [1, 3]]  # 1 and 3 are in use in the first two rows
    assert weights.tolist() == WEIGHTS.tolist()
    scale = np.full((1, 5, 5), 0.5)
    _, scaled = substitute(HELD, by_table(scores), scale)(0, IDS, WEIGHTS, CHANCE)
    assert scaled.tolist() == [[0.375, 0.25], [0.25, 0.5], [0.125, 0.375]]
    scores[0, 2] = 0
    ids, weights = substitute(HELD, by_table(scores))(0, IDS, WEIGHTS, CHANCE)
    assert weights.tolist() == [[0.75, 0.25], [0, 0.5], [0.25, 0]]  # no buddy: dropped


def test_rules_that_ask_the_router() -> None:
    assert substitute(HELD, by_router)(0, IDS, WEIGHTS, CHANCE)[0].tolist() == [[3, 1], [1, 3], [1, 3]]
    alike = np.where(np.arange(5) == 4, 100.0, 1.0)[None].repeat(5, 0)
    likely = substitute(HELD, lambda layer, wanted, chances: alike[wanted] * chances)
    assert likely(0, IDS, WEIGHTS, CHANCE)[0].tolist() == [[3, 1], [4, 3], [1, 3]]
    ids, weights = own_weight(substitute(HELD, by_router))(0, IDS, WEIGHTS, CHANCE)
    assert ids.tolist() == [[3, 1], [1, 3], [1, 3]]
    assert weights == pytest.approx(np.array([[0.4, 0.6], [0.2, 0.8], [0.5, 0.5]]))


def test_dropping() -> None:
    assert drop(HELD, renormalise=False)(0, IDS, WEIGHTS, CHANCE)[1].tolist() == [[0, 0.25], [0, 0.5], [0, 0]]
    assert drop(HELD, renormalise=True)(0, IDS, WEIGHTS, CHANCE)[1].tolist() == [[0, 1], [0, 1], [0, 0]]


def test_at_random() -> None:
    rule = substitute(HELD, at_random(5, 0))
    ids, weights = rule(0, IDS.repeat(200, 0), WEIGHTS.repeat(200, 0), CHANCE.repeat(200, 0))
    assert set(ids[:200, 0].tolist()) == {3, 4}
    assert set(ids[200:400, 0].tolist()) == {1, 4}
    assert all(len(set(row)) == 2 for row in ids.tolist())
    assert np.isin(ids, [1, 3, 4]).all()
    assert (weights > 0).all()
    assert [resident_at_random(3, 8, rate, 1).sum(1).tolist() for rate in (0.5, 0.375)] == [[4] * 3, [3] * 3]
