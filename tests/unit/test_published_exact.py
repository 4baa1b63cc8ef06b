"""Layouts of published weights beyond the releases of `published.py`: each gives the values of a torch reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from published import FP8_CONFIG, RELEASES, Release, awq, modelopt_nvfp4, write
from quantizers import Quantize, Tensors, compressed, gptq
from safetensors.torch import load_file, save_file
from tiny_models import edit_config

from tiermoe.actors.engine.model.published_linear import bytes_of
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import part_tensor
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import CheckpointError, FormError, StoreError, TierMoeError, UnsupportedModelError
from tiermoe.kernels.form_slots import dequantize

torch.set_num_threads(1)
Shape = Callable[[int, int], tuple[int, ...]]
SMALL = {"vocab_size": 64, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_hidden_layers": 2}
NAME = "model.layers.0.mlp.experts.0.up_proj"
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def small(release: Release) -> Release:
    return Release(**{**vars(release), "sizes": {**release.sizes, **SMALL}})


def assert_exact(published: Path, oracle: Path, folder: Path, *, moved: bool = False) -> ExpertStore:
    """Experts equal the oracle's to the bit, dense weights once rounded to their type if they are dequantized.

    moved: neurons are in another order, the same of gate, up and down.
    """
    ours = ExpertStore(prepare(published, folder / "store", progress=False))
    theirs = ExpertStore(prepare(oracle, folder / "oracle-store", progress=False))
    for layer, expected in zip(ours.mapped, theirs.layers, strict=True):
        for expert in range(len(expected.down)):
            gate_up, down = layer.neurons(expert)  # type: ignore[attr-defined]
            wanted_up, wanted_down = expected.gate_up[expert], expected.down[expert]
            if moved:
                assert (gate_up != wanted_up).any()
                ours_first, theirs_first = (np.lexsort(a[:, 0, :3].T) for a in (gate_up, wanted_up))
                gate_up, down = gate_up[ours_first], down[ours_first]
                wanted_up, wanted_down = wanted_up[theirs_first], wanted_down[theirs_first]
            np.testing.assert_array_equal(gate_up, wanted_up)
            np.testing.assert_array_equal(down, wanted_down)
    found, wanted = load_file(ours.describe().dense.path), load_file(theirs.describe().dense.path)
    for name, form in ours.manifest.dense.forms.items():
        parts = {part: bytes_of(found.pop(part_tensor(name, part)), code) for part, (code, _) in form.parts().items()}
        found[name] = dequantize(form, parts)
    assert set(found) == set(wanted)
    for name, tensor in found.items():
        assert torch.equal(tensor.to(wanted[name].dtype).float(), wanted[name].float()), name
    return ours


def fp8(
    name: str, shape: Shape, dtype: torch.dtype = torch.float32,
    block: tuple[int, int] | None = None, more: Tensors | None = None,
) -> Quantize:  # fmt: skip
    """FP8 whose scales have this name, shape by outputs and inputs, and type; by torch alone."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        o, i = weight.shape
        rows, columns = block or ((o, i) if int(np.prod(shape(o, i))) == 1 else (1, i))
        blocks = weight.reshape(o // rows, rows, i // columns, columns)
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        if dtype == torch.uint8:
            power = torch.ceil(torch.log2(scale)).clamp(-127, 127)
            scale, stored = torch.exp2(power), (power + 127).to(torch.uint8)
        else:
            stored = scale.to(dtype)
            scale = stored.float()
        codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(o, i)
        values = codes.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        others = {suffix: tensor.clone() for suffix, tensor in (more or {}).items()}
        return {".weight": codes, name: stored.reshape(shape(o, i)), **others}, values

    return quantize


# shapes of scales, by outputs and inputs
scalar: Shape = lambda o, i: ()  # noqa: E731
one: Shape = lambda o, i: (1,)  # noqa: E731
one_by_one: Shape = lambda o, i: (1, 1)  # noqa: E731
row: Shape = lambda o, i: (o,)  # noqa: E731
column: Shape = lambda o, i: (o, 1)  # noqa: E731
grid: Shape = lambda o, i: (o // 128, i // 128)  # noqa: E731


def ct(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "frozen",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"],
    }  # fmt: skip


INPUT = {".input_scale": torch.tensor([0.5])}
ACTIVATION = {".activation_scale": torch.tensor(0.5, dtype=torch.bfloat16)}
MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["lm_head"]}
bf16 = torch.bfloat16
FP8: list[tuple[str, Quantize, dict[str, Any], str]] = [
    ("vLLM, static", fp8(".weight_scale", scalar, more=INPUT), STATIC, "fp8_tensor"),
    ("vLLM, static, [1]", fp8(".weight_scale", one, more=INPUT), STATIC, "fp8_tensor"),
    ("vLLM, dynamic", fp8(".weight_scale", one), STATIC | {"activation_scheme": "dynamic"}, "fp8_tensor"),
    ("vLLM, rows", fp8(".weight_scale", column, bf16), STATIC | {"activation_scheme": "dynamic"}, "fp8_channel"),
    ("Mistral", fp8(".weight_scale_inv", scalar, bf16, more=ACTIVATION),
     STATIC | {"weight_block_size": None, "dequantize": False}, "fp8_tensor"),
    ("Mistral Large", fp8(".qscale_weight", scalar, bf16, more={".qscale_act": torch.tensor(0.5, dtype=bf16)}),
     STATIC | {"weight_block_size": None}, "fp8_tensor"),
    ("transformers, one scale in blocks' place", fp8(".weight_scale_inv", one_by_one), FP8_CONFIG, "fp8_tensor"),
    ("blocks by default", fp8(".weight_scale_inv", grid, block=(128, 128)), {"quant_method": "fp8"}, "fp8_block"),
    ("blocks, weight_scale", fp8(".weight_scale", grid, block=(128, 128)), FP8_CONFIG, "fp8_block"),
    ("blocks, scale", fp8(".scale", grid, block=(128, 128)), FP8_CONFIG, "fp8_block"),
    ("mxfp8", fp8(".weight_scale_inv", lambda o, i: (o, i // 32), torch.uint8, (1, 32)),
     {"quant_method": "mxfp8", "weight_block_size": [1, 32]}, "fp8_block"),
    ("fbgemm", fp8(".weight_scale", column, more={".input_scale_ub": torch.tensor([1200.0])}),
     {"quant_method": "fbgemm_fp8"}, "fp8_channel"),
    ("compressed-tensors, tensor, []", fp8(".weight_scale", scalar, bf16, more=INPUT), ct("tensor"), "fp8_tensor"),
    ("compressed-tensors, TENSOR", fp8(".weight_scale", one, bf16), ct("TENSOR", type="FLOAT"), "fp8_tensor"),
    ("compressed-tensors, [O]", fp8(".weight_scale", row, bf16), ct("channel"), "fp8_channel"),
    ("compressed-tensors, [O, 1]", fp8(".weight_scale", column, bf16), ct("channel"), "fp8_channel"),
    ("compressed-tensors, groups", fp8(".weight_scale", lambda o, i: (o, i // 64), bf16, (1, 64)),
     ct("group", group_size=64), "fp8_block"),
    ("compressed-tensors, 128x128", fp8(".weight_scale", grid, bf16, (128, 128)),
     ct("block", block_structure="128x128", actorder=False), "fp8_block"),
    ("modelopt", fp8(".weight_scale", scalar, more={".input_scale": torch.tensor(0.5)}), MODELOPT_FP8, "fp8_tensor"),
    ("Mixtral-8x7B-Instruct-v0.1-FP8", fp8(".weight_scale", scalar, more=INPUT), STATIC, "fp8_tensor"),
    ("AutoFP8's older names", fp8(".weight_scale", one, more={".act_scale": torch.ones(1)}), STATIC, "fp8_tensor"),
    ("modelopt, blocks", fp8(".weight_scale", lambda o, i: (o // 128, 1, i // 128, 1), block=(128, 128)),
     {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "fp8_block"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "quantize", "config", "kind"), FP8, ids=[case[0] for case in FP8])
def test_fp8(name: str, quantize: Quantize, config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    model_type = "mixtral" if name.startswith("Mixtral") else "qwen3_moe"
    published, oracle = write(small(Release(name, model_type, quantize, config)), tmp_path)
    store = assert_exact(published, oracle, tmp_path)
    assert store.manifest.published.label() == kind
    if kind == "fp8_tensor":
        assert facts_of_checkpoint(published).form == kind


@pytest.mark.parametrize(
    ("shape", "block", "config", "kinds"),
    [
        (grid, (128, 128), FP8_CONFIG, {"fp8_block"}),
        (scalar, None, STATIC | {"weight_block_size": None}, {"fp8_tensor"}),
        (one_by_one, None, STATIC | {"weight_block_size": None}, {"fp8_tensor"}),
        ("halves", None, STATIC | {"weight_block_size": None}, {"fp8_block", "fp8_tensor"}),
    ],
    ids=["blocks", "[E]", "[E, 1, 1]", "gate and up"],
)
def test_stacked_fp8(shape: Any, block: Any, config: dict[str, Any], kinds: set[str], tmp_path: Path) -> None:
    """As transformers keeps experts, and saves them with `save_original_format=False`."""
    published, oracle = write(small(Release("fp8", "qwen3_moe", None, None)), tmp_path)
    plain, values = load_file(published / "model.safetensors"), load_file(oracle / "model.safetensors")
    for layer in range(2):
        for param, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            head, codes, scales = f"model.layers.{layer}.mlp.experts", [], []
            for expert in range(2):
                names = [f"{head}.{expert}.{part}.weight" for part in parts]
                matrix = torch.cat([plain.pop(name) for name in names]).float()
                halves = shape == "halves" and len(parts) == 2
                whole = one_by_one if shape == "halves" else shape
                each = fp8("", lambda o, i: (2, 1), block=(256, 256)) if halves else fp8("", whole, block=block)
                found, exact = each(matrix)
                codes.append(found[".weight"])
                scales.append(found[""])
                values |= dict(zip(names, exact.split(256), strict=True)) if len(parts) == 2 else {names[0]: exact}
            plain[f"{head}.{param}"], plain[f"{head}.{param}_scale_inv"] = torch.stack(codes), torch.stack(scales)
            plain[f"{head}.{param}_activation_scale"] = torch.ones(2)
    save_file(plain, published / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in values.items()}, oracle / "model.safetensors")
    edit_config(published, quantization_config=config)
    store = assert_exact(published, oracle, tmp_path)
    forms = [store.manifest.published.of(layer).matrices for layer in range(2)]
    assert {matrix.kind for form in forms for matrix in form.values()} == kinds
    facts_of_checkpoint(published)


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_experts_may_stay_plain(tmp_path: Path) -> None:
    """What compressed-tensors makes of transformers' stacked experts, which are no linear layers."""
    release = Release("attention", "qwen3_moe", fp8(".weight_scale", column, bf16), ct("channel"), kept="experts")
    published, oracle = write(small(release), tmp_path)
    stores = [ExpertStore(prepare(path, tmp_path / path.name[:3], progress=False)) for path in (published, oracle)]
    assert stores[0].manifest.published is None
    assert facts_of_checkpoint(published).form is None
    for ours, expected in zip(*(store.layers for store in stores), strict=True):
        np.testing.assert_array_equal(ours.down.astype(np.uint32) << 16, expected.down.view(np.uint32))


# --- integers -----------------------------------------------------------------------------------------------


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    codes = (weight / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def int4_bytes(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """W4A8: codes of four bits, each in a byte."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 7).bfloat16()
    codes = (weight / scale.float()).round().clamp(-8, 7).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, codes.float() * scale.float()


def int8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts, values = int8(weight.reshape(1, -1))
    return {name: part.reshape(weight.shape if name == ".weight" else 1) for name, part in parts.items()}, (
        values.reshape(weight.shape)
    )


def with_zero_points(quantize: Quantize, value: int) -> Quantize:
    """Symmetric, and yet with zero points, as older releases of compressed-tensors wrote them."""

    def more(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts, values = quantize(weight)
        return parts | {".weight_zero_point": torch.full(parts[".weight_scale"].shape, value, dtype=torch.int8)}, values

    return more


def gptq_v2(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Zero points as they are, not less one."""
    parts, values = gptq(4, 64, False, False)(weight)
    nibbles = torch.stack([parts[".qzeros"] >> shift & 15 for shift in range(0, 32, 4)], dim=-1).long() + 1 & 15
    words = (nibbles << torch.arange(0, 32, 4)).sum(-1)
    return parts | {".qzeros": (words - (words >> 31 << 32)).int()}, values


W8A8 = compressed("int-quantized", num_bits=8, type="int", strategy="channel")
W4A16 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
GPTQ = {"bits": 4, "group_size": 64, "desc_act": False, "sym": False}
INTEGERS: list[tuple[str, Quantize, dict[str, Any] | None, dict[str, Any]]] = [
    ("int8, tensor", int8_tensor, ct("tensor", type="int") | {"format": "int-quantized"}, {}),
    ("int4 in bytes", int4_bytes, ct("channel", type="int", num_bits=4) | {"format": "int-quantized"}, {}),
    ("int8, zero points of 0", with_zero_points(int8, 0), W8A8[1], {}),
    ("GPTQ, format gptq_v2", gptq_v2, {"quant_method": "gptq", **GPTQ, "format": "gptq_v2"}, {}),
    ("AutoGPTQ, quantize_config.json", gptq(4, 64, False, False), None, {"quantize_config.json": GPTQ}),
    ("AutoGPTQ, act-order", gptq(4, 64, True, True), None,
     {"quantize_config.json": GPTQ | {"desc_act": True, "sym": True}}),
    ("act-order that the configuration does not say", gptq(4, 64, True, False), {"quant_method": "gptq", **GPTQ}, {}),
    ("AutoAWQ, quant_config.json", awq, None,
     {"quant_config.json": {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}}),
    ("ModelOpt, hf_quant_config.json", modelopt_nvfp4, None,
     {"hf_quant_config.json": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}}),
    ("gptq wins over quantize_config.json", gptq(4, 64, False, False), {"quant_method": "gptq", **GPTQ},
     {"quantize_config.json": GPTQ | {"bits": 8}}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "quantize", "config", "files"), INTEGERS, ids=[case[0] for case in INTEGERS])
def test_integers_and_files_beside(
    name: str, quantize: Quantize, config: dict[str, Any] | None, files: dict[str, Any], tmp_path: Path
) -> None:
    release = Release(name, "qwen3_moe", quantize, config, dtype=torch.float16, files=files)
    published, oracle = write(small(release), tmp_path)
    store = assert_exact(published, oracle, tmp_path, moved="act-order" in name)
    for form in store.manifest.published.forms:
        assert (form.up.order, form.down.order) == ("act-order" in name, False)
    facts = facts_of_checkpoint(published)
    assert facts.form is not None


@pytest.mark.parametrize("named", [None, "Qwen3-30B-GPTQ"])
def test_autogptq_names_its_file_itself(named: str | None, tmp_path: Path) -> None:
    files = {"quantize_config.json": GPTQ | {"model_file_base_name": named}}
    published, oracle = write(
        small(Release("gptq", "qwen3_moe", gptq(4, 64, False, False), None, dtype=torch.float16, files=files)), tmp_path
    )
    own = f"{named or 'gptq_model-4bit-64g'}.safetensors"
    (published / "model.safetensors").rename(published / own)
    assert_exact(published, oracle, tmp_path)


KV_CACHE = ct("tensor") | {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
# beside plain experts: a file from where they were quantized, which transformers does not read; scales of activations
PLAIN = {
    "a file": (Release("plain", "qwen3_moe", None, None, files={"quantize_config.json": GPTQ}), ()),
    "scales": (Release("kv", "qwen3_moe", None, KV_CACHE),
               (f"{NAME}.input_scale", "model.layers.0.self_attn.k_proj.k_scale")),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_what_lies_beside_plain_weights_changes_nothing(case: str, tmp_path: Path) -> None:
    release, more = PLAIN[case]
    published, _ = write(small(release), tmp_path)
    edit(published, lambda tensors: tensors.update({name: torch.ones(1) for name in more}))
    store = ExpertStore(prepare(published, tmp_path / "store", progress=False))
    assert store.manifest.published is None
    assert facts_of_checkpoint(published).form is None


def test_a_changed_file_beside_makes_another_store(tmp_path: Path) -> None:
    release = Release("gptq", "qwen3_moe", gptq(4, 64, False, True), None, files={"quantize_config.json": GPTQ})
    published, _ = write(small(release), tmp_path)
    store = prepare(published, tmp_path / "store", progress=False)
    before = (store / "manifest.json").read_bytes()
    (published / "quantize_config.json").write_text(json.dumps(GPTQ | {"desc_act": True}))
    prepare(published, tmp_path / "store", progress=False)
    assert (store / "manifest.json").read_bytes() != before


# --- what the model does not use ----------------------------------------------------------------------------


def unused(layer: str, drop_scales: bool = True, dtype: torch.dtype | None = None) -> Callable[[Tensors], None]:
    """The tensors of layer 0 once more under another name, without their scales, or of another type."""

    def change(tensors: Tensors) -> None:
        for name, tensor in list(tensors.items()):
            if name.startswith("model.layers.0.") and not (drop_scales and "scale" in name):
                copied = tensor.clone()
                if dtype is not None:
                    copied = torch.zeros(tensor.shape, dtype=dtype)
                tensors[name.replace("model.layers.0.", layer)] = copied

    return change


def vision(tensors: Tensors) -> None:
    tensors["visual.blocks.0.attn.qkv.weight"] = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    tensors["model.visual.merger.qweight"] = torch.zeros(4, 4, dtype=torch.int32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.ones(1)


UNUSED = [
    pytest.param("deepseek_v3", unused("model.layers.2."), id="the layer after the last, as DeepSeek's 61"),
    pytest.param("deepseek_v3", unused("model.layers.61."), id="layer 61"),
    pytest.param("qwen3_moe", unused("mtp.layers.0."), id="mtp"),
    pytest.param("qwen3_moe", unused("model.mtp.layers.0.", False, torch.int8), id="mtp, another type"),
    pytest.param("qwen3_moe", unused("mtp.model.layers.0."), id="a model within another"),
    pytest.param("qwen3_moe", vision, id="a tower for images, buffers"),
]


@pytest.mark.parametrize(("model_type", "change"), UNUSED)
def test_what_the_model_does_not_use_is_not_checked(
    model_type: str, change: Callable[[Tensors], None], tmp_path: Path
) -> None:
    fp8_block = next(r for r in RELEASES if r.name == "deepseek-ai/DeepSeek-V3")
    release = Release(**{**vars(fp8_block), "model_type": model_type})
    published, oracle = write(small(release), tmp_path)
    before = facts_of_checkpoint(published)
    edit(published, change)
    assert_exact(published, oracle, tmp_path)
    after = facts_of_checkpoint(published)
    assert (after.layer_form_bytes, after.expert_elements) == (before.layer_form_bytes, before.expert_elements)
    if change is not vision:
        assert after.dense_elements == before.dense_elements


# --- what would change the computation ----------------------------------------------------------------------


def add(suffix: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({NAME + suffix: tensor})


def drop(suffix: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(NAME + suffix)


TENSOR = fp8(".weight_scale", scalar)
REFUSED: list[tuple[str, Quantize, dict[str, Any], Callable[[Tensors], Any], type[TierMoeError], str]] = [
    ("pre_quant_scale", modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"},
     add(".pre_quant_scale", torch.ones(256)), UnsupportedModelError, r"pre_quant_scale' belongs to a quantized"),
    ("two scales", TENSOR, STATIC, add(".weight_scale_inv", torch.ones(())), UnsupportedModelError,
     r"weight_scale' belongs to a quantized"),
    ("no scale", TENSOR, STATIC, drop(".weight_scale"), CheckpointError, r"up_proj.weight_scale' is missing, which"),
    ("scales of another shape", TENSOR, STATIC, add(".weight_scale", torch.ones(3)), FormError,
     r"scales are \[3\] for 256 x 256 weights"),
    ("zero points", with_zero_points(W8A8[0], 3), W8A8[1], lambda tensors: None, FormError, "says symmetric"),
    ("sym", gptq(4, 64, False, False), {"quant_method": "gptq", **GPTQ, "sym": True}, lambda tensors: None, FormError,
     "zero points other than half.*; say `sym: false`"),
    ("twice", gptq(4, 64, False, False), {"quant_method": "gptq", **GPTQ},
     add(".weight", torch.zeros(256, 256)), CheckpointError, "occurs twice, quantized and unquantized"),
    ("none", TENSOR, {"quant_method": "gptq", **GPTQ}, lambda tensors: None, CheckpointError, "none is in that form"),
    ("nan", TENSOR, STATIC, add(".weight_scale", torch.tensor(float("nan"))), FormError,
     "compare the sha256 of model.safetensors with the publisher's"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "quantize", "config", "change", "error", "match"), REFUSED, ids=[case[0] for case in REFUSED]
)
def test_what_changes_the_computation_is_refused(
    name: str, quantize: Quantize, config: dict[str, Any], change: Callable[[Tensors], Any],
    error: type[TierMoeError], match: str, tmp_path: Path,
) -> None:  # fmt: skip
    published, _ = write(small(Release(name, "qwen3_moe", quantize, config)), tmp_path)
    edit(published, change)
    with pytest.raises(error, match=match) as caught:
        prepare(published, tmp_path / "store", progress=False)
    assert "again" not in str(caught.value)
    assert str(caught.value).count("; ") == 1


def test_a_g_idx_counts_whatever_the_configuration_says(tmp_path: Path) -> None:
    """Packed weights whose inputs are in another order, and a configuration without act-order, were read in order."""
    ordered, _ = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64)
    published, _ = write(small(Release("packed", "qwen3_moe", ordered, W4A16[1])), tmp_path)
    edit(published, add(".weight_g_idx", torch.arange(256, dtype=torch.int32).flip(0) // 64))
    with pytest.raises(UnsupportedModelError, match=r"the experts beside .* have 2 forms"):  # one expert of them all
        prepare(published, tmp_path / "store", progress=False)


def test_scales_in_another_file_of_a_folder_and_stale_ones_beside_the_weights(tmp_path: Path) -> None:
    """The index decides for the tensors of one matrix, too; and mapped experts may lie in folders."""
    published, oracle = write(small(Release("fp8", "qwen3_moe", fp8(".weight_scale", one), STATIC)), tmp_path)
    tensors = load_file(published / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith(".weight_scale")}
    where = {name: "b/scales.safetensors" if name in scales else "a/weights.safetensors" for name in tensors}
    (published / "model.safetensors").unlink()
    for file, held in (("a/weights", tensors | {n: t * 3 for n, t in scales.items()}), ("b/scales", scales)):
        (published / file).parent.mkdir()
        save_file(held, published / f"{file}.safetensors")
    (published / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    store = assert_exact(published, oracle, tmp_path)
    assert {file.file for file in store.manifest.source} >= set(where.values())
    (published / "b" / "scales.safetensors").touch()
    with pytest.raises(StoreError, match=r"scales\.safetensors"):
        ExpertStore(store.describe().path)


def test_groups_of_several_formats(tmp_path: Path) -> None:
    """Experts in NVFP4 by a pattern, all other linear layers in FP8 by their class; a format for each group."""
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    packed, config = compressed("nvfp4-pack-quantized", **weights)

    def nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        """The library's parts; it rounds values to bfloat16, so they are worked out here."""
        parts, _ = packed(weight)
        codes = unpack_fp4_from_uint8(parts[".weight_packed"], *weight.shape, dtype=torch.float32)
        scale = parts[".weight_scale"].float() / parts[".weight_global_scale"]
        return parts, codes * scale.repeat_interleave(16, dim=1)

    group = config["config_groups"]["group_0"] | {"targets": [r"re:.*mlp\.experts\.\d+\..*"]}
    rows = ct("channel")["config_groups"]["group_0"] | {"format": "float-quantized"}
    mixed = config | {"format": "mixed-precision", "config_groups": {"group_0": rows, "group_1": group}}
    experts = write(small(Release("experts", "qwen3_moe", nvfp4, mixed, kept="self_attn")), tmp_path / "a")
    others = write(small(Release("others", "qwen3_moe", fp8(".weight_scale", column, bf16), mixed, kept="experts")),
                   tmp_path / "b")  # fmt: skip
    for folder, other in zip(experts, others, strict=True):
        attention = {n: t for n, t in load_file(other / "model.safetensors").items() if "self_attn" in n}
        edit(folder, lambda tensors, attention=attention: tensors.update(attention))  # type: ignore[misc]
    store = assert_exact(*experts, tmp_path)
    assert store.manifest.published.label() == "nvfp4"
    assert facts_of_checkpoint(experts[0]).form == "nvfp4"
