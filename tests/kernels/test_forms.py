"""Published forms: every dequantized weight is that of the formats' own libraries, to the bit."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from form_cases import FORMS, expert_form, floats, form, fused_form, random_expert, random_parts
from numpy.typing import NDArray

from tiermoe.errors import FormError
from tiermoe.kernels.forms import BLOCKS, E4M3, MatrixForm
from tiermoe.kernels.repack import neurons_in_order, repack_awq, repack_compressed_tensors, repack_gptq

RNG = np.random.default_rng(0)
# its wheel needs loguru
needs_oracle = pytest.mark.skipif(find_spec("loguru") is None, reason="compressed-tensors is not installed whole")
TORCH = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.uint8}


def tensor(array: NDArray[Any], code: str) -> torch.Tensor:
    found = torch.from_numpy(np.ascontiguousarray(array))
    return found.view(TORCH[code]) if code in TORCH else found


def tensors(form: MatrixForm, parts: dict[str, NDArray[Any]]) -> dict[str, torch.Tensor]:
    return {name: tensor(parts[name], code) for name, (code, _) in form.parts().items()}


def same(found: NDArray[np.float32], wanted: torch.Tensor) -> None:
    """Equal to the bit, after the rounding of the oracle's type."""
    assert torch.equal(torch.from_numpy(found).to(wanted.dtype), wanted)


def decompressed(name: str, state: dict[str, torch.Tensor], **weights: Any) -> torch.Tensor:
    """By compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    return BaseCompressor.get_value_from_registry(name).decompress(state, scheme)["weight"]


def test_e4m3_is_that_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    np.testing.assert_array_equal(E4M3, codes.numpy())
    assert np.signbit(E4M3[128])


@pytest.mark.parametrize(("kind", "name"), [("float16", "F16"), ("bfloat16", "BF16")])
def test_plain_numbers(kind: str, name: str) -> None:
    of = MatrixForm(kind, 6, 512)
    parts = random_parts(of, RNG)
    raw = parts["weight"] if kind == "float16" else parts["weight"].view(np.uint8)
    wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(of.dequantize(parts), wanted.reshape(6, 512))
    of.verify(parts)


@pytest.mark.parametrize("scale", ["F32", "BF16", "F8_E8M0"])
def test_fp8_blocks_are_those_of_transformers(scale: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    of = MatrixForm("fp8_block", 256, 384, scale=scale)
    parts = random_parts(of, RNG)
    of.verify(parts)
    given = tensors(of, parts)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = Fp8Dequantize(None)._dequantize_one(given["weight"], given["scale"], output_dtype=dtype)
        same(of.dequantize(parts), wanted)


def test_ragged_fp8_blocks() -> None:
    """The last blocks of DeepSeek-V3's kernel may be smaller."""
    of = MatrixForm("fp8_block", 200, 130)
    parts = random_parts(of, RNG)
    assert of.parts()["scale"] == ("F32", (2, 2))
    wanted = E4M3[parts["weight"]]
    for o in range(2):
        for i in range(2):
            wanted[128 * o : 128 * o + 128, 128 * i : 128 * i + 128] *= parts["scale"][o, i]
    np.testing.assert_array_equal(of.dequantize(parts), wanted)


