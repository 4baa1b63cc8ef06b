"""What a configuration says about the quantization of its weights, without torch and before any weight is read.

`quantization_of` reads `config.json`'s `quantization_config`, or where there is none the file that a tool writes beside
it (`BESIDE`). It refuses what is not supported, and says how the tensors of one matrix are named and what they mean
(`Scheme`).

    quant_method        layouts
    fp8, mxfp8          blocks (DeepSeek-V3, Qwen3, MiniMax), or one scale a tensor or row (Mistral, vLLM); experts of
                        4 bits beside them (DeepSeek-V4)
    fbgemm_fp8          one scale a row
    mxfp4               stacked `_blocks` and `_scales` (gpt-oss)
    compressed-tensors  float-, int- and naive-quantized, mxfp8-quantized, pack-, nvfp4-pack- and mxfp4-pack-quantized
    awq, gptq           four or eight bits
    modelopt            FP8, NVFP4

The models of compressed-tensors import torch and transformers (seven seconds, 420 MB) and refuse act-order, which
published checkpoints have: `_Args` does what they do to the spellings, and a test compares the two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ...actors.store.format import first_problem
from ...errors import CheckpointError, FormError, UnsupportedModelError
from ...kernels.forms import FLOATS, ExpertForm, MatrixForm
from .weight_files import CONFIG, gguf_in, optional_json, read_json_object

# what tools write beside a config.json without `quantization_config`, and the method that they mean by default
BESIDE: Mapping[str, str] = {
    "hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq",
}  # fmt: skip
KEYS = ("quantization_config", "compression_config")
_REMEDY = "pass another release of the model, such as its bfloat16 or FP8 one"
# the names that the scale of FP8 has, all for a factor: DeepSeek's, vLLM's, DeepSeek-V4's, Mistral's
FP8_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".qscale_weight")
SUPPORTED = "fp8, mxfp8, fbgemm_fp8, mxfp4, compressed-tensors, awq, gptq, modelopt (FP8, NVFP4), GGUF"

Layout = Literal[
    "fp8", "fp8-stack", "fp4", "gpt-oss", "mxfp4", "nvfp4", "modelopt-nvfp4", "packed", "int8", "awq", "gptq"
]


class Tensors(NamedTuple):
    """The tensors of one matrix in a layout, by the suffixes of their names.

    first: the tensor that makes a matrix. code: its type; a matrix of that name in another type is not quantized.
    kind: of the matrix' form, without what the scheme or the scales change. needed, optional: tensors beside the first.
    repacked: whether slots need another order of the bytes, whatever the scheme.
    """

    first: str
    code: str
    kind: str
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    repacked: bool = False

    @property
    def suffixes(self) -> tuple[str, ...]:
        return (self.first, *self.needed, *self.optional)


LAYOUTS: Mapping[Layout, Tensors] = {
    "fp8": Tensors(".weight", "F8_E4M3", "fp8_channel", optional=FP8_SCALES),  # one of the scales
    "fp4": Tensors(".weight", "I8", "mxfp4", optional=FP8_SCALES),  # DeepSeek-V4's experts
    "fp8-stack": Tensors("", "F8_E4M3", "fp8_channel", ("_scale_inv",)),  # all experts of a layer, as in transformers
    "gpt-oss": Tensors("_blocks", "U8", "mxfp4", ("_scales",)),
    "mxfp4": Tensors(".weight_packed", "U8", "mxfp4", (".weight_scale",), (".weight_shape",)),
    "nvfp4": Tensors(".weight_packed", "U8", "nvfp4", (".weight_scale", ".weight_global_scale"), (".weight_shape",)),
    "modelopt-nvfp4": Tensors(".weight", "U8", "nvfp4", (".weight_scale", ".weight_scale_2")),
    "packed": Tensors(
        ".weight_packed", "I32", "int", (".weight_scale",), (".weight_shape", ".weight_zero_point", ".weight_g_idx")
    ),
    "int8": Tensors(".weight", "I8", "int", (".weight_scale",), (".weight_zero_point",), repacked=True),
    "awq": Tensors(".qweight", "I32", "int", (".qzeros", ".scales"), repacked=True),
    "gptq": Tensors(".qweight", "I32", "int", (".qzeros", ".scales"), (".g_idx",), repacked=True),
}


@dataclass(frozen=True)
class Scheme:
    """How one quantized matrix is published.

    Attributes:
        layout: names and types of its tensors, see `LAYOUTS`.
        bits: of an integer code; 0 for floats.
        group: inputs that share a scale; 0: the whole row, or what the kind prescribes.
        zeros: whether it has zero points.
        block: outputs and inputs that share a scale of `fp8`; None: by the shape of the scales.
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
        schemes: with the module names that each is for, as a pattern; the first that matches holds, of those of the
            tensor's type where that is known.
        source: the file with the configuration.
    """

    method: str
    schemes: tuple[tuple[re.Pattern[str], Scheme], ...]
    source: str = field(default=CONFIG, compare=False)

    def of(self, module: str, code: str | None = None) -> Scheme | None:
        """The scheme of a module, if its tensors are quantized; None: it is not quantized.

        code: type of the tensor that makes the matrix, where it is known.

        Where there is one scheme alone it is for every such module: names in a configuration may have other prefixes
        than the tensors.
        """
        fitting = [scheme for pattern, scheme in self.schemes if pattern.match(module)]
        known = {scheme for _, scheme in self.schemes}
        if not fitting:
            return known.pop() if len(known) == 1 else None
        return next((scheme for scheme in fitting if LAYOUTS[scheme.layout].code == code), fitting[0])

    def targeting(self, module: str) -> Scheme | None:
        """The scheme whose pattern matches the module's name."""
        return next((scheme for pattern, scheme in self.schemes if pattern.match(module)), None)


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


