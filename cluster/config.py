"""The configuration of a run: frozen, from a YAML file and command-line options, checked before Ray starts.

Options win over the file, and the file over the defaults here. Environment variables set nothing. A field's
description is also the help of its command-line option (`jobs.options`).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, StrictFloat, StrictInt, ValidationError, model_validator

from ..actors.base_settings import Settings, in_panel, in_unit
from ..actors.budget import Budget
from ..actors.combinations import Refusal, check_combination, refuse_first
from ..actors.gpu_driver import absent, check_gpu, gpus_free_bytes, has_gpu, hidden
from ..actors.policies.cost import NdpDevice
from ..actors.policies.sharding import Ownership
from ..actors.policy_settings import PolicySettings
from ..actors.settings import (
    EngineOptions,
    EngineSettings,
    LinkSettings,
    ShardSettings,
    StoreSettings,
)
from ..actors.tokenizer import has_tokenizer
from ..errors import CheckpointError, ConfigError
from ..limits import check_threads, usable_cores
from ..proto.tls import TlsFiles
from .host import STORE_CPUS, shown
from .yaml_file import explain, merged, read_yaml

_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_GPU_WORKER_THREADS = 4
DEFAULT_LINK = LinkSettings(gbps=16.0, latency_us=10.0)  # of every command: a PCIe 4.0 x8
AUTO, DEFAULT_BUDGET = "auto", "0.25"
DEFAULT_POLICY = "default"  # `auto` or `next-gate`: `topology.decided` decides, with the model and the nodes
MAPPED = "all-resident"  # the policy of experts that run where the store maps them
STEPPED = "next-gate"  # the default policy with `link.layer_us`
QUICK_COPY_US = 60.0  # of one expert: below, `next-gate` is the default


class ClusterConfig(Settings):
    """How many actors of each kind, and where."""

    panel = "Cluster"

    replicas: int = Field(
        default=1, ge=1, le=16, description="whole runtimes behind one server, each with its own budget; if one dies "
        "or hangs, its requests resume at another", json_schema_extra=in_unit("runtimes"),
    )  # fmt: skip
    shards: int = Field(
        default=1, ge=1, le=64, description="GPUs (or CPU stand-ins) that share the experts, the lead's included",
        json_schema_extra=in_unit("GPUs"),
    )  # fmt: skip
    ownership: Ownership = Field(
        default="layer-expert", description="GPU that owns an expert; layer-expert: (layer x experts + expert) modulo "
        "GPUs; expert: expert modulo GPUs"
    )  # fmt: skip
    strategy: Literal["pack", "spread"] = Field(
        default="pack", description="pack: shards on few nodes; spread: on many"
    )
    lead: str | None = Field(
        default=None, description="id or address of the lead's node; default: the node with most room"
    )
    gpu_memory: Annotated[ByteSize, Field(ge=1)] | None = Field(
        default=None, description="memory of one GPU, such as 80GB, which Ray does not report; default: not checked",
        json_schema_extra=in_unit("bytes"),
    )  # fmt: skip
    host_memory: Annotated[ByteSize, Field(ge=1)] | None = Field(
        default=None, description="host memory that the actors of this machine may take, such as 32GB; a larger store "
        "is read from the disk into what is left of it; default: the free memory",
        json_schema_extra=in_panel("Memory", "bytes"),
    )  # fmt: skip
    store: StoreSettings = StoreSettings()
    channel_tls: str | None = Field(
        default=None, description="folder with ca.pem, cert.pem (for the name tiermoe) and key.pem, at this path on "
        "each node: mutual TLS between tiermoe's processes; default: a token without encryption",
    )  # fmt: skip
    ndp_workers: Literal["per-node"] | Annotated[int, Field(ge=1, le=1024)] = Field(
        default=1, description="NDP workers, for policies that use them; policy auto starts those that are not asked "
        "for only without a GPU, and where a core is left, or where a joined Ray has the resource `ndp`; per-node: one "
        "on each node with that resource",
        json_schema_extra=in_unit("workers"),
    )  # fmt: skip

    @property
    def tls(self) -> TlsFiles | None:
        """The files of `channel_tls`."""
        folder = self.channel_tls
        return None if folder is None else TlsFiles.of_folder(str(Path(folder).expanduser().absolute()))


class RaySettings(Settings):
    """Which Ray the run uses and how long it may take to start."""

    address: str | None = Field(
        default=None, description="HOST:PORT of a running Ray cluster; default: start a local one"
    )
    num_cpus: int | None = Field(
        default=None, ge=2, description="CPUs of the local Ray; default: what the actors need",
        json_schema_extra=in_unit("CPUs"),
    )  # fmt: skip
    dashboard: bool = Field(
        default=False, description="run the local Ray's dashboard, autoscaler and log monitor"
    )
    startup_deadline_s: float = Field(default=300.0, gt=0, description="time limit for all actors to become ready")
    object_store_bytes: int = Field(
        default=100_000_000,
        ge=80_000_000,
        description="Ray's own shared memory, allocated at its start; weights are not in it",
    )


class RunConfig(EngineOptions):
    """Everything of a run except the prompt and its sampling."""

    model: str | None = Field(
        default=None,
        description="folder, GGUF file, or org/name[@revision][:FILE.gguf] of a hub; default: the built-in tiny model",
    )
    store: str | None = Field(default=None, description="folder of the expert store; default: one in cache_dir")
    cache_dir: str | None = Field(
        default=None,
        description="folder of prepared stores; default: tiermoe/stores in $XDG_CACHE_HOME, or in ~/.cache",
    )
    policy: str = Field(
        default=DEFAULT_POLICY, description="policy preset: a name in configs/policies, or a YAML file; "
        f"{DEFAULT_POLICY}: {STEPPED} on a GPU, where link.layer_us is given, and where the link copies an expert in "
        f"less than {QUICK_COPY_US:g} us; else {AUTO}, and where ndp_workers is given"
    )  # fmt: skip
    budget: str | StrictFloat | StrictInt | None = Field(
        default=None,
        description="expert memory of each GPU: a share of the experts such as 25%, a size such as 512MiB, or auto: "
        "its free memory less dense weights, KV cache, activations and a margin; default: auto on a GPU of this "
        "machine; on a CPU none, experts run where the store maps them; 25% with emulate",
        json_schema_extra=in_panel("Memory", "share or bytes"),
    )
    emulate: bool = Field(
        default=False, description="have the CPU stand in for a GPU, with expert slots behind a throttled link; also "
        "where policy, budget, link, ndp, ndp_workers, shards or the place of stores is given",
        json_schema_extra=in_panel("Emulation"),
    )  # fmt: skip
    threads: int | None = Field(
        default=None, ge=1, le=1024, json_schema_extra=in_unit("threads"),
        description="CPU threads of the worker; default: cores - 1; on a GPU host, at most 4",
    )  # fmt: skip
    link: LinkSettings = DEFAULT_LINK
    ray: RaySettings = RaySettings()
    cluster: ClusterConfig = ClusterConfig()
    keep_hot_set: bool = Field(
        default=True, description="of `up` and `serve`: keep how often each expert is used, in a small file beside the "
        "store, and fill free slots with the most used ones at the next start; other commands start empty",
    )  # fmt: skip
    request_deadline_s: float = Field(default=3600.0, gt=0, description="time limit of one request")

    @model_validator(mode="before")
    @classmethod
    def _with_link(cls, given: Any) -> Any:
        """What a given link leaves out is that of the default link; one that is not throttled has no latency either."""
        link = given.get("link") if isinstance(given, Mapping) else None
        if not isinstance(link, Mapping) or link.get("gbps", DEFAULT_LINK.gbps) is None:
            return given
        return {**given, "link": {"gbps": DEFAULT_LINK.gbps, "latency_us": DEFAULT_LINK.latency_us, **link}}

    @model_validator(mode="before")
    @classmethod
    def _with_policy(cls, given: Any) -> Any:
        """The default on a link whose clock only layers move, which NDP workers do not see."""
        if not isinstance(given, Mapping) or "policy" in given:
            return given
        link = given.get("link")
        layer_us = link.get("layer_us") if isinstance(link, Mapping) else getattr(link, "layer_us", None)
        return given if layer_us is None else {**given, "policy": STEPPED}

    @model_validator(mode="after")
    def _on_the_cpu(self) -> RunConfig:
        if self.emulate and self.device == "cuda":
            raise ValueError("emulate has the CPU stand in for a GPU, but device is cuda: leave one of them out")
        return self

    @property
    def stands_in(self) -> bool:
        """Whether the CPU is asked to stand in for a GPU: by `emulate`, or by something that only slots have."""
        store = self.cluster.store
        return (
            self.emulate or self.budget is not None or self.policy != DEFAULT_POLICY or self.asks_for_auto
            or not self.model_fields_set.isdisjoint({"link", "ndp"}) or self.cluster.shards > 1
            or store.layout != "replicated" or store.nodes != "workers"
        )  # fmt: skip

    @property
    def maps_experts(self) -> bool:
        """Whether experts run where the store maps them; where a Ray is joined, unless its nodes have GPUs."""
        return not (self.stands_in or self.device == "cuda" or self._on_a_gpu_here)

    @property
    def asks_for_auto(self) -> bool:
        """Whether something is given that only `auto` can carry out."""
        return "ndp_workers" in self.cluster.model_fields_set

    @property
    def chosen_budget(self) -> str | float | int:
        """The budget as given; else `auto` on a GPU of this machine whose free memory is known, and a quarter."""
        if self.budget is not None:
            return self.budget
        return AUTO if self._on_a_gpu_here and gpus_free_bytes() else DEFAULT_BUDGET

    @property
    def model_dir(self) -> Path:
        return Path(self.model).expanduser() if self.model is not None else default_model_dir()

    @property
    def worker_threads(self) -> int:
        """Torch threads of the worker: one core stays free for the driver, the store and Ray.

        A worker on a GPU has little to compute on the CPU, which it leaves to an NDP worker.
        """
        if self.threads is not None:
            return self.threads
        free = max(1, usable_cores() - 1)
        return min(_GPU_WORKER_THREADS, free) if self._on_a_gpu_here else free

    @property
    def ndp_threads(self) -> int:
        """Threads of each NDP worker's kernels: 1, and beside a GPU of this machine a share of the cores left over."""
        if self.ndp.threads is not None:
            return self.ndp.threads
        if not self._on_a_gpu_here:
            return 1
        workers = 1 if self.cluster.ndp_workers == "per-node" else max(1, self.cluster.ndp_workers)
        left = usable_cores() - self.worker_threads * self.cluster.shards - int(STORE_CPUS)
        return max(1, left // workers)

    def ndp_workers(self, policy: PolicySettings) -> int:
        """NDP workers on one machine.

        On a GPU none that nobody asked for: they round otherwise than slots, and the clock decides what they compute.
        """
        if not policy.uses_ndp or (
            self.may_drop_workers(policy) and (self._on_a_gpu_here or not self._has_core_to_spare)
        ):
            return 0
        wanted = self.cluster.ndp_workers
        return 1 if wanted == "per-node" else wanted

    def may_drop_workers(self, policy: PolicySettings) -> bool:
        """Whether NDP workers are started only without a GPU, and where there is room for them."""
        return policy.placement.optional_workers and "ndp_workers" not in self.cluster.model_fields_set

    @property
    def _has_core_to_spare(self) -> bool:
        """Whether the leads and shards of this machine leave a core to NDP workers; the nodes of a Ray that is joined
        say it themselves.
        """
        if self.ray.address is not None:
            return True
        workers = self.cluster.replicas * self.worker_threads * self.cluster.shards
        stores = self.cluster.replicas * int(STORE_CPUS)
        given = self.ray.num_cpus
        if given is not None and given < workers + stores + self.cluster.replicas * self.ndp_threads:
            return False
        return usable_cores() > workers

    def cpus_of_actors(self, policy: PolicySettings) -> int:
        """CPUs that lead, shards, one store and the NDP workers of all replica groups take."""
        workers = self.worker_threads * self.cluster.shards
        return self.cluster.replicas * (workers + int(STORE_CPUS) + self.ndp_threads * self.ndp_workers(policy))

    @property
    def _on_a_gpu_here(self) -> bool:
        """Whether the worker runs on a GPU of this machine; of a cluster that is joined nothing is known here."""
        auto = self.device == "auto" and not self.emulate and has_gpu()
        return self.ray.address is None and (self.device == "cuda" or auto)


def configs_dir() -> Path:
    """The presets that ship with the package."""
    return _PACKAGE_ROOT / "configs"


def default_model_dir() -> Path:
    """The model that ships with the project."""
    return _PACKAGE_ROOT / "models" / "tiny-moe"


def load_policy(name_or_path: str) -> PolicySettings:
    """Read a policy preset by its name, or any policy file by its path.

    Raises:
        ConfigError: no such preset or file, or its content is refused; or it is the default, which a start decides.
    """
    if name_or_path == DEFAULT_POLICY:
        raise ConfigError(
            f"policy '{DEFAULT_POLICY}' is decided where a runtime starts, by its device and link",
            f"name the policy here: {STEPPED} or {AUTO}",
        )
    return _policy(name_or_path, ())


def _policy(name_or_path: str, more_names: Sequence[str]) -> PolicySettings:
    path = _preset("policies", name_or_path, "policy", more_names)
    try:
        return PolicySettings(**read_yaml(path))
    except ValidationError as error:
        raise explain(error, PolicySettings, str(path)) from error


def chosen_policy(name_or_path: str) -> PolicySettings:
    """A policy; of the default one, `auto` until `topology.decided` has decided. Raises as `load_policy`."""
    return _policy(AUTO if name_or_path == DEFAULT_POLICY else name_or_path, (DEFAULT_POLICY,))


def load_hardware(hardware: str | Mapping[str, Any]) -> NdpDevice:
    """An NDP device: its figures, its name in configs/hardware, or the path of any such file.

    Raises:
        ConfigError: no such device or file, or its content is refused.
    """
    if isinstance(hardware, str):
        path = _preset("hardware", hardware, "hardware")
        source, figures = str(path), read_yaml(path)
    else:
        source, figures = "ndp.hardware", dict(hardware)
    try:
        return NdpDevice.from_dict(figures)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}", "compare it with configs/hardware/paper-ndp.yaml") from error


