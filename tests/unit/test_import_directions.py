"""The architecture, held by the imports.

cluster -> actors -> {proto, kernels}; inside actors: gpu_worker -> engine -> policies, and policies import nothing of
the rest but what is native.
"""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[2]
_PARTS = ("cluster", "actors", "proto", "kernels")
_LOWEST = ("errors", "limits")
_FILES = [
    *sorted(p for part in _PARTS for p in (_ROOT / part).rglob("*.py")), *(_ROOT / f"{name}.py" for name in _LOWEST),
]  # fmt: skip
_RAY_LIFE_CYCLE = {"init", "shutdown", "kill", "remote", "placement_group", "remove_placement_group"}


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _module(path: Path) -> str:
    """`actors.engine.cache` for actors/engine/cache/cache.py; a package is its own name."""
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path, on_load: bool = False) -> Iterator[str]:
    """The imports of a file, with those for type checkers; the package's own modules without `tiermoe.`.

    on_load: only those at module level.
    """
    package = path.relative_to(_ROOT).parent.parts
    tree = _tree(path)
    for node in tree.body if on_load else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module or ""
                continue
            base = package[: len(package) - (node.level - 1)]
            # `from .a import b` imports a, and a.b where that is a module
            module = ".".join((*base, node.module) if node.module else base)
            below = [f"{module}.{alias.name}" for alias in node.names]
            yield from [name for name in below if (_ROOT / f"{name.replace('.', '/')}.py").exists()] or [module]


@functools.cache
def _all_imports() -> dict[str, list[str]]:
    return {_module(path): sorted(set(_imports(path))) for path in _FILES}


@pytest.fixture(autouse=True, scope="module")
def _no_trees_stay() -> Iterator[None]:
    gc.disable()  # a tree has no garbage, and most of the time of parsing would be spent in looking for it
    yield
    _tree.cache_clear()
    gc.enable()


def test_modules_load_without_circles() -> None:
    """TopologicalSorter raises CycleError, which names the circle."""
    own = set(_all_imports())
    on_load = {_module(path): own.intersection(_imports(path, True)) - {_module(path)} for path in _FILES}
    assert set(TopologicalSorter(on_load).static_order()) == own


@pytest.mark.parametrize("part", ["actors", "cluster", "proto", "kernels"])
def test_modules_know_each_other_one_way(part: str) -> None:
    """No circle either by imports in functions, or by those for type checkers.

    Left out: the room of experiments, whose tables and figures know each other.
    """
    names = {_module(path): path for path in _FILES if _within(_module(path), part)}
    own = {name for name in names if not _within(name, "cluster.jobs.bench")}
    graph = {name: own.intersection(_imports(names[name])) - {name} for name in own}
    assert set(TopologicalSorter(graph).static_order()) == own


# the rooms of `actors/engine`, each of which knows those before it only; modules that are named nowhere are the layer's
_ROOMS = (
    ("stats",), ("cache",), ("cuda",), ("model",), (), ("peers",), ("dense", "serving"),
    ("engine", "make_policies", "describe", "host_times"),
)  # fmt: skip


def _room(module: str) -> int:
    name = module.removeprefix("actors.engine.").partition(".")[0]
    return next((number for number, named in enumerate(_ROOMS) if name in named), _ROOMS.index(()))


def test_rooms_of_the_engine_know_each_other_one_way() -> None:
    """Types included: core, cache, GPU, model, layer, peers, serving, engine."""
    back = [
        f"{module} imports {name}"
        for module, names in _all_imports().items()
        if module.startswith("actors.engine.")
        for name in names
        if name.startswith("actors.engine.") and _room(name) > _room(module)
    ]
    assert back == []


def test_a_constructor_takes_few_things() -> None:
    """Nine parameters want an object. Left out: a command's options, and kernels' operands in `kernels`."""
    many = {
        f"{_module(path)}.{owner.name}"
        for path in _FILES
        if _within(_module(path), "actors") or _within(_module(path), "cluster.simulate")
        for owner in ast.walk(_tree(path))
        if isinstance(owner, ast.ClassDef)
        for made in owner.body
        if isinstance(made, ast.FunctionDef) and made.name == "__init__"
        if len([*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]) - 1 > 8
    }
    assert many == set()


