"""What a configuration says about the quantization of its weights, without torch and before any weight is read.

`read_quantization` takes `config.json`'s `quantization_config` (or ModelOpt's `hf_quant_config.json`), refuses what is
not supported, and tells how the tensors of one matrix are named and what they mean (`Scheme`).

    quant_method        layouts
    fp8                 blocks with `weight_scale_inv` (DeepSeek-V3, Qwen3, MiniMax)
    mxfp4               stacked `_blocks` and `_scales` (gpt-oss)
    compressed-tensors  float-, int- and naive-quantized, pack-, nvfp4-pack- and mxfp4-pack-quantized
    awq, gptq           four or eight bits
    modelopt            FP8, NVFP4
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..actors.store.format import first_problem
from ..errors import CheckpointError, FormError, UnsupportedModelError
from ..kernels.forms import FLOATS, ExpertForm, MatrixForm
from .prompt import read_json_object

HF_QUANT_CONFIG = "hf_quant_config.json"  # ModelOpt's own file
KEYS = ("quantization_config", "compression_config")
_REMEDY = "pass another release of the model, such as its bfloat16 or FP8 one"
SUPPORTED = "fp8, mxfp4, compressed-tensors, awq, gptq, modelopt (FP8, NVFP4), GGUF"

Layout = Literal["fp8", "scaled", "gpt-oss", "mxfp4", "nvfp4", "modelopt-nvfp4", "packed", "int8", "awq", "gptq"]


@dataclass(frozen=True)
class Scheme:
    """How one quantized matrix is published.

    Attributes:
        layout: names and types of its tensors, see `published.SUFFIXES`.
        bits: of an integer code; 0 for floats.
        group: inputs that share a scale; 0: the whole row, or what the kind prescribes.
        zeros: whether it has zero points.
        block: outputs and inputs that share a scale; None: no blocks.
        order: whether inputs are quantized in another order (act-order).
        version: of GPTQ's format; in version 1 zero points are stored less one.
    """

    layout: Layout
    bits: int = 0
    group: int = 0
    zeros: bool = False
    block: tuple[int, int] | None = None
    order: bool = False
    version: int = 1


@dataclass(frozen=True)
class Quantization:
    """The quantization of a checkpoint.

    Attributes:
        method: such as "compressed-tensors", for people.
        schemes: with the module names that each is for, as a pattern; the first that matches holds.
    """

    method: str
    schemes: tuple[tuple[re.Pattern[str], Scheme], ...]

    def of(self, module: str) -> Scheme | None:
        """The scheme of a module; None: it is not quantized."""
        return next((scheme for pattern, scheme in self.schemes if pattern.search(module)), None)


def quantization_dict(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization part of a `config.json`, at its top or in a text part; None: there is none."""
    for part in (config, *(part for part in config.values() if isinstance(part, dict))):
        for key in KEYS:
            if part.get(key) is not None:
                found = part[key]
                return found if isinstance(found, dict) else {"quant_method": str(found)}
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of the dequantized model."""
    return {
        name: without_quantization(part) if isinstance(part, dict) else part
        for name, part in config.items()
        if name not in KEYS
    }


def read_quantization(config: Mapping[str, Any], hf_quant: Mapping[str, Any] | None = None) -> Quantization | None:
    """The quantization of a checkpoint by its configuration; None: it has none.

    Args:
        hf_quant: the content of `hf_quant_config.json`, where there is one.

    Raises:
        UnsupportedModelError: this quantization is not supported. CheckpointError: the configuration is malformed.
    """
    found = quantization_dict(config)
    if found is None and hf_quant is None:
        return None
    if found is None:
        found = {"quant_method": "modelopt", **_section(hf_quant or {}, "quantization")}
    method = found.get("quant_method") or ("modelopt" if "quant_algo" in found else None)
    reader = _READERS.get(str(method))
    if reader is None:
        raise UnsupportedModelError(f"the checkpoint is quantized ({method}), which is not supported",
                                    f"{_REMEDY}; supported: {SUPPORTED}")  # fmt: skip
    try:
        return Quantization(str(method), tuple(reader(found)))
    except (ValidationError, re.error) as error:
        raise CheckpointError(
            f"the quantization_config of config.json is malformed ({first_problem(error)})", "download it again"
        ) from error


def published_as(model_dir: Path) -> str | None:
    """How a checkpoint's folder publishes its weights, such as "fp8" or "GGUF"; None: as plain numbers, or a store.

    Raises:
        UnsupportedModelError, CheckpointError: as `read_quantization`; or a file is no JSON object.
    """
    config, beside = model_dir / "config.json", model_dir / HF_QUANT_CONFIG
    if any(model_dir.glob("*.gguf")) and not any(model_dir.glob("*.safetensors")):
        return "GGUF"
    if not config.is_file():
        return None
    found = read_quantization(read_json_object(config), read_json_object(beside) if beside.is_file() else None)
    return None if found is None else found.method


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the checkpoint is quantized with {what}, which is not supported", _REMEDY)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


_ALL = re.compile("")
Schemes = list[tuple[re.Pattern[str], Scheme]]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Fp8(_Part):
    weight_block_size: tuple[int, int] | None = None
    fmt: str | None = None


def _fp8(found: dict[str, Any]) -> Schemes:
    given = _Fp8(**found)
    if given.fmt not in (None, "e4m3", "float8_e4m3fn"):
        raise _refused(f"FP8 of the type {given.fmt}")
    block = given.weight_block_size
    return [(_ALL, Scheme("fp8", block=block or (128, 128)))]


def _mxfp4(found: dict[str, Any]) -> Schemes:
    return [(_ALL, Scheme("gpt-oss"))]


class _Awq(_Part):
    bits: Literal[4, 8] = Field(validation_alias="w_bit", default=4)
    group_size: int = Field(validation_alias="q_group_size", default=128, ge=-1)
    zero_point: bool = True
    version: str = "gemm"


def _awq(found: dict[str, Any]) -> Schemes:
    aliases = {"w_bit": found.get("bits"), "q_group_size": found.get("group_size")}
    given = _Awq(**{**found, **{name: value for name, value in aliases.items() if value is not None}})
    if given.version.lower() != "gemm" or given.bits != 4:
        raise _refused(f"AWQ of {given.bits} bits in the version {given.version}")
    return [(_ALL, Scheme("awq", bits=4, group=max(0, given.group_size), zeros=True))]


class _Gptq(_Part):
    bits: int
    group_size: int = Field(default=128, ge=-1)
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    dynamic: dict[str, dict[str, Any] | bool] | None = None


def _gptq(found: dict[str, Any]) -> Schemes:
    given = _Gptq(**found)
    schemes: Schemes = []
    for pattern, changes in (given.dynamic or {}).items():  # GPTQModel: patterns of modules with other settings
        if not pattern.startswith("-:") and isinstance(changes, dict):  # the others have no tensors of this layout
            other = _Gptq(**{**found, **changes, "dynamic": None})
            schemes.append((re.compile(pattern.removeprefix("+:")), _gptq_scheme(other)))
    return [*schemes, (_ALL, _gptq_scheme(given))]


def _gptq_scheme(given: _Gptq) -> Scheme:
    if given.bits not in (4, 8) or given.checkpoint_format not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ of {given.bits} bits in the format {given.checkpoint_format}")
    version = 1 if given.checkpoint_format == "gptq" else 2
    return Scheme(
        "gptq", bits=given.bits, group=max(0, given.group_size), zeros=not given.sym, order=given.desc_act,
        version=version,
    )  # fmt: skip


class _Weights(_Part):
    num_bits: int
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: str | None = None


class _GroupConfig(_Part):
    targets: tuple[str, ...]
    weights: _Weights | None = None
    format: str | None = None


class _Compressed(_Part):
    config_groups: dict[str, _GroupConfig]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


def _compressed(found: dict[str, Any]) -> Schemes:
    given = _Compressed(**found)
    if (given.sparsity_config or {}).get("format", "dense") != "dense":
        raise _refused(f"sparsity of the format {(given.sparsity_config or {}).get('format')}")
    if (given.transform_config or {}).get("config_groups"):
        raise _refused("transforms of the inputs (compressed-tensors' transform_config)")
    schemes: Schemes = []
    for group in given.config_groups.values():
        if group.weights is not None:
            layout = group.format or given.format or "pack-quantized"
            schemes.append((_targets(group.targets), _compressed_scheme(layout, group.weights)))
    if not schemes:
        raise _refused("compressed-tensors without quantized weights")
    return sorted(schemes, key=lambda item: item[0] is _ALL)  # names before classes


def _targets(targets: tuple[str, ...]) -> re.Pattern[str]:
    """Modules by compressed-tensors' targets: classes of modules (all of them here), names, or patterns after `re:`."""
    if any(target[0].isupper() and "." not in target for target in targets if target):
        return _ALL
    return re.compile("|".join(f"(?:{t[3:]})" if t.startswith("re:") else f"^{re.escape(t)}$" for t in targets))