@needs_oracle
@pytest.mark.parametrize("scale", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_fp8_of_compressed_tensors(strategy: str, scale: str) -> None:
    of = MatrixForm(f"fp8_{strategy}", 256, 128, scale=scale)
    parts = random_parts(of, RNG)
    given = tensors(of, parts)
    blocks = {"block_structure": [128, 128]} if strategy == "block" else {}
    state = {"weight": given["weight"], "weight_scale": given["scale"]}
    same(
        of.dequantize(parts),
        decompressed("float-quantized", state, num_bits=8, type="float", strategy=strategy, **blocks),
    )


def test_mxfp4_is_that_of_gpt_oss() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    of = MatrixForm("mxfp4", 24, 96)
    parts = random_parts(of, RNG)
    parts["scale"][0] = [0, 1, 252]  # 2**-127 is subnormal
    of.verify(parts)
    blocks = torch.from_numpy(parts["weight"]).view(1, 24, 3, 16)
    for dtype in (torch.float32, torch.bfloat16):
        wanted = convert_moe_packed_tensors(blocks, torch.from_numpy(parts["scale"])[None], dtype=dtype)
        same(of.dequantize(parts), wanted[0].T)


@needs_oracle
def test_mxfp4_of_compressed_tensors() -> None:
    of = MatrixForm("mxfp4", 24, 96)
    parts = random_parts(of, RNG)
    state = {"weight_packed": torch.from_numpy(parts["weight"]), "weight_scale": torch.from_numpy(parts["scale"])}
    wanted = decompressed("mxfp4-pack-quantized", state, num_bits=4, type="float", strategy="group", group_size=32)
    same(of.dequantize(parts), wanted)


@needs_oracle
def test_nvfp4() -> None:
    """compressed-tensors divides by the global scale in the scale's type, here float32; ModelOpt multiplies."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    of = MatrixForm("nvfp4", 24, 96, divides=True)
    parts = random_parts(of, RNG)
    of.verify(parts)
    given = tensors(of, parts)
    codes = unpack_fp4_from_uint8(given["weight"], 24, 96, dtype=torch.float32)
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    wanted = dequantize(codes, given["scale"].float(), args=args, global_scale=given["global_scale"])
    assert wanted.dtype == torch.float32
    same(of.dequantize(parts), wanted)

    multiplies = MatrixForm("nvfp4", 24, 96)
    scales = E4M3[parts["scale"]] * parts["global_scale"]
    np.testing.assert_array_equal(multiplies.dequantize(parts), codes.numpy() * scales.repeat(16, axis=1))


@needs_oracle
@pytest.mark.parametrize("scale", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("group", "inputs", "zeros"), [(32, 96, False), (32, 96, True), (0, 100, True), (0, 99, False)]
)
def test_pack_quantized(bits: int, group: int, inputs: int, zeros: bool, scale: str) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    of = MatrixForm("int", 24, inputs, group=group, bits=bits, scale=scale, zeros=zeros)
    half, groups = 1 << (bits - 1), of.parts()["scale"][1][1]
    codes = torch.from_numpy(RNG.integers(-half, half, (24, inputs), dtype=np.int8))
    scales = floats(RNG.uniform(0.001, 0.01, (24, groups)), scale)
    state = {
        "weight_packed": pack_to_int32(codes, bits), "weight_scale": tensor(scales, scale),
        "weight_shape": torch.tensor([24, inputs]),
    }  # fmt: skip
    if zeros:
        points = torch.from_numpy(RNG.integers(-half, half, (24, groups), dtype=np.int8))
        state["weight_zero_point"] = pack_to_int32(points, bits, packed_dim=0).contiguous()
    found = repack_compressed_tensors(
        of, state["weight_packed"].numpy(), scales, state["weight_zero_point"].numpy() if zeros else None
    )
    of.verify(found)
    kind = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    wanted = decompressed("pack-quantized", state, num_bits=bits, type="int", symmetric=not zeros, **kind)
    same(of.dequantize(found), wanted)


def packed_words(codes: NDArray[np.uint8], bits: int, order: tuple[int, ...] = tuple(range(8))) -> NDArray[np.int32]:
    """[R, C] codes -> int32 [R, C * bits / 32], with shifts of one word, as the formats' own packers do."""
    per_word = 32 // bits
    words = np.zeros((len(codes), codes.shape[1] // per_word), np.uint32)
    for at in range(per_word):
        words |= codes[:, order[at] if bits == 4 else at :: per_word].astype(np.uint32) << (bits * at)
    return words.view(np.int32)


@pytest.mark.parametrize("bias", ["", "BF16"])
@pytest.mark.parametrize("name", ["int, 4 bits, order", "nvfp4", "fp8_tensor", "fp8_channel", "q4_k", "bfloat16"])
def test_neurons_take_the_order_of_downs_inputs(name: str, bias: str) -> None:
    """Whatever form gate and up have, apart or in one matrix, and with biases."""
    rng = np.random.default_rng(1)
    order = rng.permutation(256).astype(np.int32)
    forms = [fused_form(name, 256, 256, interleaved=way, bias=bias) for way in (False, True)]
    for of in forms if bias else [*forms, expert_form(name, 256, 256)]:
        parts = random_expert(of, rng)
        moved = dict(parts)
        for matrix in [one for one in of.matrices if one != "down"]:
            own = {p.removeprefix(f"{matrix}."): array for p, array in parts.items() if p.startswith(f"{matrix}.")}
            moved |= {f"{matrix}.{p}": array for p, array in neurons_in_order(of, matrix, own, order).items()}
        before, after = of.dequantize(parts), of.dequantize(moved)
        np.testing.assert_array_equal(after.gate, before.gate[order])
        np.testing.assert_array_equal(after.up, before.up[order])
        if before.up_bias is not None:
            np.testing.assert_array_equal(after.up_bias, before.up_bias[order])


def test_an_order_of_down_and_of_blocks_of_neurons_is_refused() -> None:
    """Stores that were made before have it: they say so when they are opened."""
    of = expert_form("int, 4 bits, order", 256, 128)
    with pytest.raises(FormError, match="the inputs of down"):
        dataclasses.replace(of, down=dataclasses.replace(of.down, order=True))
    blocks = expert_form("fp8_block", 256, 128)
    with pytest.raises(FormError, match="in blocks"):
        neurons_in_order(blocks, "up", {}, np.arange(128, dtype=np.int32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(bits: int, act_order: bool, version: int) -> None:
    """The formula of AutoGPTQ's own dequantization: scales[g_idx] * (qweight - zeros[g_idx])."""
    o, i, group = 40, 96, 32
    codes, zeros = (RNG.integers(0, 1 << bits, shape, dtype=np.uint8) for shape in ((i, o), (3, o)))
    scales = floats(RNG.uniform(0.001, 0.01, (3, o)), "F16")
    g_idx = (np.arange(i) // group).astype(np.int32)
    if act_order:
        g_idx = RNG.permutation(g_idx)
    stored = zeros - np.uint8(version == 1) & (1 << bits) - 1
    of = MatrixForm("int", o, i, group=group, bits=bits, zeros=True, order=act_order)
    qweight, qzeros = packed_words(np.ascontiguousarray(codes.T), bits).T, packed_words(stored, bits)
    parts = repack_gptq(of, np.ascontiguousarray(qweight), qzeros, scales, g_idx, version=version)
    of.verify(parts)
    wanted = (codes.astype(np.float32) - zeros.astype(np.float32)[g_idx]) * scales.astype(np.float32)[g_idx]
    np.testing.assert_array_equal(of.dequantize(parts), wanted.T)
    if act_order:
        with pytest.raises(FormError, match="order"):
            repack_gptq(dataclasses.replace(of, order=False), qweight, qzeros, scales, g_idx)


@pytest.mark.parametrize("inputs", [96, 1300, 33])
def test_awq(inputs: int) -> None:
    """The nibbles of a word are the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    o, group = 40, 0 if inputs == 33 else 32
    groups = -(-inputs // (group or inputs))
    codes, zeros = (RNG.integers(0, 16, shape, dtype=np.uint8) for shape in ((inputs, o), (groups, o)))
    scales = floats(RNG.uniform(0.001, 0.01, (groups, o)), "F16")
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    of = MatrixForm("int", o, inputs, group=group, bits=4, zeros=True)
    parts = repack_awq(of, packed_words(codes, 4, order), packed_words(zeros, 4, order), scales)
    of.verify(parts)
    spread = [a.astype(np.float32).repeat(group or inputs, axis=0)[:inputs] for a in (zeros, scales)]
    np.testing.assert_array_equal(of.dequantize(parts), ((codes - spread[0]) * spread[1]).T)
    with pytest.raises(FormError, match="half of the range"):
        repack_awq(dataclasses.replace(of, zeros=False), *(packed_words(a, 4, order) for a in (codes, zeros)), scales)


@pytest.mark.parametrize("name", FORMS)
def test_parts_and_bytes(name: str) -> None:
    of = form(name, 48, 512)
    parts = random_parts(of, RNG)
    assert sum(array.nbytes for array in parts.values()) == of.nbytes()
    assert of.dequantize(parts).shape == (48, 512)
    assert np.isfinite(of.dequantize(parts)).all()
    assert np.count_nonzero(of.dequantize(parts)) > 0.6 * 48 * 512  # a third of a ternary type's are 0
    of.verify(parts)


def test_experts() -> None:
    """Of a fused matrix, interleaved or not, with biases or without."""
    for interleaved in (False, True):
        of = fused_form("mxfp4", 64, 32, interleaved=interleaved, bias="BF16")
        parts = random_expert(of, RNG)
        of.verify(parts)
        assert list(of.parts()) == [
            "gate_up.weight",
            "gate_up.scale",
            "gate_up.bias",
            "down.weight",
            "down.scale",
            "down.bias",
        ]
        expert, whole = of.dequantize(parts), of.matrices["gate_up"].dequantize(of.of("gate_up", parts))
        np.testing.assert_array_equal(expert.gate[1], whole[2 if interleaved else 1])
        np.testing.assert_array_equal(expert.up[1], whole[3 if interleaved else 33])
        assert expert.up_bias is not None
        assert expert.up_bias.shape == (32,)
        assert of.nbytes() == sum(array.nbytes for array in parts.values())
    apart = expert_form("fp8_block", 256, 128)
    assert apart.nbytes() == 3 * (256 * 128 + 2 * 4)
    assert (apart.hidden, apart.intermediate) == (256, 128)


@pytest.mark.parametrize("name", FORMS)
def test_damaged_parts(name: str) -> None:
    of = form(name, 48, 512)
    whole = random_parts(of, RNG)

    def refused(says: str, **changed: NDArray[Any]) -> None:
        with pytest.raises(FormError, match=says):
            of.verify(whole | changed)

    refused("parts", other=whole["weight"])
    refused("weight", weight=whole["weight"][:, :-1])
    refused("weight", weight=whole["weight"].astype(np.int64))
    if "scale" in whole:
        bad = whole["scale"].copy()
        bad.flat[-1] = 255 if bad.dtype == np.uint8 else 0x7F80 if bad.dtype == np.uint16 else np.inf
        refused("scale is not finite", scale=bad)
    if of.kind.startswith("fp8"):
        bad = whole["weight"].copy()
        bad[3, 3] = 255
        refused("NaN", weight=bad)
    if of.kind in BLOCKS:
        bad = whole["weight"].copy()
        _, size, places = BLOCKS[of.kind]
        blocks = bad.reshape(-1, size)
        if of.kind == "iq1_m":
            blocks[-1, [53, 55]] = 255
        elif places:
            blocks[-1, places[-1] : places[-1] + 2] = np.array([np.nan], np.float16).view(np.uint8)
        else:
            blocks[-1, 0] = 255
        refused("scale is not finite", weight=bad)
    if of.order:
        bad = whole["order"].copy()
        bad[0] = bad[1]
        refused("permutation", order=bad)
    if of.zeros and of.bits == 4:
        refused("four bits", zero=whole["zero"] | 16)
