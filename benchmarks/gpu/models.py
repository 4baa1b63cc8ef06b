"""The measured models (models.yaml): random weights on the device, random experts in host memory."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict
from torch import nn

from tiermoe.actors.engine.cache.form_slots import FormWeights
from tiermoe.actors.engine.cache.low_bits import ReplicaWeights
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.model.attention import attention_for
from tiermoe.actors.engine.model.model import MoeBlock, assign_dense, blocks_at, register_implementation
from tiermoe.actors.store.format import ExpertShape, Published, part_bytes
from tiermoe.cluster.simulate.shapes import ModelShape, shape_named
from tiermoe.cluster.yaml_file import read_yaml
from tiermoe.errors import ConfigError, UnsupportedModelError
from tiermoe.kernels.forms import ExpertForm, MatrixForm
from tiermoe.kernels.pack import PackedShape
from tiermoe.kernels.packed_slots import packed_shapes
from tiermoe.limits import host_free_bytes, usable_cores

from ..random_forms import random_expert
from .near_data import DISTINCT_LAYERS
from .run_parts import Context


class RealShape(ModelShape):
    """One model.

    Attributes:
        model_type: transformers' name of the architecture. options: of its configuration.
        most_layers: so many of its layers run at most, and fewer where memory is short; 0: all of them.
        form: of an expert's matrices as published (`MatrixForm`); None: neurons in the type of the compute.
        fused: gate and up are one matrix, with these fields of `ExpertForm`.
        most_ms: a token of all layers should take, with all experts resident.
    """

    model_config = ConfigDict(protected_namespaces=())  # `model_type` is transformers' word

    name: str
    model_type: str
    options: dict[str, Any]
    most_layers: int = 0
    form: dict[str, Any] | None = None
    fused: dict[str, Any] | None = None
    most_ms: float | None = None

    @property
    def expert(self) -> ExpertShape:
        return ExpertShape(
            num_experts=self.experts, hidden=self.hidden, intermediate=self.intermediate, gates=2,
            has_bias=bool((self.fused or {}).get("bias")),
        )  # fmt: skip

    @property
    def expert_form(self) -> ExpertForm | None:
        """The form of a published expert."""
        if self.form is None:
            return None

        def matrix(outputs: int, inputs: int) -> MatrixForm:
            return MatrixForm(outputs=outputs, inputs=inputs, **self.form)  # type: ignore[arg-type]

        down, gate = matrix(self.hidden, self.intermediate), matrix(self.intermediate, self.hidden)
        if self.fused is None:
            return ExpertForm(down=down, gate=gate, up=gate)
        return ExpertForm(down=down, gate_up=matrix(2 * self.intermediate, self.hidden), **self.fused)

    def published(self, layers: int) -> Published | None:
        """The forms of so many layers, as an engine takes them."""
        form = self.expert_form
        return None if form is None else Published.of_layers([form] * layers)

    @property
    def label(self) -> str:
        """The name of the form."""
        return "neurons" if self.form is None else self.form["kind"]

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Of one expert. dtype: of neurons."""
        form = self.expert_form
        return self.expert.nbytes(dtype.itemsize) if form is None else form.nbytes()

    def config(self, moe_layers: int) -> Any:
        """transformers' configuration with this number of MoE layers."""
        from transformers import AutoConfig

        options = self.options | {
            "hidden_size": self.hidden, "num_hidden_layers": moe_layers + self.dense_layers,
            "num_experts_per_tok": self.top_k,
        }  # fmt: skip
        return AutoConfig.for_model(self.model_type, **options)


def _shapes() -> tuple[dict[str, RealShape], dict[str, RealShape]]:
    """The models of models.yaml by name, at their real and at their toy sizes."""
    real, toy = dict[str, RealShape](), dict[str, RealShape]()
    for key, given in read_yaml(Path(__file__).with_name("models.yaml")).items():
        of, small = dict(given), dict(given["toy"])
        del of["toy"]
        real[key] = RealShape(**shape_named(of.pop("shape")).model_dump() | of)
        options = of["options"] | _SMALL | small.pop("options")
        changes = {"name": f"toy {of['name']}", "top_k": 2, "hidden": 64, "intermediate": 96, "options": options}
        toy[key] = real[key].model_copy(update=changes | small)
    return real, toy


