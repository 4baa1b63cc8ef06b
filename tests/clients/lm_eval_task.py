"""The multiple-choice items that a model ships, as a task of lm-evaluation-harness: the items of `tiermoe eval`.

    python tests/clients/lm_eval_task.py MODEL FOLDER
    lm_eval --model local-completions --include_path FOLDER --tasks tiermoe_choices --model_args ...

docs/results/clients.md has the whole command. The harness joins the tokens of the context without its trailing white
space to what follows them in the tokens of the whole text. Where a token spans that boundary, this loses it. So a
context ends before such tokens, and all choices of the item begin with them, which adds the same to each. The program
prints how many items are scored by the tokens of `tiermoe eval` (`same_tokens`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.evaluate.text import as_tokens, build_choices, load_heldout
from tiermoe.cluster.prompt import load_tokenizer

_TASK = """\
task: tiermoe_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def as_harness(encode: Callable[[str], list[int]], context: str, choice: str) -> list[int]:
    """The tokens that the harness sends (`lm_eval.api.model._encode_pair`)."""
    bare = context.rstrip()
    first = encode(bare)
    return first + encode(context + choice)[len(first) :]


def main() -> None:
    """Write choices.jsonl and tiermoe_choices.yaml."""
    model, folder = (Path(argument) for argument in sys.argv[1:3])
    heldout, options, tokenizer = load_heldout(model), EvaluationOptions(), load_tokenizer(model)
    items = as_tokens(build_choices(heldout), heldout, options.documents, options.items or 1)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "choices.jsonl"
    same = 0
    with data.open("w", encoding="utf-8") as file:
        for item in items:
            for cut in range(len(item.context), len(item.context) // 2, -1):
                context = tokenizer.decode(list(item.context[:cut]), skip_special_tokens=True)
                ends = [item.context[cut:] + ids for ids in item.candidates]
                choices = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in ends]
                sent = [as_harness(lambda text: list(tokenizer.encode(text).ids), context, text) for text in choices]
                if equal := sent == [list(item.context + ids) for ids in item.candidates]:
                    break
            same += equal
            file.write(json.dumps({"context": context, "choices": choices, "answer": item.answer}) + "\n")
    (folder / "tiermoe_choices.yaml").write_text(_TASK.format(data=data.absolute()), encoding="utf-8")
    print(json.dumps({"items": len(items), "same_tokens": same}))


if __name__ == "__main__":
    main()