_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")  # a code fills its type: nothing is packed


def _compressed_scheme(layout: str, weights: _Weights) -> Scheme:
    bits, group = weights.num_bits, max(0, weights.group_size or 0)
    what = f"compressed-tensors {layout} of {bits} bits, type {weights.type}, strategy {weights.strategy}"
    block = weights.block_structure if weights.strategy == "block" else None
    shared = ("channel", "tensor", None) if block is None else ("block",)
    if weights.type == "float" and bits == 8 and weights.strategy in shared and layout in _PLAIN:
        return Scheme("scaled", block=block)
    if weights.type == "float" and bits == 4:
        if layout == "nvfp4-pack-quantized" and group in (0, 16):
            return Scheme("nvfp4", group=16)
        if layout == "mxfp4-pack-quantized" and group in (0, 32):
            return Scheme("mxfp4", group=32)
    if weights.type == "int" and weights.strategy in ("group", "channel", None):
        if layout == "pack-quantized" and bits in (4, 8):
            order = weights.actorder in ("group", "dynamic")
            return Scheme("packed", bits=bits, group=group, zeros=not weights.symmetric, order=order)
        if layout in _PLAIN and bits == 8:
            return Scheme("int8", bits=8, group=group, zeros=not weights.symmetric)
    raise _refused(what)


