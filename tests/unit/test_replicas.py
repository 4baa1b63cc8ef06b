"""Replicas of a store: written, opened, resumed, replaced, refused."""

from __future__ import annotations

import json
import pickle
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from tiny_models import save_tiny_checkpoint
from tiny_tokenizer import VOCAB_SIZE, save_byte_tokenizer
from typer.testing import CliRunner

from tiermoe.actors.expert_store import ExpertStore
from tiermoe.actors.front import fetch_front
from tiermoe.actors.links import Noticeboard, PeerLink, StoreLink
from tiermoe.actors.replica_format import REPLICA_STAMP_NAME, REPLICAS_NAME, replica_name
from tiermoe.actors.replica_store import describe_replicas, open_replicas, read_tables
from tiermoe.actors.settings import StoreSettings
from tiermoe.actors.store_worker import StoreWorker
from tiermoe.cluster.jobs.prepare import ensure_prepared, ensure_replicas, is_store, prepare, replica_job
from tiermoe.cluster.jobs.prepare.calibration import WINDOW_TOKENS, read_texts, read_windows
from tiermoe.cluster.jobs.prepare.capture import open_inputs
from tiermoe.cluster.jobs.prepare.command import prepare_command
from tiermoe.cluster.jobs.prepare.quantize_layer import unpacked
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.errors import CheckpointError, ConfigError, StoreError, TierMoeError, UnsupportedModelError

torch.set_num_threads(1)

TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE)
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def made(checkpoint: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with replicas of 2 and 4 bits; tests that change it take a copy."""
    store = prepare(checkpoint, tmp_path_factory.mktemp("made") / "store", progress=False)
    return add_replicas(store, checkpoint, ReplicaOptions((4, 2), 32), calibration, progress=False)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


def contents(folder: Path) -> dict[str, bytes]:
    names = [p for p in folder.iterdir() if p.name.startswith(("replicas-b", "losses", REPLICAS_NAME))]
    return {path.name: path.read_bytes() for path in names}


def beside(store: Path) -> list[str]:
    return [path.name for path in store.parent.iterdir()]


def test_replicas_reopen_as_the_experts_they_were(made: Path) -> None:
    view = describe_replicas(made)
    assert view is not None
    view = pickle.loads(pickle.dumps(view))
    assert view.widths == (2, 4)
    tables, arrays = read_tables(view), open_replicas(view)
    layers = ExpertStore(made).layers
    error = {}
    for bits in view.widths:
        assert len(arrays[bits]) == len(layers) == 2
        for layer, packed in enumerate(arrays[bits]):
            assert all(not array.flags.writeable and array.ctypes.data % 64 == 0 for array in packed.values())
            lossy = unpacked(packed, view.shape(bits))
            exact = torch.from_numpy(layers[layer].gate_up.copy()).transpose(1, 2).flatten(1, 2)
            error[bits, layer] = float((lossy.gate_up - exact).square().mean() / exact.square().mean())
    assert all(error[4, layer] < 0.03 < error[2, layer] < 0.3 for layer in (0, 1)), error
    assert tables.losses.shape == tables.rtn_losses.shape == tables.fallback.shape == (2, 8, 2)
    assert not tables.losses.flags.writeable
    assert bool((tables.losses_at(4) < tables.losses_at(2)).all())
    with pytest.raises(StoreError, match="not 3"):
        tables.losses_at(3)
    assert [p.keys() for p in open_replicas(view, [1])[2]] == [arrays[2][1].keys()]
    assert np.array_equal(open_replicas(view, [1])[2][0]["down"], arrays[2][1]["down"])


def test_tables_count_what_the_router_chose(made: Path, checkpoint: Path, calibration: Path) -> None:
    """Against transformers' own model, its router hooked."""
    from transformers import AutoModelForCausalLM

    tables = read_tables(describe_replicas(made))  # type: ignore[arg-type]
    windows = read_windows(calibration, checkpoint, Console(quiet=True))
    assert windows.ids.shape[1] == 256  # the model's longest, below WINDOW_TOKENS
    assert WINDOW_TOKENS > 256
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    counts, scores = np.zeros((2, 8), dtype=np.int64), np.zeros((2, 8))

    def count(layer: int) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            ids, weights = args[1].flatten(), args[2].flatten()
            counts[layer] += np.bincount(ids, minlength=8)
            scores[layer] += np.bincount(ids, weights=weights.detach(), minlength=8)

        return hook

    for layer in range(2):
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(count(layer))
    with torch.no_grad():
        for row in windows.ids:
            model(torch.from_numpy(row[None]))
    assert counts.sum() == windows.tokens * 2 * 2
    assert np.abs(tables.counts - counts).sum() <= 4  # a near tie may fall the other way
    assert tables.scores == pytest.approx(scores, abs=1.0)


def test_the_tables_travel_to_a_node_without_the_store(made: Path, tmp_path: Path) -> None:
    with closing(StoreWorker(str(made), verify="stamp", directory=(board := Noticeboard()))):
        link = StoreLink("store/0", (), PeerLink(board, name="store/0"))
        fetch_front([link], tmp_path, StoreSettings())
    view = describe_replicas(tmp_path, tables_only=True)
    assert view is not None
    assert view.layers == {}
    here, there = read_tables(view), read_tables(describe_replicas(made))  # type: ignore[arg-type]
    assert here.widths == there.widths
    assert np.array_equal(here.losses, there.losses)
    assert np.array_equal(here.counts, there.counts)
    with pytest.raises(StoreError, match="missing from the replicas"):
        describe_replicas(tmp_path)


def test_a_store_without_replicas(checkpoint: Path, tmp_path: Path) -> None:
    assert describe_replicas(prepare(checkpoint, tmp_path / "store", progress=False)) is None


def test_the_store_itself_is_not_affected(store: Path, checkpoint: Path) -> None:
    before = (store / "manifest.json").read_bytes()
    ExpertStore(store)
    ExpertStore(store, verify="stamp")
    assert is_store(store)
    assert prepare(checkpoint, store, progress=False) == store
    assert (store / REPLICAS_NAME).exists()
    assert (store / "manifest.json").read_bytes() == before
    prepare(checkpoint, store, progress=False, force=True)
    assert contents(store) == {}
    assert describe_replicas(store) is None


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


@pytest.mark.parametrize("change", ["group", "act_order", "text"])
def test_other_options_replace_the_set(
    store: Path, checkpoint: Path, calibration: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = calibration
    if change == "text":
        text = tmp_path / "other.jsonl"
        text.write_text(json.dumps({"text": TEXT[::-1]}))
    options = ReplicaOptions((2,), 64 if change == "group" else 32, change == "act_order")
    before = contents(store)
    add_replicas(store, checkpoint, options, text)
    assert "replacing" in capsys.readouterr().err
    view = describe_replicas(store)
    assert view is not None
    assert view.widths == (2,)
    assert (view.manifest.group, view.manifest.act_order) == (options.group, options.act_order)
    assert len(contents(store)) == 4
    assert contents(store) != before


STEPS = ("capture", "_write_figures", "pack_expert", "_write_tables", "write_file", "sync_folder")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("step", STEPS)
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
    real = getattr(replica_job, step)
    with pytest.MonkeyPatch.context() as patch:

        def count(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return real(*args, **kwargs)

        patch.setattr(replica_job, step, count)
        add_replicas(whole, checkpoint, options, calibration, progress=False)
    assert calls
    with pytest.MonkeyPatch.context() as patch:

        def stop_at_last(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls -= 1
            if not calls:
                raise KeyboardInterrupt
            return real(*args, **kwargs)

        patch.setattr(replica_job, step, stop_at_last)
        with pytest.raises(KeyboardInterrupt):
            add_replicas(out, checkpoint, options, calibration, progress=False)
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
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch, journal: bool
) -> None:
    """Guards a leak: killed while it removed its work folder, whose activations then lay there for good."""
    work = store.with_name("store.replicas")

    def stop(folder: Path) -> None:
        if not journal:
            (folder / "journal.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replica_job, "discard", stop)
        with pytest.raises(KeyboardInterrupt):
            add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    whole = contents(store)
    assert work.exists()
    add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert not work.exists()
    assert contents(store) == whole


def test_unfinished_work_on_other_widths_is_kept(
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(replica_job, "_write_tables", stop)
        with pytest.raises(KeyboardInterrupt):
            add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    add_replicas(store, checkpoint, ReplicaOptions((2,), 32), calibration, progress=False)  # nothing to do
    assert (store.with_name("store.replicas") / replica_name(3, 32, 0)).exists()


def test_damaged_leftovers_are_made_again(
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Path(shutil.copytree(store, store.with_name("reference")))
    add_replicas(reference, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    with monkeypatch.context() as patch:

        def stop(*_args: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(replica_job, "_write_tables", stop)
        with pytest.raises(KeyboardInterrupt):
            add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    work = store.with_name("store.replicas")
    assert len(open_inputs(work, 0).hidden) > 0
    for name in (replica_name(3, 32, 1), "inputs-000.safetensors", "figures-b3-000.f32"):
        data = bytearray((work / name).read_bytes())
        data[-1] ^= 1
        (work / name).write_bytes(data)
    add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert contents(store) == contents(reference)


def test_fallbacks_are_reported(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    text = tmp_path / "short.txt"
    text.write_text(TEXT[:90])
    add_replicas(store, checkpoint, ReplicaOptions((4,), 32), text)
    tables = read_tables(describe_replicas(store))  # type: ignore[arg-type]
    few = tables.counts < 32
    assert few.any()
    assert np.array_equal(tables.fallback[..., 0], few)
    assert np.array_equal(tables.losses[few], tables.rtn_losses[few])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{few.sum()} of 16 experts got fewer than 32 calibration rows" in said


@pytest.mark.parametrize("verify", ["full", "stamp"])
@pytest.mark.parametrize("seed", range(12))
def test_any_altered_byte_is_refused(store: Path, seed: int, verify: Any) -> None:
    describe_replicas(store)  # leaves stamps
    rng = np.random.default_rng(seed)
    path = store / sorted(contents(store))[seed % len(contents(store))]
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError):
        describe_replicas(store, verify=verify)


def test_missing_longer_and_foreign_files_are_refused(store: Path, made: Path) -> None:
    victim = store / replica_name(4, 32, 1)
    data = victim.read_bytes()
    victim.unlink()
    with pytest.raises(StoreError, match="missing"):
        describe_replicas(store)
    victim.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match="bytes"):
        describe_replicas(store)
    victim.unlink()
    victim.mkdir()
    with pytest.raises(StoreError):
        describe_replicas(store)
    victim.rmdir()
    victim.write_bytes(data)
    assert describe_replicas(store) is not None
    manifest = json.loads((store / "manifest.json").read_bytes())
    assert manifest["format_version"] == 1


def test_a_file_that_changes_after_verification_is_refused(store: Path) -> None:
    view = describe_replicas(store)
    assert view is not None
    path = store / replica_name(2, 32, 0)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError, match="changed since"):
        open_replicas(view)


def test_replicas_of_another_store_are_refused(store: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint("qwen3_moe", tmp_path / "other", seed=1, vocab_size=VOCAB_SIZE)
    foreign = prepare(other, tmp_path / "foreign", progress=False)
    for name in contents(store):
        shutil.copy(store / name, foreign / name)
    with pytest.raises(StoreError, match="another store"):
        describe_replicas(foreign)


def rewrite(store: Path, layer_file: str, change: Any) -> None:
    """A file with other tensors under a manifest that vouches for it."""
    from safetensors.numpy import load_file

    from tiermoe.actors.replica_format import decode_replicas, encode_replicas
    from tiermoe.cluster.jobs.prepare.write import write_tensors

    path = store / layer_file
    tensors = load_file(path)
    change(tensors)
    codes = {"u": "U8", "e": "F16", "f": "F32", "d": "F64", "q": "I64", "l": "I64", "B": "U8"}
    header = {name: (codes[array.dtype.char], array.shape) for name, array in tensors.items()}
    record = write_tensors(path, header, [array.tobytes() for array in tensors.values()])
    manifest = decode_replicas((store / REPLICAS_NAME).read_bytes(), "")

    def fixed(old: Any) -> Any:
        return old.model_copy(update=record.model_dump()) if old.file == layer_file else old

    files = tuple(fixed(file) for file in manifest.files)
    manifest = manifest.model_copy(update={"files": files, "losses": fixed(manifest.losses)})
    (store / REPLICAS_NAME).write_bytes(encode_replicas(manifest))


def not_finite(tensors: dict[str, np.ndarray]) -> None:
    tensors["down_scales"].flat[3] = np.inf


def missing(tensors: dict[str, np.ndarray]) -> None:
    del tensors["gate_up"]


def extra(tensors: dict[str, np.ndarray]) -> None:
    tensors["more"] = np.zeros(3, dtype=np.uint8)


def mis_shaped(tensors: dict[str, np.ndarray]) -> None:
    tensors["down"] = tensors["down"].reshape(-1)


@pytest.mark.parametrize("change", [not_finite, missing, extra, mis_shaped])
def test_wrong_tensors_with_right_digests_are_refused(store: Path, change: Any) -> None:
    rewrite(store, replica_name(2, 32, 0), change)
    with pytest.raises(StoreError, match=r"finite|does not hold"):
        describe_replicas(store)


def test_wrong_tables_with_right_digests_are_refused(store: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["losses"].flat[0] = np.nan

    rewrite(store, "losses-b24-g32.safetensors", spoil)
    with pytest.raises(StoreError, match="not finite"):
        describe_replicas(store)


def test_damaged_replicas_are_made_again(store: Path, checkpoint: Path, calibration: Path) -> None:
    (store / replica_name(2, 32, 0)).write_bytes(b"")
    add_replicas(store, checkpoint, ReplicaOptions((2, 4), 32), calibration, progress=False)
    view = describe_replicas(store)
    assert view is not None
    assert view.widths == (2, 4)


def test_ensure_replicas_names_the_command(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    with pytest.raises(ConfigError, match=r"tiermoe prepare \S+ \S+ --bits 2,3 --group-size 64 --calibration FILE"):
        ensure_replicas(store, checkpoint, (3, 2), progress=False)
    ships = Path(shutil.copytree(checkpoint, tmp_path / "ships"))
    (ships / "calibration").mkdir()
    shutil.copy(calibration, ships / "calibration" / "text.txt")
    ensure_replicas(store, ships, (2,), progress=False)
    ensure_replicas(store, ships, (3,), progress=False)  # the 2 bits stay
    assert describe_replicas(store).widths == (2, 3)  # type: ignore[union-attr]


def test_replicas_in_other_groups_are_refused_not_replaced(store: Path, checkpoint: Path) -> None:
    before = contents(store)
    with pytest.raises(ConfigError, match=r"in groups of 32, the run asks for 64; set ndp.group_size: 32"):
        ensure_replicas(store, checkpoint, (2,), 64, progress=False)
    assert contents(store) == before
    assert beside(store) == ["store"]


def run(*args: object) -> Any:
    app = typer.Typer()
    app.command()(prepare_command)
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_the_command(checkpoint: Path, calibration: Path, tmp_path: Path) -> None:
    options = ("--calibration", calibration, "--group-size", 128, "--act-order")
    result = run(checkpoint, tmp_path / "s", "--bits", "1", *options)
    assert result.exit_code == 0, result.output
    view = describe_replicas(tmp_path / "s")
    assert view is not None
    assert (view.widths, view.manifest.group, view.manifest.act_order) == ((1,), 128, True)
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
        (("--bits", "4"), "ships no calibration text"),
        (("--bits", "4", "--calibration", "nowhere.txt"), "nowhere.txt"),
        (("--group-size", "64"), "without --bits"),
        (("--act-order",), "without --bits"),
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
    assert beside(store) == ["checkpoint", "store"] or beside(store) == ["store", "checkpoint"]


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

    monkeypatch.setattr(replica_job, "ReplicaJob", refuse)
    with pytest.raises(UnsupportedModelError, match="gate in a way of their own; use it without replicas"):
        add_replicas(store, checkpoint, ReplicaOptions((3,)), calibration, progress=False)
    after = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert {path for path in after if before.get(path) != after[path]} == set()


def test_a_full_disk_is_a_typed_error(
    store: Path, checkpoint: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(store)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
    with pytest.raises(TierMoeError, match="free some space"):
        add_replicas(store, checkpoint, ReplicaOptions((3,), 32), calibration, progress=False)
    assert contents(store) == before


def test_the_benchmark_measures_on_held_out_inputs(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiermoe.cluster.jobs.bench.quantize import bench_quantize

    monkeypatch.setenv("HOME", str(tmp_path))  # where the store goes
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    with pytest.raises(CheckpointError, match="ships no held-out"):
        bench_quantize(str(model), None)
    for name, text in (("calibration", TEXT * 4), ("heldout", TEXT[1000:1800])):
        (model / name).mkdir()
        (model / name / "text.txt").write_text(text)
    report = bench_quantize(str(model), None)
    by = {(row["case"], row["bits"]): row for row in report.rows}
    assert report.settings["heldout_tokens"] == 800 // 256 * 256
    for bits in (1, 2, 3, 4, 8):
        assert by["gptq", bits]["experts"] == 16
        fitted, nearest = by["gptq", bits]["relative_mean"], by["rtn", bits]["relative_mean"]
        assert fitted < nearest <= by["rtn-minmax", bits]["relative_mean"]
    assert {bar.name.split(",")[0] for bar in report.bars} >= {
        "experts with GPTQ below rtn", "experts whose error falls with every width"
    }  # fmt: skip
