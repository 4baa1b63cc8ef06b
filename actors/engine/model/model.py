"""The binding to transformers: its model code, our experts, expert parameters never materialised.

All experts of a layer are one torch operator, `tiermoe::experts`, so the dense part can be compiled around it.
Operators take tensors and ints only; this one finds its layer by a handle.

Under `torch.compile` an int would be a constant and recompile every layer, so `tiermoe::experts_at` takes the handle as
a tensor in host memory. Both read the routing on the host, so CUDA graphs end there (`serving.recorded`).
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ....errors import StoreError, UnsupportedModelError
from ....kernels.expert_ffn import Gate
from ....kernels.form_slots import dequantize
from ....kernels.forms import FLOATS
from ....kernels.router import LinearRouter
from ...settings import Attention
from ...store.files import FileView
from ...store.format import REBUILD, Manifest, part_tensor, read_header
from ..cache.sources import DTYPES
from .architecture import from_config
from .attention import attention_for
from .published_linear import DeviceMatrix, FormMatrix, PublishedMatrix, bytes_of, exchange, keeps_form, numbers_of

IMPLEMENTATION = "tiermoe"  # name under which transformers knows it


class ExpertLayer(Protocol):
    """What the operator calls."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...

    def forward_into(
        self, out: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None: ...


_layers: dict[int, ExpertLayer] = {}
_handles = itertools.count(1)


_library = torch.library.Library("tiermoe", "DEF")
_library.define("experts(Tensor hidden, Tensor ids, Tensor weights, int handle) -> Tensor")
_library.define("experts_at(Tensor hidden, Tensor ids, Tensor weights, Tensor handle) -> Tensor")


# (layer, hidden, ids, weights) -> the experts' output
Cut = Callable[["ExpertLayer", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Cutting(threading.local):
    cut: Cut | None = None


_cutting = _Cutting()


@contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """In this context this thread's forwards call `cut` where a layer's experts are to run."""
    _cutting.cut = cut
    try:
        yield
    finally:
        _cutting.cut = None


def _run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: int) -> torch.Tensor:
    layer, cut = _layers[handle], _cutting.cut
    return layer.forward(hidden, ids, weights) if cut is None else cut(layer, hidden, ids, weights)


def _run_at(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: torch.Tensor) -> torch.Tensor:
    return _run(hidden, ids, weights, int(handle))


for _device in ("CPU", "CUDA"):
    _library.impl("experts", _run, _device)
    _library.impl("experts_at", _run_at, _device)


def _fake(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, handle: Any) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)  # contiguous, as the kernels return it


torch.library.register_fake("tiermoe::experts", _fake, lib=_library)
torch.library.register_fake("tiermoe::experts_at", _fake, lib=_library)


def _experts_forward(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """transformers' experts interface: hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
    if torch.compiler.is_compiling():
        return torch.ops.tiermoe.experts_at(hidden, ids, weights, module.tiermoe_handle_there)
    return torch.ops.tiermoe.experts(hidden, ids, weights, module.tiermoe_handle)


def register_implementation() -> str:
    """Register `tiermoe` with transformers' experts interface; returns its name."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts_forward)
    return IMPLEMENTATION


def attach(module: Any, layer: ExpertLayer) -> int:
    """Have an experts module run through `layer`; returns the handle for `detach`."""
    handle = next(_handles)
    _layers[handle] = layer
    module.tiermoe_handle = handle
    module.tiermoe_handle_there = torch.tensor(handle, device="cpu")
    return handle


def detach(handle: int) -> None:
    """Forget a layer; its module can no longer run."""
    _layers.pop(handle, None)


def layer_of(handle: int) -> ExpertLayer:
    """The layer of a handle."""
    return _layers[handle]


@contextmanager
def replaced_layers(handles: Iterable[int], layer: ExpertLayer) -> Iterator[None]:
    """In this context `layer` runs for these handles."""
    before = {handle: _layers[handle] for handle in handles}
    _layers.update(dict.fromkeys(before, layer))
    try:
        yield
    finally:
        _layers.update(before)


RouterProbe = Callable[[torch.Tensor], torch.Tensor]

TORCH_TYPES: dict[str, torch.dtype] = {  # by safetensors' codes: those of `store.format.ITEM_BYTES`
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of a setting; auto is float32 on the CPU, else bfloat16."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else "bfloat16"
    return DTYPES[name]


@dataclass(frozen=True)
class MoeBlock:
    """One MoE layer of the model.

    experts: the experts module. gate: its activation on interleaved pre-activations [n, I*G] -> [n, I]. activation: its
    name where gating is plainly act(gate) * up, for kernels that build it in; else None. post: a norm after each
    expert. router: logits [T, E] for hidden states [T, H]; None where they cannot be had. normalised: whether the
    weights of a token's experts are scaled to a fixed sum.
    """

    experts: nn.Module
    gate: Gate
    activation: str | None
    post: nn.Module | None
    router: RouterProbe | None
    normalised: bool = True


@contextmanager
def quiet_logger(name: str, level: int) -> Iterator[None]:
    """In this context a library's logger drops messages below `level`: we report those ourselves."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


def build_model(
    store: Path, manifest: Manifest, dtype: torch.dtype, device: torch.device, attention: Attention,
    dense_file: FileView | None = None,
) -> Any:  # fmt: skip
    """The transformers model of a store: dense part on `device`, expert parameters on meta.

    The dense part is in `dtype`; matrices that the store has in a published form stay so, but on the CPU in other types
    than float32.

    Args:
        dense_file: the verified file of the dense weights, which may stay mapped; None: `store` is no store that
            others may change, and its weights are copied.

    Raises:
        StoreError: the dense file changed since it was verified, or lacks parameters that the model has.
    """
    from transformers import GenerationConfig

    implementation = register_implementation()
    model = _on_meta(store, dtype, attention, device)
    dense = _copied_dense(store / manifest.dense.file) if dense_file is None else _mapped_dense(dense_file)
    _take_published(model, manifest, dense, dtype, device)
    if left := assign_dense(model, dense, {layer.module for layer in manifest.layers}, device):
        raise StoreError(
            f"the store's dense file does not fit the model: {', '.join(sorted(left)[:3])}",
            "prepare the store again with --force",
        )
    model.set_experts_implementation(implementation)
    if (ends := _special_tokens(store / "generation_config.json")) is not None:
        model.generation_config = GenerationConfig(**ends)
    return model.eval()


def _special_tokens(path: Path) -> dict[str, Any] | None:
    """The tokens that end and begin a text, by generation_config.json; None: there is no such file.

    All else that the file says is a default for what requests leave out, which whoever sends them fills in.

    Raises:
        StoreError: it is not JSON.
    """
    if not path.exists():
        return None
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise StoreError(f"'{path}' is not valid JSON ({error})", REBUILD) from error
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: found[name] for name in names if name in found}


def _mapped_dense(file: FileView) -> dict[str, torch.Tensor]:
    """The dense weights by name, on the pages of the file. Raises StoreError: it changed since it was verified."""

    def problem(what: str) -> StoreError:
        return StoreError(what, REBUILD)

    path, pages = Path(file.path), file.pages(REBUILD, writable=True)  # a model may write to its buffers
    found = {}
    for spec in read_header(path, problem)[1]:
        kind = TORCH_TYPES[spec.dtype]
        data = memoryview(pages)[spec.offset : spec.offset + spec.nbytes]
        if not spec.nbytes:
            found[spec.name] = torch.empty(spec.shape, dtype=kind)
            continue
        raw = torch.frombuffer(data, dtype=torch.uint8)
        aligned = raw if spec.offset % kind.itemsize == 0 else raw.clone()
        found[spec.name] = aligned.view(kind).view(spec.shape)
    return found


def _take_published(
    model: Any, manifest: Manifest, dense: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Take the parts of matrices in published forms out of `dense`: each stays so, or is dequantized into `dense`.

    On a GPU, and on the CPU in float32, a module runs on the matrix as it is. Elsewhere the dense part has the compute
    dtype, and so have tables of plain numbers on a GPU.

    Raises:
        StoreError: a part is missing.
    """
    forms = manifest.dense.forms
    shared = {tied.name: tied.source for tied in manifest.dense.tied if tied.source in forms}
    modules = dict(model.named_modules())
    kept: dict[str, FormMatrix] = {}
    for name, form in forms.items():
        try:
            parts = {part: dense.pop(part_tensor(name, part)) for part in form.parts()}
        except KeyError as error:
            raise StoreError(f"the store's dense file lacks {error}", "prepare the store again with --force") from error
        parts = {part: bytes_of(tensor, form.parts()[part][0]) for part, tensor in parts.items()}
        owners = [one for one in (name, *shared) if one == name or shared[one] == name]
        paths = [one.removesuffix(".weight") for one in owners]
        stays = all(path in modules and keeps_form(modules[path], path, form) for path in paths)
        if stays and device.type == "cpu" and dtype == torch.float32:
            of_host = PublishedMatrix(form, {part: numbers_of(tensor) for part, tensor in parts.items()})
            kept.update(dict.fromkeys(owners, of_host))
            continue
        on_device = {part: tensor.to(device) for part, tensor in parts.items()}
        if stays and device.type != "cpu" and form.kind not in FLOATS:
            kept.update(dict.fromkeys(owners, DeviceMatrix(form, on_device, dtype)))
        else:
            dense[name] = dequantize(form, on_device).to(dtype)
    exchange(model, kept)


def _copied_dense(path: Path) -> dict[str, torch.Tensor]:
    """The dense weights by name, in memory of their own."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict


def build_blocks(store: Path, manifest: Manifest, dtype: torch.dtype, device: torch.device) -> list[MoeBlock]:
    """The MoE layers of a store's model without its dense part: for a shard, which runs experts only.

    The model stays on meta; other tensors in its experts modules (a norm after each, a learnt activation) are read from
    the dense file. The blocks have no router.

    Raises:
        StoreError: the dense file lacks such a tensor.
    """
    from safetensors import safe_open

    model = _on_meta(store, dtype, "auto", device)
    with safe_open(store / manifest.dense.file, framework="pt") as dense:
        there = set(dense.keys())
        for layer in manifest.layers:
            experts = model.get_submodule(layer.module)
            for name, parameter in experts.named_parameters():
                if "." not in name:
                    continue  # the experts themselves
                full = f"{layer.module}.{name}"
                if full not in there:
                    raise StoreError(f"the store's dense file lacks {full}", "prepare the store again with --force")
                owner, _, last = name.rpartition(".")
                value = dense.get_tensor(full).to(device=device, dtype=parameter.dtype, copy=True)
                setattr(experts.get_submodule(owner), last, nn.Parameter(value, requires_grad=False))
    return [replace(block, router=None) for block in find_blocks(model, manifest)]


def _on_meta(store: Path, dtype: torch.dtype, attention: Attention, device: torch.device) -> Any:
    """The transformers model of a store without weights."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(store, trust_remote_code=False)
    with torch.device("meta"):
        return from_config(config, dtype=dtype, attn_implementation=attention_for(config, attention, device))


def assign_dense(
    model: Any, dense: dict[str, torch.Tensor], expert_modules: set[str], device: torch.device
) -> list[str]:
    """Give a model on meta these tensors, by their names in its state, and compute what no checkpoint holds.

    Args:
        dense: moved to `device` and the model's dtypes, in place.
        expert_modules: modules whose own parameters stay on meta.

    Returns:
        Parameters that are still on meta, and names that the model does not have.
    """
    expected = model.state_dict()
    for name, tensor in dense.items():
        if name in expected:
            dense[name] = tensor.to(device=device, dtype=expected[name].dtype)
    experts = {name for name in expected if name.rpartition(".")[0] in expert_modules}
    loaded = model.load_state_dict(dense, strict=False, assign=True)
    model.requires_grad_(False)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # so that the initialisation below leaves it alone
    # Buffers that no checkpoint holds (rotary frequencies) are computed anew, as for a meta-initialised model.
    model._move_missing_keys_from_meta_to_device(set(), {"": device}, None, None)
    model._initialize_missing_keys(False)
    shared, lacking = model.all_tied_weights_keys, {n for n, p in model.named_parameters() if p.is_meta}
    if lacking.intersection({*shared, *shared.values()}):  # else each has numbers of its own, whatever config.json says
        model.tie_weights(lacking, recompute_mapping=False)
    left = [n for n, p in model.named_parameters() if p.is_meta and n not in experts]
    return left + list(loaded.unexpected_keys)


def find_blocks(model: Any, manifest: Manifest) -> list[MoeBlock]:
    """The MoE layers of a model in the store's order.

    Raises:
        UnsupportedModelError: the model lacks an experts module that the store names.
    """
    return blocks_at(model, [layer.module for layer in manifest.layers], manifest.experts.num_experts)


def blocks_at(model: Any, modules: Sequence[str], num_experts: int) -> list[MoeBlock]:
    """The MoE layers whose experts modules have these names; each has `num_experts` experts.

    Raises:
        UnsupportedModelError: the model lacks such a module.
    """
    blocks, routers = [], _router_classes(model)
    normalised = bool(getattr(model.config.get_text_config(), "norm_topk_prob", True))  # without the option all do
    for name in modules:
        try:
            experts = model.get_submodule(name)
        except AttributeError as error:
            raise UnsupportedModelError(
                f"the model has no experts module {name}", "prepare the store again with --force"
            ) from error
        post = experts.post_expert_norm if getattr(experts, "has_post_expert_norm", False) else None
        parent = model.get_submodule(name.rpartition(".")[0])
        router = _router_probe(routers, parent, num_experts)
        blocks.append(MoeBlock(experts, gate_of(experts), activation_of(experts), post, router, normalised))
    return blocks


def experts_per_token(config: Any) -> int:
    """The router's top-k, under whichever name the architecture has for it.

    Raises:
        UnsupportedModelError: it has none of the known names.
    """
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_top_k", "moe_k", "num_selected_experts", "top_k_experts", "moe_topk"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    raise UnsupportedModelError(f"{type(text).__name__} does not say how many experts a token uses", "report the model")


def _plainly_gated(experts: Any) -> bool:
    from transformers.integrations.moe import _default_apply_gate

    return experts.has_gate and type(experts)._apply_gate is _default_apply_gate


def gate_of(experts: Any) -> Gate:
    """The experts module's own activation, on neuron-major pre-activations [n, I*G] (gate, up interleaved)."""
    act_fn = getattr(experts, "act_fn", None)
    if not experts.has_gate:
        return act_fn  # type: ignore[return-value]
    if _plainly_gated(experts):

        def default_gate(x: torch.Tensor) -> torch.Tensor:
            pairs = x.view(x.shape[0], -1, 2)
            return act_fn(pairs[..., 0]) * pairs[..., 1]  # type: ignore[misc]

        return default_gate
    if not experts.is_concatenated:
        return experts._apply_gate

    def concatenated_gate(x: torch.Tensor) -> torch.Tensor:
        return experts._apply_gate(x.view(x.shape[0], -1, 2).transpose(1, 2).reshape(x.shape[0], -1))

    return concatenated_gate


def activation_of(experts: Any) -> str | None:
    """The name of a plain act(gate) * up gating among those that kernels build in."""
    from transformers.activations import ACT2FN

    if not _plainly_gated(experts):
        return None
    known = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
    for name, ours in known.items():
        if type(ACT2FN[name]) is type(experts.act_fn):
            return ours
    functions = {nn.functional.silu: "silu", nn.functional.relu: "relu"}  # some models name the function itself
    return functions.get(experts.act_fn) if inspect.isroutine(experts.act_fn) else None


def _router_classes(model: Any) -> tuple[type[nn.Module], ...]:
    """The classes that the model itself names in `_can_record_outputs["router_logits"]`."""
    return tuple(
        getattr(recorder, "target_class", recorder)
        for owner in model.modules()
        if (recorder := (getattr(owner, "_can_record_outputs", None) or {}).get("router_logits")) is not None
    )


def _router_probe(classes: tuple[type[nn.Module], ...], block: nn.Module, experts: int) -> RouterProbe | None:
    """The linear part of an MoE block's router, without top-k.

    The router is the block's module of one of `classes`; its weight is the [E, H] one within.
    """
    for router in [m for m in block.modules() if isinstance(m, classes)]:
        for module in router.modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2 and weight.shape[0] == experts:
                return LinearRouter(weight, getattr(module, "bias", None))
    return None
