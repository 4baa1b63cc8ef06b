"""Configurations of quantized weights: every spelling that their own readers take, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationArgs
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.cluster.checkpoints.quantization import Scheme, _Args, quantization_of
from tiermoe.errors import CheckpointError, UnsupportedModelError

EXPERT = "model.layers.3.mlp.experts.7.up_proj"


def scheme_of(folder: Path, config: dict[str, Any] | None, **files: Any) -> Scheme | None:
    """The scheme of an expert. files: further JSON files, by their name without suffix."""
    body = {"model_type": "qwen3_moe"} | ({} if config is None else {"quantization_config": config})
    (folder / "config.json").write_text(json.dumps(body))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    found = quantization_of(folder)
    return None if found is None else found.of(EXPERT)


# --- compressed-tensors -------------------------------------------------------------------------------------


def cases(text: str) -> st.SearchStrategy[str]:
    return st.sampled_from([text, text.upper(), text.capitalize()])


STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
ARGS = st.fixed_dictionaries(
    {},
    optional={
        "num_bits": st.sampled_from([4, 8]),
        "type": st.sampled_from(["int", "float", "half"]).flatmap(cases),
        "symmetric": st.booleans(),
        "group_size": st.sampled_from([None, -2, -1, 0, 16, 32, 128]),
        "strategy": st.none() | st.sampled_from([*STRATEGIES, "rows"]).flatmap(cases),
        "block_structure": st.sampled_from([None, "128x128", "2x4", "x", "128", [128, 128], [64, 32], [0, 8], [128]]),
        "actorder": st.sampled_from([None, False, "weight", "static", "sideways"]),
        "dynamic": st.sampled_from([False, True]),
        "observer": st.sampled_from([None, "minmax"]),
        "observer_kwargs": st.just({}),
        "scale_dtype": st.sampled_from([None, "torch.float8_e4m3fn", "torch.uint8"]),
        "zp_dtype": st.sampled_from([None, "torch.int8"]),
        "unheard_of": st.just(1),
    },
)


@given(ARGS)
def test_arguments_are_read_as_the_library_reads_them(args: dict[str, Any]) -> None:
    try:
        theirs = QuantizationArgs(**args)
    except ValueError:
        with pytest.raises(ValueError):  # noqa: PT011  # pydantic's
            _Args(**args)
        return
    ours = _Args(**args)
    for name in ("num_bits", "type", "symmetric", "group_size", "strategy", "actorder"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert list(ours.block_structure or ()) == list(theirs.block_structure or ())


def compressed(layout: str | None, group_format: str | None = None, targets: Any = ("Linear",), **weights: Any) -> Any:
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group | {"format": group_format}},
        "format": layout, "ignore": ["lm_head", "re:.*mlp.gate$"], "quantization_status": "compressed",
        "kv_cache_scheme": None, "sparsity_config": {}, "transform_config": {}, "global_compression_ratio": None,
        "version": "0.15.0",
    }  # fmt: skip


BLOCKS = Scheme("fp8", block=(128, 128))
INT4 = Scheme("packed", bits=4, group=128)
SPELLINGS: list[tuple[Any, Scheme]] = [
    (compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="128x128"), BLOCKS),
    (compressed("float-quantized", num_bits=8, type="FLOAT", strategy="BLOCK", block_structure=[128, 128]), BLOCKS),
    (compressed("naive-quantized", num_bits=8, type="Float", strategy="Block", block_structure="128x128",
                actorder=False), BLOCKS),
    (compressed("FLOAT_QUANTIZED", num_bits=8, type="float", strategy="channel"), Scheme("fp8")),
    (compressed("float-quantized", type="float"), Scheme("fp8")),  # eight bits, a scale for the tensor
    (compressed("float-quantized", type="float", group_size=-1), Scheme("fp8")),
    (compressed("mixed-precision", "float-quantized", type="float", strategy="tensor"), Scheme("fp8")),
    (compressed("mixed-precision", type="float", strategy="tensor"), Scheme("fp8")),
    (compressed("float-quantized", type="float", group_size=64), Scheme("fp8", block=(1, 64))),
    (compressed("mxfp8-quantized", type="float", group_size=32), Scheme("fp8", block=(1, 32))),
    (compressed("pack-quantized", num_bits=4, group_size=128), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, actorder=False), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, actorder="weight"), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, actorder="STATIC", type="INT", strategy="GROUP"), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, targets=[r"re:.*\.experts\..*"]), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, targets=[EXPERT]), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, targets=["re:language_model.*"]), INT4),  # by a prefix
    (compressed(None, num_bits=4, group_size=128), INT4),
    (compressed("pack-quantized", num_bits=4, group_size=128, actorder="group"),
     Scheme("packed", bits=4, group=128, order=True)),
    (compressed("pack-quantized", num_bits=4, group_size=128, actorder=True),
     Scheme("packed", bits=4, group=128, order=True)),
    (compressed("pack-quantized", num_bits=8, group_size=-1), Scheme("packed", bits=8)),
    (compressed("pack-quantized", num_bits=4, group_size=32, symmetric=False),
     Scheme("packed", bits=4, group=32, zeros=True)),
    (compressed("int-quantized", strategy="tensor"), Scheme("int8", bits=8)),
    (compressed("int-quantized", num_bits=4, group_size=-1), Scheme("int8", bits=8)),
    (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
     Scheme("nvfp4", group=16)),
    (compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), Scheme("mxfp4", group=32)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), SPELLINGS)
def test_spellings_of_compressed_tensors(config: Any, expected: Scheme, tmp_path: Path) -> None:
    assert scheme_of(tmp_path, config) == expected


def test_the_configuration_may_be_nested(tmp_path: Path) -> None:
    """As in older releases, with `sparsity_config` beside it; under the older key, too."""
    inner = compressed("pack-quantized", num_bits=4, group_size=128)
    del inner["quant_method"]
    dense = {"format": "dense"}
    config = {"quant_method": "compressed-tensors", "quantization_config": inner, "sparsity_config": dense}
    assert scheme_of(tmp_path, config) == INT4
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"compression_config": config}}))
    found = quantization_of(tmp_path)
    assert found.of(EXPERT) == INT4


@pytest.mark.parametrize("groups", [{}, {"group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 8}}}])
def test_a_quantized_kv_cache_leaves_weights_plain(groups: Any, tmp_path: Path) -> None:
    config = compressed("float-quantized") | {"config_groups": groups, "kv_cache_scheme": {"num_bits": 8}}
    assert scheme_of(tmp_path, config) is None


def test_groups_go_by_names_then_patterns_then_classes(tmp_path: Path) -> None:
    """As the library's `match_targets`; a class of embeddings is not one of linear layers."""
    args = {name: compressed("pack-quantized", num_bits=bits, group_size=size)["config_groups"]["group_0"]
            for name, bits, size in (("a", 4, 128), ("b", 8, 64), ("c", 8, 32), ("d", 4, 32))}  # fmt: skip
    targets = {"a": ["Linear"], "b": [r"re:.*experts.*"], "c": [EXPERT], "d": ["Embedding"]}
    config = compressed("pack-quantized", num_bits=4, group_size=128)
    config["config_groups"] = {name: group | {"targets": targets[name]} for name, group in args.items()}
    assert scheme_of(tmp_path, config) == Scheme("packed", bits=8, group=32)
    found = quantization_of(tmp_path)
    assert found.of("model.layers.1.mlp.experts.0.up_proj") == Scheme("packed", bits=8, group=64)
    assert found.of("model.layers.1.self_attn.q_proj") == Scheme("packed", bits=4, group=128)
    assert found.of("model.embed_tokens") == Scheme("packed", bits=4, group=32)
    # the library's patterns hold from the beginning of a name on
    config["config_groups"]["b"]["targets"] = ["re:experts.*"]
    del config["config_groups"]["c"]
    assert scheme_of(tmp_path, config) == Scheme("packed", bits=4, group=128)


