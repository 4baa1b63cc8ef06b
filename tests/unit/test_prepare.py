"""From checkpoint to store: every expert and dense tensor equals what transformers loads, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import edit_config, save_tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tiermoe.actors.engine.model.architecture import from_config
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import layer_name, read_manifest
from tiermoe.cluster.checkpoints.plan import find_experts
from tiermoe.cluster.jobs.prepare import convert, default_store_dir, ensure_prepared, is_store, prepare
from tiermoe.errors import CheckpointError, StoreError, UnsupportedModelError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


def edit_tensors(checkpoint: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add, or (None) drop tensors; `__` stands for a dot."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def expected_layer(module: Any) -> dict[str, torch.Tensor]:
    """What a layer file must hold, worked out neuron by neuron from the loaded module."""
    gates = 2 if module.has_gate else 1
    up = module.gate_up_proj if module.has_gate else module.up_proj
    up = up.transpose(1, 2) if module.is_transposed else up  # [E, G*I, H]
    down = module.down_proj if module.is_transposed else module.down_proj.transpose(1, 2)  # [E, I, H]
    size = up.shape[1] // gates

    def row(neuron: int, gate: int) -> int:
        return gate * size + neuron if module.is_concatenated else gates * neuron + gate

    order = [row(neuron, gate) for neuron in range(size) for gate in range(gates)]
    tensors = {"gate_up": up[:, order].unflatten(1, (size, gates)), "down": down}
    if module.has_bias:
        tensors["gate_up_bias"] = module.gate_up_proj_bias[:, order].unflatten(1, (size, gates))
        tensors["down_bias"] = module.down_proj_bias
    return {name: tensor.detach() for name, tensor in tensors.items()}


def assert_same_as_transformers(checkpoint: Path, store: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    opened = ExpertStore(store)
    modules = dict(model.named_modules())
    expert_names: set[str] = set()
    for layer in opened.layers:
        for name, tensor in expected_layer(modules[layer.module]).items():
            stored = torch.from_numpy(getattr(layer, name).copy()).view(getattr(torch, layer.dtype))
            assert torch.equal(stored, tensor), f"{layer.module} {name}"
        expert_names |= {f"{layer.module}.{name}" for name, _ in modules[layer.module].named_parameters()}
    state = model.state_dict()
    tied = {pair.name: pair.source for pair in opened.manifest.dense.tied}
    with safe_open(opened.describe().dense.path, "pt") as dense:
        assert set(dense.keys()) | set(tied) == set(state) - expert_names
        for name in dense.keys():  # noqa: SIM118  # not a dict
            assert torch.equal(dense.get_tensor(name), state[name]), name
        for name, source in tied.items():
            assert torch.equal(dense.get_tensor(source), state[name]), name


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_store_equals_from_pretrained(model_type: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "checkpoint")
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    assert_same_as_transformers(checkpoint, store)


def test_sharded_bfloat16_checkpoint(qwen: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="30KB")
    assert len(list((tmp_path / "checkpoint").glob("*.safetensors"))) > 3
    store = prepare(tmp_path / "checkpoint", tmp_path / "store", progress=False)
    assert read_manifest(store).dtype == "bfloat16"
    assert_same_as_transformers(tmp_path / "checkpoint", store)


@pytest.mark.parametrize(("case", "tied"), [("twice", 1), ("twice, different", 0), ("under the other name", 1)])
def test_tied_weights(tmp_path: Path, case: str, tied: int) -> None:
    checkpoint = save_tiny_checkpoint("cohere2_moe", tmp_path / "checkpoint")
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding + 1 if case == "twice, different" else embedding.clone()
    edit_tensors(checkpoint, lm_head__weight=head)
    if case == "under the other name":
        edit_tensors(checkpoint, model__embed_tokens__weight=None)
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    assert len(read_manifest(store).dense.tied) == tied
    assert_same_as_transformers(checkpoint, store)


def test_a_store_is_self_contained(qwen: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--org--tiny"
    shutil.copytree(qwen, repository / "blobs")
    checkpoint = repository / "snapshots" / ("0" * 40)
    checkpoint.mkdir(parents=True)
    for path in qwen.iterdir():
        (checkpoint / path.name).symlink_to(f"../../blobs/{path.name}")  # as in a Hugging Face cache
    (checkpoint / "tokenizer.json").write_text("{}")
    (checkpoint / "modeling_custom.py").write_text("raise SystemExit")
    store = prepare(checkpoint, tmp_path / "deep" / "store", progress=False)
    names = {path.name for path in store.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "manifest.json"} <= names
    assert "modeling_custom.py" not in names
    assert "journal.json" not in names
    assert [path.name for path in store.parent.iterdir()] == ["store"]  # nothing left beside it
    assert is_store(store)
    assert not is_store(checkpoint)
    assert ensure_prepared(store) == store


def test_a_store_behind_a_link_is_made_anew_in_its_place(qwen: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "store")
    assert prepare(qwen, link, progress=False) == link
    (link / "notes.txt").touch()  # goes with the store that it is in
    prepare(qwen, link, progress=False, force=True)
    assert link.is_symlink()
    assert is_store(tmp_path / "store")
    assert not (link / "notes.txt").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "store"]


def interrupted(checkpoint: Path, out: Path) -> None:
    """A preparation that is interrupted before the dense file, the last one."""

    def stop(*_args: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "_write_dense", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare(checkpoint, out, progress=False)


def test_an_interrupted_preparation_resumes(qwen: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "store", tmp_path / "store.partial"
    interrupted(qwen, out)
    assert not out.exists()
    with pytest.raises(StoreError):
        ExpertStore(partial)
    first = (partial / layer_name(0)).stat()
    damaged = partial / layer_name(1)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")  # found by its hash, and made again
    prepare(qwen, out, progress=False)
    assert (out / layer_name(0)).stat().st_ino == first.st_ino
    assert (out / layer_name(0)).stat().st_mtime_ns == first.st_mtime_ns
    assert not partial.exists()
    assert_same_as_transformers(qwen, out)


def test_leftovers_of_another_checkpoint_are_not_used(qwen: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint("qwen3_moe", tmp_path / "other", seed=1)
    interrupted(other, tmp_path / "store")
    assert_same_as_transformers(qwen, prepare(qwen, tmp_path / "store", progress=False))


def test_a_full_disk_is_a_typed_error_and_resumes(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
        with pytest.raises(StoreError, match=r"needs .* KiB and 256.00 MiB to spare, .* has 1000 B free; free some"):
            prepare(qwen, tmp_path / "store", progress=False)
    with pytest.MonkeyPatch.context() as patch:

        def full(*_args: object) -> int:
            raise OSError(28, "No space left on device")

        patch.setattr("tiermoe.cluster.jobs.prepare.writer.os.write", full)
        with pytest.raises(StoreError, match="it resumes"):
            prepare(qwen, tmp_path / "store", progress=False)
    prepare(qwen, tmp_path / "store", progress=False)


def test_an_existing_store_stays_unless_forced_or_truncated(qwen: Path, tmp_path: Path) -> None:
    out = prepare(qwen, tmp_path / "store", progress=False)
    before = (out / layer_name(0)).stat().st_ino
    assert ensure_prepared(qwen, out, progress=False) == out
    assert (out / layer_name(0)).stat().st_ino == before
    prepare(qwen, out, progress=False, force=True)
    assert (out / layer_name(0)).stat().st_ino != before
    (out / "dense.safetensors").write_bytes(b"")
    ensure_prepared(qwen, out, progress=False)
    assert_same_as_transformers(qwen, out)


def test_a_changed_checkpoint_is_prepared_again(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    out = ensure_prepared(checkpoint, tmp_path / "store", progress=False)
    cached = default_store_dir(checkpoint, tmp_path / "cache")
    save_tiny_checkpoint("qwen3_moe", checkpoint, seed=1)
    ensure_prepared(checkpoint, out, progress=False)
    assert_same_as_transformers(checkpoint, out)
    assert default_store_dir(checkpoint, tmp_path / "cache") != cached


def test_a_folder_that_is_no_store_is_never_replaced(qwen: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "manifest.json").write_text("mine")
    for out in (tmp_path / "thesis", qwen):
        with pytest.raises(StoreError, match="not an expert store"):
            prepare(qwen, out, progress=False, force=True)
    assert (tmp_path / "thesis" / "manifest.json").read_text() == "mine"


def test_two_at_once_convert_once(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held inside its conversion until the second says that it waits."""
    waiting = threading.Event()
    conversions: list[Path] = []
    real_write, real_print = convert.write_store, Console.print

    def slow_write(conversion: convert.Conversion, folder: Path, advance: convert.Advance) -> None:
        conversions.append(folder)
        assert waiting.wait(30)
        real_write(conversion, folder, advance)

    def note(console: Console, *parts: object, **options: Any) -> None:
        if "waiting" in str(parts):
            waiting.set()
        real_print(console, *parts, **options)

    monkeypatch.setattr(convert, "write_store", slow_write)
    monkeypatch.setattr(Console, "print", note)
    results: list[Path] = []
    threads = [
        threading.Thread(target=lambda: results.append(ensure_prepared(qwen, cache_dir=tmp_path, progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(conversions) == 1
    assert results[0] == results[1] == default_store_dir(qwen, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [results[0].name]


def test_finding_a_store_needs_no_torch(qwen: Path, tmp_path: Path) -> None:
    store = ensure_prepared(qwen, cache_dir=tmp_path, progress=False)
    code = (
        "import sys; from pathlib import Path; from tiermoe.cluster.jobs.prepare import ensure_prepared; "
        f"print(ensure_prepared(Path({str(qwen)!r}), cache_dir=Path({str(tmp_path)!r}))); "
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [str(store), "[]"]


# -- checkpoints that cannot be served: the message says which tensor or setting is to blame --------------------------

EXPERT = "model__layers__1__mlp__experts__3__up_proj__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({EXPERT: None}, "not numbered|do not fit|is \\["),
        ({EXPERT: torch.zeros(24, 31)}, "do not fit"),
        ({EXPERT: torch.full((24, 32), torch.nan)}, "NaN or infinity"),
        ({EXPERT: torch.full((24, 32), torch.inf)}, "NaN or infinity"),
        ({EXPERT: torch.zeros(24, 32, dtype=torch.int32)}, "not floating point"),
        ({EXPERT: None, EXPERT.replace("__3__", "__8__"): torch.zeros(24, 32)}, "not numbered"),
        ({EXPERT.replace("__3__", "__8__"): torch.zeros(24, 32)}, "up_proj|do not fit|is \\["),
        ({"model__layers__1__mlp__experts__3__scale": torch.zeros(2)}, "the model lacks"),
        ({"model__norm__weight": None}, "lacks model.norm.weight"),
        ({"model__norm__weight": torch.zeros(31)}, r"model.norm.weight is \[31\], not \[32\]"),
        ({"model__norm__weight": torch.full((32,), -torch.inf)}, "NaN or infinity"),
        ({"norm__weight": torch.zeros(32)}, "both make parameter"),
    ],
)
def test_bad_tensors_are_refused(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    checkpoint = edit_tensors(save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), **changes)
    with pytest.raises(CheckpointError, match=message):
        prepare(checkpoint, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\), but none"),
        ({"model_type": "no-such-model"}, "not usable"),
        ({"model_type": "vit"}, "cannot build|not usable|no routed experts"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"num_local_experts": 7}, "not"),
        ({"moe_intermediate_size": "many"}, "not usable|cannot build"),
        ({"hidden_size": 64}, "not"),
        ({"dtype": "float16"}, "NaN or infinity"),  # of an expert's 1e6
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    checkpoint = edit_config(save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), **changes)
    edit_tensors(checkpoint, **{EXPERT: torch.full((24, 32), 1e6)})
    with pytest.raises(CheckpointError, match=message):
        prepare(checkpoint, tmp_path / "store", progress=False)


@pytest.mark.parametrize("model_type", ["llama4_text", "longcat_flash", "step3p7"])
def test_experts_outside_the_interface_are_named(model_type: str) -> None:
    """Guards a refusal that said that such a model has no experts."""
    with torch.device("meta"):
        model = from_config(AutoConfig.for_model(model_type))
    with pytest.raises(UnsupportedModelError, match="Experts, outside transformers' experts interface"):
        find_experts(model)


def test_dense_models_and_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    config = Qwen3Config(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="has no routed experts"):
        prepare(tmp_path / "checkpoint", tmp_path / "store", progress=False)
    with pytest.raises(CheckpointError, match="not a folder"):
        prepare(tmp_path / "absent", tmp_path / "store", progress=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        prepare(tmp_path, tmp_path / "store", progress=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin.*save_pretrained"):
        prepare(tmp_path, tmp_path / "store", progress=False)


_MEASURE = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tiermoe.cluster.jobs.prepare import prepare

def kilobytes(key):
    status = Path("/proc/self/status").read_text()
    return int(status.split(key + ":")[1].split()[0])

small, big, out = map(Path, sys.argv[1:])
prepare(small, out / "small-store", progress=False)  # imports are not the subject
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = kilobytes("VmRSS")
prepare(big, out / "big-store", progress=False)
print(kilobytes("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_bounded_by_layers_not_by_the_model(qwen: Path, tmp_path: Path) -> None:
    """Eight layers of 40 MB: the growth must stay under two layers and a fixed allowance."""
    layer_bytes = 32 * 3 * 256 * 416 * 4
    sizes = {"hidden_size": 256, "moe_intermediate_size": 416, "num_experts": 32, "num_hidden_layers": 8}
    big = save_tiny_checkpoint("qwen3_moe", tmp_path / "big", layer_types=None, **sizes)
    assert (big / "model.safetensors").stat().st_size > 8 * layer_bytes
    command = [sys.executable, "-c", _MEASURE, str(qwen), str(big), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    growth = int(result.stdout) * 1024
    assert growth < 2 * layer_bytes + (100 << 20)
