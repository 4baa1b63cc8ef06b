"""Presets that need what `tiermoe prepare` makes: a start makes it, or refuses with a command that works."""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path

import pytest
from policy_presets import POLICIES
from tiny_models import TEXT, VOCAB_SIZE, save_byte_tokenizer, save_tiny_checkpoint

from tiermoe.actors.store.artifacts import GATES_NAME
from tiermoe.cluster import cli
from tiermoe.cluster.config import RunConfig, load_policy, load_run_config
from tiermoe.cluster.jobs.options import checked_settings
from tiermoe.cluster.jobs.plan import planned
from tiermoe.cluster.jobs.prepare import ensure_prepared, needs
from tiermoe.cluster.jobs.prepare.needs import check_artifacts, command, lacking, make_missing, start_makes
from tiermoe.cluster.llm import LLM
from tiermoe.errors import StoreError, TierMoeError, TraceError

NEEDING = [name for name in POLICIES if load_policy(name).needs]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    checkpoint = save_tiny_checkpoint("mixtral", tmp_path / "a checkpoint", vocab_size=VOCAB_SIZE, num_hidden_layers=5)
    save_byte_tokenizer(checkpoint)
    (checkpoint / "calibration").mkdir()
    (checkpoint / "calibration" / "text.txt").write_text(TEXT[:800])
    return load_run_config(None, {"model": str(checkpoint), "cache_dir": str(tmp_path / "stores")})


def with_policy(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"policy": name})


@pytest.mark.parametrize("name", ["buddymoe", "pre-gated", "promoe"])
def test_a_start_makes_what_is_missing_once(config: RunConfig, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the error that such presets began with on every model, the project's own included."""
    config = with_policy(config, name)
    notes = planned(config).as_dict()["notes"]
    assert sum(note.startswith(f"policy '{name}' needs ") and "the start makes it, once" in note for note in notes)
    config, settings = checked_settings(config)  # refuses nothing
    store = needs.prepared_store(config, settings, progress=True)
    said = capsys.readouterr().err
    assert re.search(rf"made .* for {name} in \d+ s from .*calibration: kept in {re.escape(str(store))}", said)
    assert lacking(settings.policy, config) is None
    before = {path: path.stat().st_mtime_ns for path in store.iterdir()}
    assert needs.prepared_store(config, settings, progress=True) == store
    assert {path: path.stat().st_mtime_ns for path in store.iterdir()} == before
    assert "made" not in capsys.readouterr().err
    assert not [path.name for path in store.parent.iterdir() if path != store]  # no lock, no work folder


def test_of_two_starts_one_makes_it(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that fails, or is ended, leaves it to the next."""
    policy, store = load_policy("pre-gated"), ensure_prepared(config.model_dir, cache_dir=Path(str(config.cache_dir)))
    make, made, begun, errors = needs._make, list[str](), threading.Barrier(2), list[TierMoeError]()

    def failing(*_: object) -> None:
        raise StoreError("the disk is full", "free some")

    monkeypatch.setattr(needs, "_make", failing)
    with pytest.raises(StoreError, match="full"):
        make_missing(store, policy, config)

    def counting(need: str, *rest: object) -> None:
        assert lacking(policy, config) is not None  # nothing half made is in the store
        made.append(need)
        make(need, *rest)  # type: ignore[arg-type]

    def start() -> None:
        begun.wait()
        try:
            make_missing(store, policy, config)
        except TierMoeError as error:
            errors.append(error)

    monkeypatch.setattr(needs, "_make", counting)
    starts = [threading.Thread(target=start) for _ in range(2)]
    for thread in starts:
        thread.start()
    for thread in starts:
        thread.join()
    assert (made, errors) == (["gates"], [])


def test_a_damaged_file_is_made_again(config: RunConfig) -> None:
    policy, store = load_policy("pre-gated"), ensure_prepared(config.model_dir, cache_dir=Path(str(config.cache_dir)))
    (store / GATES_NAME).write_bytes(b"damaged")
    make_missing(store, policy, config)
    assert lacking(policy, config) is None


def test_what_a_larger_model_needs_is_left_to_the_user(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's size; of the project's own model it is made all the same."""
    assert start_makes(config)
    monkeypatch.setattr(needs, "_SMALL_BYTES", 1000)
    assert not start_makes(config)
    assert start_makes(RunConfig())
    monkeypatch.setattr(needs, "published_as", lambda _: "GGUF")
    assert not start_makes(config)
    lines = command(load_policy("promoe"), config).split(" && ")  # a text needs neurons: the routing is recorded
    assert [line.split()[1] for line in lines] == ["record", "prepare"]
    refused = lacking(load_policy("pre-gated"), config)
    assert refused is not None
    assert refused.remedy.endswith("use the unquantized checkpoint of the model for this")


@pytest.mark.parametrize("prepared", [False, True], ids=["no store", "a store"])
@pytest.mark.parametrize("name", NEEDING)
def test_refused_before_anything_starts(
    config: RunConfig, name: str, prepared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards refusals by a lead that Ray had started and that had loaded the model, with `MODEL` and `TEXT` in them."""
    monkeypatch.setattr(needs, "_SMALL_BYTES", 0)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pre-gated", "buddymoe", "promoe"])
def test_the_command_works_as_it_stands(
    config: RunConfig, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, policy = with_policy(config, name), load_policy(name)
    monkeypatch.chdir("/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for line in command(policy, config).split(" && "):
        name, *given = shlex.split(line)
        assert name == "tiermoe"
        with pytest.raises(SystemExit) as ended:
            cli.main(given)
        assert not ended.value.code
    check_artifacts(policy, config)
    assert lacking(policy, config) is None
