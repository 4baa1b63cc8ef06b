"""The cases of `tiermoe bench NAME` that need a clone: their options, by name."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import Field

from tiermoe.actors.policies.sharding import Ownership
from tiermoe.cluster.jobs.bench.cases import Config, Model, Options, Repeats, measure

from .requantized import Published

if TYPE_CHECKING:
    from tiermoe.cluster.config import RunConfig
    from tiermoe.cluster.jobs.bench.metrics import Report

Budget = Annotated[str, Field(description="Device memory for experts, of policies that load them.")]
Gbps = Annotated[float, Field(ge=0.001, description="Emulated link, 1e9 bytes per second.")]
Batches = Annotated[tuple[Annotated[int, Ge(1)], ...], Field(description="Prompts in flight together; repeat it.")]
LATENCY_US = 10.0  # of a copy on an emulated link
Tokens = Annotated[int, Field(ge=2, description="Tokens generated after each prompt.")]


class Against(StrEnum):
    """What `overhead` compares with."""

    TRANSFORMERS = "transformers"
    LLAMA_CPP = "llama.cpp"
    LAYERS = "qwen3-30b-layers"
    BLOCKS = "qwen3-30b-blocks"


class Served(Options):
    """Options of what serves prompts on an emulated link."""

    own_keys: ClassVar[Sequence[str]] = ("policy", "budget", "link")
    model: Model = None
    repeats: Repeats = 5
    budget: Budget = "0.25"
    link_gbps: Gbps = 16.0
    config: Config = None

    def run_of(self, policy: str, **more: Any) -> RunConfig:
        """The run of a policy: with all experts and no link where it loads all at start, else with budget and link.

        more: further options of the run, or another `model`.
        """
        from tiermoe.cluster.config import load_policy
        from tiermoe.cluster.jobs.local_worker import run_config

        whole = load_policy(policy).preload == "all"
        link = {"gbps": None if whole else self.link_gbps, "latency_us": 0.0 if whole else LATENCY_US}
        model, budget = more.pop("model", self.model), "1.0" if whole else self.budget
        return run_config(model, self.config, policy=policy, budget=budget, link=link, **more)


class Overhead(Served):
    """Decode time against transformers' continuous batching and llama.cpp, and what prefetch adds to it."""

    measure = "overhead.overhead"
    repeats: Repeats = 7
    against: tuple[Against, ...] = Field(
        tuple(Against),
        description="What to compare with; repeat it. The last two: llama.cpp on random layers of Qwen3-30B-A3B's "
        "shape, in bfloat16 and in blocks of a GGUF file.",
    )
    pairs: int = Field(8, ge=1, description="Counted rounds against llama.cpp.")
    layers: int = Field(
        2, ge=1,
        description="Layers of Qwen3-30B-A3B's shape: 5 GB of disk and of memory each in bfloat16, 0.7 GB in blocks.",
    )  # fmt: skip
    threads: tuple[Annotated[int, Ge(1)], ...] = Field((1,), description="Of both sides, in blocks; repeat it.")


class HostDevice(StrEnum):
    """What `host` runs on."""

    CPU = "cpu"
    FAKE_GPU = "fake-gpu"


class Host(Served):
    """What a decoded token's time consists of: the host's microseconds by part of a layer, a step and a request."""

    measure = "host.host"
    preset: tuple[str, ...] = Field((), description="Policy; repeat it; default: the cases that the bars judge.")
    batch: Batches = (1, 8)
    device: HostDevice = Field(
        HostDevice.CPU, description="fake-gpu: the step beside a GPU whose kernels and copies take no time."
    )
    form: tuple[Published, ...] = Field(
        (Published.BF16,), description="Form of the default model's experts, with --preset; repeat it."
    )
    shards: tuple[Annotated[int, Ge(1)], ...] = Field((1,), description="Of the cache, with --preset; repeat it.")
    ray: bool = Field(True, description="Also what a request through Ray costs; not of a fake GPU.")

    def result(self, name: str) -> str:
        return name if self.device is HostDevice.CPU else f"{name}-gpu"


class Ttft(Served):
    """Time to the first token of long prompts, at a part of the experts and with all resident."""

    measure = "serving.ttft"
    repeats: Repeats = 7
    policy: tuple[str, ...] = Field(
        ("next-gate", "on-demand"), description="Policies beside all-resident; the bar judges the first; repeat it."
    )
    prompt_tokens: int = Field(512, ge=1, description="Tokens of each prompt.")


class Turns(Served):
    """A conversation's second turn with the prefix cache, and the gap that a long prompt makes in running streams."""

    measure = "serving.turns"
    own_keys = ("policy", "budget", "link", "kv")
    policy: str = Field("next-gate", description="Of all cases.")
    turn_tokens: int = Field(1500, ge=1, description="Tokens of the first turn's prompt.")
    prompt_tokens: int = Field(2000, ge=1, description="Tokens of the prompt that comes while four streams run.")
    chunk: tuple[Annotated[int, Ge(1)], ...] = Field(
        (256, 512, 128, 64), description="kv.prefill_chunk; the bar judges the first; repeat it."
    )