def load_run_config(file: str | None = None, options: Mapping[str, Any] | None = None) -> RunConfig:
    """Read a run configuration.

    Args:
        file: path of a YAML file, or the name of one in configs/clusters; None: the defaults.
        options: command-line options by key (nested for sections); None is left out, but for `link.gbps`, whose None
            is a value: unthrottled.

    Raises:
        ConfigError: the file is missing or malformed, a key is unknown, or a value is out of range.
    """
    base = read_yaml(_preset("clusters", file, "configuration file")) if file is not None else {}
    given = _without_none(options or {})
    if "tokens" in given.get("kv", {}) and isinstance(pages := base.get("kv"), dict):  # the option wins
        base = base | {"kv": {name: value for name, value in pages.items() if name != "num_blocks"}}
    try:
        return RunConfig(**merged(base, given))
    except ValidationError as error:
        raise explain(error, RunConfig, file or "the run configuration", given) from error


def on_this_machine(config: RunConfig) -> RunConfig:
    """The configuration with a device that is here; of a cluster that is joined nothing is known yet.

    Raises:
        ConfigError: there is none, or a GPU that CUDA cannot use; or a process is to have more threads than this
            machine has cores for it.
    """
    if config.ray.address is not None:
        return config
    check_threads("threads", config.threads)
    check_threads("ndp.threads", config.ndp.threads)
    check_gpu(config.device)
    if config.device == "cuda" and not has_gpu():
        raise absent()
    # Ray counts a GPU for each entry of CUDA_VISIBLE_DEVICES, also for one that hides them all
    return config.model_copy(update={"device": "cpu"}) if hidden() or config.emulate else config


