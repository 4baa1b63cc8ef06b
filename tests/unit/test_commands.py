"""What commands refuse: arguments and files -> one line on standard error, before anything starts or is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import traces
from commands import Command
from tiny_models import save_byte_tokenizer
from topology_cases import MIXTRAL, NODES

from tiermoe.cluster.jobs.prepare import prepare

_SERVE, _PLAN, _REPLAY, _PROFILE = (
    "serve --device cpu --port 0", "plan --model {model}", "replay {trace}", "prepare {store} --profile"
)
_RUN, _EVAL, _RECORD = "run hello --model {runnable}", "eval --policy on-demand", "record {prompts} {folder}/out"

# words of a command, in which {0} is a file and others are of `places` -> what is said, in parts; the file's text
REFUSED: dict[str, tuple[str, ...]] = {
    # serve
    _SERVE + " --server-config {0} #1": ("unknown key 'colour'", "colour: red"),
    _SERVE + " --server-config {0} #2": ("key 'limits.waiting' is -1", "limits: {waiting: -1}"),
    _SERVE + " --server-config {0} #3": ("give --attach", "deployment: abcdef"),
    _SERVE + " --server-config {0} #4": ("set request_deadline_s", "limits: {request_s: 5}"),
    _SERVE + " --server-config {0} #5": ("no tokenizer in '/nowhere'", "tokenizer: /nowhere"),
    _SERVE + " --server-config {0} #6": ("'https://a.example/x' is no origin", "allow_origins: [https://a.example/x]"),
    _SERVE + " --api-key-file /nowhere/key": ("cannot be read",),
    _SERVE + " --chat-template /nowhere/template": ("cannot be read",), _SERVE + " --deployment abcdef": ("--attach",),
    _SERVE + " --allow-origin https://a.example --allow-origin a.example": ("'a.example' is no origin; give",),
    _SERVE + " --allowed-host a.example:8000": ("'a.example:8000' is no host; give a name",),
    _SERVE + " --attach 127.0.0.1:1 --budget 25%": ("belongs to the runtime",),
    _SERVE + " --policy nothing": ("no policy",),
    **{f"serve {option} a": ("HTTPS needs a certificate and its key; give --ssl-certfile and --ssl-keyfile",)
       for option in ("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")},
    # run
    _RUN + " --policy magic": ("no policy 'magic'|choose one of activeevict, ",),
    _RUN + " --budget 0": ("budget '0'|512MiB",), _RUN + " --budget 1.5": ("budget '1.5'|share",),
    _RUN + " --budget lots": ("budget 'lots'|share",),
    _RUN + " --policy all-resident": ("keeps every expert|--budget 1.0",),
    _RUN + " --max-tokens 0": ("--max-tokens is 0|from 1",),
    _RUN + " --max-tokens 64": ("exceed the model's 64 positions|lower --max-tokens",),
    _RUN + " --temperature -1": ("--temperature is -1|greedy",), _RUN + " --top-p 7": ("--top-p is 7|up to 1",),
    _RUN + " --top-k -1": ("--top-k",), _RUN + " --seed -4": ("--seed is -4|from 0",),
    _RUN + " --link-gbps 0": ("--link-gbps is 0|greater than 0",),
    _RUN + " --link-latency-us inf": ("--link-latency-us is inf|finite",),
    _RUN + " --device tpu": ("--device is 'tpu'|cuda",),
    _RUN + " --device cuda --link-gbps 3": ("device is cuda|leave them out",),
    _RUN + " --threads 0": ("--threads is 0|greater than or equal to 1",),
    _RUN + " --config moon": ("no configuration file 'moon'|laptop",),
    _RUN + " --config {0}": ("unknown key 'bugdet'; did you mean 'budget'?", "bugdet: 0.5"),
    _RUN + " --trace /nowhere/at/all/trace.json": ("no directory '/nowhere/at/all'|mkdir",),
    _RUN + " --prompt-file x": ("both PROMPT and --prompt-file|either",),
    _RUN + " --max-tokens 4": ("safetensors",),  # a checkpoint without weights
    "run hello --model {folder}/none": ("--model",), "run hello --model {folder}": ("has no config.json",),
    "run '' --model {runnable}": ("prompt",), "run --model {runnable}": ("prompt",),
    "run --prompt-file {folder}/none.txt --model {runnable}": ("none.txt': No such file",),
    "run --prompt-file {0} --model {runnable} --max-tokens 1": ("100 prompt tokens", "x" * 100),
    # eval and record
    _EVAL.replace("on-demand", "magic"): ("no policy 'magic'",), _EVAL + " --windows 0": ("--windows is 0",),
    _EVAL + " --prefix 2000": ("exceed the model's 2048 positions",),
    _EVAL + " --model /nowhere": ("no model at '/nowhere'",),
    _EVAL + " --model {checkpoint} --prefix 16 --continuation 16": ("held-out passages",),
    _RECORD + " --max-tokens 0": ("--max-tokens is 0",), _RECORD + " --distances 9": ("--distances is 9",),
    _RECORD + " --max-tokens 5000 --sample 1": ("prompt 1: ",), _RECORD + " --limit 0": ("--limit is 0",),
    _RECORD + " --sample -1": ("--sample is -1",),
    _RECORD + " --seed 1": ("--seed and --ignore-eos are for sampled tokens",), _RECORD: ("in '",),
    # plan
    _PLAN + " --config multi-gpu --nodes {nodes}": ("shard 2 fits on no node",),
    _PLAN + " --config multi-node": ("pass --live to ask it, or --nodes FILE",),
    _PLAN + " --config laptop --live": ("ray.address names none; set ray.address",),
    _PLAN + " --nodes {nodes} --live": ("--nodes and --live both name the nodes",),
    _PLAN + " --nodes /nowhere.yaml": ("cannot read '/nowhere.yaml'",),
    _PLAN + " --budget 1B": ("budget 1 B holds no expert",), _PLAN + " --policy nope": ("no policy 'nope'",),
    _PLAN + " --config {0} --live": ("no Ray answers at '127.0.0.1:1'", "ray: {address: '127.0.0.1:1'}"),
    _PLAN + " --config {0}": ("unknown key 'cluster.store.layuot'; did you mean 'layout'?",
                              "cluster: {store: {layuot: sliced}}"),
    "plan --model /nowhere": ("no model at '/nowhere'; pass --model",),
    "plan --model {folder}/nope.gguf": ("no model at ",),
    "plan --model {binary}": ("is a file, and no GGUF file; pass --model",),
    # replay
    _REPLAY + " --policies on-demand,on-demnd": ("did you mean 'on-demand'",),
    _REPLAY + " --policies on-demand --policy lru": ("--policies is 'on-demand', beside --policy or --recall",),
    _REPLAY + " --policies ,": ("--policies is",),
    _REPLAY + " --machine nope": ("this, 3090x6-nvlink, a100-pcie4",),
    _REPLAY + " --eviction nope": ("lru, lru-sweep, ",),
    # prepare
    "prepare {store} {folder}/out --cache-dir {folder}": ("OUT and --cache-dir are both given",),
    **{f"prepare {{store}} {option} {{binary}}": ("text.bin",) for option in ("--gates", "--predictors")},
    _PROFILE + " {text} --profile-trace {trace}": ("both given",),
    "prepare {store} --profile-outputs 5": ("--profile-outputs is given without --profile",),
    "prepare {store} --profile-warmup-weight 0.5": ("--profile-warmup-weight is given without",),
    "prepare {store} --profile-trace x --profile-outputs 5": ("a trace has no outputs",),
    _PROFILE + " {text} --profile-outputs 0": ("--profile-outputs is 0",),
    _PROFILE + " {text} --profile-warmup -1": ("--profile-warmup is -1",),
    _PROFILE + " {text} --profile-warmup-weight 0.5": ("add --profile-warmup",),
    _PROFILE + " nowhere.txt": ("nowhere.txt",), _PROFILE + " {text} --force": ("a store already",),
}  # fmt: skip


@pytest.fixture(scope="module")
def places(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "mixtral").mkdir()
    (folder / "mixtral" / "config.json").write_text(json.dumps(MIXTRAL))  # a checkpoint of which only that is there
    (folder / "nodes.yaml").write_text(NODES)
    (folder / "text.txt").write_text("A text. " * 100)
    (folder / "text.bin").write_text("x")
    (folder / "prompts.txt").write_text("so and " * 30 + "\n")
    (folder / "runnable").mkdir()
    (folder / "runnable" / "config.json").write_text('{"max_position_embeddings": 64}')
    save_byte_tokenizer(folder / "runnable")
    traces.write(folder / "trace", traces.header(), [[1, 2, 3], [4, 5]], 6)
    prepare(checkpoint, folder / "store", progress=False)
    return {
        "folder": folder, "model": folder / "mixtral", "nodes": folder / "nodes.yaml", "text": folder / "text.txt",
        "prompts": folder / "prompts.txt", "runnable": folder / "runnable", "binary": folder / "text.bin",
        "trace": folder / "trace", "store": folder / "store", "checkpoint": checkpoint,
    }  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused_in_one_line(words: str, places: dict[str, Path], tmp_path: Path, command: Command) -> None:
    said, *contents = REFUSED[words]
    files = [tmp_path / f"{number}.yaml" for number in range(len(contents))]
    for file, content in zip(files, contents, strict=True):
        file.write_text(content)
    args = [word.format(*files, **places).replace("''", "") for word in words.partition(" #")[0].split()]
    before = sorted(path.name for path in places["folder"].rglob("*"))
    code, out, err = command(*args)
    assert (code, out) == (1 if "no Ray answers" in said else 2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [part for part in said.split("|") if part not in err] == [], err
    assert sorted(path.name for path in places["folder"].rglob("*")) == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_local_experts": None}, "has none of num_local_experts"),
        ({"num_local_experts": ...}, "has no routed experts"),  # the key is not there: a dense model
        ({"hidden_size": "8"}, "hidden_size is '8'"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "has no layer with routed experts"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"first_k_dense_replace": "one"}, "first_k_dense_replace is 'one'"),
        ({"moe_layer_freq": "often"}, "moe_layer_freq is 'often'"),
        # more than any model has: lists of all experts took minutes and gigabytes
        ({"num_hidden_layers": 10**10}, "num_hidden_layers is 10000000000"),
        ({"num_local_experts": 10**10}, "num_local_experts is 10000000000"),
        ({"num_hidden_layers": 4096, "num_local_experts": 4096}, "says 4096 layers of 4096 experts"),
    ],
)  # fmt: skip
def test_a_configuration_of_no_use(change: dict[str, Any], said: str, tmp_path: Path, command: Command) -> None:
    config = {name: value for name, value in (MIXTRAL | change).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert said in command.refusal("plan", "--model", tmp_path)