_SMALL: dict[str, Any] = {
    "vocab_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "intermediate_size": 96,
}  # fmt: skip
REAL, TOY = _shapes()


def experts_modules(model: Any) -> list[str]:
    """The names of the modules that transformers' experts interface runs."""
    return [name for name, module in model.named_modules() if hasattr(module, "has_gate")]


@dataclass(frozen=True)
class RandomModel:
    """One transformers model, run by us or by its own experts implementations.

    Attributes:
        modules: its experts modules.
        blocks: the same for an engine.
        dense_bytes: of all parameters but the routed experts.
        read_bytes: of those that a decode step reads: all but the embeddings.
    """

    model: Any
    modules: list[Any]
    blocks: list[MoeBlock]
    dense_bytes: int
    read_bytes: int

    def use(self, implementation: str) -> None:
        self.model.set_experts_implementation(implementation)

    def router_weights(self) -> list[torch.Tensor]:
        """[E, H] of each layer's router."""
        found = []
        for module, name in zip(self.modules, experts_modules(self.model), strict=True):
            parent = self.model.get_submodule(name.rpartition(".")[0])
            experts = module.gate_up_proj.shape[0]
            weights = [
                p for n, p in parent.named_parameters()
                if p.dim() == 2 and p.shape[0] == experts and not n.startswith("experts.")
            ]  # fmt: skip
            if not weights:
                raise UnsupportedModelError(f"{name} has no router with a weight for each expert", "report the model")
            found.append(weights[0].detach())
        return found

    @contextmanager
    def own_experts(self, device: torch.device, seed: int = 1) -> Iterator[None]:
        """Random expert parameters on `device`, for the model with all experts resident, without us; on meta after."""
        generator = torch.Generator(device).manual_seed(seed)
        self._set_experts(device, lambda value: value.normal_(0, 0.02, generator=generator))
        try:
            yield
        finally:
            self._set_experts(torch.device("meta"), lambda value: value)

    def _set_experts(self, device: torch.device, fill: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for module in self.modules:
            for name, parameter in list(module.named_parameters(recurse=False)):
                value = fill(torch.empty(parameter.shape, dtype=parameter.dtype, device=device))
                setattr(module, name, nn.Parameter(value, requires_grad=False))


def build_random_model(
    shape: RealShape, moe_layers: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> RandomModel:
    """The model of a shape, with its experts on meta and everything else random on `device`.

    Raises:
        UnsupportedModelError: transformers' model differs from the shape.
    """
    from transformers import AutoModelForCausalLM

    config = shape.config(moe_layers)
    ours = register_implementation()
    with torch.device("meta"):
        attention = attention_for(config, "auto", device)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    names = experts_modules(model)
    if len(names) != moe_layers:
        raise UnsupportedModelError(
            f"{shape.name} has {len(names)} MoE layers in this transformers, not {moe_layers}", "report the version"
        )
    generator = torch.Generator(device).manual_seed(seed)

    def random(like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        if like.dim() < 2:
            return made.fill_(1.0)  # norms, and biases of attention
        return made.normal_(0, 0.02, generator=generator)

    inside = set(names)
    dense = {
        name: random(tensor)
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in inside and tensor.is_floating_point()
    }
    left = assign_dense(model, dense, inside, device)
    if left:
        raise UnsupportedModelError(f"{shape.name}: {left[0]} could not be filled", "report the transformers version")
    model.set_experts_implementation(ours)
    model.eval()
    nbytes = sum(parameter.nbytes for parameter in model.parameters() if not parameter.is_meta)
    embedding = model.get_input_embeddings().weight.nbytes
    blocks = blocks_at(model, names, shape.experts)
    modules = [model.get_submodule(name) for name in names]
    return RandomModel(model, modules, blocks, nbytes, nbytes - embedding)


Weights = LayerWeights | FormWeights  # of a layer
_HUGE = 2 << 20  # bytes of a huge page
_ALIGNED = 64  # bytes, of a tensor of replicas, or a part of an expert
_DISTINCT_EXPERTS = 4  # of a layer in a published form
_SCALE = 1e-3  # of all replicas, and their offsets


@dataclass
class HostExperts:
    """Random experts of a model in pinned host memory, layer by layer, without a store.

    Attributes:
        layers: as an engine takes them.
        how: the kind of each layer's memory: "registered", "pinned" or "pageable". pin_s: seconds to register it.
    """

    layers: list[Weights] = field(default_factory=list)
    how: list[str] = field(default_factory=list)
    pin_s: list[float] = field(default_factory=list)
    _replicas: dict[tuple[int, int], ReplicaWeights] = field(default_factory=dict)  # by bits and group
    _memory: list[tuple[Any, int | None]] = field(default_factory=list)

    def add(self, shape: RealShape, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        """Add a layer: registered with the GPU if there is one.

        Raises:
            ConfigError: this machine has not enough memory.
        """
        form = shape.expert_form
        begin_s = time.perf_counter()
        if form is None:
            flat, how, memory = _allocate(shape.experts * shape.expert.elements(), dtype, device)
        else:
            flat, how, memory = _allocate(shape.experts * aligned_bytes(form), torch.uint8, device)
        self.pin_s.append(time.perf_counter() - begin_s)
        self.how.append(how)
        self._memory.append(memory)
        self.layers.append(_neurons(flat, shape.expert, device, seed) if form is None else published(flat, form, seed))

    def replicas(self, shape: ExpertShape, bits: int, group: int, device: torch.device) -> ReplicaWeights:
        """Replicas of one width with random codes, in the same kind of memory; those of a few layers serve all in turn.

        Raises:
            ConfigError: this machine has not enough memory.
        """
        found = self._replicas.get((bits, group))
        if found is None:
            packed = PackedShape(shape.hidden, shape.intermediate, bits, group)
            distinct = min(DISTINCT_LAYERS, len(self.layers))
            made = [self._replica_layer(packed, shape.num_experts, device, seed) for seed in range(distinct)]
            layers = [made[layer % distinct] for layer in range(len(self.layers))]
            found = self._replicas[bits, group] = ReplicaWeights(packed, layers)
        return found

    def _replica_layer(self, packed: PackedShape, experts: int, device: torch.device, seed: int) -> LayerWeights:
        kinds = [(dtype, (experts, *dims)) for dtype, dims in packed_shapes(packed)]
        sizes = [math.prod(dims) * dtype.itemsize for dtype, dims in kinds]
        starts = [0, *itertools.accumulate(-(-size // _ALIGNED) * _ALIGNED for size in sizes)]
        flat, _, memory = _allocate(starts[-1], torch.uint8, device)
        self._memory.append(memory)
        _fill(flat, device, seed)
        tensors = []
        for (dtype, dims), size, start in zip(kinds, sizes, starts, strict=False):  # the last start is the end
            tensor = flat[start : start + size].view(dtype).view(dims)
            tensors.append(tensor if dtype == torch.uint8 else tensor.fill_(_SCALE))
        return LayerWeights(tuple(tensors))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors)

    def close(self) -> None:
        """Free the memory. Nothing may use it any more."""
        self.layers.clear()
        self._replicas.clear()
        for _, address in self._memory:
            if address is not None:
                torch.cuda.cudart().cudaHostUnregister(address)
        self._memory.clear()


def _allocate(elements: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, str, tuple[Any, Any]]:
    """A flat tensor in host memory; its kind; its memory and registered address."""
    if device.type != "cuda":
        return torch.empty(elements, dtype=dtype), "pageable", (None, None)
    nbytes = elements * dtype.itemsize
    try:
        # private: few machines have huge pages for shared memory
        block = mmap.mmap(-1, -(-nbytes // _HUGE) * _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        what = f"{nbytes} bytes of host memory cannot be allocated: {error}"
        raise ConfigError(what, "run a smaller shape") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: registering takes longer
            block.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to register
    flat = torch.frombuffer(block, dtype=dtype, count=elements)
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    flat.zero_()  # by all cores: registering would touch the pages one by one
    torch.set_num_threads(threads)
    if int(torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), nbytes, 0)) == 0:
        return flat, "registered", (block, flat.data_ptr())
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # clears the last error, which the next launch would raise
    try:
        return torch.empty(elements, dtype=dtype, pin_memory=True), "pinned", (None, None)
    except RuntimeError:
        return flat, "pageable", (block, None)


def _neurons(flat: torch.Tensor, shape: ExpertShape, device: torch.device, seed: int) -> LayerWeights:
    """A layer's experts in this memory, filled from the GPU if there is one."""
    _fill(flat, device, seed)
    size = shape.num_experts * shape.intermediate * shape.gates * shape.hidden
    gate_up = flat[:size].view(shape.num_experts, *shape.gate_up)
    down = flat[size:].view(shape.num_experts, *shape.down)
    return LayerWeights((gate_up, down))


def aligned_bytes(form: ExpertForm) -> int:
    """Of an expert in a published form, each part of which begins aligned."""
    return sum(-(-nbytes // _ALIGNED) * _ALIGNED for nbytes in part_bytes(form).values())


def published(flat: torch.Tensor, form: ExpertForm, seed: int) -> FormWeights:
    """Experts in a published form that fill this memory, uint8; a few different ones take turns."""
    rng, step = np.random.default_rng(seed), aligned_bytes(form)
    distinct = [random_expert(form, rng) for _ in range(min(_DISTINCT_EXPERTS, len(flat) // step))]
    experts = []
    for number, begin in enumerate(range(0, len(flat), step)):
        parts, at = list[torch.Tensor](), begin
        for part in distinct[number % len(distinct)].values():
            values = torch.from_numpy(part.reshape(-1).view(np.uint8))
            parts.append(flat[at : at + len(values)].copy_(values))
            at += -(-len(values) // _ALIGNED) * _ALIGNED
        experts.append(tuple(parts))
    return FormWeights(tuple(experts))


def _fill(flat: torch.Tensor, device: torch.device, seed: int) -> None:
    """Random numbers of an expert's scale, or bytes: one block, repeated."""
    generator = torch.Generator(device).manual_seed(seed)
    block = torch.empty(min(flat.numel(), 64 << 20), dtype=flat.dtype, device=device)
    if flat.dtype == torch.uint8:
        block.random_(0, 256, generator=generator)
    else:
        block.normal_(0, 0.02, generator=generator)
    for start in range(0, flat.numel(), block.numel()):
        part = flat[start : start + block.numel()]
        part.copy_(block[: part.numel()])


_HOST_SHARE, _GPU_SHARE = 0.75, 0.85
_PART_SHARE = 0.65  # of the GPU, for a part of a shape's layers: batched_mm copies the experts of a prompt


def moe_layers(shape: RealShape, context: Context) -> int:
    """The number of MoE layers to run: all, or as many as memory holds of a shape that need not run whole.

    Host memory has the experts once; the GPU's twice: the reference's, and ours at budget 1.0.

    Raises:
        ConfigError: all must fit, and do not.
    """
    wanted = min(shape.moe_layers, shape.most_layers or shape.moe_layers)
    if context.toy:
        return shape.moe_layers
    layer_bytes = shape.experts * shape.slot_bytes(context.dtype)
    room = int(_HOST_SHARE * host_free_bytes() / layer_bytes)
    if context.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(context.device)
        room = min(room, int((_PART_SHARE if shape.most_layers else _GPU_SHARE) * free / 2 / layer_bytes))
    if shape.most_layers and room >= 2:
        return min(wanted, room)
    if room < wanted:
        raise ConfigError(
            f"{shape.name} has {wanted} layers of {layer_bytes / 1e9:.2f} GB, there is room for {room}",
            "leave this part out with --parts, or use a machine with more memory",
        )
    return wanted
