"""Configuration: budgets, presets, YAML files, cores, and what is said when they are wrong."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import Command
from fakes import FAKE_FACTS
from hypothesis import given
from hypothesis import strategies as st
from policy_presets import POLICIES
from pydantic import BaseModel
from serving import policy, settings

from tiermoe.actors import ndp_worker
from tiermoe.actors.budget import AutoBudget, Budget
from tiermoe.actors.settings import KvSettings, LinkSettings, NdpSettings, ShardSettings
from tiermoe.cluster import config as config_module
from tiermoe.cluster.api.settings import ApiSettings
from tiermoe.cluster.config import (
    ClusterConfig,
    RunConfig,
    check_model_dir,
    configs_dir,
    default_model_dir,
    engine_settings,
    load_hardware,
    load_policy,
    load_run_config,
    on_this_machine,
)
from tiermoe.cluster.jobs.keys import filled, keys
from tiermoe.cluster.jobs.options import RUNTIME, Policy, check_budget, with_options
from tiermoe.cluster.jobs.prepare import default_store_dir
from tiermoe.cluster.topology import inputs as inputs_module
from tiermoe.cluster.topology.decided import decided
from tiermoe.cluster.topology.inputs import LocalRay, local_notes, local_ray, this_machine
from tiermoe.cluster.topology.spec import NodeInfo, cluster_spec
from tiermoe.cluster.worker_process import Role
from tiermoe.errors import BudgetError, CheckpointError, ConfigError


def test_budgets() -> None:
    shares = {"0.25": 0.25, "25%": 0.25, "100 %": 1.0, "1": 1.0, ".5": 0.5, 0.5: 0.5, 1: 1.0}
    for text, share in shares.items():
        assert Budget.parse(text) == Budget(share=share)
    for size, nbytes in {"512MiB": 512 * 2**20, "1GB": 10**9, "1.5 kib": 1536, "7B": 7}.items():
        assert Budget.parse(size) == Budget(nbytes=nbytes)
    assert Budget.parse(" Auto ", auto=True) == Budget(auto=AutoBudget())
    for wrong in ("0", "0%", "0B", "-1", "2", "101%", "nan", "inf", "", "junk", "auto", "0.5B", "1e400GB", "1XB"):
        with pytest.raises(BudgetError, match=re.escape(f"budget '{wrong}'")):
            Budget.parse(wrong)


@given(st.text(max_size=12))
def test_any_text_is_a_budget_or_a_typed_error(text: str) -> None:
    try:
        found = Budget.parse(text)
    except BudgetError:
        return
    assert found.share is not None or (found.nbytes or 0) >= 1


def test_presets_are_valid_and_carry_their_file_name() -> None:
    assert {"all-resident", "next-gate", "on-demand", "context-ndp-3bit", "monde"} <= set(POLICIES)
    assert all(load_policy(name).name == name and load_policy(name).description for name in POLICIES)
    for path in (configs_dir() / "clusters").glob("*.yaml"):
        settings = engine_settings(load_run_config(str(path)))
        assert "max_batch_tokens" not in settings.kv.model_fields_set, "a GPU's memory decides it"
    assert load_run_config("laptop") == RunConfig(device="cpu", emulate=True)


def test_options_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("budget: 0.5\nlink: {gbps: 3.0, latency_us: 7}\n")
    config = load_run_config(str(file), {"budget": "10%", "policy": None, "link": {"gbps": 4.0, "latency_us": None}})
    assert (config.budget, config.link.gbps, config.link.latency_us) == ("10%", 4.0, 7)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + below] * 9)}]\n" for below, name in pairwise("abcdefghi")
)


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
        ("model: &a [*a]", "line 1: an alias contains itself"),
        pytest.param(_BOMB + "model: *i", "aliases repeat too much", id="a bomb of aliases"),
        ("model: a\nmodel: b", "line 2: key 'model' occurs twice"),
        ("- 1", "is not a mapping"),
        ("a: [", "line 1"),
        ("!!python/object:os.system {}", "not valid YAML"),
        ("budget: 2024-13-45", "not valid YAML: month must be in 1..12"),
        pytest.param("[" * 1000, "not valid YAML", id="deeper than Python's stack"),
        ("budget: yes", "key 'budget' is True"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, yaml: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_run_config(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"link": {"gbps": -1.0}}, "--link-gbps is -1"),
        ({"cluster": {"shards": 65}}, r"^--shards is 65; input should be less than or equal to 64$"),
        ({"cluster": {"ndp_workers": "many"}}, r"^--ndp-workers is 'many'; input should be 'per-node', or a valid int"),
        ({"cluster": {"ndp_workers": 0}}, r"^--ndp-workers is 0; input should be 'per-node', or greater than or equal"),
        ({"ndp": {"cores": [-1]}}, "cores"),
    ],
)
def test_a_bad_option_is_named_as_it_is_written(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_config(None, options)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no policy 'magic'; choose one of .*all-resident, .*next-gate, on-demand"):
        load_policy("magic")
    with pytest.raises(ConfigError, match=r"no configuration file 'moon'.*laptop, .*one-gpu"):
        load_run_config("moon")
    with pytest.raises(ConfigError, match="did you mean 'on-demand'"):
        load_policy("on-demnd")


@pytest.mark.parametrize(
    ("given", "gbps", "latency_us"),
    [({}, 16, 10), ({"gbps": 2}, 2, 10), ({"latency_us": 5}, 16, 5), ({"gbps": 2, "latency_us": 0}, 2, 0),
     ({"gbps": None}, None, 0), ({"gbps": None, "latency_us": 5}, None, 5), ({"layer_us": 100}, 16, 10)],
)  # fmt: skip
def test_a_link_that_is_given_in_part_keeps_the_other_defaults(
    given: dict[str, Any], gbps: float | None, latency_us: float
) -> None:
    """`--link-gbps 2` had no latency, `--link-latency-us 5` a link that was not throttled, and `gbps=None`, of
    `tiermoe record`, one of 16 GB/s.
    """
    for link in (RunConfig(link=given).link, load_run_config(None, {"link": given}).link):  # type: ignore[arg-type]
        assert (link.gbps, link.latency_us) == (gbps, latency_us)


def test_the_default_policy_is_a_name_where_a_start_decides_it() -> None:
    """`--policy defualt` was answered with the 48 presets, without the one that was meant."""
    with pytest.raises(ConfigError, match=r"did you mean 'default'\?"):
        engine_settings(RunConfig(policy="defualt"))
    with pytest.raises(ConfigError, match=r"choose one of .*, default, drop"):
        engine_settings(RunConfig(policy="magic"))


def test_the_default_policy_is_refused_where_no_runtime_starts() -> None:
    """`replay --policy default` said that there is no such policy."""
    with pytest.raises(ConfigError, match=r"'default' is decided where a runtime starts.*name .*: next-gate or auto"):
        load_policy("default")
    with pytest.raises(ConfigError, match=r"choose one of (?!.*default)"):  # nor is it offered
        load_policy("magic")


@pytest.mark.parametrize(
    ("lossless", "body", "message"),
    [
        ("false", "placement: {kind: context}\nprecision: {kind: uniform}", "takes bits"),
        ("false", "placement: {kind: context}\nprecision: {kind: full, bits: 3}", "takes no bits"),
        ("false", "placement: {kind: context}\nprecision: {kind: uniform, bits: 5}", "1, 2, 3, 4 or 8"),
        ("false", "placement: {kind: context}\nprecision: {kind: prefix-split, bits: 4.5}", "1 to 4 bits on average"),
        ("false", "precision: {kind: uniform, bits: 3}", "placement cache does not use"),
        ("false", "placement: {kind: static}\nprefetch: {kind: next-gate}", "leave prefetch and preload out"),
        ("true", "placement: {kind: context}\nprecision: {kind: uniform, bits: 3}", "not lossless"),
        ("true", "prefetch: {kind: next-gate, distance: 0}", "at least one layer ahead"),
        ("true", "prefetch: {kind: layerwise, distance: 2}", "this layer (0) or the next (1)"),
        ("true", "prefetch: {kind: next-gate, dynamic: false}", "are of expert maps"),
        ("true", "prefetch: {kind: expert-map, synchronous: true}", "never waits for the matcher"),
        ("true", "prefetch: {kind: expert-map, top: 3}", "leave top out"),
        ("true", "prefetch: {kind: next-gate}\neviction: expert-map", "eviction expert-map goes by maps"),
    ],
)
def test_policies_that_contradict_themselves(lossless: str, body: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nlossless: {lossless}\n{body}\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_policy(str(file))


def test_what_a_matcher_does_is_said_by_policy_and_run() -> None:
    found = engine_settings(RunConfig(policy="fmoe-ts", threads=1, matcher={"capacity": 7}))
    maps = found.policy.maps
    assert maps is not None
    assert (found.matcher.capacity, maps.distance, maps.semantic, maps.dynamic) == (7, 3, True, False)


def test_hardware_profiles(tmp_path: Path) -> None:
    for path in (configs_dir() / "hardware").glob("*.yaml"):
        assert load_hardware(path.stem).name == path.stem
    with pytest.raises(ConfigError, match=r"no hardware 'abacus'; choose one of .*paper-ndp"):
        load_hardware("abacus")
    file = tmp_path / "mine.yaml"
    file.write_text("name: mine\n")
    with pytest.raises(ConfigError, match="is missing"):
        load_hardware(str(file))


_JOINED = {"address": "10.0.0.5:6379"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "monde", "threads": 2, "ndp": {"threads": 3}, "ray": {"num_cpus": 5}},
         "the NDP worker's 3 and the store need 6"),
        ({"policy": "context-ndp-full", "threads": 2, "ndp": {"threads": 3}, "ray": {"num_cpus": 9},
          "cluster": {"shards": 2, "ndp_workers": 2}},
         "the worker's 2 threads on each of 2 GPUs, 2 NDP workers with 3 and the store need 11"),
        ({"threads": 4, "ray": {"num_cpus": 4}}, "4 threads and the store need 5"),
        ({"policy": "monde", "cluster": {"shards": 2}}, "there are to be 2 GPUs"),
        ({"threads": 1, "ray": _JOINED | {"num_cpus": 8}}, "ray.num_cpus describes a local Ray"),
        ({"threads": 1, "ray": _JOINED | {"object_store_bytes": 100_000_000}},
         "ray.object_store_bytes describes a local Ray"),
    ],
)  # fmt: skip
def test_settings_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_settings(load_run_config(None, options))


def test_settings_that_agree() -> None:
    engine_settings(load_run_config(None, {"threads": 1, "ray": _JOINED}))
    two = load_run_config(None, {"policy": "context-ndp-full", "cluster": {"shards": 2}})
    assert engine_settings(two).shards.count == 2
    actors = {"threads": 2, "ndp": {"threads": 3}, "cluster": {"shards": 2, "ndp_workers": 2}}
    room_for_all = load_run_config(None, actors | {"policy": "context-ndp-full"})
    assert local_ray(room_for_all, engine_settings(room_for_all)) == LocalRay(11, {"ndp": 2.0})


@pytest.mark.parametrize(
    ("gpus", "enough", "says"),
    [(1, 1.0, r"--budget 1\.0")]
    + [(n, 1 / n, rf"on {n} GPUs, but the budget of each is .*--budget 1\.0") for n in (2, 3, 4)],
)
def test_all_resident_wants_its_part_on_each_gpu(gpus: int, enough: float, says: str) -> None:
    shards = ClusterConfig(shards=gpus)
    found = engine_settings(RunConfig(policy="all-resident", budget=enough, cluster=shards))
    assert (found.shards.count, found.budget.share) == (gpus, enough)
    with pytest.raises(BudgetError, match=says):
        engine_settings(RunConfig(policy="all-resident", budget=enough - 0.01, cluster=shards))


def test_a_model_directory_that_is_absent_or_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"folder .safetensors, config"):
        check_model_dir(tmp_path / "none")
    for missing in ("config.json", "tokenizer.json"):
        with pytest.raises(CheckpointError, match=f"has no {missing}"):
            check_model_dir(tmp_path)
        (tmp_path / missing).write_text("{}")
    monkeypatch.setattr("tiermoe.cluster.config._PACKAGE_ROOT", tmp_path)
    with pytest.raises(CheckpointError, match="train-default-model"):
        check_model_dir(default_model_dir())


@pytest.fixture(scope="module")
def store(mixtral_store: Any) -> Path:
    return Path(mixtral_store.describe().path)


_SLOT_BYTES = 3 * 48 * 32 * 4  # I = 48, H = 32, fp32


def test_bytes_for_one_expert_are_enough_and_one_less_is_not(store: Path) -> None:
    check_budget(settings(_SLOT_BYTES), store)
    with pytest.raises(BudgetError, match="holds no expert"):
        check_budget(settings(_SLOT_BYTES - 1), store)


@pytest.mark.parametrize(
    ("shards", "ownership", "most", "says"),
    [
        (1, "layer-expert", 8, "keeps all experts resident"),  # 2 layers of 4 experts
        (2, "layer-expert", 4, "on the fullest of 2 GPUs; the budget is 1 B short"),
        (3, "layer-expert", 3, "on the fullest of 3 GPUs; the budget is 1 B short"),
        (3, "expert", 4, "on the fullest of 3 GPUs; the budget is 1 B short"),
    ],
)
def test_all_resident_needs_what_the_fullest_gpu_owns(
    store: Path, shards: int, ownership: Any, most: int, says: str
) -> None:
    more = {"policy": policy(preload="all"), "shards": ShardSettings(count=shards, ownership=ownership)}
    check_budget(settings(most * _SLOT_BYTES, **more), store)
    with pytest.raises(BudgetError, match=says):
        check_budget(settings(most * _SLOT_BYTES - 1, **more), store)
    check_budget(settings(most / 8, **more), store)


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
    """Threads of the GPU worker and of each NDP worker, on a machine of 16 cores."""
    monkeypatch.setattr(config_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(config_module, "has_gpu", lambda: gpu)
    settings = engine_settings(load_run_config(None, {"policy": "context-ndp-full"} | given))
    assert (settings.threads, settings.ndp.threads) == threads


def test_workers_take_cores_in_turn() -> None:
    settings = NdpSettings(threads=2, cores=(4, 5, 6, 7, 9))
    assert [settings.cores_of(i) for i in range(3)] == [(4, 5), (6, 7), (4, 5)]
    assert NdpSettings(threads=2).cores_of(3) == ()
    assert pickle.loads(pickle.dumps(Role.ndp(settings).arguments))["settings"] == settings  # as a child gets them
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": [1, 0]}})
    assert engine_settings(config).ndp.cores_of(0) == (1, 0)


@pytest.mark.parametrize("cores", [(1,), (1, 1), (1, 2, 1)])
def test_too_few_cores_are_refused(cores: tuple[int, ...]) -> None:
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": list(cores)}})
    with pytest.raises(ConfigError, match="name at least 2 cores, each once"):
        engine_settings(config)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are bound on Linux only")
def test_the_worker_binds_its_threads() -> None:
    here = min(os.sched_getaffinity(0))
    assert ndp_worker._threads(NdpSettings(cores=(here,)), 0).count == 1
    with pytest.raises(ConfigError, match="NDP worker 0 cannot have 1 threads on cores"):
        ndp_worker._threads(NdpSettings(cores=(1023,), hardware=asdict(config_module.load_hardware("paper-ndp"))), 0)


# options


def test_options_come_from_the_fields() -> None:
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
    assert parameters["shards"].help == f"{_about(ClusterConfig, 'shards')}; default: 1."
    assert parameters["threads"].help == f"{_about(RunConfig, 'threads')}."
    assert parameters["link_gbps"].help == f"{_about(LinkSettings, 'gbps')}; default: 16."
    assert all(parameter.default is None for name, parameter in parameters.items() if name != "host")


def _about(model: type[BaseModel], field: str) -> str:
    text = model.model_fields[field].description or ""
    return text[0].upper() + text[1:]


def test_a_longer_request_gets_a_kv_cache_that_holds_one() -> None:
    assert KvSettings().request_tokens == 32 * 256
    longer = KvSettings(max_model_len=10_000)
    assert (longer.num_blocks, longer.request_tokens) == (313, 10_000)
    assert KvSettings(max_model_len=100).num_blocks == 256
    with pytest.raises(ValueError, match="is more than the 128 tokens that the KV cache holds"):
        KvSettings(max_model_len=10_000, num_blocks=4)


def test_the_kv_cache_is_sized_in_tokens() -> None:
    """Issue 30: its size was in no page and no option. `num_blocks` of a file stays another spelling."""
    assert (KvSettings().tokens, KvSettings().num_blocks) == (8192, 256)
    assert (KvSettings(tokens=5000).num_blocks, KvSettings(tokens=5000).request_tokens) == (157, 5024)
    assert KvSettings(num_blocks=64, page_size=16) == KvSettings(tokens=1024, page_size=16)
    assert KvSettings(**KvSettings(tokens=5000, max_model_len=3000).model_dump()).num_blocks == 157  # over a channel
    config = load_run_config("one-gpu", {"kv": {"tokens": 4096}})
    assert config.kv.num_blocks == 128
    assert load_run_config("one-gpu").kv.num_blocks == 2048


def test_an_option_wins_over_the_pages_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("kv:\n  num_blocks: 1000\n")
    assert load_run_config(str(file)).kv.tokens == 32_000
    assert load_run_config(str(file), {"kv": {"tokens": 64}}).kv.tokens == 64


@pytest.mark.parametrize(
    ("kv", "what", "remedy"),
    [
        ({"tokens": 0}, "--kv-tokens is 0", "greater than or equal to 8"),
        ({"tokens": -5}, "--kv-tokens is -5", "greater than or equal to 8"),
        ({"tokens": 20}, "kv: tokens 20 are 1 pages of 32", "give 64 to 33554432"),
        ({"tokens": 10**12}, "kv: tokens 1000000000000 are 31250000000 pages", "give 64 to 33554432"),
        ({"tokens": 64, "max_model_len": 65}, "kv: max_model_len 65 is more than the 64 tokens", "--kv-tokens"),
        ({"tokens": 64, "num_blocks": 2}, "kv: tokens and num_blocks both size the KV cache", "leave one out"),
        ({"num_blocks": 1.5}, "kv: num_blocks is not a whole number of pages", "give tokens"),
    ],
)
def test_a_kv_cache_that_cannot_be_is_refused_in_words(kv: dict[str, Any], what: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_run_config(None, {"kv": kv})
    assert what in refused.value.what
    assert remedy in refused.value.remedy
    assert "{" not in str(refused.value)  # no dictionary in a message


def test_the_page_of_keys_is_what_the_models_say() -> None:
    """Issue 30: 19 of 68 keys were in no page. `python -m tiermoe.cluster.jobs.keys` writes it again."""
    page = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text


def test_every_key_has_a_meaning_and_every_number_a_unit() -> None:
    server = list(keys(ApiSettings()))
    assert {"api_key_file", "limits.waiting"} <= {key.name for key in server}
    found = {key.name: key for key in [*server, *keys(RunConfig())]}
    assert len(found) >= 68
    assert {"kv.tokens", "cluster.store.copies", "link.layer_us"} <= set(found)
    assert not [name for name, key in found.items() if not key.meaning or not key.kind]
    assert not [name for name, key in found.items() if "number" in key.kind and not key.unit]
    assert not [name for name, key in found.items() if "none: " in key.meaning]  # "default: ", the word of the helps
    assert (found["kv.tokens"].option, found["kv.tokens"].default) == ("`--kv-tokens`", "8192")
    assert found["link.gbps"].default == "16"  # of a run, not of the section's class


def test_options_are_in_panels(command: Command) -> None:
    _, text, _ = command("run", "--help")
    panels = ["Options", "Model", "Memory", "Sampling", "Output", "Runtime", "Cluster", "Emulation"]
    places = [text.index(f"─ {panel} ─") for panel in panels]
    assert places == sorted(places)
    assert "org/name[@revision]" in text  # no markup
    assert "bool" not in text
    assert "--ndp-pace/--no-ndp-pace" in text
    names = ("--model ", "--policy ", "--budget ", "--max-tokens ", "--link-gbps ")
    assert sorted(names, key=text.index) == list(names)
    for args in ((), ("bench",), ("bench", "compare"), ("trace",), ("trace", "stats"), ("jobs",)):
        assert "<bool>" not in command(*args, "--help")[1], args
    memory = text[places[2] : places[3]]
    assert all(option in memory for option in ("--budget", "--max-model-len", "--max-num-seqs", "--host-memory"))


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store_dir(default_model_dir()).parent == tmp_path / "tiermoe" / "stores"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_store_dir(default_model_dir()).parent == Path.home() / ".cache" / "tiermoe" / "stores"


def test_host_memory_bounds_what_a_plan_may_take() -> None:
    config = load_run_config(None, {"cluster": {"host_memory": "1MB"}})
    (node,) = this_machine(local_ray(config, engine_settings(config)))
    assert node.resources["memory"] == 1e6


@pytest.mark.parametrize(
    ("given", "expert_bytes", "gpu", "policy"),
    [
        ({"emulate": True}, 192 << 10, False, "next-gate"),  # 12 us at 16 GB/s, and 10
        ({"emulate": True}, 799_999, False, "next-gate"), ({"emulate": True}, 800_000, False, "auto"),  # 60 us
        ({}, 192 << 10, True, "next-gate"),  # of a Ray that is joined: only its nodes say that there are GPUs
        ({"link": {"gbps": 2.0}}, 192 << 10, False, "auto"), ({"link": {"gbps": 8.0}}, 192 << 10, False, "next-gate"),
        ({"link": {"gbps": 8.0}}, 9 << 20, False, "auto"), ({"link": {"gbps": 8.0}}, 9 << 20, True, "next-gate"),
        ({"link": {"gbps": None}}, 9 << 20, False, "next-gate"), ({"cluster": {"shards": 2}}, 9 << 20, False, "auto"),
        ({"link": {"gbps": 2.0, "layer_us": 5.0}}, 9 << 20, False, "next-gate"),
        ({"cluster": {"ndp_workers": 2}}, 192 << 10, False, "auto"), ({"cluster": {"ndp_workers": 2}}, 1, True, "auto"),
        ({"policy": "auto"}, 192 << 10, True, "auto"),
        ({"policy": "on-demand"}, 9 << 20, False, "on-demand"), ({"policy": "default"}, 9 << 20, True, "next-gate"),
    ],
)  # fmt: skip
def test_the_default_policy(given: dict[str, Any], expert_bytes: int, gpu: bool, policy: str) -> None:
    """It was `auto` everywhere, which took 1.04 to 1.19 of next-gate's time on quick links, and 1.7 on a GPU."""
    config = RunConfig(**{"dtype": "float16", **given})  # 2 bytes a number, on either device
    facts = replace(FAKE_FACTS, expert_elements=expert_bytes // 2, item_bytes=2)
    if expert_bytes == 799_999:
        facts = replace(facts, form="q4_0", form_bytes=expert_bytes)
    nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": int(gpu)})]
    settings, why = decided(config, engine_settings(config), facts, nodes, here=False)
    assert settings.policy.name == policy
    said = [line for line in why if line.startswith("the default policy is")]
    assert len(said) == (config.policy == "default")
    assert all(f"the default policy is {policy} here" in line for line in said)


@pytest.mark.parametrize(
    ("given", "mapped"),
    [
        ({}, True), ({"device": "cpu"}, True), ({"dtype": "bfloat16", "threads": 1}, True),
        ({"kv": {"tokens": 64}}, True),
        ({"cluster": {"replicas": 2}}, True), ({"ray": {"address": "head:6379"}}, True),
        ({"emulate": True}, False), ({"budget": "0.5"}, False), ({"budget": "auto"}, False), ({"link": {}}, False),
        ({"link": {"gbps": None}}, False), ({"policy": "on-demand"}, False), ({"cluster": {"ndp_workers": 1}}, False),
        ({"ndp": {"threads": 2}}, False), ({"cluster": {"shards": 2}}, False),
        ({"cluster": {"store": {"nodes": "marked"}}}, False), ({"cluster": {"store": {"layout": "sliced"}}}, False),
        ({"cluster": {"ndp_workers": 2}, "ray": {"address": "head:6379"}}, False),
    ],
)  # fmt: skip
def test_without_a_gpu_experts_run_where_the_store_maps_them(given: dict[str, Any], mapped: bool) -> None:
    """A machine without a GPU got a quarter of the experts behind a throttled link, although all fit."""
    config = RunConfig(**given)
    facts, nodes = FAKE_FACTS, [NodeInfo("a", "1", True, {"CPU": 8, "memory": 1 << 40})]
    settings, why = decided(config, engine_settings(config), facts, nodes, here=False)
    assert settings.budget.mapped == mapped
    assert (settings.policy.name == "all-resident") == mapped
    assert any("--emulate stands in for a GPU" in line for line in why) == mapped
    spec = cluster_spec(config, settings, facts, nodes)
    assert (spec.mapped, spec.budget_bytes == 0) == (mapped, mapped)


def test_a_gpu_takes_the_budget_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = RunConfig(ray={"address": "head:6379"})  # type: ignore[arg-type]
    nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": 1})]
    settings, _ = decided(joined, engine_settings(joined), FAKE_FACTS, nodes, here=False)
    assert settings.budget == Budget(share=0.25)
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)
    assert not engine_settings(RunConfig()).budget.mapped
    assert on_this_machine(RunConfig(emulate=True)).device == "cpu"  # the CPU stands in beside a GPU, too
    with pytest.raises(ConfigError, match="emulate has the CPU stand in for a GPU, but device is cuda"):
        load_run_config(None, {"emulate": True, "device": "cuda"})