class _ModelOpt(_Part):
    quant_algo: str
    group_size: int | None = None


def _modelopt(found: dict[str, Any]) -> Schemes:
    given = _ModelOpt(**{**found, **_section(found, "quantization")})
    if given.quant_algo == "FP8":
        return [(_ALL, Scheme("scaled"))]
    if given.quant_algo == "NVFP4" and given.group_size in (None, 16):
        return [(_ALL, Scheme("modelopt-nvfp4", group=16))]
    raise _refused(f"ModelOpt's {given.quant_algo}")


_READERS = {
    "fp8": _fp8, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed,
    "modelopt": _modelopt,
}  # fmt: skip


_FORM_OF: Mapping[Layout, str] = {
    "fp8": "fp8_block", "scaled": "fp8_channel", "gpt-oss": "mxfp4", "mxfp4": "mxfp4", "nvfp4": "nvfp4",
    "modelopt-nvfp4": "nvfp4", "packed": "int", "int8": "int", "awq": "int", "gptq": "int",
}  # fmt: skip


def expected_experts(quantization: Quantization, layer: int, hidden: int, width: int) -> tuple[ExpertForm, bool] | None:
    """The form of a layer's experts by the configuration alone, and whether they are mapped where they lie.

    Scales are taken to have the types that their forms have by default.

    Returns:
        None: the configuration leaves experts unquantized.
    """
    names = (f"model.layers.{layer}.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down"))
    schemes = [quantization.of(name) for name in names]
    if None in schemes:
        return None
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    try:
        gate, up, down = (
            _expected_matrix(scheme, *size) for scheme, size in zip(schemes, sizes, strict=True) if scheme is not None
        )
        if schemes[0] is not None and schemes[0].layout == "gpt-oss":
            both = _expected_matrix(schemes[0], 2 * width, hidden)
            return ExpertForm(down=down, gate_up=both, interleaved=True, bias="BF16"), True
        return ExpertForm(down=down, gate=gate, up=up), all(map(_is_mapped, schemes))
    except FormError as error:
        raise UnsupportedModelError(
            f"experts of {hidden} x {width} cannot be quantized as config.json says: {error.what}", error.remedy
        ) from error


def plain_experts(code: str, hidden: int, width: int) -> ExpertForm:
    """The form of experts that a release leaves unquantized. code: their type, such as "BF16"."""
    kind = next(kind for kind, of_kind in FLOATS.items() if of_kind == code)
    gate = MatrixForm(kind, width, hidden)
    return ExpertForm(down=MatrixForm(kind, hidden, width), gate=gate, up=gate)


def _expected_matrix(scheme: Scheme, outputs: int, inputs: int) -> MatrixForm:
    kind = _FORM_OF[scheme.layout]
    if kind == "fp8_channel" and scheme.block is not None:
        kind = "fp8_block"
    block = (0, 0) if scheme.block is None else scheme.block
    integer = kind == "int"
    return MatrixForm(
        kind, outputs, inputs, group=block[1] if not integer else scheme.group if scheme.group < inputs else 0,
        block=block[0] if kind == "fp8_block" else 0, bits=scheme.bits if integer else 0,
        zeros=integer and scheme.zeros, order=integer and scheme.order,
    )  # fmt: skip


def _is_mapped(scheme: Scheme | None) -> bool:
    """Whether the checkpoint's bytes are in the order of slots."""
    if scheme is None or scheme.layout in ("awq", "gptq", "int8"):
        return False
    return not (scheme.layout == "packed" and (scheme.zeros or scheme.order))
