"""lm-evaluation-harness and `tiermoe eval` on the same items: exit status 1 where their accuracies differ.

    tiermoe serve --policy on-demand --budget 1.0 --model-name tiny-moe
    python tests/clients/lm_eval_accuracy.py URL MODEL LM_EVAL

URL: http://HOST:PORT of the server. MODEL: the folder that it serves, under its folder's name. LM_EVAL: the harness's
program, in an environment of its own (`pip install 'lm-eval[api]' transformers`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def harness(url: str, model: Path, program: str, folder: Path) -> dict[str, Any]:
    """What lm_eval measures: accuracy, its number of items."""
    made = Path(__file__).with_name("lm_eval_task.py")
    subprocess.run([sys.executable, str(made), str(model), str(folder)], check=True)
    settings = f"model={model.name},base_url={url}/v1/completions,tokenizer={model},tokenized_requests=True"
    command = [program, "--model", "local-completions", "--include_path", str(folder), "--tasks", "tiermoe_choices"]
    out = folder / "results"
    subprocess.run([*command, "--model_args", settings, "--output_path", str(out)], check=True)
    (file,) = out.rglob("results_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    items = found["n-samples"]["tiermoe_choices"]["effective"]
    return {"accuracy": found["results"]["tiermoe_choices"]["acc,none"], "items": items}


def ours(model: Path) -> dict[str, Any]:
    """What `tiermoe eval` measures, in one run without loss."""
    tiermoe = str(Path(sys.executable).with_name("tiermoe"))
    command = [tiermoe, "eval", "--policy", "on-demand", "--model", str(model), "--budget", "1.0", "--json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"accuracy": found["choice_accuracy"], "items": found["items"]}


def main() -> None:
    url, model, program = sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3]
    with tempfile.TemporaryDirectory() as folder:
        found = {"lm_eval": harness(url, model, program, Path(folder)), "tiermoe eval": ours(model)}
    print(json.dumps(found))
    sys.exit(found["lm_eval"] != found["tiermoe eval"])


if __name__ == "__main__":
    main()
