"""The model as transformers sees it, on the meta device, and the experts modules in it."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from ....actors.checksummed import first_problem
from ....actors.quiet_logger import quiet_logger
from ....actors.store_format import DTYPE_CODES, ExpertShape
from ....errors import CheckpointError, UnsupportedModelError
from .checkpoint import REFETCH, Checkpoint

_LAYOUT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_NO_EXPERTS = "serve it with transformers or vLLM: tiermoe offloads routed experts"


@dataclass(frozen=True)
class ExpertsModule:
    """One experts module and its layout.

    Attributes:
        path: in the model, such as `model.layers.3.mlp.experts`.
        transposed: weights are [in, out] rather than [out, in].
        concatenated: gate rows, then up rows, rather than gate and up in turns.
        params: parameter path by stored name (`gate_up`, `down`, `gate_up_bias`, `down_bias`).
    """

    path: str
    shape: ExpertShape
    transposed: bool
    concatenated: bool
    params: dict[str, str]

    def neuron_major(self, name: str, block: torch.Tensor) -> torch.Tensor:
        """Lay out some experts' weights as the store does.

        Args:
            name: the stored name.
            block: [n, ...] of the module's parameter, n experts.

        Returns:
            [n, I, G, H], [n, I, H], [n, I, G] or [n, H]: contiguous.
        """
        if name.startswith("gate_up"):
            if name == "gate_up" and self.transposed:
                block = block.transpose(1, 2)  # [n, G*I, H]
            gates, rest = self.shape.gates, block.shape[2:]
            if self.concatenated:
                block = block.reshape(block.shape[0], gates, self.shape.intermediate, *rest).transpose(1, 2)
            else:
                block = block.reshape(block.shape[0], self.shape.intermediate, gates, *rest)
        elif name == "down" and not self.transposed:
            block = block.transpose(1, 2)  # [n, I, H]
        return block.contiguous()


def build_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's model on the meta device, in the checkpoint's type.

    Raises:
        UnsupportedModelError: quantized, or of an architecture that transformers does not have.
        CheckpointError: the configuration is malformed.
    """
    _refuse_quantized(checkpoint.config)
    config, dtype = _load_config(checkpoint)
    try:
        with torch.device("meta"), quiet_logger("transformers", logging.ERROR):  # it is only looked at
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # as above
        raise UnsupportedModelError(
            f"{checkpoint.path}: transformers cannot build a causal language model from config.json "
            f"({first_problem(error)})",
            "pass a text-generation checkpoint that transformers supports without remote code",
        ) from error


def find_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    """The experts modules in layer order.

    Raises:
        UnsupportedModelError: there are none, or their shapes or types differ.
    """
    found = [
        _describe(path, module)
        for path, module in model.named_modules()
        if all(hasattr(module, flag) for flag in _LAYOUT_FLAGS) and hasattr(module, "down_proj")
    ]
    name = type(model).__name__
    if not found:
        raise UnsupportedModelError(f"{name} has no routed experts", _NO_EXPERTS)
    shapes = Counter(module.shape for module in found)
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"the experts of {name} have {len(shapes)} different shapes",
            "serve it without tiermoe: its slots need one shape",
        )
    return found


def expert_dtype(model: PreTrainedModel, experts: list[ExpertsModule]) -> str:
    """Name of the type that all experts have.

    Raises:
        UnsupportedModelError: it is none of bfloat16, float16 and float32, or there are several.
    """
    dtypes = {model.get_parameter(path).dtype for module in experts for path in module.params.values()}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if len(names) != 1 or names[0] not in DTYPE_CODES:
        raise UnsupportedModelError(
            f"the experts are of type {', '.join(names)}", f"convert the checkpoint to one of {', '.join(DTYPE_CODES)}"
        )
    return names[0]


def _describe(path: str, module: Any) -> ExpertsModule:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up": up, "down": "down_proj"}
    if module.has_bias:
        names |= {"gate_up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    try:
        shape = _expert_shape(module, {name: getattr(module, attribute) for name, attribute in names.items()})
    except (AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} has experts of an unknown layout ({first_problem(error)})",
            "check that the transformers release is one that tiermoe supports",
        ) from error
    return ExpertsModule(
        path=path,
        shape=shape,
        transposed=module.is_transposed,
        concatenated=module.is_concatenated,
        params={name: f"{path}.{attribute}" for name, attribute in names.items()},
    )


def _expert_shape(module: Any, params: dict[str, Any]) -> ExpertShape:
    """The shape of one expert, from parameters that must agree on it.

    Raises:
        ValueError: they do not.
    """
    order = -1 if module.is_transposed else 1
    count, rows, hidden = params["gate_up"].shape[:1] + params["gate_up"].shape[1:][::order]
    gates: Literal[1, 2] = 2 if module.has_gate else 1
    shape = ExpertShape(
        num_experts=count, hidden=hidden, intermediate=rows // gates, gates=gates, has_bias=module.has_bias
    )
    expected = {
        "gate_up": (rows, hidden)[::order],
        "down": (hidden, rows // gates)[::order],
        "gate_up_bias": (rows,),
        "down_bias": (hidden,),
    }
    for name, param in params.items():
        if tuple(param.shape) != (count, *expected[name]) or rows % gates:
            raise ValueError(f"{name} is {list(param.shape)}")
    return shape


def _refuse_quantized(config: dict[str, Any]) -> None:
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            if part.get(key) is not None:
                method = part[key].get("quant_method") if isinstance(part[key], dict) else part[key]
                raise UnsupportedModelError(
                    f"the checkpoint is quantized ({method})",
                    "pass the unquantized checkpoint (bfloat16, float16 or float32)",
                )


def _load_config(checkpoint: Checkpoint) -> tuple[PretrainedConfig, torch.dtype]:
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        depth = getattr(config.get_text_config(), "num_hidden_layers", 1)
        # More layers than tensors would take long to build, only to be found wrong.
        if not isinstance(depth, int) or not 1 <= depth <= len(checkpoint.tensors):
            raise ValueError(f"{depth} layers, but the files have {len(checkpoint.tensors)} tensors")
        return config, _checkpoint_dtype(config, checkpoint)
    except Exception as error:  # transformers raises many kinds for a bad configuration
        raise CheckpointError(
            f"{checkpoint.path}: config.json is not usable ({first_problem(error)})",
            f"check that the transformers release knows this architecture, or {REFETCH}",
        ) from error


def _checkpoint_dtype(config: PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The type that transformers' `dtype="auto"` loads: the configuration's, else the weights'."""
    dtype = config.dtype if config.dtype is not None else config.get_text_config().dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype is None:
        nbytes: Counter[str] = Counter()
        for entry in checkpoint.tensors.values():
            nbytes[entry.spec.dtype] += entry.spec.nbytes
        code = nbytes.most_common(1)[0][0]
        name = next((name for name, known in DTYPE_CODES.items() if known == code), None)
        dtype = getattr(torch, name) if name else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError("it does not tell the type of the weights")
    return dtype