def _offenders(inside: str | tuple[str, ...], forbidden: tuple[str, ...]) -> list[str]:
    inside = (inside,) if isinstance(inside, str) else inside
    return [
        f"{module} imports {name}"
        for module, names in _all_imports().items()
        if any(_within(module, part) for part in inside)
        for name in names
        if any(_within(name, part) for part in forbidden)
    ]


def _within(module: str, part: str) -> bool:
    return module == part or module.startswith(f"{part}.")


@pytest.mark.parametrize(
    ("inside", "forbidden"),
    [
        ("actors", ("cluster",)),
        (("proto", "kernels"), ("cluster", "actors")),
        ("proto", ("kernels",)),
        ("kernels", ("proto",)),
        ("actors.engine", ("actors.gpu_worker",)),
        ("actors.policies", ("actors.engine", "actors.gpu_worker", "actors.store", "proto")),
        (("cluster.config", "cluster.host"), ("cluster.topology", "cluster.jobs")),
        ("cluster.topology", ("cluster.jobs", "cluster.deploy")),
        ("cluster.checkpoints", ("cluster.jobs", "cluster.topology", "cluster.deploy")),
        (("cluster.jobs.evaluate", "cluster.jobs.prepare", "cluster.jobs.profile", "cluster.jobs.record"),
         ("cluster.jobs.bench",)),
        (_LOWEST, _PARTS),
        ((*_PARTS, *_LOWEST), ("benchmarks", "tests")),
    ],
    ids=str,
)
def test_direction(inside: str | tuple[str, ...], forbidden: tuple[str, ...]) -> None:
    assert _offenders(inside, forbidden) == []


def test_what_is_native_of_policies() -> None:
    """Orders and rules that have one body, in C++."""
    native = set(_offenders("actors.policies", ("actors.core", "kernels")))
    assert native == {
        *(f"actors.policies.{name} imports actors.core" for name in (
            "activeevict", "auto", "buddymoe", "eviction", "fmoe", "fmoe.maps", "moepic", "prefetch", "routing",
            "slot_classes", "worth",
        )),
    }  # fmt: skip


def test_policies_touch_no_device_clock_channel_or_ray() -> None:
    banned = ("torch", "transformers", "ray", "grpc", "time", "threading", "socket", "multiprocessing", "asyncio")
    assert _offenders("actors.policies", banned) == []


def test_inside_the_package_imports_are_relative() -> None:
    assert _offenders((*_PARTS, "errors"), ("tiermoe",)) == []


def test_only_these_import_torch() -> None:
    """And transformers; the server renders chats with a part of it that imports no torch (`test_templates`), and
    tokenizers are read in a process without it (`test_tokenizer_layouts`)."""
    may = ("actors.engine", "actors.gpu_worker", "kernels", "cluster.jobs")
    checkpoints = ("plan", "left_out", "tensors", "gguf_plan", "gguf_check", "gguf_layouts", "dense_forms")
    may += tuple(f"cluster.checkpoints.{name}" for name in checkpoints)
    offenders = _offenders((*_PARTS, *_LOWEST), ("torch", "transformers"))
    others = [line for line in offenders if not any(_within(line.split()[0], part) for part in may)]
    assert sorted(others) == [
        "actors.tokenizer imports transformers",
        "cluster.api.rendering imports transformers",
        "cluster.api.rendering imports transformers.utils.chat_template_utils",
    ]


def test_one_file_writes_arrays_with_safetensors() -> None:
    """The library writes memory as it lies: whoever called it with an array in Fortran's order wrote other numbers."""
    writers = {
        _module(path)
        for path in _FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("safetensors")
        and {alias.name for alias in node.names} & {"save", "save_file", "serialize", "serialize_file"}
    }  # fmt: skip
    assert writers == {"actors.store.artifacts"}


def test_actors_do_not_know_ray() -> None:
    """But for one file: experts as Ray objects."""
    users = {line.split()[0] for line in _offenders(("actors", "kernels", "proto"), ("ray",))}
    assert users == {"actors.store.remote"}


