"""How replicas are asked for, and what is refused before anything is computed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from tiny_models import VOCAB_SIZE, beside, contents, save_byte_tokenizer, save_tiny_checkpoint
from typer.testing import CliRunner

from tiermoe.actors.store.replicas import describe_replicas
from tiermoe.cluster.jobs.prepare import ensure_prepared, ensure_replicas, prepare, quantize
from tiermoe.cluster.jobs.prepare.calibration import read_texts, read_windows
from tiermoe.cluster.jobs.prepare.prepare_command import prepare_command
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.errors import CheckpointError, ConfigError, TierMoeError, UnsupportedModelError


def test_ensure_replicas_names_the_command(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    with pytest.raises(ConfigError, match=r"tiermoe prepare \S+ \S+ --bits 2,3 --group-size 64 --calibration FILE"):
        ensure_replicas(store, checkpoint, (3, 2), calibrated=True, progress=False)
    ensure_replicas(store, checkpoint, (), calibrated=True, progress=False)  # popularity alone is counted online
    assert describe_replicas(store) is None
    ships = Path(shutil.copytree(checkpoint, tmp_path / "ships"))
    (ships / "calibration").mkdir()
    shutil.copy(calibration, ships / "calibration" / "text.txt")
    ensure_replicas(store, ships, (2,), calibrated=True, progress=False)
    ensure_replicas(store, ships, (3,), progress=False)  # the 2 bits stay
    view = describe_replicas(store)
    assert view is not None
    assert (view.widths, view.manifest.method) == ((2, 3), "gptq")


def test_other_groups_and_a_full_disk_are_refused_and_replace_nothing(
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store)
    with pytest.raises(ConfigError, match=r"in groups of 32, the run asks for 64; set ndp.group_size: 32"):
        ensure_replicas(store, checkpoint, (2,), 64, progress=False)
    assert beside(store) == ["store"]
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    with pytest.raises(TierMoeError, match="free some space"):
        add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert contents(store) == before


def run(*args: object) -> Any:
    app = typer.Typer()
    app.command()(prepare_command)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_command(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    options = ("--calibration", calibration, "--group-size", 128)
    result = run(checkpoint, tmp_path / "s", "--bits", "1", *options)
    assert result.exit_code == 0, result.output
    view = describe_replicas(tmp_path / "s")
    assert view is not None
    assert (view.widths, view.manifest.group) == ((1,), 128)
    result = run(tmp_path / "s", "--bits", "1,2", *options)
    assert result.exit_code == 0, result.output
    assert describe_replicas(tmp_path / "s").widths == (1, 2)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--bits", "5"), "no replicas of 5 bits"),
        (("--bits", ""), "not a list of widths"),
        (("--bits", "1,x"), "not a list of widths"),
        (("--bits", "4", "--group-size", "48"), "group size 48"),
        (("--bits", "4", "--calibrated"), "ships no calibration text"),
        (("--bits", "4", "--calibration-tokens", "4096"), "without --calibrated"),
        (("--bits", "4", "--calibration", "text.txt", "--calibration-tokens", "9"), "at least 64"),
        (("--calibrated",), "without --bits"),
        (("--bits", "4", "--calibration", "nowhere.txt"), "nowhere.txt"),
        (("--group-size", "64"), "without --bits"),
        (("--calibration", "text.txt"), "without --bits"),
    ],
)
def test_the_command_refuses_before_it_computes(
    checkpoint: Path, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    result = run(checkpoint, tmp_path / "store", *args)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", b""),
        ("a.txt", b"too short"),
        ("a.txt", b"\xff\xfe" * 200),
        ("a.md", b"x" * 500),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b'{"text": 3}\n'),
        ("a.jsonl", b"{nonsense\n"),
    ],
)
def test_unusable_calibration_is_refused(
    made: Path, checkpoint: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="calibration"):
        add_replicas(made, checkpoint, ReplicaOptions((3,), 32), path, progress=False)


def test_calibration_texts_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.txt"):
        read_texts(tmp_path)
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "more", "id": 1}\n')
    (tmp_path / "c.md").write_text("no")
    assert read_texts(tmp_path) == ["one", "more", "two"]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path, calibration: Path) -> None:
    path = save_tiny_checkpoint("qwen3_moe", tmp_path / "small")  # 128 tokens, the tokenizer has 259
    save_byte_tokenizer(path)
    text = tmp_path / "text.txt"
    text.write_text("zzzz é" * 100)
    with pytest.raises(CheckpointError, match="the model has 128"):
        read_windows(text, path, Console(quiet=True))


@pytest.mark.parametrize(("model_type", "what"), [("gpt_oss", "biases"), ("nemotron_h", "no gate")])
def test_unsupported_experts_are_refused(tmp_path: Path, calibration: Path, model_type: str, what: str) -> None:
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "checkpoint", vocab_size=VOCAB_SIZE)
    save_byte_tokenizer(checkpoint)
    store = ensure_prepared(checkpoint, tmp_path / "store", progress=False)
    with pytest.raises(UnsupportedModelError, match=what):
        add_replicas(store, checkpoint, ReplicaOptions((3,)), calibration, progress=False)
    assert sorted(beside(store)) == ["checkpoint", "store"]


def test_unusual_gating_is_refused_before_anything_is_written(
    tmp_path: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shapes are those of any gated expert: only the model's code tells. Guards a refusal after the journal."""
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint", vocab_size=VOCAB_SIZE, hidden_act="mish")
    save_byte_tokenizer(checkpoint)
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def refuse(*_args: object) -> None:
        raise AssertionError("the refusal comes first")

    monkeypatch.setattr(quantize, "Calibrated", refuse)
    with pytest.raises(UnsupportedModelError, match="have their own gating; use it without replicas"):
        add_replicas(store, checkpoint, ReplicaOptions((3,)), calibration, progress=False)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path for path in after if before.get(path) != after[path]} == set()