class Scale(Served):
    """The same requests on 1, 2 and 4 GPUs: throughput, bytes per GPU, time lost to copies."""

    measure = "serving.scale"
    parted = "batch"
    repeats: Repeats = 4
    policy: str = Field("on-demand", description="Of all GPUs.")
    budget: str = Field("0.125", description="Device memory for experts of one GPU, a share of all.")
    link_gbps: float = Field(2.0, ge=0.001, description="Emulated link of each GPU, 1e9 bytes/s.")
    batch: Batches = (1, 4, 8, 16)
    prompts: int = Field(20, ge=1, description="Held-out prompts for each batch size, at least.")
    ownership: Ownership = Field("layer-expert", description="Rule by which experts belong to GPUs.")


class Deployment(Options):
    """What a deployment on two and four emulated nodes serves: by GPUs, NDP workers, batch and store, and simulated."""

    measure = "deployment.deployment"
    repeats: Repeats = 3
    nodes: tuple[Annotated[int, Ge(2)], ...] = Field((2, 4), description="Nodes, as namespaces; repeat it.")
    link_gbps: float = Field(2.0, ge=0.001, description="Emulated link of each GPU, 1e9 bytes/s.")
    gbit: float = Field(10.0, gt=0, description="Bandwidth of each node's cable, 1e9 bits/s each way.")
    delay_us: float = Field(50.0, ge=0, description="Delay of a cable, where the kernel has netem.")
    layers: int = Field(4, ge=0, description="Layers of Qwen3-30B-A3B's shape in Q4_0; 0: the default model alone.")
    work: Path | None = Field(
        None, description="Folder of finished cells: the same command resumes; default: a temporary one."
    )
    quick: bool = Field(False, description="The ends of the grid alone, at the largest batch.")
    gpus: tuple[Annotated[int, Ge(1)], ...] = Field((), description="Points with so many GPUs alone; repeat it.")
    ndp: tuple[Annotated[int, Ge(0)], ...] = Field((), description="Points with so many NDP workers alone; repeat it.")


class DraftKind(StrEnum):
    """Drafts of `drafts`, as in `drafts.kind`."""

    NGRAM = "ngram"
    MTP = "mtp"


class Drafts(Options):
    """Drafts against none: tokens a second of code edits and of prose, or of code and prose that go on, by link."""

    measure = "drafts.drafts"
    own_keys = ("policy", "budget", "link", "drafts")
    model: Model = None
    kind: DraftKind = Field(DraftKind.NGRAM, description="ngram: of the text; mtp: of the model's own head, too.")
    repeats: Repeats = 5
    policy: str = Field("next-gate", description="Of both; its tokens must not depend on where an expert ran.")
    budget: Budget = "0.25"
    link_gbps: tuple[Annotated[float, Ge(0.001)], ...] = Field(
        (2.0, 16.0), description="Emulated link, 1e9 bytes per second; repeat it."
    )
    prompts: int = Field(2, ge=1, description="Texts of each kind in a round.")
    prompt_tokens: int = Field(280, ge=16, description="Tokens of each prompt.")
    max_tokens: Tokens = 160
    tokens: int = Field(7, ge=1, le=63, description="Most drafted tokens (drafts.tokens).")
    config: Config = None


class DraftTable(Options):
    """Drafts of a head, simulated: tokens a second over none for a published shape, by budget, link and acceptance."""

    measure = "draft_table.draft_table"
    shape: str = Field("qwen3.6-35b-a3b", description="Of configs/shapes.")
    bits: float = Field(4.5, gt=0, description="Of an expert's weight, in slots and on the link.")
    machine: str = Field("a6000-pcie4", description="Of configs/machines.")
    family: str = Field("sticky", description="Of synthetic routing.")
    budgets: tuple[Annotated[float, Gt(0), Le(1)], ...] = Field(
        (0.25, 0.5, 1.0), description="Shares of the experts that are resident; repeat it."
    )
    link_gbps: tuple[Annotated[float, Ge(0.001)], ...] = Field(
        (8.0, 25.0, 50.0), description="Links, 1e9 bytes per second; repeat it."
    )
    accepted: tuple[Annotated[float, Gt(0), Lt(1)], ...] = Field(
        (0.6, 0.7, 0.8, 0.9), description="Chance that a draft is right, if those before it are."
    )
    policy: str = Field("next-gate", description="Preset.")
    max_tokens: Tokens = 600
    tokens: int = Field(7, ge=1, le=63, description="Most drafted tokens (drafts.tokens).")


class Family(StrEnum):
    """Model types of `streams`."""

    QWEN = "qwen3_5_moe_text"
    DEEPSEEK = "deepseek_v2"
    NEMOTRON = "nemotron_h"