def engine_settings(config: RunConfig, *, trace: bool = False) -> EngineSettings:
    """What the worker needs, with policy and budget resolved and checked against each other.

    Raises:
        ConfigError: unknown policy, one that does not go with several GPUs, fewer CPUs than threads, or a setting of a
            local Ray for one that is joined.
        BudgetError: budget malformed, or too small for the policy.
    """
    mapped = config.maps_experts
    policy = chosen_policy(MAPPED if mapped else config.policy)
    budget = Budget(mapped=True) if mapped else Budget.parse(config.chosen_budget, auto=True)
    _check_ray(config, policy)
    resolved = {"threads": config.ndp_threads, "hardware": asdict(load_hardware(config.ndp.hardware))}
    settings = EngineSettings(
        **{name: getattr(config, name) for name in EngineOptions.model_fields if name != "ndp"},
        ndp=config.ndp.model_copy(update=resolved),
        policy=policy,
        budget=budget,
        threads=config.worker_threads,
        shards=ShardSettings(count=config.cluster.shards, ownership=config.cluster.ownership),
        store=config.cluster.store,
        trace=trace,
    )
    check_combination(settings)
    return settings


def _check_ray(config: RunConfig, policy: PolicySettings) -> None:
    """Refuse settings of a local Ray for one that is joined, and fewer CPUs than the actors' threads."""
    local_only = sorted({"num_cpus", "object_store_bytes", "dashboard"} & config.ray.model_fields_set)
    joined, cpus, threads = config.ray.address is not None, config.ray.num_cpus, config.worker_threads
    needed, shards, ndp = config.cpus_of_actors(policy), config.cluster.shards, config.ndp_workers(policy)
    times = f" on each of {shards} GPUs" if shards > 1 else ""
    who = f"{ndp} NDP workers with" if ndp > 1 else "the NDP worker's"
    near = f", {who} {config.ndp_threads}" if ndp else ""
    refuse_first((
        Refusal(
            joined and bool(local_only),
            f"ray.{''.join(local_only[:1])} describes a local Ray, but ray.address joins a running one",
            "leave one of them out",
        ),
        Refusal(
            not joined and cpus is not None and cpus < needed,
            f"ray.num_cpus is {cpus}, but the worker's {threads} threads{times}{near} and the store need {needed}",
            "raise ray.num_cpus, or lower threads",
        ),
    ))  # fmt: skip


