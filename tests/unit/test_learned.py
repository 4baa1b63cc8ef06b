"""The learned hot set: its file, what is counted into it, and what a start makes of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf.constants import MODEL_TENSOR, TENSOR_NAMES
from serving import Tiny, greedy, prepared, serving, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors import learned as learned_module
from tiermoe.actors.learned import MOST, LearnedUses
from tiermoe.actors.store.artifacts import encode_tensors
from tiermoe.actors.store.format import Manifest, model_fingerprint, read_manifest
from tiermoe.actors.store.learned import Uses, find_learned, learned_files, read_learned, write_learned
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.plan import ot_of
from tiermoe.errors import StoreError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tiny_store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("learned")
    return prepared(save_tiny_checkpoint("qwen3_moe", folder / "model"), folder / "store")


@pytest.fixture
def store(tiny_store: Any) -> Any:
    yield tiny_store
    for path in Path(tiny_store.describe().path).glob("hot-*"):
        path.unlink()


def uses_of(manifest: Manifest, forwards: float = 10.0) -> Uses:
    layers, experts = len(manifest.layers), manifest.experts.num_experts
    counts = np.arange(layers * experts, dtype=np.float32).reshape(layers, experts) % 7
    return Uses(counts, forwards)


def test_a_file_is_read_as_it_was_written(store: Any) -> None:
    folder, manifest = Path(store.describe().path), store.manifest
    assert find_learned(folder, manifest) is None
    path = write_learned(folder, manifest, uses_of(manifest))
    assert path.parent == folder
    found = read_learned(path, manifest)
    assert found.forwards == 10.0
    np.testing.assert_array_equal(found.counts, uses_of(manifest).counts)
    assert find_learned(folder, manifest) == path
    assert [p.name for p in folder.glob("hot-*")] == [path.name]  # nothing beside it


def changed(manifest: Manifest, tag: dict[str, Any] | None = None, counts: Any = None) -> bytes:
    given = {"fingerprint": model_fingerprint(manifest), "forwards": 10.0} | (tag or {})
    counts = uses_of(manifest).counts if counts is None else counts
    return encode_tensors({"uses": counts}, {"tiermoe": json.dumps(given)})


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (lambda m: b"", "holds no uses"),
        (lambda m: b"\xff" * 40, "holds no uses"),
        (lambda m: changed(m)[:-3], "holds no uses"),
        (lambda m: encode_tensors({"uses": uses_of(m).counts}), "holds no uses"),
        (lambda m: changed(m, {"fingerprint": "0" * 64}), "another model"),
        (lambda m: changed(m, counts=uses_of(m).counts[:, :-1]), "holds no uses"),
        (lambda m: changed(m, counts=uses_of(m).counts.astype(np.float64)), "holds no uses"),
        (lambda m: changed(m, {"forwards": "many"}), "holds no uses"),
        (lambda m: changed(m, {"forwards": 0}), "cannot be counts"),
        (lambda m: changed(m, {"forwards": 3}), "cannot be counts"),  # an expert has 6
        (lambda m: changed(m, counts=-uses_of(m).counts), "cannot be counts"),
        (lambda m: changed(m, counts=np.full_like(uses_of(m).counts, np.nan)), "cannot be counts"),
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_file_is_said_and_changes_nothing(
    store: Any, data: Callable[[Manifest], bytes], what: str
) -> None:
    path = next(learned_files(Path(store.describe().path), store.manifest))
    path.write_bytes(data(store.manifest))
    with pytest.raises(StoreError, match=what):
        read_learned(path, store.manifest)
    engine = SimpleNamespace(cache=SimpleNamespace(uses=np.zeros(4, np.int64)))
    learned = LearnedUses(engine, store.manifest, path.parent)  # type: ignore[arg-type]
    learned.begin()
    learned._end.set()
    (note,) = learned.notes
    assert note.startswith("the learned hot set is not used")
    assert what in note


def test_a_store_that_cannot_be_written_has_its_file_in_the_users_cache(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = store.manifest
    for folder in (None, tmp_path / "gone"):
        path = write_learned(folder, manifest, uses_of(manifest))
        assert tmp_path / "cache" in path.parents
        assert find_learned(folder, manifest) == path
    assert (tmp_path / "cache" / "tiermoe" / "hot").stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StoreError, match="cannot be kept"):
        write_learned(None, manifest, uses_of(manifest))


class Counted:
    """An engine that counts what a test says."""

    def __init__(self, manifest: Manifest) -> None:
        keys = len(manifest.layers) * manifest.experts.num_experts
        self.uses, self.forwards, self.begun = np.zeros(keys, np.int64), 0, list[Uses]()
        core = SimpleNamespace(counts=lambda layer: SimpleNamespace(forwards=self.forwards))
        self.cache = SimpleNamespace(uses=self.uses, core=core)

    def begin_with(self, uses: Uses) -> int:
        self.begun.append(uses)
        return 3

    def ran(self, expert: int, forwards: int) -> None:
        self.uses[expert] += forwards
        self.forwards += forwards


def test_uses_add_up_over_resets_and_restarts(store: Any) -> None:
    """Those of earlier runs count as at most `MOST` forwards."""
    folder, manifest = Path(store.describe().path), store.manifest
    engine = Counted(manifest)
    first = LearnedUses(engine, manifest, folder)  # type: ignore[arg-type]
    first.save()
    assert find_learned(folder, manifest) is None  # nothing ran
    engine.ran(2, 3 * MOST)
    first.save()
    engine.uses[:], engine.forwards = 0, 0  # counters are reset
    engine.ran(5, MOST)
    first.save()
    path = find_learned(folder, manifest)
    assert path is not None
    found = read_learned(path, manifest)
    assert (found.counts.reshape(-1)[2], found.counts.reshape(-1)[5], found.forwards) == (3 * MOST, MOST, 4 * MOST)
    assert found.hottest() == [2, 5]

    second = Counted(manifest)
    learned = LearnedUses(second, manifest, folder)  # type: ignore[arg-type]
    learned.begin()
    assert second.begun[0].hottest() == [2, 5]
    assert learned.notes == [f"3 slots are filled with the experts that earlier runs used most ({path})"]
    second.ran(5, MOST)
    learned.close()
    found = read_learned(path, manifest)
    assert (found.counts.reshape(-1)[2], found.counts.reshape(-1)[5]) == (0.75 * MOST, 1.25 * MOST)
    assert found.forwards == 2 * MOST


@pytest.mark.parametrize("policy", ["on-demand", "next-gate", "auto"])
def test_a_restart_begins_with_the_experts_that_were_used(
    store: Any, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens, and more hits in the first of them; without the setting nothing is kept."""
    monkeypatch.setattr(learned_module, "SAVE_S", 0.01)  # also while it serves
    found = []
    for kept in (False, True, True):
        with serving(store, settings(0.4, policy=load_policy(policy), keep_hot_set=kept)) as worker:
            worker.engine.cache.core.wait_all()
            tokens = greedy(worker, Tiny.PROMPTS, 8)
            notes = [note for note in worker.plan()["notes"] if "slots are filled" in note]
            found.append((tokens, worker.stats().total().hits, len(notes)))
            worker.engine.cache.check_integrity()
    (cold, _, none), (first, start_hits, nothing), (again, hits, filled) = found
    assert cold == first == again
    assert (none, nothing, filled) == (0, 0, 1)
    assert hits > start_hits or policy == "auto"  # measured times decide which misses it loads


