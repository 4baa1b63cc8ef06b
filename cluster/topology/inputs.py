"""What the planner reads: the sizes of a model, and the nodes there are.

Sizes come from a store's manifest, or from a checkpoint before there is a store; no weight is loaded. A checkpoint's
config.json alone is enough, for a model that is not downloaded: what is not a routed expert is then computed from its
fields and marked as such. Nodes come from a file, from this machine, or from a Ray that runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, TypeAdapter, ValidationError, field_validator

from ...actors.base_settings import Settings
from ...actors.gpu_driver import gpu_count
from ...actors.numa import gpu_nodes, words
from ...actors.settings import EngineSettings
from ...actors.store.format import DTYPE_CODES, ITEM_BYTES, Published, part_tensor, read_manifest
from ...actors.store.published import is_table
from ...errors import CheckpointError, RuntimeFailure, UnsupportedModelError
from ...kernels.forms import ExpertForm
from ...limits import host_free_bytes, usable_cores
from ..checkpoints.hub import headers, tensors_of
from ..checkpoints.hub_cache import name_of
from ..checkpoints.quantization import FP8_SCALES, expected_experts, plain_experts, quantization_of, with_one_scale
from ..checkpoints.weight_files import OTHER_CONFIG, gguf_in
from ..config import RunConfig
from ..host import shown
from ..prompt import EXPERT_COUNTS, load_model_config
from ..ray_auth import check_joinable
from ..yaml_file import explain, read_yaml
from .spec import NODE_ID_LABEL, ModelFacts, NodeInfo

_ANSWER_DEADLINE_S = 10
_BYTES = ("memory", "object_store_memory")
_BYTE_SIZE = TypeAdapter(ByteSize)
# not `.shared_experts.`: those run for every token; of GGUF files stacked, or one for each expert
ROUTED = re.compile(r"\.experts\.|_exps\.|\.ffn_(gate|up|down)\.\d+\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER, _FURTHER = re.compile(r"(?:^|\.)layers\.(\d+)\."), re.compile(r"(?:^|\.)mtp(?:\.|_)")
_TOP_K = (
    "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_k", "top_k_experts",
)  # fmt: skip
_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
_HIDDEN = ("moe_latent_size", "moe_hidden_size", "hidden_size")  # of experts
# fields with an entry for each layer, and those of layers with routed experts
_KINDS: Mapping[str, tuple[Any, ...]] = {
    "mlp_layer_types": ("sparse", "moe", "hash_moe"), "layers_block_type": ("moe",), "hybrid_override_pattern": ("E",),
    "moe_layer_freq": (1,),
}  # fmt: skip
_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")  # counted from layer 1
# factors of a layer's running state, by the names that configurations have for them
_RUNNING = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("linear_num_heads", "linear_head_dim", "linear_head_dim"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("mamba_expand", "hidden_size", "mamba_d_state"),
)
# length of a layer's convolution by its names, and the numbers of a token that it keeps: products to be added
_CONVOLUTIONS = (
    ("linear_conv_kernel_dim", ((2, "linear_num_key_heads", "linear_key_head_dim"),
                                (1, "linear_num_value_heads", "linear_value_head_dim"))),
    ("conv_kernel", ((1, "mamba_num_heads", "mamba_head_dim"), (2, "n_groups", "ssm_state_size"))),
    ("mamba_d_conv", ((1, "mamba_expand", "hidden_size"), (2, "mamba_n_groups", "mamba_d_state"))),
    ("conv_L_cache", ((1, "hidden_size"),)),
)  # fmt: skip
_SCANNED = "mamba_dt_rank"  # a configuration has it whose layers scan a whole prompt at once (Mamba's first form)
_STATE_BYTES = 4  # of a number: transformers keeps states in float32
_SCALES = re.compile(r"(scale|scales|scale_inv|zero_point)$")  # of quantized weights
_NUMBERS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_PLAIN = frozenset(("F32", "F16", "BF16"))
_CODES = frozenset(("F8_E4M3", "U8", "I8", "I32"))  # of quantized weights
_MOST = 1 << 22  # of any size, and of experts in all layers: a plan holds lists of them
_DTYPES: Mapping[str, Literal[2, 4]] = {"bfloat16": 2, "float16": 2, "float32": 4}


def facts_of_store(store: Path, model_dir: Path) -> ModelFacts:
    """From a store's manifest; routing and attention from the checkpoint's config.json.

    Without its file here the dense part is taken for the file's length, which has some kilobytes of header.

    Raises:
        StoreError: it is not a store. CheckpointError: config.json is unusable.
    """
    manifest, config = read_manifest(store), _text_config(model_dir)
    file = store / manifest.dense.file
    item, shape = ITEM_BYTES[DTYPE_CODES[manifest.dtype]], manifest.experts
    forms = manifest.dense.forms
    published = sum(form.outputs * form.inputs for form in forms.values())
    published_bytes = sum(form.nbytes() for form in forms.values())
    shared = {tied.source for tied in manifest.dense.tied}
    of_tables = sum(f.nbytes() for n, f in forms.items() if n not in shared and is_table(n, f.nbytes()))
    if file.is_file():
        parts = {part_tensor(name, part) for name, form in forms.items() for part in form.parts()}
        plain = _elements(found for name, (_, found) in tensors_of(file).items() if name not in parts)
    else:
        plain = (manifest.dense.nbytes - published_bytes) // item
    return ModelFacts(
        name=manifest.model,
        layers=len(manifest.layers),
        experts=shape.num_experts,
        top_k=_number(config, _TOP_K, model_dir),
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        gates=shape.gates,
        expert_elements=shape.elements(),
        dense_elements=plain + published,
        published_elements=published,
        published_bytes=published_bytes,
        table_bytes=of_tables,
        kv_elements=_kv_elements(config, model_dir),
        item_bytes=item,
        source=f"store {store}",
        **_activation_facts(config, model_dir),
        **_published_facts(manifest.published, shape.num_experts, [layer.mapped for layer in manifest.layers]),
    )


def facts_of_checkpoint(model_dir: Path) -> ModelFacts:
    """From config.json, and from the headers of the weights where those are there.

    Without headers experts are taken to have a gate projection and no bias, as nearly all have.

    Raises:
        CheckpointError: config.json is unusable. UnsupportedModelError: the model has no routed experts.
    """
    config = _text_config(model_dir)
    if not any(key in config for key in EXPERT_COUNTS):
        raise UnsupportedModelError(
            f"'{shown(model_dir)}' has no routed experts in its config.json",
            "serve it with transformers or vLLM: tiermoe offloads routed experts",
        )
    experts, hidden = _number(config, EXPERT_COUNTS, model_dir), _number(config, _HIDDEN, model_dir)
    width = _number(config, _WIDTH, model_dir)
    item = _DTYPES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), 2)
    numbers = _moe_layers(config, model_dir)
    layers = len(numbers)
    if layers * experts > _MOST:
        raise CheckpointError(
            f"'{model_dir / 'config.json'}' says {layers} layers of {experts} experts, more than any model has",
            OTHER_CONFIG,
        )
    if gguf := bool(gguf_in(model_dir)):
        from ..checkpoints.gguf_header import (  # the package takes 0.2 s
            expert_forms,
            expert_layers,
            gguf_files,
            published_gguf,
            read_experts,
            typed_tensors,
        )

        tensors = typed_tensors(read_experts(gguf_files(model_dir)))
        layers = expert_layers(tensors)
    else:
        depth = _depth(config, model_dir)
        tensors = {name: what for name, what in (headers(model_dir) or {}).items() if _is_used(name, depth)}
    source = "config.json and the headers of the weights" if tensors else "config.json"
    tensors = {name: found for name, found in tensors.items() if not _is_of_images(name, experts)}
    routed = {name: found for name, found in tensors.items() if ROUTED.search(name)}
    if named := {int(found[1]) for found in map(_LAYER.search, routed) if found is not None}:
        numbers, layers = sorted(named), len(named)
    forms = expert_forms(routed) if gguf else _expected_forms(config, model_dir, numbers, hidden, width, routed)
    if forms is not None and len(forms) != layers:
        what = f"'{shown(model_dir)}' has {len(forms)} layers with experts, its config.json says {layers}"
        raise CheckpointError(what, OTHER_CONFIG)
    form = None if forms is None else Published.of_layers([form for form, _ in forms])
    each = 3 * hidden * width
    found = _elements(shape for _, shape in routed.values() if shape != (experts,)) / (layers * experts)
    if form is None and each / 2 < found < 2 * each:
        each = round(found)  # with biases, without a gate
    scales = _scales_of(tensors)
    rest = [found for name, found in tensors.items() if name not in routed and name not in scales]
    packed = not gguf and any(code not in _NUMBERS for code, _ in rest)  # several numbers in one
    estimated = not rest or packed
    dense = _dense_elements(config, model_dir, layers) if estimated else _elements(shape for _, shape in rest)
    of_dense = {name: found for name, found in tensors.items() if name not in routed}
    published = published_gguf(of_dense) if gguf else _published_matrices(of_dense, dense)
    return ModelFacts(
        name=name_of(model_dir),
        layers=layers,
        experts=experts,
        top_k=_number(config, _TOP_K, model_dir),
        hidden=hidden,
        intermediate=width,
        gates=2 if form is not None or each > 2.5 * hidden * width else 1,
        expert_elements=each,
        dense_elements=dense,
        kv_elements=_kv_elements(config, model_dir),
        item_bytes=item,
        source=source,
        dense_estimated=estimated,
        published_elements=published[0],
        published_bytes=published[1],
        table_bytes=published[2],
        **_activation_facts(config, model_dir),
        **_published_facts(form, experts, [mapped for _, mapped in forms or ()]),
    )


def _is_used(name: str, depth: int) -> bool:
    """Whether a tensor is not of the layers that predict further tokens: named so, or after the last layer."""
    number = _LAYER.search(name)
    return not _FURTHER.search(name) and (number is None or int(number[1]) < depth)


def _is_of_images(name: str, experts: int) -> bool:
    """Whether a tensor is of an expert of ERNIE's for images, whose numbers go on after those for text."""
    number = _EXPERT.search(name)
    return number is not None and int(number[1]) >= experts