def quantization_of(model_dir: Path) -> Quantization | None:
    """The quantization of a checkpoint's folder by its configuration; None: it has none.

    Raises:
        UnsupportedModelError: this quantization is not supported. CheckpointError: a file is malformed.
    """
    config = read_json_object(model_dir / CONFIG)
    found = quantization_dict(config)
    if found is not None:  # it wins over the files beside it, as in transformers
        found = {_EXPERT_DTYPE: config.get(_EXPERT_DTYPE), **found}  # DeepSeek-V4 has it outside, V4.1 inside
        method = found.get("quant_method") or ("modelopt" if "quant_algo" in found else None)
        if found.get("load_in_4bit") or found.get("load_in_8bit"):
            method = "bitsandbytes"
        return _read(found, str(method), CONFIG)
    for name, method in BESIDE.items():
        if (beside := optional_json(model_dir / name)) is not None:
            return _read(beside, _method(beside, method), name)
    return None


def _method(found: Mapping[str, Any], default: str) -> str:
    """The method of a file beside config.json: by its content, since tools read each other's files."""
    named = found.get("quant_method") or found.get("method")
    if named is None and any(key in found for key in ("w_bit", "q_group_size", "zero_point")):
        return "awq"
    if named is None and "desc_act" in found:
        return "gptq"
    return str(named or default)


def _read(found: dict[str, Any], method: str, source: str) -> Quantization | None:
    reader = _READERS.get(method.lower().replace("_", "-"))
    if reader is None:
        raise UnsupportedModelError(f"the checkpoint is quantized ({method}), which is not supported",
                                    f"{_REMEDY} (supported: {SUPPORTED})")  # fmt: skip
    try:
        schemes = tuple(reader(found))
    except (ValidationError, re.error) as error:
        what = f"the quantization_config of {source} is malformed ({first_problem(error)})"
        raise CheckpointError(what, f"correct it, or copy {source} from where the model is published") from error
    return Quantization(method, schemes, source) if schemes else None