class Streams(Options):
    """Several requests over one, on models with running states or latent attention, whose KV cache is not paged."""

    measure = "streams.streams"
    repeats: Repeats = 5
    family: tuple[Family, ...] = Field(tuple(Family), description="Model type of random weights; repeat it.")
    streams: int = Field(8, ge=2, description="Requests together.")
    tokens: Tokens = 48


class Disk(Options):
    """A store larger than memory: experts read from the disk into bounded slots, against the store's mapped files."""

    measure = "disk.disk"
    repeats: Repeats = 3
    shape: str = Field("qwen3-30b-a3b", description="Of the random model, in Q4_0.")
    layers: int = Field(4, ge=1, description="Of the random model; 340 MB of disk each in the default shape.")
    share: float = Field(1 / 3, gt=0, lt=1, description="Of the store's experts that memory has room for.")
    policy: str = Field("next-gate", description="Of the slots.")
    threads: int = Field(1, ge=1, description="Compute threads.")
    tokens: Tokens = 64


class Core(Options):
    """Microseconds of the core in a layer, by preset, and by order of eviction; layer steps of the simulator."""

    measure = "core.core"
    repeats: Repeats = 5
    preset: tuple[str, ...] = Field(
        ("all-resident", "on-demand", "next-gate", "moepic", "fmoe"),
        description="Preset without rules and peers; repeat it.",
    )
    order: tuple[str, ...] = Field(
        ("lru", "lru-sweep", "lfu", "lfu-decay", "expert-map", "importance", "worth"),
        description="Order of eviction whose growth is measured; repeat it.",
    )


class Validation(Options):
    """The simulator and what `plan` predicts against this machine: TPOT and hit rate of presets x budgets x links."""

    measure = "validation.validation"
    model: Model = None
    repeats: Repeats = 5
    preset: tuple[str, ...] = Field(
        (
            "on-demand", "next-gate", "moepic", "cache-only", "mixtral-offloading", "moe-infinity",
            "activeevict-lossless", "deepspeed-inference",
        ),
        description="Preset; repeat it.",
    )  # fmt: skip
    budget: tuple[str, ...] = Field(("0.25", "0.5", "0.75"), description="Device memory for experts; repeat it.")
    link_gbps: tuple[Annotated[float, Ge(0.001)], ...] = Field(
        (2.0, 16.0), description="Emulated link, 1e9 bytes per second; repeat it."
    )
    max_tokens: Tokens = 48


class Auto(Options):
    """The planner of `auto` against the field's fixed rules, simulated: shapes x routing x budgets x links x hosts."""

    measure = "auto.auto"
    share: float = Field(0.06, gt=0, le=1, description="Share of the cells, drawn at random beforehand.")
    seeds: int = Field(5, ge=1, description="Seeds of the routing, from 1 on.")
    layers: int = Field(8, ge=0, description="Layers of each shape; 0: all of them.")
    variant_cells: int = Field(36, ge=0, description="Cells of the ablation and of wrong costs.")
    jobs: int = Field(2, ge=1, description="Processes.")
    journal: Path | None = Field(
        None, description="Finished parts are in NAME.partial.json beside it: the same command resumes; default: none."
    )
    quick: bool = Field(False, description="Cells of one shape at batch 1, on few layers and tokens.")


class Channel(Options):
    """Round trips between two processes: shared memory, gRPC, a bare gRPC stream, a Ray actor call."""

    measure = "channels.channel"
    repeats: Repeats = 7


class Kernel(Options):
    """The CPU's kernels of packed and published experts, on one core or many, against memory bandwidth."""

    measure = "kernels.kernel"
    repeats: Repeats = 7
    group: int = Field(64, description="Quantization group: 32, 64 or 128.")
    instruction_set: str | None = Field(None, description="Of our kernels; default: the best here.")
    threads: int = Field(1, ge=1, le=1024, description="Cores.")


class Resident(Options):
    """Host memory of a lead that serves without a GPU, over the model's bytes."""

    measure = "resident.resident"
    model: Model = None
    layers: int = Field(4, ge=1, description="Layers of a random model by name (qwen3-30b-a3b, in Q4_0).")


class GpuEstimates(Options):
    """What a token takes on GPUs that were not measured, computed from bytes, launches and the host's time."""

    measure = "gpu.estimates.estimates"

    def write_page(self, page: Path, report: Report) -> None:
        from .gpu.estimates import write_page

        write_page(page, report)


CASES: dict[str, type[Options]] = {
    "overhead": Overhead, "host": Host, "ttft": Ttft, "turns": Turns, "scale": Scale, "streams": Streams,
    "deployment": Deployment, "drafts": Drafts, "draft-table": DraftTable, "disk": Disk, "core": Core,
    "validation": Validation, "auto": Auto, "channel": Channel, "kernel": Kernel, "resident": Resident,
    "gpu-estimates": GpuEstimates,
}  # fmt: skip


def measured(name: str, values: dict[str, Any]) -> Report:
    """A case on this node, by plain values (`clone.CloneCall`)."""
    return measure(CASES[name](**values))
