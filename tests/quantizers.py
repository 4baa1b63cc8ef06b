"""Matrices quantized as MoE models are published: by the code of the form's own library, else as its tools do it.

Tests write checkpoints with these. Each function takes a matrix [O, I] in float32 and gives the tensors
by the suffix of their names, and the float32 values that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tiermoe.errors import ConfigError

INSTALL = "pip install 'compressed-tensors>=0.20,<0.21'"
Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]  # [O, I] -> tensors by suffix, and their values


# --- FP8 -------------------------------------------------------------------------------------------------------


def fp8_block(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of 128 x 128, decoded by transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    o, i = weight.shape
    blocks = weight.reshape(o // 128, 128, i // 128, 128)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(o, i)
    values = Fp8Dequantize(None)._dequantize_one(codes, scale, output_dtype=torch.float32)
    return {".weight": codes, ".weight_scale_inv": scale}, values


FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


# --- compressed-tensors ------------------------------------------------------------------------------------------


def compressed(layout: str, **weights: Any) -> tuple[Quantize, dict[str, Any]]:
    """The quantization of a format of compressed-tensors, by its own compressors; and its quantization_config.

    Raises:
        ConfigError: compressed-tensors is not installed.
    """
    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationScheme
    except ImportError as error:
        raise ConfigError(f"compressed-tensors, which writes {layout}, is not installed", INSTALL) from error
    group = {"weights": {"symmetric": True, **weights}, "targets": ["Linear"], "format": layout}
    config = {
        "quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.get_value_from_registry(layout)

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        state = {"weight": weight, **_scales(weight, weights)}
        found = compressor.compress(state, scheme)
        if weights.get("actorder"):
            found["weight_g_idx"] = state["weight_g_idx"]
        values = compressor.decompress({name: _wide(name, t) for name, t in found.items()}, scheme)["weight"].float()
        if "weight_global_scale" in found:
            exact = _nvfp4(found)
            assert ((values - exact).abs() <= exact.abs() / 256).all()  # which the library rounds to bfloat16
            values = exact
        return {f".{name}": tensor for name, tensor in found.items()}, values

    return quantize, config


def _wide(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """For the library, which computes in the type of the scales: a copy in float32 where they are bfloat16."""
    return tensor.float() if name == "weight_scale" and tensor.dtype == torch.bfloat16 else tensor.clone()


def _nvfp4(found: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values in float32."""
    packed = found["weight_packed"]
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes & 7] * (1.0 - 2.0 * (codes >> 3))
    scales = found["weight_scale"].float() / found["weight_global_scale"]
    return values * scales.repeat_interleave(16, dim=1)


def _scales(weight: torch.Tensor, args: Mapping[str, Any]) -> Tensors:
    """Fitted to the largest values, as an observer of the library would."""
    o, i = weight.shape
    size = args.get("group_size") or i
    groups = weight.reshape(o, -1, size)
    largest = groups.abs().amax(dim=2)
    if args["type"] == "int":
        if args.get("symmetric", True):
            return {"weight_scale": (largest / (2 ** (args["num_bits"] - 1) - 1)).bfloat16()}
        low, high = groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)
        scale = ((high - low) / (2 ** args["num_bits"] - 1)).bfloat16()
        zero = (-(2 ** (args["num_bits"] - 1)) - low / scale).round().to(torch.int8)
        return {"weight_scale": scale, "weight_zero_point": zero}
    if args["num_bits"] == 8:
        whole = weight.abs().amax().reshape(1) if args["strategy"] == "tensor" else largest
        return {"weight_scale": (whole / 448).bfloat16()}
    if size == 32:  # powers of two
        return {"weight_scale": torch.exp2(torch.floor(torch.log2(largest)) - 2)}
    whole = (448 * 6 / weight.abs().amax()).reshape(1)
    return {"weight_scale": (largest / 6 * whole).to(torch.float8_e4m3fn).float(), "weight_global_scale": whole}


# --- GPTQ ------------------------------------------------------------------------------------------------------


def codes_of(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric codes [O, I], scales and zero points [O, G]."""
    o, i = weight.shape
    groups = weight.reshape(o, -1, group)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).round().clamp(0, 2**bits - 1)
    codes = (groups / scale.float()[:, :, None] + zero[:, :, None]).round().clamp(0, 2**bits - 1)
    return codes.reshape(o, i), scale, zero


def words_of(codes: np.ndarray, order: list[int], bits: int) -> torch.Tensor:
    """Codes [R, C] -> int32 [R, C * bits / 32]; nibble k of a word is its code order[k]."""
    per = 32 // bits
    grouped = codes.astype(np.uint32).reshape(len(codes), -1, per)
    words = np.zeros(grouped.shape[:2], np.uint32)
    for k, place in enumerate(order):
        words |= grouped[:, :, place] << np.uint32(bits * k)
    return torch.from_numpy(words.view(np.int32))


def gptq(bits: int, group: int, act_order: bool, symmetric: bool) -> Quantize:
    """AutoGPTQ's packing: along inputs, zero points less one, and the group of each input."""

    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        o, i = weight.shape
        generator = torch.Generator().manual_seed(i)
        order = torch.randperm(i, generator=generator) if act_order else torch.arange(i)
        g_idx = torch.empty(i, dtype=torch.int32)
        g_idx[order] = (torch.arange(i) // group).int()
        moved, scale, zero = codes_of(weight[:, order], group, bits)
        if symmetric:
            half = float(2 ** (bits - 1))
            scale = (weight[:, order].reshape(o, -1, group).abs().amax(dim=2) / (half - 1)).half()
            zero = torch.full_like(zero, half)
            spread = scale.float().repeat_interleave(group, 1)
            moved = (weight[:, order] / spread + half).round().clamp(0, 2 * half - 1)
        codes = torch.empty_like(moved)
        codes[:, order] = moved
        plain = list(range(32 // bits))
        parts = {
            ".qweight": words_of(codes.numpy(), plain, bits).t().contiguous(),
            ".qzeros": words_of((zero - 1).t().numpy() % (1 << bits), plain, bits), ".scales": scale.t().contiguous(),
            ".g_idx": g_idx,
        }  # fmt: skip
        groups = g_idx.long()
        return parts, (codes - zero[:, groups]) * scale.float()[:, groups]

    return quantize


def gptq_config(bits: int, group: int, act_order: bool, symmetric: bool) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric,
        "checkpoint_format": "gptq",
    }  # fmt: skip
