"""The multiple-choice items that a model ships, as a task of lm-evaluation-harness: the items of `tiermoe eval`.

    python tests/clients/lm_eval_task.py MODEL FOLDER
    lm_eval --model local-completions --include_path FOLDER --tasks tiermoe_choices --model_args ...

docs/api.md has the whole command. The harness scores the same tokens where its tokenizer divides context and
continuation as the item does; the task says how many items have this (`same_tokens`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.evaluate.text import as_tokens, load_choices, load_heldout
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


def main() -> None:
    """Write choices.jsonl and tiermoe_choices.yaml."""
    model, folder = (Path(argument) for argument in sys.argv[1:3])
    heldout, options, tokenizer = load_heldout(model), EvaluationOptions(), load_tokenizer(model)
    items = as_tokens(load_choices(model, heldout), heldout, options.documents, options.items)
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "choices.jsonl"
    same = 0
    with data.open("w", encoding="utf-8") as file:
        for item in items:
            context = tokenizer.decode(list(item.context), skip_special_tokens=True)
            choices = [tokenizer.decode(list(ids), skip_special_tokens=True) for ids in item.candidates]
            whole = [tuple(tokenizer.encode(context + text).ids) for text in choices]
            same += whole == [item.context + ids for ids in item.candidates]
            file.write(json.dumps({"context": context, "choices": choices, "answer": item.answer}) + "\n")
    (folder / "tiermoe_choices.yaml").write_text(_TASK.format(data=data.absolute()), encoding="utf-8")
    print(json.dumps({"items": len(items), "same_tokens": same}))


if __name__ == "__main__":
    main()