def published_as(model_dir: Path) -> str | None:
    """How a checkpoint's folder publishes its weights, such as "fp8" or "GGUF"; None: as plain numbers, or a store.

    Raises:
        UnsupportedModelError, CheckpointError: as `quantization_of`.
    """
    if gguf_in(model_dir):
        return "GGUF"
    if not (model_dir / CONFIG).is_file():
        return None
    found = quantization_of(model_dir)
    return None if found is None else found.method


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the checkpoint is quantized with {what}, which is not supported", _REMEDY)


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


_ALL = re.compile("")
_EXPERT, _EXPERT_DTYPE = re.compile(r"(.*\.)?experts\.\d+\."), "expert_dtype"
Schemes = list[tuple[re.Pattern[str], Scheme]]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Fp8(_Part):
    weight_block_size: tuple[int, int] | None = None
    fmt: str | None = None
    activation_scheme: str | None = None
    expert_dtype: str | None = None


def _fp8(found: dict[str, Any]) -> Schemes:
    given = _Fp8(**found)
    if (given.fmt or "e4m3").lower() not in ("e4m3", "e4m3fn", "float8_e4m3fn", "float8_e4m3"):
        raise _refused(f"FP8 of the type {given.fmt}")
    if given.weight_block_size is not None and min(given.weight_block_size) < 1:
        raise _refused(f"FP8 in blocks of {given.weight_block_size}")
    if given.expert_dtype not in (None, "fp8", "fp4"):
        raise _refused(f"experts of the type {given.expert_dtype}")
    experts: Schemes = [(_EXPERT, Scheme("fp4"))] if given.expert_dtype == "fp4" else []
    return [*experts, (_ALL, Scheme("fp8", block=given.weight_block_size))]


def _mxfp8(found: dict[str, Any]) -> Schemes:
    return _fp8({"weight_block_size": (1, 32)} | {name: value for name, value in found.items() if value is not None})


def _mxfp4(found: dict[str, Any]) -> Schemes:
    return [(_ALL, Scheme("gpt-oss"))]


class _Awq(_Part):
    bits: int = 4
    group_size: int = Field(default=128, ge=-1)
    version: str = "gemm"
    backend: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, found: dict[str, Any]) -> dict[str, Any]:
        """AutoAWQ's own names, and the newer one of the version."""
        names = {"bits": "w_bit", "group_size": "q_group_size", "version": "format"}
        given = {name: found[alias] for name, alias in names.items() if found.get(alias) is not None}
        return given | {name: value for name, value in found.items() if value is not None}


def _awq(found: dict[str, Any]) -> Schemes:
    given = _Awq(**found)
    if given.version.lower() != "gemm" or given.bits != 4 or given.backend == "llm-awq":
        raise _refused(f"AWQ of {given.bits} bits in the version {given.backend or given.version}")
    return [(_ALL, Scheme("awq", bits=4, group=max(0, given.group_size), zeros=True))]


class _Gptq(_Part):
    bits: int
    group_size: int = Field(default=128, ge=-1)
    sym: bool = True
    desc_act: bool = False
    checkpoint_format: str = "gptq"
    pack_dtype: str = "int32"
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, Any] | bool] | None = None

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, found: dict[str, Any]) -> dict[str, Any]:
        """`format` is the newer name of `checkpoint_format`."""
        given = {} if found.get("format") is None else {"checkpoint_format": found["format"]}
        return given | {name: value for name, value in found.items() if value is not None}


def _gptq(found: dict[str, Any]) -> Schemes:
    given = _Gptq(**found)
    schemes: Schemes = []
    for pattern, changes in (given.dynamic or {}).items():  # GPTQModel: patterns of modules with other settings
        if not pattern.startswith("-:") and isinstance(changes, dict):  # the others have no tensors of this layout
            other = _Gptq(**{**found, **changes, "dynamic": None})
            schemes.append((re.compile(pattern.removeprefix("+:")), _gptq_scheme(other)))
    return [*schemes, (_ALL, _gptq_scheme(given))]


