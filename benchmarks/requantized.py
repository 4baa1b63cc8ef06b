"""The default model with its experts in a form in which models are published: FP8 in blocks, or MXFP4."""

from __future__ import annotations

import json
import shutil
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cluster.config import default_model_dir

if TYPE_CHECKING:
    import torch

BLOCK, GROUP = 64, 32  # weights of a side of an FP8 block; inputs that share a scale of MXFP4


class Published(StrEnum):
    """The form of the experts; bf16 is the model as it is."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP4 = "mxfp4"


def requantized(form: Published, folder: Path) -> Path:
    """Write the default model in this form, with its tokenizer and texts; the folder, which must not exist."""
    from safetensors.torch import load_file, save_file

    source = default_model_dir()
    shutil.copytree(source, folder)
    if form is Published.BF16:
        return folder
    quantize, how = (_fp8, _FP8) if form is Published.FP8 else (_mxfp4, _MXFP4)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".experts." in name:
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.{part}": values for part, values in quantize(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}), encoding="utf-8")
    return folder


_FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]
}  # fmt: skip
_MXFP4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
    "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "targets": ["Linear"], "format": "mxfp4-pack-quantized",
        "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True},
    }},
}  # fmt: skip


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [O, I] -> float8 [O, I] and a scale for each block."""
    import torch

    o, i = weight.shape
    blocks = weight.view(o // BLOCK, BLOCK, i // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    return {"weight": codes.reshape(o, i), "weight_scale_inv": scale}


def _mxfp4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """weight [O, I] -> two codes a byte [O, I / 2], and the exponent of each group, biased by 127."""
    import torch

    o, i = weight.shape
    groups = weight.view(o, i // GROUP, GROUP)
    exponent = groups.abs().amax(dim=2, keepdim=True).log2().floor() - 2  # the largest code is 6
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    near = ((groups / exponent.exp2()).abs()[..., None] - sizes).abs().argmin(dim=-1)
    codes = (near + 8 * (groups < 0)).view(o, i // 2, 2).to(torch.uint8)
    packed = codes[..., 0] | codes[..., 1] << 4
    return {"weight_packed": packed, "weight_scale": (exponent.view(o, -1) + 127).to(torch.uint8)}