# --- the other tools ----------------------------------------------------------------------------------------

AWQ, GPTQ = Scheme("awq", bits=4, group=128, zeros=True), Scheme("gptq", bits=4, group=128)
AUTO_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
AUTO_GPTQ = {
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model",
}  # fmt: skip
OTHERS: list[tuple[Any, Scheme]] = [
    ({"quant_method": "fp8", "activation_scheme": "static"}, Scheme("fp8")),
    ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None, "dequantize": False,
      "modules_to_not_convert": ["lm_head"]}, Scheme("fp8")),
    ({"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}, BLOCKS),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4"},
     Scheme("fp4")),  # DeepSeek-V4.1
    ({"quant_method": "mxfp8", "weight_block_size": None}, Scheme("fp8", block=(1, 32))),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Scheme("fp8")),
    ({"quant_method": "mxfp8", "weight_block_size": [1, 32]}, Scheme("fp8", block=(1, 32))),
    ({"quant_method": "awq", **AUTO_AWQ}, AWQ),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "backend": "autoawq",
      "modules_to_not_convert": None}, AWQ),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "format": "gemm", "zero_point": True}, AWQ),
    ({"quant_method": "gptq", **AUTO_GPTQ}, GPTQ),
    ({"quant_method": "gptq", **AUTO_GPTQ, "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {}}, GPTQ),
    ({"quant_method": "gptq", **AUTO_GPTQ, "checkpoint_format": None, "format": "GPTQ_V2"},
     Scheme("gptq", bits=4, group=128, version=2)),
    ({"quant_method": "gptq", **AUTO_GPTQ, "format": "gptq_v2"}, Scheme("gptq", bits=4, group=128, version=2)),
    ({"quant_method": "gptq", **AUTO_GPTQ, "dynamic": {r"+:.*experts.*": {"bits": 8}, r"-:.*attn.*": {}}},
     Scheme("gptq", bits=8, group=128)),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, Scheme("fp8")),
    ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, Scheme("modelopt-nvfp4", group=16)),
    (SPELLINGS[0][0] | {"quant_method": "COMPRESSED_TENSORS"}, BLOCKS),
    ({"quant_method": "modelopt_mxfp8", "quant_algo": "mxfp8"}, Scheme("fp8", block=(1, 32))),
    ({"producer": {"name": "modelopt"}, "quant_algo": "NVFP4", "ignore": ["lm_head"]},
     Scheme("modelopt-nvfp4", group=16)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), OTHERS)