def _published_facts(published: Published | None, experts: int, mapped: Sequence[bool]) -> dict[str, Any]:
    """The fields of `ModelFacts` about published forms. mapped: the layers that stay in the checkpoint."""
    if published is None:
        return {}
    each = tuple(published.of(layer).nbytes() for layer in range(len(mapped)))
    return {
        "form": published.label(), "form_bytes": published.slot_bytes, "form_width": published.width,
        "layer_form_bytes": each,
        "mapped_bytes": experts * sum(n for n, is_mapped in zip(each, mapped, strict=True) if is_mapped),
    }  # fmt: skip


def _expected_forms(
    config: Mapping[str, Any], model_dir: Path, layers: Sequence[int], hidden: int, width: int,
    routed: Mapping[str, tuple[str, tuple[int, ...]]],
) -> list[tuple[ExpertForm, bool]] | None:  # fmt: skip
    """The form of each MoE layer's experts, and whether they stay in the checkpoint; None: all are plain numbers.

    Args:
        layers: numbers of the MoE layers.
        routed: type code and shape of the tensors of routed experts; empty if they are not known.
    """
    quantization = quantization_of(model_dir)
    if quantization is None:
        return None
    codes: dict[int, set[str]] = {}
    scales: dict[int, set[int]] = {}  # numbers in a scale
    for name, (code, shape) in routed.items():
        if (match := re.search(r"\.layers\.(\d+)\.", name)) is not None:
            codes.setdefault(int(match[1]), set()).add(code)
            if name.endswith(FP8_SCALES):
                scales.setdefault(int(match[1]), set()).add(math.prod(shape))
    plain_code = DTYPE_CODES.get(str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"), "BF16")
    found: list[tuple[ExpertForm, bool]] = []
    kept = 0  # layers that the release leaves unquantized
    for layer in layers:
        there = codes.get(layer, set())
        known = bool(there - _PLAIN)
        expected = expected_experts(quantization, layer, hidden, width, known) if known or not there else None
        if expected is not None and scales.get(layer) == {1}:
            expected = with_one_scale(expected[0]), expected[1]
        kept += expected is None
        code = next(iter(there & _PLAIN), plain_code)
        found.append(expected or (plain_experts(code, hidden, width), True))
    return None if kept == len(layers) else found


def _published_matrices(tensors: Mapping[str, tuple[str, tuple[int, ...]]], dense: int) -> tuple[int, int, int]:
    """Numbers and bytes of the quantized matrices of a dense part of so many numbers, and of its tables; and of those.

    Without an output matrix the embedding is that, too, and so no table.
    """
    tied = not any(name.endswith("head.weight") for name in tensors)
    sizes = {name: math.prod(shape) * ITEM_BYTES[code] for name, (code, shape) in tensors.items() if code in _PLAIN}
    tables = {name for name, nbytes in sizes.items() if is_table(name, nbytes)}
    tables -= {name for name in tables if tied and name.endswith("embed_tokens.weight")}
    of_tables, rows = sum(sizes[name] for name in tables), _elements(tensors[name][1] for name in tables)
    scales = _scales_of(tensors)
    packed = {name for name, (code, _) in tensors.items() if code in _CODES} - scales
    if not packed:
        return rows, of_tables, of_tables
    numbers = dense - _elements(shape for name, (_, shape) in tensors.items() if name not in packed | scales)
    nbytes = sum(math.prod(tensors[name][1]) * ITEM_BYTES[tensors[name][0]] for name in packed | scales)
    return max(0, numbers) + rows, nbytes + of_tables, of_tables


def _scales_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> set[str]:
    """Names of scales beside quantized weights; other modules have plain numbers of that name."""
    modules = {name.rpartition(".")[0] for name, (code, _) in tensors.items() if code in _CODES}
    return {name for name in tensors if _SCALES.search(name) and name.rpartition(".")[0] in modules}


def _elements(shapes: Iterable[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def _number(config: Mapping[str, Any], names: tuple[str, ...], model_dir: Path) -> int:
    """The first of some fields that is present; one of them must be."""
    for name in names:
        if (value := _single(config.get(name))) is not None:
            if type(value) is not int or not 1 <= value <= _MOST:
                raise _malformed(name, value, model_dir)
            return value
    raise CheckpointError(
        f"'{shown(model_dir / 'config.json')}' has none of {', '.join(names)}",
        "make a store with `tiermoe prepare` and plan with that",
    )


def _depth(config: Mapping[str, Any], model_dir: Path) -> int:
    """Layers, which some configurations only list."""
    kinds = config.get("layers_block_type")
    if "num_hidden_layers" not in config and isinstance(kinds, list):
        config = {"num_hidden_layers": len(kinds)}
    return _number(config, ("num_hidden_layers",), model_dir)


def _count(config: Mapping[str, Any], name: str, model_dir: Path) -> int:
    """A field that may be absent: then 0."""
    value = _single(config.get(name))
    if value is not None and (type(value) is not int or not 0 <= value <= 1 << 40):
        raise _malformed(name, value, model_dir)
    return value or 0


def _text_config(model_dir: Path) -> dict[str, Any]:
    """As `load_model_config`; of ERNIE's two sizes of experts that of those of text."""
    config = load_model_config(model_dir)
    sizes = config.get("moe_intermediate_size")
    return config | ({"moe_intermediate_size": sizes[0]} if isinstance(sizes, list) and len(sizes) == 2 else {})


def _single(value: Any) -> Any:
    """A value that is the same for each layer; any other as it is."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _malformed(name: str, value: Any, model_dir: Path) -> CheckpointError:
    return CheckpointError(f"'{shown(model_dir / 'config.json')}': {name} is {value!r}", OTHER_CONFIG)


def _moe_layers(config: Mapping[str, Any], model_dir: Path) -> list[int]:
    """Numbers of the layers with routed experts, by the fields with which configurations name these or the others."""
    total = _depth(config, model_dir)
    for name, kinds in _KINDS.items():
        if isinstance(of_layers := config.get(name), list | str):
            listed = [i for i, kind in enumerate(of_layers[:total]) if kind in kinds]
            if listed:
                return listed
    first = max(_count(config, name, model_dir) for name in _FIRST)
    # most steps count from layer 1, DeepSeek's from layer 0, Jamba's from one of its own
    frequency, period = (_count(config, name, model_dir) for name in ("moe_layer_freq", "expert_layer_period"))
    step, offset = frequency or max(_count(config, name, model_dir) for name in _STEPS) or 1, int(not frequency)
    if period:
        step, offset = period, -_count(config, "expert_layer_offset", model_dir)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _malformed("mlp_only_layers", dense, model_dir)
    found = [i for i in range(total) if i >= first and i not in dense and (i + offset) % step == 0]
    if not found:
        raise UnsupportedModelError(f"'{shown(model_dir)}' has no layer with routed experts", "check its config.json")
    return found


def _heads(config: Mapping[str, Any], model_dir: Path) -> tuple[int, int, int]:
    """Attention heads, KV heads, head size."""
    heads = _number(config, ("num_attention_heads",), model_dir)
    size = _count(config, "head_dim", model_dir) or _number(config, ("hidden_size",), model_dir) // heads
    return heads, _count(config, "num_key_value_heads", model_dir) or heads, size


def _activation_facts(config: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """The fields of `ModelFacts` on which activations depend."""
    heads, _, size = _heads(config, model_dir)
    shared = _count(config, "n_shared_experts", model_dir) * _count(config, "moe_intermediate_size", model_dir)
    widths = (_count(config, name, model_dir) for name in ("shared_expert_intermediate_size", "intermediate_size"))
    return {
        "depth": _depth(config, model_dir), "heads": heads, "head_size": size,
        "vocabulary": _count(config, "vocab_size", model_dir), "mlp": max(shared, *widths),
        **_state_facts(config, model_dir),
    }  # fmt: skip


def _state_facts(config: Mapping[str, Any], model_dir: Path) -> dict[str, Any]:
    """The fields of `ModelFacts` about running states. All layers count where the configuration does not name them."""

    def product(*names: str) -> int:
        return math.prod(_count(config, name, model_dir) for name in names)

    running = next((size for names in _RUNNING if (size := product(*names))), 0)
    kept = (
        product(kernel) * sum(times * product(*names) for times, *names in parts) for kernel, parts in _CONVOLUTIONS
    )
    each = running + next((size for size in kept if size), 0)
    kinds = config.get("layer_types") or config.get("layers_block_type")
    layers = _depth(config, model_dir)
    if isinstance(kinds, list):
        layers = sum(any(name in str(kind) for name in ("linear", "mamba", "conv")) for kind in kinds)
    latent = _count(config, "kv_lora_rank", model_dir) or _count(config, "index_topk", model_dir)
    scanned = running if _count(config, _SCANNED, model_dir) else 0
    return {"state_bytes": _STATE_BYTES * layers * each, "paged": not each and not latent, "scanned": scanned}


def _kv_elements(config: Mapping[str, Any], model_dir: Path) -> int:
    """Numbers for each token in all layers; latent attention (DeepSeek) is cached expanded, as transformers does."""
    layers = _depth(config, model_dir)
    heads, kv_heads, size = _heads(config, model_dir)
    if _count(config, "kv_lora_rank", model_dir):
        parts = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        return layers * heads * sum(_count(config, part, model_dir) for part in parts)
    return layers * 2 * kv_heads * size


def _dense_elements(config: Mapping[str, Any], model_dir: Path, moe_layers: int) -> int:
    """Embeddings, attention, routers, dense layers and shared experts; norms and biases are left out."""
    hidden, vocab = _number(config, ("hidden_size",), model_dir), _number(config, ("vocab_size",), model_dir)
    total = _depth(config, model_dir)
    heads, kv_heads, size = _heads(config, model_dir)
    width = _count(config, "moe_intermediate_size", model_dir)
    shared = _count(config, "shared_expert_intermediate_size", model_dir)
    shared += _count(config, "n_shared_experts", model_dir) * width
    per_layer = 2 * hidden * size * (heads + kv_heads)
    per_moe_layer = hidden * _number(config, EXPERT_COUNTS, model_dir) + 3 * hidden * shared
    per_dense_layer = 3 * hidden * _count(config, "intermediate_size", model_dir)
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    dense_layers = total - moe_layers
    return embeddings + total * per_layer + moe_layers * per_moe_layer + dense_layers * per_dense_layer


@dataclass(frozen=True)
class LocalRay:
    """What a local Ray is started with, whatever the machine has; `resources` are custom ones, such as {"ndp": 2}."""

    cpus: int
    resources: Mapping[str, float]
    memory: int | None = None  # bytes that its actors may take; None: what is free


def local_ray(config: RunConfig, settings: EngineSettings) -> LocalRay:
    """Room for all actors of a configuration, or what it says in `ray.num_cpus`."""
    replicas = config.cluster.replicas
    ndp = replicas * config.ndp_workers(settings.policy)
    resources = {"ndp": float(ndp)} if ndp else {}
    if config.cluster.store.nodes == "marked":
        resources["store"] = float(replicas)
    cpus = config.ray.num_cpus or config.cpus_of_actors(settings.policy)
    return LocalRay(cpus, resources, config.cluster.host_memory)


def local_notes(config: RunConfig, settings: EngineSettings) -> tuple[str, ...]:
    """What a user of this machine would not expect."""
    cpus, cores = local_ray(config, settings).cpus, usable_cores()
    found = list[str]()
    if cpus > cores:
        found.append(f"the actors reserve {cpus} CPUs and share the {cores} that can be used here, so they are slower "
                     "than with a core for each")  # fmt: skip
    if settings.device != "cpu":
        near = gpu_nodes()[: config.cluster.replicas * settings.shards.count]  # Ray takes the first ones
        found += [f"threads and pages of the worker on GPU {i} keep to its memory {words(node)}"
                  for i, node in enumerate(near) if node is not None]  # fmt: skip
    return tuple(found)


class _Node(Settings):
    id: str = Field(min_length=1)
    address: str = Field(min_length=1)
    alive: bool = True
    resources: dict[str, Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)

    @field_validator("resources", mode="before")
    @classmethod
    def _bytes_with_units(cls, resources: Any) -> Any:
        """Memory may be written as 200GB; nothing else has a unit."""
        if not isinstance(resources, Mapping):
            return resources
        return {k: _BYTE_SIZE.validate_python(v) if k in _BYTES else v for k, v in resources.items()}


class _NodesFile(Settings):
    nodes: tuple[_Node, ...] = Field(min_length=1)


def nodes_from_file(path: Path) -> list[NodeInfo]:
    """Nodes from YAML, in the terms of `ray.nodes()`; bytes may have a unit, such as 200GB.

    Raises:
        ConfigError: the file is missing or malformed.
    """
    try:
        found = _NodesFile(**read_yaml(path)).nodes
    except ValidationError as error:
        raise explain(error, _NodesFile, str(path)) from error
    return [NodeInfo(node.id, node.address, node.alive, node.resources, node.labels) for node in found]


def nodes_from_ray(records: Sequence[Mapping[str, Any]]) -> list[NodeInfo]:
    """What `ray.nodes()` returned, sorted by id; Ray's own `node:...` and accelerator-type resources are left out."""
    nodes = [
        NodeInfo(
            record["NodeID"], record["NodeManagerAddress"], record["Alive"], _ours(record["Resources"]),
            dict(record.get("Labels") or {}),
        )
        for record in records
    ]  # fmt: skip
    return sorted(nodes, key=lambda node: node.id)


def this_machine(given: LocalRay) -> list[NodeInfo]:
    """The one node of a local Ray, as `cluster.deploy` starts it."""
    free = host_free_bytes()
    resources = {
        "CPU": float(given.cpus),
        "GPU": float(gpu_count()),
        "memory": float(max(1, free if given.memory is None else min(free, given.memory))),  # 0: not known
        **given.resources,
    }
    return [NodeInfo("local", "127.0.0.1", True, {name: amount for name, amount in resources.items() if amount})]


def nodes_of_cluster(address: str) -> list[NodeInfo]:
    """Ask a running Ray's head for its nodes. No driver joins, so no job, process or file comes of it.

    Args:
        address: HOST:PORT of the head.

    Raises:
        RuntimeFailure: no Ray answers there in time, or its authentication differs.
    """
    check_joinable(address)
    # what `ray status` asks with: it knows the token and the certificates
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated.autoscaler_pb2 import GetClusterResourceStateReply, NodeStatus

    try:
        reply = GetClusterResourceStateReply()
        reply.ParseFromString(GcsClient(address).get_cluster_resource_state(timeout_s=_ANSWER_DEADLINE_S))
    except Exception as error:  # Ray's client raises RpcError, ValueError and bare Exception
        reason = " ".join(str(error).split())[:200]
        raise RuntimeFailure(
            f"the Ray at '{address}' did not name its nodes ({reason})", "look at it with `ray status`"
        ) from error
    nodes = [
        NodeInfo(
            state.node_id.hex(), state.node_ip_address, state.status not in (NodeStatus.DEAD, NodeStatus.DRAINING),
            _ours(state.total_resources), dict(state.labels) | {NODE_ID_LABEL: state.node_id.hex()},
        )
        for state in reply.cluster_resource_state.node_states
    ]  # fmt: skip
    return sorted(nodes, key=lambda node: node.id)


def _ours(resources: Mapping[str, float]) -> dict[str, float]:
    rays_own = ("node:", "accelerator_type:")
    return {name: float(amount) for name, amount in resources.items() if not name.startswith(rays_own)}