def _gptq_scheme(given: _Gptq) -> Scheme:
    version = {"gptq": 1, "gptq_v2": 2}.get(given.checkpoint_format.lower())
    if given.bits not in (4, 8) or version is None or given.is_marlin_format:
        layout = "marlin" if given.is_marlin_format else given.checkpoint_format
        raise _refused(f"GPTQ of {given.bits} bits in the format {layout}")
    if given.pack_dtype.removeprefix("torch.") != "int32":
        raise _refused(f"GPTQ packed in {given.pack_dtype}")
    return Scheme(
        "gptq", bits=given.bits, group=max(0, given.group_size), zeros=not given.sym, order=given.desc_act,
        version=version,
    )  # fmt: skip


Strategy = Literal["tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"]


class _Args(BaseModel):
    """`compressed_tensors.quantization.QuantizationArgs` of weights: the same spellings, defaults and refusals.

    Only act-order (`actorder` group, dynamic or true) is known here and refused there: what it means is in the tensors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_bits: int = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    group_size: int | None = Field(default=None, ge=-1)
    strategy: Strategy | None = None
    block_structure: tuple[int, int] | None = None
    dynamic: Any = False
    actorder: Literal["weight", "static", "group", "dynamic"] | None = None
    scale_dtype: Any = None
    zp_dtype: Any = None
    observer: Any = None
    observer_kwargs: Any = None

    @field_validator("type", "strategy", "actorder", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @field_validator("actorder", mode="before")
    @classmethod
    def _flag(cls, value: Any) -> Any:
        return {True: "group", False: None}[value] if isinstance(value, bool) else value

    @field_validator("block_structure", mode="before")
    @classmethod
    def _rows_x_columns(cls, value: Any) -> Any:
        """[128, 128], or as older releases write it "128x128"."""
        return value.split("x") if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> _Args:
        size = self.group_size or 0
        inferred: Strategy = "group" if size > 0 else "channel" if size < 0 else "tensor"
        strategy = self.strategy or inferred
        if self.strategy is None and self.group_size == 0:
            raise ValueError("group_size is 0")
        if (strategy in ("group", "tensor_group")) != (size > 0):
            raise ValueError(f"group_size {self.group_size} does not fit the strategy {strategy}")
        if (strategy == "block") != (self.block_structure is not None):
            raise ValueError(f"block_structure {self.block_structure} does not fit the strategy {strategy}")
        if self.block_structure is not None and min(self.block_structure) < 1:
            raise ValueError(f"block_structure is {self.block_structure}")
        if self.dynamic and strategy in ("channel", "block", "attn_head"):
            raise ValueError(f"the strategy {strategy} is not for dynamic quantization")
        if strategy == "token" and not self.dynamic:
            raise ValueError("the strategy token is for dynamic quantization")
        object.__setattr__(self, "strategy", strategy)
        return self


class _GroupConfig(_Part):
    targets: tuple[str, ...]
    weights: _Args | None = None
    input_activations: dict[str, Any] | None = None
    format: str | None = None


class _Compressed(_Part):
    config_groups: dict[str, _GroupConfig | list[str]] = Field(default_factory=dict)
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    moe_sparsity_config: dict[str, Any] | None = None


def _compressed(found: dict[str, Any]) -> Schemes:
    nested = found.get("quantization_config")  # older releases put it beside `sparsity_config`
    given = _Compressed(**(found | nested if isinstance(nested, dict) else found))
    if (given.sparsity_config or {}).get("format", "dense") != "dense":
        raise _refused(f"sparsity of the format {(given.sparsity_config or {}).get('format')}")
    if (given.transform_config or {}).get("config_groups"):
        raise _refused("transforms of the inputs (compressed-tensors' transform_config)")
    if (given.moe_sparsity_config or {}).get("method", "prune") != "prune":
        raise _refused(f"experts replaced by {(given.moe_sparsity_config or {}).get('method')} (moe_sparsity_config)")
    found_schemes: list[tuple[int, str, re.Pattern[str], Scheme]] = []
    for name, group in given.config_groups.items():
        if isinstance(group, list):
            raise _refused(f"compressed-tensors' preset {name}, without its scheme")
        if group.weights is not None:
            scheme = _compressed_scheme(_format(group.format or given.format, group), group.weights)
            found_schemes += [(*_target(target), scheme) for target in group.targets]
    # empty if only activations or the KV cache are quantized
    ordered = sorted(found_schemes, key=lambda item: item[:2])  # as `match_targets` of the library
    return [(pattern, scheme) for _, _, pattern, scheme in ordered]


_EMBEDDINGS = re.compile(r"(.*\.)?(embed\w*|wte|word_embeddings)$")


def _target(target: str) -> tuple[int, str, re.Pattern[str]]:
    """Rank, name and pattern of a target: names before patterns (after `re:`) before classes of modules."""
    if target.startswith("re:"):
        return 1, target, re.compile(target[3:])
    if target[:1].isupper() and "." not in target:
        return 2, target, _EMBEDDINGS if target == "Embedding" else _ALL  # all other matrices are of linear layers
    return 0, target, re.compile(f"{re.escape(target)}$")


def _format(given: str | None, group: _GroupConfig) -> str:
    """A group's format, by its weights where none or several are named; as `infer_module_format` of the library."""
    layout = (given or "").lower().replace("_", "-")
    if layout not in ("", "fakequant", "mixed-precision") or group.weights is None:
        return layout
    weights = group.weights
    if weights.type == "int":
        return "int-quantized" if group.input_activations is not None else "pack-quantized"
    sizes = {(4, 32): "mxfp4-pack-quantized", (4, 16): "nvfp4-pack-quantized", (8, 32): "mxfp8-quantized"}
    return sizes.get((weights.num_bits, weights.group_size or 0), "float-quantized")