def test_one_file_reads_what_ray_does_not_promise() -> None:
    """A new version of Ray may change all of it."""
    users = {line.split()[0] for line in _offenders((*_PARTS, *_LOWEST), ("ray._private",))}
    assert users == {"cluster.ray_internals"}


def test_only_four_files_start_place_and_end() -> None:
    """Ray's start and end; our actors' placement, life and death; what an attached driver may do to those of others;
    and an experiment's cells on nodes."""
    found = set()
    for path in _FILES:
        for node in ast.walk(_tree(path)):
            on_ray = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ray"
            if on_ray and node.attr in _RAY_LIFE_CYCLE:
                found.add(_module(path))
        if any("placement_group" in name or "scheduling_strategies" in name for name in _all_imports()[_module(path)]):
            found.add(_module(path))
    assert found == {"cluster.ray_session", "cluster.deployed_actors", "cluster.attach", "cluster.jobs.bench.nodes"}


def test_the_driver_needs_no_torch() -> None:
    """What `tiermoe run` imports before it deploys: a torch import would cost every run seconds."""
    light = ("cluster.cli", "cluster.config", "cluster.deploy", "cluster.prompt", "cluster.jobs.run", "cluster.report")
    assert _offenders(light, ("torch", "transformers")) == []


def test_what_starts_often_imports_nothing_heavy() -> None:
    """An NDP worker, a store, a channel, and a command that refuses its options: in milliseconds, whatever is lazy."""
    code = (
        "import sys, tiermoe.kernels.packed_ffn, tiermoe.actors.store.files, tiermoe.proto.peers, tiermoe.proto.server;"
        "tiermoe.kernels.packed_ffn.Threads(2); heavy = {'ray', 'torch', 'transformers', 'grpc'};"
        "assert not heavy & sys.modules.keys();"
        "import tiermoe.cluster.jobs.prepare.prepare_command; assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_shard_needs_no_transformers() -> None:
    """Which takes half of the seconds that its process needs to start, also when it starts again after a loss."""
    modules = {_module(path): _imports(path, on_load=True) for path in _FILES if _module(path).startswith("actors.")}
    users = {module for module, names in modules.items() if any(_within(name, "transformers") for name in names)}
    serving = ("batching", "kv_rows", "scheduler", "shared_memory", "states", "steps")
    assert users == {f"actors.engine.serving.{name}" for name in serving}


def test_every_package_is_installed() -> None:
    """The list in pyproject.toml is written by hand, because the repository's root is the package."""
    setup = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    there = {".".join(("tiermoe", _module(path))) for path in _FILES if path.name == "__init__.py"}
    assert set(setup["packages"]) == there | {"tiermoe"}
    assert sorted(setup["packages"]) == setup["packages"]


def test_what_is_imported_is_installed() -> None:
    """By every installation: guards `tiermoe serve`, and figures, that asked for another installation first."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.split(r"[\[<>=]", line)[0].lower().replace("_", "-") for line in project["dependencies"]}
    packages = packages_distributions()
    lacking = {
        top
        for names in _all_imports().values()
        for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {*_PARTS, *_LOWEST, ""}
        if required.isdisjoint(name.lower().replace("_", "-") for name in packages.get(top, []))
    }
    of_requirements = {"annotated_types", "httpx", "pydantic_core", "starlette", "typing_extensions"}
    assert lacking == {"triton"} | of_requirements  # extras
    assert [project["optional-dependencies"][name] for name in ("grammar", "plots", "serve")] == [[], [], []]


# the date that an answer bears; when a certificate expires
_DATED = {"cluster/api/answers.py", "cluster/api/responses.py", "cluster/api/routes.py", "proto/tls.py"}


def test_durations_and_deadlines_use_the_monotonic_clock() -> None:
    """`time.time` jumps when the clock is set: for the date only."""
    found = {
        str(path.relative_to(_ROOT))
        for path in _FILES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "time.time_ns", "datetime.utcnow")
    }
    assert found == _DATED
