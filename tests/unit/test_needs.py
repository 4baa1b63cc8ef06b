"""Presets that need what `tiermoe prepare` makes: refused before anything starts, with a command that works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny_models import VOCAB_SIZE, save_byte_tokenizer, save_tiny_checkpoint

from tiermoe.actors.store.artifacts import GATES_NAME
from tiermoe.cluster import cli
from tiermoe.cluster.config import RunConfig, load_policy, load_run_config, policy_names
from tiermoe.cluster.jobs.evaluate.command import evaluate
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.options import checked_settings
from tiermoe.cluster.jobs.plan import planned
from tiermoe.cluster.jobs.prepare import ensure_prepared, needs
from tiermoe.cluster.jobs.prepare.needs import check_artifacts, command, lacking
from tiermoe.cluster.llm import LLM
from tiermoe.errors import StoreError, TierMoeError, TraceError

NEEDING = [name for name in policy_names() if load_policy(name).needs]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    checkpoint = save_tiny_checkpoint("mixtral", tmp_path / "a checkpoint", vocab_size=VOCAB_SIZE, num_hidden_layers=5)
    save_byte_tokenizer(checkpoint)
    return load_run_config(None, {"model": str(checkpoint), "cache_dir": str(tmp_path / "stores")})


def with_policy(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"policy": name})


def test_there_are_such_presets() -> None:
    assert {"promoe", "buddymoe", "pre-gated", "adapmoe"} <= set(NEEDING)


@pytest.mark.parametrize("prepared", [False, True], ids=["no store", "a store"])
@pytest.mark.parametrize("name", NEEDING)
def test_refused_before_anything_starts(
    config: RunConfig, name: str, prepared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards refusals by a lead that Ray had started and that had loaded the model, with `MODEL` and `TEXT` in them."""
    config = with_policy(config, name)
    if prepared:
        ensure_prepared(config.model_dir, cache_dir=tmp_path / "stores", progress=False)
    for start in (
        lambda: checked_settings(config),  # of run, serve, up
        lambda: LLM(str(config.model), policy=name, cache_dir=config.cache_dir),
    ):
        with pytest.raises((StoreError, TraceError), match=f"^policy '{name}' needs ") as found:
            start()
        assert f"`{command(load_policy(name), config)}`" in found.value.remedy
    lines = command(load_policy(name), config).split(" && ")
    for word in [word for line in lines for word in shlex.split(line)]:
        assert not re.fullmatch("[A-Z]+", word)
        assert not word.startswith("/") or Path(word).exists() or "traces" in word or word.endswith("/stores")
    assert str(config.model_dir) in shlex.split(lines[-1])
    notes = planned(config).as_dict()["notes"]
    assert sum(note.startswith(f"policy '{name}' needs ") for note in notes) == 1
    assert prepared or not (tmp_path / "stores").exists()


def test_eval_refuses_first(config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(StoreError, match=r"^policy 'pre-gated' needs trained gates"):
        evaluate(str(config.model), "pre-gated", "0.5", 1, EvaluationOptions(), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre-gated", "adapmoe", "buddymoe", "promoe"])
def test_the_command_works_as_it_stands(
    config: RunConfig, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, policy = with_policy(config, name), load_policy(name)
    monkeypatch.chdir("/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(needs, "_RECORDED", tuple("2" if word == "200" else word for word in needs._RECORDED))
    for line in command(policy, config).split(" && "):
        name, *given = shlex.split(line)
        assert name == "tiermoe"
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert not ended.value.code
    check_artifacts(policy, config)
    assert lacking(policy, config) is None


def test_the_command_names_the_store_that_is_configured(config: RunConfig, tmp_path: Path) -> None:
    out = tmp_path / "own store"
    config = config.model_copy(update={"store": str(out), "cache_dir": None})
    assert shlex.split(command(load_policy("pre-gated"), config))[3] == str(out)
    store = ensure_prepared(config.model_dir, out, progress=False)
    (store / GATES_NAME).write_bytes(b"damaged")
    with pytest.raises(TierMoeError, match=f"'{store / GATES_NAME}' holds no gates"):
        check_artifacts(load_policy("pre-gated"), config)
    as_model = RunConfig(model=str(store))  # a store in place of a checkpoint
    assert shlex.split(command(load_policy("pre-gated"), as_model))[2] == str(store)
    with pytest.raises(TierMoeError, match="holds no gates"):
        check_artifacts(load_policy("pre-gated"), as_model)
