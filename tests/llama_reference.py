"""llama.cpp as the reference for GGUF files: what it makes of the files of `ggufs` and `gguf_vocabularies`.

`PYTHONPATH=tests python -m llama_reference` writes tests/golden/gguf.json anew, with `pip install 'tiermoe[peers]'`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from gguf_vocabularies import TEXTS, vocabularies
from ggufs import PROMPT, cases

from tiermoe.benchmarks import llama

_log: Any = None  # llama.cpp holds it as long as it runs
GOLDEN = Path(__file__).with_name("golden") / "gguf.json"


def logits(file: Path) -> np.ndarray:
    """[T, V] of a model after each token of the prompt."""
    with closing(llama.LlamaCpp(file, exact=True)) as model:
        lib, context = model._lib, model._context
        batch = lib.llama_batch_init(len(PROMPT), 0, 1)
        try:
            batch.n_tokens = len(PROMPT)
            for at, token in enumerate(PROMPT):
                batch.token[at], batch.pos[at], batch.logits[at] = token, at, True
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
            model._decoded(lib.llama_decode(context, batch))
            vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model._model))
            found = (lib.llama_get_logits_ith(context, at) for at in range(len(PROMPT)))
            return np.stack([np.ctypeslib.as_array(row, (vocabulary,)) for row in found])
        finally:
            lib.llama_batch_free(batch)


def tokens(file: Path, texts: Sequence[str]) -> dict[str, Any]:
    """ids: of each text, special tokens added and parsed. ends: the tokens that end a generation."""
    import llama_cpp as lib

    global _log
    _log = _log or llama._silence(lib)
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(str(file).encode(), params)
    assert model, f"llama.cpp does not load {file}"
    vocabulary, rows = lib.llama_model_get_vocab(model), []
    for text in texts:
        data = text.encode()
        found = (lib.llama_token * (4 * len(data) + 16))()
        count = lib.llama_tokenize(vocabulary, data, len(data), found, len(found), True, True)
        rows.append(list(found[:count]))
    count = lib.llama_vocab_n_tokens(vocabulary)
    ends = [i for i in range(count) if lib.llama_vocab_is_eog(vocabulary, i)]
    lib.llama_model_free(model)
    return {"ids": rows, "ends": ends}


def main() -> None:
    """Write the file of recorded figures."""
    with tempfile.TemporaryDirectory() as scratch:
        of_models = {}
        for name, file in cases(Path(scratch) / "models").items():
            found = logits(file)
            last = [round(float(value), 4) for value in found[-1]]
            of_models[name] = {"best": found.argmax(axis=1).tolist(), "last": last}
        of_texts = {name: tokens(file, TEXTS) for name, file in vocabularies(Path(scratch) / "texts").items()}
    rows = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in {**of_models, **of_texts}.items()]
    GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