def test_configurations_of_other_tools(config: Any, expected: Scheme, tmp_path: Path) -> None:
    assert scheme_of(tmp_path, config) == expected


MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"quantize_config": AUTO_GPTQ}, GPTQ),
        ({"quantize_config": {**AUTO_GPTQ, "quant_method": "gptq", "checkpoint_format": "gptq"}}, GPTQ),
        ({"quant_config": AUTO_AWQ}, AWQ),
        ({"quantize_config": AUTO_AWQ}, AWQ),  # AutoAWQ's, under the other name
        ({"quant_config": {"quant_method": "gptq", **AUTO_GPTQ}}, GPTQ),
        ({"hf_quant_config": MODELOPT}, Scheme("fp8")),
        ({"hf_quant_config": {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}}, None),
    ],
)
def test_files_beside_a_configuration_that_says_nothing(files: Any, expected: Scheme | None, tmp_path: Path) -> None:
    assert scheme_of(tmp_path, None, **files) == expected


def test_the_configuration_wins_over_files_beside_it(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", **AUTO_GPTQ, "bits": 8}
    assert scheme_of(tmp_path, config, quantize_config=AUTO_GPTQ) == Scheme("gptq", bits=8, group=128)
    assert scheme_of(tmp_path, None, quantize_config=AUTO_GPTQ) == GPTQ


REFUSED: list[tuple[Any, str]] = [
    (compressed("pack-quantized", num_bits=3, group_size=128), "of 3 bits"),
    (compressed("mxfp6-pack-quantized", num_bits=6, type="float", group_size=32), "mxfp6-pack-quantized"),
    (compressed("marlin-24", num_bits=4, group_size=128), "marlin-24"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="tensor_group", group_size=16), "tensor_group"),
    (compressed("float-quantized", num_bits=8, type="float", symmetric=False), "float-quantized"),
    (compressed("dense", num_bits=8), "compressed-tensors dense"),
    (compressed("pack-quantized", num_bits=4, group_size=128) | {"transform_config": {"config_groups": {"u": {}}}},
     "transforms of the inputs"),
    (compressed("pack-quantized", num_bits=4, group_size=128) | {"sparsity_config": {"format": "sparse-bitmask"}},
     "sparse-bitmask"),
    (compressed("pack-quantized", num_bits=4, group_size=128) | {"moe_sparsity_config": {"method": "novice"}},
     "novice"),
    (compressed("pack-quantized") | {"config_groups": {"W4A16": ["Linear"]}}, "preset W4A16"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    ({"quant_method": "fp8", "expert_dtype": "int4"}, "experts of the type int4"),
    ({"quant_method": "awq", **AUTO_AWQ, "version": "GEMV"}, "GEMV"),
    ({"quant_method": "awq", **AUTO_AWQ, "backend": "llm-awq"}, "llm-awq"),
    ({"quant_method": "awq", **AUTO_AWQ, "w_bit": 3}, "3 bits"),
    ({"quant_method": "gptq", **AUTO_GPTQ, "bits": 3}, "3 bits"),
    ({"quant_method": "gptq", **AUTO_GPTQ, "is_marlin_format": True}, "marlin"),
    ({"quant_method": "gptq", **AUTO_GPTQ, "format": "bitblas"}, "bitblas"),
    ({"quant_method": "gptq", **AUTO_GPTQ, "pack_dtype": "int64"}, "int64"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "NVFP4_AWQ"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "without its quantized_layers"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "W4A8_AWQ"}}}, "W4A8_AWQ"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.layers.0.mlp.experts.0.up_proj": {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "MXFP8"}}},
     "several forms of one type"),
    ({"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4}, "auto-round"),
    ({"quant_method": "quark"}, "quark"),
    ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "match"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=match) as caught:
        scheme_of(tmp_path, config)
    assert "again" not in str(caught.value)
    assert str(caught.value).count("pass another release") == 1


@pytest.mark.parametrize(
    "config",
    [
        compressed("pack-quantized", num_bits=4, group_size=128, block_structure="wide"),
        compressed("pack-quantized", num_bits=4, strategy="group"),
        compressed("pack-quantized", num_bits=4, group_size=128, rotation="hadamard"),  # may change the computation
        compressed("pack-quantized", num_bits=4, group_size=128, targets=["re:("]),
        {"quant_method": "gptq", "bits": "many"},
        {"quant_method": "fp8", "weight_block_size": [128]},
    ],
)
def test_a_malformed_configuration_is_not_a_damaged_one(config: Any, tmp_path: Path) -> None:
    refused = r"quantization_config of config.json is malformed \(.*; correct it"
    with pytest.raises(CheckpointError, match=refused) as caught:
        scheme_of(tmp_path, config)
    assert "again" not in str(caught.value)