_PLAIN = ("float-quantized", "int-quantized", "naive-quantized")  # a code fills its type: nothing is packed


def _compressed_scheme(layout: str, weights: _Args) -> Scheme:
    bits, group, strategy = weights.num_bits, max(0, weights.group_size or 0), weights.strategy
    what = f"compressed-tensors {layout} of {bits} bits, type {weights.type}, strategy {strategy}"
    if weights.type == "float" and weights.symmetric:
        if layout in _PLAIN and bits == 8 and strategy in ("channel", "tensor", "block", "group"):
            return Scheme("fp8", block=(1, group) if strategy == "group" else weights.block_structure)
        if layout == "mxfp8-quantized" and bits == 8 and group == 32:
            return Scheme("fp8", block=(1, 32))
        if layout == "nvfp4-pack-quantized" and bits == 4 and group == 16:
            return Scheme("nvfp4", group=16)
        if layout == "mxfp4-pack-quantized" and bits == 4 and group == 32:
            return Scheme("mxfp4", group=32)
    if weights.type == "int" and strategy in ("group", "channel", "tensor"):
        zeros = not weights.symmetric
        if layout == "pack-quantized" and bits in (4, 8) and not (zeros and strategy == "tensor"):
            order = weights.actorder in ("group", "dynamic")
            return Scheme("packed", bits=bits, group=group, zeros=zeros, order=order)
        if layout in _PLAIN and bits <= 8:  # fewer bits have a byte each, too
            return Scheme("int8", bits=8, group=group, zeros=zeros)
    raise _refused(what)


class _ModelOptLayer(_Part):
    quant_algo: str | None = None
    group_size: int | None = None

    def scheme(self) -> Scheme:
        """Raises UnsupportedModelError: of another algorithm."""
        algorithm = (self.quant_algo or "").upper()
        if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return Scheme("fp8")
        if algorithm in ("FP8_PB_WO", "MXFP8"):
            return Scheme("fp8", block=(128, 128) if algorithm == "FP8_PB_WO" else (1, 32))
        if algorithm in ("NVFP4", "W4A16_NVFP4") and self.group_size in (None, 16):
            return Scheme("modelopt-nvfp4", group=16)
        raise _refused(f"ModelOpt's {self.quant_algo}")


