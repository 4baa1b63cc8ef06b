"""Which architectures share forward passes: every model type with transformers' experts interface is served once, and
its tokens are compared with `generate`. Writes the table of docs/checkpoints.md:

    python tests/matrix.py [TYPE ...]      all types take some ten minutes on one core; prints the table of those given

`test_matrix` runs the same cases and holds the page to them.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from serving import gathered, reference_greedy
from tiny_models import ALL_TYPES, tiny_model

from tiermoe.actors.gpu_worker import make_batcher
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings

# modules of transformers with the experts interface that are not compared, and why
LEFT_OUT = {
    "openai_privacy_filter": "classifies tokens, generates no text",
    "diffusion_gemma": "makes blocks of text by diffusion, not token after token",
    "qwen3_omni_moe": "`generate` goes through parts for speech, so that there are no tokens to compare with",
    "deepseek_ocr2": "reads documents as images only",
    "unlimited_ocr": "reads documents as images only",
}
PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
_BEGIN, _END = "<!-- matrix: written by tests/matrix.py -->\n", "<!-- end of matrix -->\n"
_SIZE, _TOKENS = 16, 10  # of a page of the KV cache; of an answer
_WAYS = ("share forward passes", "share them, on the model's own cache", "take turns, a token each")


class Rows:
    """Counts the rows of decode steps, and of chunks of prompts."""

    def __init__(self) -> None:
        self.most = self.chunk = 0
        self.ended: list[str] = []

    def begin_forward(self, sequences: Any) -> None:
        self.most = max(self.most, sum(s.decode for s in sequences))
        self.chunk = max(self.chunk, *(s.stop - s.start for s in sequences))

    def end_sequence(self, name: str) -> None:
        self.ended.append(name.partition("#")[0])


@dataclass(frozen=True)
class Served:
    """How a type is served. reason: why its cache is not paged. chunks, prefixes: of prompts."""

    way: str
    chunks: bool
    prefixes: bool
    reason: str

    @property
    def cells(self) -> str:
        """Columns of the table after the types."""
        words = {True: "yes", False: "no"}
        return f"{words[self.chunks]} | {words[self.prefixes]} | {self.reason}"


def modules() -> set[str]:
    """transformers' modules that use its experts interface."""
    root = Path(transformers.__file__).parent / "models"
    files = root.glob("*/modeling_*.py")
    return {path.parent.name for path in files if "use_experts_implementation" in path.read_text()}


def module_of(model: Any) -> set[str]:
    """The modules of transformers that a model's experts come from."""
    return {type(module).__module__.split(".")[-2] for module in model.modules() if hasattr(module, "is_concatenated")}


def prompts() -> list[list[int]]:
    """Two short ones, and three with two pages in common."""
    source = random.Random(1)
    drawn = [[source.randrange(3, 120) for _ in range(length)] for length in (2 * _SIZE, 6, 1, 9, 3, 14)]
    return [*drawn[1:3], *(drawn[0] + rest for rest in drawn[3:])]


def serve(model_type: str) -> tuple[Served, Any]:
    """Serve one type, with arrivals, a cancellation, chunks and a common beginning, alone and in company.

    Returns:
        How, and the model.

    Raises:
        AssertionError: tokens differ from `generate`, or a request is not counted as what it was.
    """
    model, asked, watcher = tiny_model(model_type), prompts(), Rows()
    expected = reference_greedy(model, asked, _TOKENS, ignore_eos=True)
    kv = KvSettings(page_size=_SIZE, num_blocks=24, max_batch_tokens=24)
    with closing(make_batcher(model, kv, watcher)) as batcher:
        watcher.ended.clear()
        watcher.most = watcher.chunk = 0

        def ask(name: str, prompt: list[int], tokens: int = _TOKENS) -> Any:
            request = GenerationRequest(name, tuple(prompt), SamplingParams(tokens, ignore_eos=True))
            return batcher.submit(request)

        found: list[Generation] = [gathered(ask(f"alone {i}", asked[i])) for i in (0, 2, 3)]
        assert [one.token_ids for one in found] == [expected[i] for i in (0, 2, 3)]
        assert watcher.most == 1
        left = ask("left", asked[0] * 5, 90)
        assert next(iter(left)).token_ids  # it runs by now
        streams = [ask(f"beside {i}", asked[i]) for i in (0, 1, 2, 4)]
        batcher.cancel(left)
        found = [gathered(stream) for stream in streams]
        assert [one.token_ids for one in found] == [expected[i] for i in (0, 1, 2, 4)]
        way = _WAYS[0 if batcher.unpaged_because is None else 1 if batcher.shares else 2]
        assert (watcher.most > 1) == (way != _WAYS[2])
        assert sorted(watcher.ended) == sorted(
            ["left", *(f"alone {i}" for i in (0, 2, 3)), *(f"beside {i}" for i in (0, 1, 2, 4))]
        )
        reason = "" if batcher.unpaged_because is None else _short(batcher.unpaged_because)
        return Served(way, watcher.chunk <= kv.max_batch_tokens, found[-1].cached_tokens >= 2 * _SIZE, reason), model


def _short(reason: str) -> str:
    """What of an architecture is not paged, without numbers."""
    of_class = reason.partition(": ")[2]
    return re.split(r" has keys of|, which| \(linear| in place of|, \d", of_class)[0].strip()


def table(found: Iterable[tuple[str, Served]]) -> str:
    """Lines of Markdown: types by how they are served."""
    groups: dict[Served, list[str]] = {}
    for model_type, served in found:
        groups.setdefault(served, []).append(f"`{model_type}`")
    lines = ["| requests | architectures (`model_type`) | chunks | prefixes | why not paged |", "|---|---|---|---|---|"]
    for served in sorted(groups, key=lambda s: (_WAYS.index(s.way), s.reason, s.chunks, s.prefixes)):
        lines.append(f"| {served.way} | {', '.join(sorted(groups[served]))} | {served.cells} |")
    for name, why in LEFT_OUT.items():
        lines.append(f"| not compared | `{name}` | | | {why} |")
    return "\n".join(lines) + "\n"


def line_of(model_type: str) -> str:
    """The page's line about a type."""
    section = PAGE.read_text().partition(_BEGIN)[2].partition(_END)[0]
    return next((line for line in section.splitlines() if f"`{model_type}`" in line), "")


def main(types: list[str]) -> int:
    """Serve these types, or all, and print or write the table. Returns 1: tokens of some differ."""
    found, failed = [], []
    for model_type in types or ALL_TYPES:
        try:
            found.append((model_type, serve(model_type)[0]))
            print(model_type, found[-1][1], flush=True)
        except Exception as error:  # the others are to be seen, too
            failed.append(model_type)
            print(model_type, "FAILED", type(error).__name__, str(error)[:300], flush=True)
    if types or failed:
        print(table(found))
    else:
        text = PAGE.read_text()
        before, _, rest = text.partition(_BEGIN)
        PAGE.write_text(before + _BEGIN + table(found) + _END + rest.partition(_END)[2])
    return 1 if failed else 0


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
