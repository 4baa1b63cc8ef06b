"""Configuration: budgets, presets, YAML files, cores, and what is said when they are wrong."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from serving import policy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors import ndp_worker
from tiermoe.actors.settings import LinkSettings, NdpSettings, ShardSettings
from tiermoe.cluster import config as config_module
from tiermoe.cluster import host as cores_module
from tiermoe.cluster.config import (
    ClusterConfig,
    RaySettings,
    RunConfig,
    check_model_dir,
    configs_dir,
    default_model_dir,
    engine_settings,
    load_hardware,
    load_policy,
    load_run_config,
    parse_budget,
    policy_names,
)
from tiermoe.cluster.jobs.options import RUNTIME, check_budget, with_options
from tiermoe.cluster.topology.inputs import LocalRay, local_ray
from tiermoe.cluster.worker_process import Role
from tiermoe.errors import BudgetError, CheckpointError, ConfigError, TierMoeError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.25", 0.25),
        ("25%", 0.25),
        ("100 %", 1.0),
        ("1", 1.0),
        (".5", 0.5),
        (0.5, 0.5),
        ("512MiB", 512 * 2**20),
        ("1GB", 10**9),
        ("1.5 kib", 1536),
        ("7B", 7),
    ],
)
def test_budget(text: str | float, value: float | int) -> None:
    parsed = parse_budget(text)
    assert parsed == value
    assert type(parsed) is type(value)


_BAD_BUDGETS = ["0", "0%", "0B", "-1", "2", "101%", "nan", "inf", "", "junk", "0.5B", "1e400GB", "1XB"]


@pytest.mark.parametrize("text", _BAD_BUDGETS)
def test_budget_out_of_range_or_junk(text: str) -> None:
    with pytest.raises(BudgetError, match=re.escape(f"budget '{text}'")):
        parse_budget(text)


@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_a_typed_error(text: str) -> None:
    try:
        value = parse_budget(text)
    except BudgetError:
        return
    assert (isinstance(value, float) and 0 < value <= 1) or (isinstance(value, int) and value >= 1)


def test_presets_are_valid_and_carry_their_file_name() -> None:
    assert {"all-resident", "next-gate", "on-demand", "context-ndp-3bit", "monde"} <= set(policy_names())
    assert all(load_policy(name).name == name and load_policy(name).description for name in policy_names())
    for path in (configs_dir() / "clusters").glob("*.yaml"):
        engine_settings(load_run_config(str(path)))


def test_laptop_is_the_default() -> None:
    assert load_run_config("laptop") == RunConfig(device="cpu")


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("budget: 0.5\nlink: {gbps: 3.0, latency_us: 7}\n")
    config = load_run_config(str(file), {"budget": "10%", "policy": None, "link": {"gbps": 4.0, "latency_us": None}})
    assert (config.budget, config.link.gbps, config.link.latency_us) == ("10%", 4.0, 7)


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("modle: x", "run.yaml: unknown key 'modle'; did you mean 'model'?"),
        ("ray: {adress: x}", "run.yaml: unknown key 'ray.adress'; did you mean 'address'?"),
        ("link: {zzz: 1}", "run.yaml: unknown key 'link.zzz'; known keys: gbps, latency_us"),
        ("ray: {startup_deadline_s: -3}", "key 'ray.startup_deadline_s' is -3; input should be greater than 0"),
        ("device: tpu", "key 'device' is 'tpu'; input should be 'auto', 'cpu' or 'cuda'"),
        ("ray: 3", "key 'ray' is 3"),
        ("threads: two", "key 'threads' is 'two'"),
        ("model: a\nmodel: b", "line 2: key 'model' is there twice"),
        ("- 1", "is not a mapping"),
        ("a: [", "line 1"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("budget: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("[" * 3000, "not valid YAML"),
        ("budget: yes", "key 'budget' is True"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_run_config(str(file))
    assert "\n" not in str(caught.value)


def test_a_bad_option_is_named_as_the_option() -> None:
    with pytest.raises(ConfigError, match="--link-gbps is -1"):
        load_run_config(None, {"link": {"gbps": -1.0}})


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'magic'; choose one of .*all-resident, .*next-gate, on-demand"):
        load_policy("magic")
    with pytest.raises(ConfigError, match=r"no configuration file 'moon'.*laptop, .*one-gpu"):
        load_run_config("moon")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("placement: {kind: context}\nprecision: {kind: uniform}", "takes bits"),
        ("placement: {kind: context}\nprecision: {kind: full, bits: 3}", "takes no bits"),
        ("placement: {kind: context}\nprecision: {kind: uniform, bits: 5}", "1, 2, 3, 4 or 8"),
        ("placement: {kind: context}\nprecision: {kind: prefix-split, bits: 4.5}", "1 to 4 bits on average"),
        ("precision: {kind: uniform, bits: 3}", "placement cache does not use"),
        ("placement: {kind: static}\nprefetch: {kind: next-gate}", "leave prefetch and preload out"),
    ],
)
def test_placements_that_contradict_themselves(body: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nlossless: false\n{body}\n")
    with pytest.raises(ConfigError, match=message):
        load_policy(str(file))
    file.write_text("name: mine\nlossless: true\nplacement: {kind: context}\nprecision: {kind: uniform, bits: 3}\n")
    with pytest.raises(ConfigError, match="not lossless"):
        load_policy(str(file))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("prefetch: {kind: next-gate, distance: 0}", "at least one layer ahead"),
        ("prefetch: {kind: layerwise, distance: 2}", "this layer (0) or the next (1)"),
        ("prefetch: {kind: next-gate, dynamic: false}", "are of expert maps"),
        ("prefetch: {kind: expert-map, synchronous: true}", "never waits for the matcher"),
        ("prefetch: {kind: expert-map, top: 3}", "leave top out"),
        ("prefetch: {kind: next-gate}\neviction: expert-map", "eviction expert-map goes by maps"),
    ],
)
def test_prefetches_that_contradict_themselves(body: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nlossless: true\n{body}\n")
    with pytest.raises(ConfigError) as raised:
        load_policy(str(path))
    assert message in str(raised.value)


def test_what_a_matcher_does_is_said_by_policy_and_run(tmp_path: Path) -> None:
    run = RunConfig(policy="fmoe-ts", threads=1, matcher={"capacity": 7})
    found = engine_settings(run).matcher_settings
    assert (found.capacity, found.distance, found.semantic, found.dynamic) == (7, 3, True, False)


def test_hardware_profiles(tmp_path: Path) -> None:
    for path in (configs_dir() / "hardware").glob("*.yaml"):
        assert load_hardware(path.stem).name == path.stem
    with pytest.raises(ConfigError, match=r"no hardware 'abacus'; choose one of .*paper-ndp"):
        load_hardware("abacus")
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\n")
    with pytest.raises(ConfigError, match="is missing"):
        load_hardware(str(file))


def test_a_local_ray_needs_room_for_the_ndp_worker() -> None:
    config = load_run_config(None, {"policy": "monde", "threads": 2, "ndp": {"threads": 3}, "ray": {"num_cpus": 5}})
    with pytest.raises(ConfigError, match="the NDP worker's 3 and the store need 6"):
        engine_settings(config)


def test_a_policy_file_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\nlossless: true\n")
    assert load_policy(str(file)).name == "mine"
    file.write_text("name: mine\n")
    with pytest.raises(ConfigError, match="key 'lossless' is missing"):
        load_policy(str(file))


def test_all_resident_wants_the_whole_budget() -> None:
    with pytest.raises(BudgetError, match=r"--budget 1\.0"):
        engine_settings(RunConfig(policy="all-resident"))
    assert engine_settings(RunConfig(policy="all-resident", budget="100%")).budget == 1.0


@pytest.mark.parametrize(("gpus", "enough"), [(2, 0.5), (3, 1 / 3), (4, 0.25)])
def test_all_resident_on_several_gpus_wants_a_part_on_each(gpus: int, enough: float) -> None:
    shards = ClusterConfig(shards=gpus)
    assert engine_settings(RunConfig(policy="all-resident", budget=enough, cluster=shards)).shards.count == gpus
    with pytest.raises(BudgetError, match=rf"on {gpus} GPUs, but the budget of each is .*--budget 0\.\d+"):
        engine_settings(RunConfig(policy="all-resident", budget=enough - 0.01, cluster=shards))


def test_monde_wants_one_gpu() -> None:
    with pytest.raises(ConfigError, match="there are to be 2 GPUs"):
        engine_settings(RunConfig(policy="monde", cluster=ClusterConfig(shards=2)))
    assert engine_settings(RunConfig(policy="context-ndp-full", cluster=ClusterConfig(shards=2))).shards.count == 2


@pytest.mark.parametrize(("present", "missing"), [((), "config.json"), (("config.json",), "tokenizer.json")])
def test_an_incomplete_model_directory(tmp_path: Path, present: tuple[str, ...], missing: str) -> None:
    for name in present:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=f"has no {missing}"):
        check_model_dir(tmp_path)


def test_an_absent_model_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="pass --model the directory"):
        check_model_dir(tmp_path / "none")
    monkeypatch.setattr("tiermoe.cluster.config._PACKAGE_ROOT", tmp_path)
    with pytest.raises(CheckpointError, match="train-default-model"):
        check_model_dir(default_model_dir())


def test_threads_need_their_cpus() -> None:
    with pytest.raises(ConfigError, match="4 threads and the store need 5"):
        engine_settings(RunConfig(threads=4, ray=RaySettings(num_cpus=4)))


@pytest.mark.parametrize("own", [{"num_cpus": 8}, {"object_store_bytes": 100_000_000}])
def test_what_describes_a_local_ray_is_refused_for_a_joined_one(own: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"ray.{next(iter(own))} describes a local Ray"):
        engine_settings(RunConfig(threads=1, ray=RaySettings(address="10.0.0.5:6379", **own)))
    engine_settings(RunConfig(threads=1, ray=RaySettings(address="10.0.0.5:6379")))


def test_settings_are_frozen() -> None:
    config: Any = RunConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.budget = "1"


def test_cpus_of_a_local_ray_are_those_of_all_actors() -> None:
    actors = {"threads": 2, "ndp": {"threads": 3}, "cluster": {"shards": 2, "ndp_workers": 2}}
    config = load_run_config(None, actors | {"policy": "context-ndp-full", "ray": {"num_cpus": 9}})
    match = "the worker's 2 threads on each of 2 GPUs, 2 NDP workers with 3 and the store need 11"
    with pytest.raises(ConfigError, match=match):
        engine_settings(config)
    more = config.model_copy(update={"ray": config.ray.model_copy(update={"num_cpus": None})})
    assert local_ray(more, engine_settings(more)) == LocalRay(11, {"ndp": 2.0})


def test_options_of_the_cluster_are_named_as_they_are_written() -> None:
    with pytest.raises(ConfigError, match=r"^--shards is 65; input should be less than or equal to 64$"):
        load_run_config(None, {"cluster": {"shards": 65}})
    with pytest.raises(ConfigError, match=r"^--ndp-workers is 'many'"):
        load_run_config(None, {"cluster": {"ndp_workers": "many"}})


def test_what_a_gpu_is_told_reaches_the_engine() -> None:
    options = {
        "expert_kernel": "loop", "compile": "default", "copies": {"ahead_mib": 3},
        "link": {"gbps": 2.0, "latency_us": 1.0, "layer_us": 5.0},
    }  # fmt: skip
    settings = engine_settings(load_run_config(None, options))
    assert (settings.expert_kernel, settings.compile, settings.copies.ahead_mib) == ("loop", "default", 3)
    assert settings.link.layer_us == 5.0


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("budget")
    return Path(prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store").describe().path)


def test_bytes_for_one_expert_are_enough_and_one_less_is_not(store: Path) -> None:
    slot_bytes = 3 * 48 * 32 * 4  # I = 48, H = 32, fp32
    check_budget(settings(slot_bytes), store)
    with pytest.raises(BudgetError, match="holds no expert"):
        check_budget(settings(slot_bytes - 1), store)


def test_all_resident_needs_all(store: Path) -> None:
    all_bytes = 2 * 4 * 3 * 48 * 32 * 4  # 2 layers of 4 experts
    check_budget(settings(all_bytes, policy=policy(preload="all")), store)
    with pytest.raises(BudgetError, match="keeps all experts resident"):
        check_budget(settings(all_bytes - 1, policy=policy(preload="all")), store)


@pytest.mark.parametrize(
    ("shards", "ownership", "most"), [(2, "layer-expert", 4), (3, "layer-expert", 3), (3, "expert", 4)]
)
def test_all_resident_needs_what_the_fullest_gpu_owns(store: Path, shards: int, ownership: str, most: int) -> None:
    each = ShardSettings(count=shards, ownership=ownership)  # type: ignore[arg-type]
    needed = most * 3 * 48 * 32 * 4
    check_budget(settings(needed, policy=policy(preload="all"), shards=each), store)
    with pytest.raises(BudgetError, match=rf"on the fullest of {shards} GPUs; the budget is"):
        check_budget(settings(needed - 1, policy=policy(preload="all"), shards=each), store)
    share = most / 8
    check_budget(settings(share, policy=policy(preload="all"), shards=each), store)


def _threads(monkeypatch: pytest.MonkeyPatch, gpu: bool, **given: Any) -> tuple[int, int]:
    """Of the GPU worker and of each NDP worker, on a machine of 16 cores."""
    monkeypatch.setattr(config_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(config_module, "has_gpu", lambda: gpu)
    settings = engine_settings(load_run_config(None, {"policy": "context-ndp-full"} | given))
    return settings.threads, settings.ndp.threads


@pytest.mark.parametrize(
    ("gpu", "given", "threads"),
    [
        (False, {}, (15, 1)),  # the CPU stands in for the GPU and has all but one
        (True, {}, (4, 11)),  # one is the store's
        (True, {"device": "cpu"}, (15, 1)),
        (False, {"device": "cuda"}, (4, 11)),
        (True, {"threads": 6}, (6, 9)),
        (True, {"threads": 16}, (16, 1)),
        (True, {"ndp": {"threads": 3}}, (4, 3)),
        (True, {"cluster": {"ndp_workers": 2}}, (4, 5)),
        (True, {"cluster": {"shards": 2}}, (4, 7)),
        (True, {"ray": {"address": "10.0.0.5:6379"}}, (15, 1)),  # of the nodes of a cluster nothing is known here
    ],
)
def test_beside_a_gpu_the_ndp_worker_has_what_is_left(
    gpu: bool, given: dict[str, Any], threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _threads(monkeypatch, gpu, **given) == threads


def test_workers_take_cores_in_turn() -> None:
    settings = NdpSettings(threads=2, cores=(4, 5, 6, 7, 9))
    assert [settings.cores_of(i) for i in range(3)] == [(4, 5), (6, 7), (4, 5)]
    assert NdpSettings(threads=2).cores_of(3) == ()
    assert pickle.loads(pickle.dumps(Role.ndp(settings).arguments))["settings"] == settings  # as a child gets them
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": [1, 0]}})
    assert engine_settings(config).ndp.cores_of(0) == (1, 0)


@pytest.mark.parametrize("cores", [(1,), (1, 1), (1, 2, 1)])
def test_too_few_cores_are_refused(cores: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="name at least 2 cores, each once"):
        NdpSettings(threads=2, cores=cores).cores_of(0)
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": list(cores)}})
    with pytest.raises(ConfigError, match="name at least 2 cores, each once"):
        engine_settings(config)


def test_a_core_that_is_no_core_is_refused_by_the_configuration() -> None:
    with pytest.raises(TierMoeError, match="cores"):
        load_run_config(None, {"ndp": {"cores": [-1]}})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are bound on Linux only")
def test_the_worker_binds_its_threads() -> None:
    here = min(os.sched_getaffinity(0))
    assert ndp_worker._threads(NdpSettings(cores=(here,)), 0).count == 1
    with pytest.raises(ConfigError, match="NDP worker 0 cannot have 1 threads on cores"):
        ndp_worker._threads(NdpSettings(cores=(1023,), hardware=asdict(config_module.load_hardware("paper-ndp"))), 0)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("1200000 100000", 8), ("50000 100000", 1), ("nonsense", 8), (None, 8)],
)
def test_a_quota_of_the_control_group_bounds_the_cores(
    quota: str | None, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against as many threads as the host has cores in a container that may keep few of them busy."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cores_module, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores_module.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores_module.usable_cores() == cores


# options


def test_options_are_made_of_the_fields() -> None:
    """Names, types and help are those of `RunConfig`; a command gets the given ones, nested by section."""
    seen: list[dict[str, Any]] = []

    @with_options(*RUNTIME)
    def command(options: dict[str, Any], host: str = "h") -> None:
        seen.append(options | {"host": host})

    app = typer.Typer(add_completion=False)
    app.command()(command)
    given = ["--budget", "25%", "--link-gbps", "2", "--ndp-workers", "per-node", "--no-ndp-pace", "--host", "x"]
    app(given, standalone_mode=False)
    app([], standalone_mode=False)
    found = {
        "budget": "25%", "link": {"gbps": 2.0}, "cluster": {"ndp_workers": "per-node"}, "ndp": {"pace": False},
        "host": "x",
    }  # fmt: skip
    assert seen == [found, {"host": "h"}]
    parameters = {p.name: p for p in typer.main.get_command(app).params}
    assert parameters["shards"].help == f"{_about(ClusterConfig, 'shards')}. (1)"
    assert parameters["threads"].help == f"{_about(RunConfig, 'threads')}."
    assert parameters["link_gbps"].help == f"{_about(LinkSettings, 'gbps')}. (16)"
    assert all(parameter.default is None for name, parameter in parameters.items() if name != "host")


def _about(model: type[BaseModel], field: str) -> str:
    text = model.model_fields[field].description or ""
    return text[0].upper() + text[1:]