class _ModelOpt(_ModelOptLayer):
    quantized_layers: dict[str, _ModelOptLayer] = Field(default_factory=dict)


def _modelopt(found: dict[str, Any]) -> Schemes:
    given = _ModelOpt(**{**found, **_section(found, "quantization")})
    if not given.quant_algo:  # the KV cache alone
        return []
    if given.quant_algo.upper() != "MIXED_PRECISION":
        return [(_ALL, given.scheme())]
    # Some ten thousand names, with other prefixes than the tensors may have: which of the schemes a matrix is in, its
    # type says; of experts that are not there yet the names.
    of_experts: dict[Scheme, None] = {}
    schemes: dict[Scheme, None] = {}
    for name, layer in given.quantized_layers.items():
        if layer.quant_algo:
            schemes[layer.scheme()] = None
            if _EXPERT.match(name):
                of_experts[layer.scheme()] = None
    if not schemes:
        raise _refused("ModelOpt's MIXED_PRECISION, without its quantized_layers")
    if len({LAYOUTS[scheme.layout].code for scheme in schemes}) < len(schemes):
        raise _refused("ModelOpt's MIXED_PRECISION of several forms of one type")
    return [*((_EXPERT, scheme) for scheme in of_experts), *((_ALL, scheme) for scheme in schemes)]


_READERS: Mapping[str, Callable[[dict[str, Any]], Schemes]] = {
    "fp8": _fp8, "mxfp8": _mxfp8, "fbgemm-fp8": _fp8, "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq,
    "compressed-tensors": _compressed, "modelopt": _modelopt, "modelopt-fp4": _modelopt, "modelopt-mxfp8": _modelopt,
}  # fmt: skip


def expected_experts(
    quantization: Quantization, layer: int, hidden: int, width: int, quantized: bool = False
) -> tuple[ExpertForm, bool] | None:
    """The form of a layer's experts by the configuration alone, and whether they are mapped in place.

    Scales are taken to have the types that their forms have by default.

    Args:
        quantized: the experts are known to be, whatever names the configuration has for them.

    Returns:
        None: the configuration leaves experts unquantized.
    """
    names = (f"model.layers.{layer}.mlp.experts.0.{name}_proj" for name in ("gate", "up", "down"))
    schemes = [quantization.of(name) if quantized else quantization.targeting(name) for name in names]
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
        return ExpertForm(down=replace(down, order=False), gate=gate, up=up), all(map(_is_mapped, schemes))
    except FormError as error:
        raise UnsupportedModelError(
            f"experts of {hidden} x {width} cannot be quantized as config.json says: {error.what}", error.remedy
        ) from error


def with_one_scale(form: ExpertForm) -> ExpertForm:
    """The form with one scale for each FP8 matrix, if the shapes of the scales are known."""
    fp8 = {name: matrix for name, matrix in form.matrices.items() if matrix.kind.startswith("fp8")}
    changed: dict[str, Any] = {
        name: MatrixForm("fp8_tensor", one.outputs, one.inputs, scale=one.scale) for name, one in fp8.items()
    }
    return replace(form, **changed)


def plain_experts(code: str, hidden: int, width: int) -> ExpertForm:
    """The form of experts that a release leaves unquantized. code: their type, such as "BF16"."""
    kind = next(kind for kind, of_kind in FLOATS.items() if of_kind == code)
    gate = MatrixForm(kind, width, hidden)
    return ExpertForm(down=MatrixForm(kind, hidden, width), gate=gate, up=gate)


def _expected_matrix(scheme: Scheme, outputs: int, inputs: int) -> MatrixForm:
    kind = LAYOUTS[scheme.layout].kind
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
    if scheme is None or LAYOUTS[scheme.layout].repacked:
        return False
    return not (scheme.layout == "packed" and (scheme.zeros or scheme.order))