def check_model_is_there(path: Path) -> None:
    """Refuse a model that is no directory. Raises CheckpointError."""
    if path.is_dir():
        return
    remedy = (
        "make it with `make train-default-model`, or pass --model DIRECTORY"
        if path == default_model_dir()
        else "pass --model a checkpoint's folder (safetensors, config.json, tokenizer), or ORG/NAME of a hub"
    )
    what = f"'{path}' is a file, and no GGUF file" if path.is_file() else f"no model at '{path}'"
    raise CheckpointError(what, remedy)


def check_model_dir(path: Path) -> None:
    """Refuse a model directory that cannot be served, before anything is started.

    Raises:
        CheckpointError: no such directory, or one without config.json or a tokenizer.
    """
    check_model_is_there(path)
    for name, there in (("config.json", (path / "config.json").is_file()), ("tokenizer.json", has_tokenizer(path))):
        if not there:
            whole, own = "download the whole checkpoint, with its tokenizer", shown(path)
            remedy = whole if own == path else f"put the model's {name} beside it"  # own: a GGUF file
            raise CheckpointError(f"'{own}' has no {name}", remedy)


def _presets(section: str) -> list[str]:
    """Names of the files in configs/SECTION, sorted."""
    return sorted(path.stem for path in (configs_dir() / section).glob("*.yaml"))


def _preset(section: str, name_or_path: str, what: str, more_names: Sequence[str] = ()) -> Path:
    """The file of a preset: a bare word is a name in configs/SECTION; with a suffix or a separator it is a path.

    Args:
        more_names: names that the caller takes, too, and that have no file.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml") and len(path.parts) == 1:
        path = configs_dir() / section / f"{name_or_path}.yaml"
    if not path.is_file():
        raise no_such_name(what, name_or_path, sorted([*_presets(section), *more_names]))
    return path


def no_such_name(what: str, given: str, known: Sequence[str]) -> ConfigError:
    """The refusal of a name that is not among the known ones, nor a file."""
    near = difflib.get_close_matches(given, known, n=1)
    choose = f"did you mean '{near[0]}'?" if near else f"choose one of {', '.join(known)},"
    return ConfigError(f"no {what} '{given}'", f"{choose} or give the path of a YAML file")


def _without_none(options: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """The options that are given: `link.gbps` may be given as None, which is a link that is not throttled."""
    cleaned = {
        k: _without_none(v, k) if isinstance(v, Mapping) else v
        for k, v in options.items()
        if v is not None or (section, k) == ("link", "gbps")
    }
    return {k: v for k, v in cleaned.items() if v != {}}