def test_layers_go_to_llama_cpp_by_use_within_a_size(store: Any) -> None:
    """By tensor names of the `gguf` package: every routed expert's tensor has one place, no other tensor has one."""
    manifest = store.manifest
    layers, experts = len(manifest.layers), manifest.experts.num_experts
    counts = np.zeros((layers, experts), np.float32)
    counts[:, 0] = [1, 5] + [3] * (layers - 2)
    each = experts * manifest.experts.nbytes(4)
    exps = [
        TENSOR_NAMES[one] for one in (
            MODEL_TENSOR.FFN_GATE_EXP, MODEL_TENSOR.FFN_UP_EXP, MODEL_TENSOR.FFN_DOWN_EXP,
            MODEL_TENSOR.FFN_GATE_UP_EXP,
        )
    ]  # fmt: skip
    others = [name for kind, name in TENSOR_NAMES.items() if name not in exps and "{bid}" in name]
    for room, blocks in ((0, ()), (each - 1, ()), (each, (1,)), (10**12, (1, *range(2, layers), 0))):
        found = ot_of(manifest, Uses(counts, 8.0), room)
        assert (found.blocks, found.of, found.nbytes) == (blocks, layers, each * len(blocks))
        rules = [rule.rsplit("=", 1) for rule in found.option.split(",")]

        def place(name: str, rules: list[list[str]] = rules) -> str | None:
            return next((where for pattern, where in rules if re.search(pattern, name)), None)

        for layer in range(layers):
            names = [f"{name.format(bid=layer)}.weight" for name in exps]
            assert {place(name) for name in names} == {"CUDA0" if layer in blocks else "CPU"}
            assert not any(place(f"{name.format(bid=layer)}.weight") for name in others)


def test_the_command_prints_the_option(store: Any, command: Any) -> None:
    folder = Path(store.describe().path)
    asked = ("plan", "--model", folder, "--export-ot", "50%")
    assert "was counted on this machine" in command.refusal(*asked)
    manifest = read_manifest(folder)
    write_learned(folder, manifest, uses_of(manifest))
    nbytes = len(manifest.layers) * manifest.experts.num_experts * manifest.experts.nbytes(4) // 2
    expected = ot_of(manifest, uses_of(manifest), nbytes)
    code, out, err = command(*asked)
    assert (code, out) == (0, f"{expected.option}\n")
    assert "10 forwards" in err
    assert command.json(*asked) == json.loads(json.dumps(expected._asdict()))