@pytest.mark.parametrize(
    ("cores", "gpu", "given", "workers"),
    [
        (1, False, {}, 0), (2, False, {}, 1), (16, False, {}, 1), (2, False, {"threads": 2}, 0),
        (2, False, {"cluster": {"replicas": 2}}, 0), (4, False, {"ray": {"num_cpus": 4}}, 0),
        (4, False, {"ray": {"num_cpus": 5}}, 1), (64, True, {}, 0), (4, True, {"cluster": {"ndp_workers": 1}}, 1),
        (1, False, {"ray": {"address": "head:6379"}}, 1),
        (1, False, {"cluster": {"ndp_workers": 2}}, 2), (1, False, {"policy": "auto"}, 0),
    ],
)  # fmt: skip
def test_auto_takes_no_core_of_the_leads_and_shards_and_none_beside_a_gpu(
    cores: int, gpu: bool, given: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it took each miss there or near data by the clock, which round differently."""
    monkeypatch.setattr(config_module, "usable_cores", lambda: cores)
    monkeypatch.setattr(config_module, "has_gpu", lambda: gpu)
    assert load_run_config(None, given).ndp_workers(load_policy("auto")) == workers


@pytest.mark.parametrize(("gpus", "given", "workers"), [(1, {}, False), (0, {}, True), (1, {"ndp_workers": 1}, True)])
def test_near_data_beside_a_gpu_is_asked_for(gpus: int, given: dict[str, Any], workers: bool) -> None:
    """A joined Ray whose nodes have both: an NDP worker would round otherwise than the GPU."""
    config = load_run_config(None, {"policy": "auto", "ray": {"address": "head:6379"}, "cluster": given})
    nodes = [NodeInfo("a", "1", True, {"CPU": 8, "GPU": gpus, "ndp": 1})]
    settings, why = decided(config, engine_settings(config), FAKE_FACTS, nodes, here=False)
    assert (cluster_spec(config, settings, FAKE_FACTS, nodes).ndp is not None) == workers
    assert any("--ndp-workers asks for one" in line for line in why) == (not workers)


def test_help_and_notes_say_what_the_default_policy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help named neither exception, and on a CPU a note compared the times with those of a GPU."""
    said = {key.name: key.meaning for key in keys(RunConfig())}
    assert "link.layer_us" in said["policy"]
    assert config_module.STEPPED in said["policy"]
    assert "layer_us" not in Policy.__metadata__[0].help  # of replay and eval, whose defaults differ
    assert "policy auto" in said["cluster.ndp_workers"]
    monkeypatch.setattr(config_module, "usable_cores", lambda: 2)
    monkeypatch.setattr(inputs_module, "usable_cores", lambda: 2)
    config = load_run_config(None, {"emulate": True})
    (note,) = local_notes(config, engine_settings(config))
    assert "reserve 3 CPUs and share the 2" in note
    assert "GPU" not in note
