"""Settings of the actors, frozen and validated.

`cluster.config` builds these from YAML files and command-line options.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from .base_settings import Settings, in_panel, in_unit
from .budget import Budget, coded_row_bytes
from .policies.cost import NdpDevice
from .policies.sharding import Ownership
from .policy_settings import PolicySettings

CompileMode = Literal["auto", "off", "native", "default", "graphs"]
Attention = Literal["auto", "sdpa", "eager", "flash", "triton"]
ExpertKernelName = Literal["auto", "loop", "triton"]

Transport = Literal["auto", "shm", "grpc"]

_TRANSPORT = (
    "shm: shared memory within a node; grpc: a stream between nodes; auto: shm where both ends see the same memory"
)
_LEAST_PAGES, _MOST_PAGES = 2, 1 << 20  # of a KV cache


class LinkSettings(Settings):
    """The host-to-device link that the CPU stand-in throttles copies to (ignored on CUDA)."""

    panel = "Emulation"

    gbps: float | None = Field(
        default=None,
        gt=0,
        description="emulated host-to-device link in 1e9 bytes/s, CPU stand-in only; null in a file: unthrottled",
    )
    latency_us: float = Field(default=0.0, ge=0, description="microseconds added before each copy on the emulated link")
    layer_us: float | None = Field(
        default=None, gt=0,
        description="advance the link's clock by this a layer, so that runs repeat exactly; default: wall-clock time",
    )  # fmt: skip

    @model_validator(mode="after")
    def _consistent(self) -> LinkSettings:
        if self.layer_us is not None and self.gbps is None:
            raise ValueError("layer_us needs a throttled link: give gbps, too")
        return self


class CopySettings(Settings):
    """Copies of experts to a GPU (ignored on the CPU stand-in)."""

    pinned_gib: float | None = Field(
        default=None, ge=0, description="GiB of host memory that each GPU's process may pin; default: all experts"
    )
    pin: Literal["mapped", "copy"] = Field(
        default="mapped",
        description="mapped: pin the pages of the store's mapped files; copy: copy the experts to pinned huge pages at "
        "start, which takes their memory once more for each GPU's process",
    )
    unpinned: Literal["stage", "copy"] = Field(
        default="stage",
        description="experts that the driver cannot pin in place; stage: copy through a small pinned buffer; copy: "
        "keep a pinned copy in the process, which takes their memory twice",
    )
    ahead_mib: int = Field(
        default=64,
        ge=1,
        le=1 << 20,
        description="MiB of prefetches submitted to the GPU at once; a demand load waits for them",
    )


class NdpSettings(Settings):
    """The NDP workers, all alike, and the channels to them, for policies that use them.

    `cluster.config.engine_settings` resolves `threads` to a number and `hardware` to the content of its file.
    """

    panel = "Cluster"

    threads: int | None = Field(
        default=None, ge=1, le=1024, json_schema_extra=in_unit("threads"),
        description="threads of each NDP worker; default: 1; on a GPU host, a share of the remaining cores",
    )  # fmt: skip
    cores: tuple[Annotated[int, Field(ge=0, lt=1024)], ...] = Field(
        default=(), description="cores that the NDP workers' threads are bound to, worker by worker; default: unbound",
        json_schema_extra=in_unit("core numbers"),
    )
    group_size: Literal[32, 64, 128] = Field(
        default=64,
        description="inputs that share one scale in a quantized replica",
        json_schema_extra=in_unit("inputs"),
    )
    hardware: str | dict[str, Any] = Field(
        default="paper-ndp", description="NDP device to model: a name in configs/hardware, or a YAML file",
        json_schema_extra=in_panel("Emulation"),
    )
    pace: bool = Field(
        default=False, description="delay each answer to the time that the modelled NDP device would take",
        json_schema_extra=in_panel("Emulation"),
    )  # fmt: skip
    transport: Transport = Field(default="auto", description=_TRANSPORT)
    deadline_s: float = Field(
        default=5.0, gt=0, description="time limit of one answer; after it the lead computes the experts"
    )

    @property
    def worker_threads(self) -> int:
        """Threads of one worker's kernels."""
        return self.threads or 1

    @property
    def device(self) -> NdpDevice:
        """The modelled device. Raises ValueError: its figures are malformed, or only named."""
        if isinstance(self.hardware, str):
            raise ValueError(f"'{self.hardware}' is a name, and the figures are needed")
        return NdpDevice.from_dict(self.hardware)

    def cores_of(self, index: int) -> tuple[int, ...]:
        """The cores of worker 0..N-1, one for each thread; none: any. Fewer than threads are refused before a start."""
        if not self.cores:
            return ()
        threads = self.worker_threads
        first = index % (len(self.cores) // threads) * threads
        return self.cores[first : first + threads]


class ShardSettings(Settings):
    """The GPUs that share a model's experts, and the channels from the lead to the others."""

    count: int = Field(default=1, ge=1, le=64, description="GPUs that hold experts; the lead's GPU is shard 0")
    ownership: Ownership = Field(default="layer-expert", description="rule that assigns experts to shards")
    transport: Transport = Field(default="auto", description=_TRANSPORT)
    deadline_s: float = Field(
        default=30.0, gt=0, description="time limit of one answer; after it the lead computes the experts"
    )


class StoreSettings(Settings):
    """Where the full-precision experts lie in host memory, and how another node's store is read."""

    transport: Literal["auto", "ray", "grpc"] = Field(
        default="auto", description="how experts of another node are read; grpc: over the channel between nodes; "
        "ray: through Ray's object store; auto: grpc"
    )
    deadline_s: float = Field(
        default=10.0, gt=0, description="time limit of one expert, other stores included; after it the request fails"
    )
    layout: Literal["replicated", "sliced"] = Field(
        default="replicated", description="replicated: every store holds all layers; sliced: `copies` stores hold "
        "each layer"
    )  # fmt: skip
    nodes: Literal["workers", "marked"] = Field(
        default="workers", description="workers: a store on each node with a GPU worker; marked: a store on each node "
        "with the Ray resource `store`, which other nodes read over the network"
    )  # fmt: skip
    copies: int = Field(
        default=1, ge=1, le=64, description="stores that hold each layer, with layout sliced",
        json_schema_extra=in_unit("stores"),
    )  # fmt: skip


class MatcherSettings(Settings):
    """The matcher of expert maps (fMoE) and the channel to it."""

    capacity: int = Field(
        default=1000, ge=1, le=1 << 20, description="expert maps to keep at most", json_schema_extra=in_unit("maps")
    )
    width: int = Field(
        default=512, ge=1, le=1 << 16, description="width of a stored embedding; wider embeddings are sketched",
        json_schema_extra=in_unit("numbers"),
    )  # fmt: skip
    learn: bool = Field(default=True, description="add the expert maps of served iterations")
    warm: str | None = Field(default=None, description="file of initial maps, read if there is no snapshot")
    keep: str | None = Field(
        default=None, description="snapshot file, kept after the runtime ends; default: no snapshots"
    )
    snapshot_s: float = Field(default=30.0, gt=0, description="time between snapshots, while the maps change")
    transport: Transport = Field(default="auto", description=_TRANSPORT)
    deadline_s: float = Field(default=1.0, gt=0, description="age at which an answer of the matcher is discarded")


class KvSettings(Settings):
    """The KV cache, always bounded, and how requests share it.

    `num_blocks` pages in place of `tokens` are taken, too.
    """

    panel = "Memory"

    tokens: int = Field(
        default=8192, ge=8, description="tokens in the KV cache, over all requests, rounded up to whole pages",
        json_schema_extra=in_unit("tokens"),
    )  # fmt: skip
    max_model_len: int | None = Field(
        default=None, ge=2, json_schema_extra=in_unit("tokens"),
        description="most tokens of a request, prompt and output; default: the model's limit, within kv.tokens",
    )  # fmt: skip
    max_num_seqs: int = Field(
        default=64, ge=1, description="most requests in one forward pass", json_schema_extra=in_unit("requests")
    )
    page_size: int = Field(
        default=32, ge=4, le=1 << 16, description="tokens of a page, the unit of KV cache allocation",
        json_schema_extra=in_unit("tokens"),
    )  # fmt: skip
    max_batch_tokens: int = Field(
        default=512, ge=1, json_schema_extra=in_unit("tokens"),
        description="most tokens in one forward pass; default: 512; on a GPU that does not hold all experts up to "
        "8192, as memory allows",
    )
    dtype: Literal["auto", "int8", "fp8"] = Field(
        default="auto", description="numbers of the paged KV cache; auto: those of the computation; int8, fp8: 8 bits "
        "with a scale for each row and head, rounded as kv-cache.md says",
    )  # fmt: skip
    prefill_chunk: int | None = Field(
        default=None, ge=1, description="most prompt tokens in a pass that also decodes; default: kv.max_batch_tokens",
        json_schema_extra=in_unit("tokens"),
    )  # fmt: skip
    prefix_cache: bool = Field(default=True, description="share KV cache pages between requests with a common prefix")
    checkpoint_mib: int = Field(
        default=256, ge=0, le=1 << 20, description="MiB of host memory for states after earlier prompts and answers, "
        "of models whose KV cache is not paged; 0: none",
    )  # fmt: skip
    elastic: bool = Field(
        default=True, description="with budget auto, expert slots use the KV cache's memory until requests need it"
    )
    batching: Literal["auto", "continuous", "serial"] = Field(
        default="auto", description="auto: requests share forward passes, on the paged KV cache where the model "
        "allows it, else on its own; continuous: on the paged one only; serial: one request at a time",
    )  # fmt: skip

    @model_validator(mode="before")
    @classmethod
    def _room(cls, given: Any) -> Any:
        """Pages as tokens; a longer request than the default KV cache holds gets a KV cache that holds one."""
        if not isinstance(given, dict):
            return given
        fields = cls.model_fields
        page, longest = given.get("page_size", fields["page_size"].default), given.get("max_model_len")
        if "num_blocks" in given:
            pages = given["num_blocks"]
            if "tokens" in given:
                raise ValueError("tokens and num_blocks both size the KV cache: leave one out")
            if type(pages) is not int or type(page) is not int:
                raise ValueError("num_blocks is not a whole number of pages: give tokens in its place")
            rest = {name: value for name, value in given.items() if name != "num_blocks"}
            return rest | {"tokens": pages * page}
        if "tokens" not in given and type(longest) is int:
            return given | {"tokens": max(longest, fields["tokens"].default)}
        return given

    @model_validator(mode="after")
    def _fits(self) -> KvSettings:
        held = self.page_size * self.num_blocks
        if not _LEAST_PAGES <= self.num_blocks <= _MOST_PAGES:
            raise ValueError(
                f"tokens {self.tokens} are {self.num_blocks} pages of {self.page_size}: "
                f"give {_LEAST_PAGES * self.page_size} to {_MOST_PAGES * self.page_size}"
            )
        if self.coded is not None and self.batching == "serial":
            raise ValueError(f"dtype {self.dtype} is of the paged KV cache, which batching: serial has none of")
        if self.max_model_len is not None and self.max_model_len > held:
            raise ValueError(
                f"max_model_len {self.max_model_len} is more than the {held} tokens that the KV cache holds: "
                "raise tokens (--kv-tokens), or leave it out"
            )
        return self

    @property
    def coded(self) -> Literal["int8", "fp8"] | None:
        """The form of rows in 8 bits; None: they are numbers of the computation."""
        return None if self.dtype == "auto" else self.dtype

    def row_bytes(self, width: int, item: int) -> int:
        """Bytes of one token's key or value of one head. width: its numbers. item: bytes of one in the computation."""
        return width * item if self.coded is None else coded_row_bytes(width)

    @property
    def num_blocks(self) -> int:
        """Pages of the KV cache, in each layer."""
        return -(-self.tokens // self.page_size)

    @property
    def checkpoint_bytes(self) -> int:
        """For states after earlier prompts and answers."""
        return self.checkpoint_mib << 20 if self.prefix_cache else 0

    @property
    def request_tokens(self) -> int:
        """Tokens that one request may have, as far as the KV cache goes."""
        return self.max_model_len or self.page_size * self.num_blocks


class DraftSettings(Settings):
    """Tokens that are guessed from the text and verified together (`policies.drafts`)."""

    panel = "Model"

    kind: Literal["auto", "mtp", "ngram", "off"] = Field(
        default="off",
        description="drafted tokens, verified in one pass, as many as pay; ngram: those that followed the last ones "
        "before; mtp: those of the model's own head, too; auto: mtp where the checkpoint has a head, else ngram, but "
        "none with a policy that is lossy; off: none",
    )
    tokens: int = Field(
        default=7, ge=1, le=63, description="most drafted tokens of a request in a pass",
        json_schema_extra=in_unit("tokens"),
    )  # fmt: skip


class EngineOptions(Settings):
    """Options of a configuration file that the engine reads unchanged."""

    panel = "Model"

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="device of the worker: auto, cpu or cuda; auto: cuda where there is a GPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="data type of the computation: auto, float32, bfloat16 or float16"
    )
    link: LinkSettings = LinkSettings()
    copies: CopySettings = CopySettings()
    kv: KvSettings = KvSettings()
    drafts: DraftSettings = DraftSettings()
    ndp: NdpSettings = NdpSettings()
    matcher: MatcherSettings = MatcherSettings()
    attention: Attention = Field(
        default="auto",
        description="attention kernel; auto: sdpa where the model has it, on a GPU triton for steps that are graphs; "
        "flash: flash-attn; triton: tiermoe's own (flash and triton need a GPU, and do not copy the KV cache in every "
        "step)",
    )
    expert_kernel: ExpertKernelName = Field(
        default="auto", description="kernel that computes experts on a GPU; auto: triton, where it can"
    )
    compile: CompileMode = Field(
        default="auto",
        description="how the dense part runs; off: transformers' modules; native: one native program (CPU); default: "
        "torch.compile; graphs: decode steps as CUDA graphs (GPU, with attention: triton); auto: graphs on a GPU, on "
        "a CPU native where a measurement at start shows equal results and more speed; else off",
    )
    integrity_checks: bool = Field(default=False, description="check the cache's invariants after every forward pass")

    @property
    def asks_for_graphs(self) -> bool:
        """Whether a GPU's decode steps are to be CUDA graphs, as far as settings say."""
        if self.compile == "graphs":
            return True
        return self.compile == "auto" and self.attention in ("auto", "triton") and self.kv.batching != "serial"


class EngineSettings(EngineOptions):
    """The settings of a `GpuWorker` lead."""

    policy: PolicySettings
    budget: Budget = Field(description="expert memory of each GPU")
    host_bytes: int | None = Field(
        default=None, ge=1, description="host memory of the lead, and of each shard, for experts of a store that is "
        "larger, which are read from the disk past the page cache; None: the store is mapped",
    )  # fmt: skip
    threads: int = Field(default=1, ge=1, description="torch intra-op threads of the worker")
    shards: ShardSettings = ShardSettings()
    store: StoreSettings = StoreSettings()
    trace: bool = Field(default=False, description="record a timeline of compute, copies and waits")
    keep_hot_set: bool = Field(default=False, description="count uses of experts over restarts, and begin by them")


def shared_bytes(settings: EngineSettings) -> int:
    """Bytes of the KV cache that expert slots may have while requests do not need them; 0: each has its own memory.

    Slots that are divided between parts of experts or replicas, and those that are copied back, keep their number.
    """
    policy, auto = settings.policy, settings.budget.auto
    fixed = policy.split.kind != "off" or policy.low_bit is not None or policy.evict_writeback
    if auto is None or fixed or not settings.kv.elastic or settings.kv.batching == "serial":
        return 0
    return auto.kv
