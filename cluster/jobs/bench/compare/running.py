"""Run a comparison: groups one after the other, the policies of a group in turn on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, Protocol

from rich.progress import Progress

from .....errors import ConfigError, RuntimeFailure
from ....config import RunConfig
from ..metrics import Measures
from ..serving import serve, start_worker
from .kept import Cell, Finished, Kept
from .measures import added, counters, layer_counters
from .sweep import Group, Prompt, Sweep

Start = Callable[[RunConfig], Any]


class Scorer(Protocol):
    """Figures of `tiermoe eval` for a started worker."""

    def __call__(self, worker: Any, progress: Progress | None) -> dict[str, Any]: ...


def measure(
    sweep: Sweep, kept: Kept, progress: Progress | None = None, start: Start = start_worker,
    score: Scorer | None = None, score_lossless: bool = False,
) -> list[Finished]:  # fmt: skip
    """All groups of a sweep, those in `kept` without running them again.

    Only the workers of one group are alive at a time.

    Args:
        start: a started worker; it is closed here.
        score: quality of a policy that is not lossless; None: by `tiermoe eval`'s own measure. score_lossless: the
            others are scored too.

    Raises:
        RuntimeFailure: a request failed, or lossless policies gave different tokens.
        ConfigError: links are to be emulated on hardware that has its own.
    """
    score = _Evaluation(sweep) if score is None else score
    visits = len(sweep.policies) * (sweep.repeats + 1)
    task = progress.add_task("measuring", total=visits * len(sweep.groups)) if progress is not None else None

    def advanced(steps: int = 1) -> None:
        if progress is not None and task is not None:
            progress.update(task, advance=steps)

    done = []
    for group in sweep.groups:
        found = kept.find(group)
        if found is None:
            cells = _measure_group(sweep, group, kept, advanced, start, score, score_lossless, progress)
            found = Finished(group, cells)
            kept.add(found)
        else:
            advanced(visits)
        done.append(found)
    return done


def _measure_group(
    sweep: Sweep, group: Group, kept: Kept, advanced: Callable[[], None], start: Start, score: Scorer,
    score_lossless: bool, progress: Progress | None,
) -> list[Cell]:  # fmt: skip
    presets = {policy: sweep.preset(policy) for policy in sweep.policies}
    cells: dict[str, Cell] = {}
    with ExitStack() as stack:  # a worker that is not closed keeps the process alive
        workers: dict[str, Any] = {}
        for policy, preset in presets.items():
            worker = workers[policy] = stack.enter_context(closing(start(sweep.config(policy, group))))
            cells[policy] = Cell(policy, preset.lossless, worker.stats().executor)
            if cells[policy].executor == "real" and group.gbps is not None:
                raise ConfigError("links are emulated on the CPU stand-in only", "pass --links none on this hardware")
        for worker in workers.values():
            _serve(worker, sweep.warm_up, sweep)
            advanced()
        for number in range(sweep.repeats):
            _repetition(sweep, number, workers, cells, kept.tokens, advanced)
        for policy, cell in cells.items():
            if score_lossless or not cell.lossless:
                cell.quality = score(workers[policy], progress)
    return list(cells.values())


def _repetition(
    sweep: Sweep, number: int, workers: Mapping[str, Any], cells: Mapping[str, Cell], known: dict[int, list[int]],
    advanced: Callable[[], None],
) -> None:  # fmt: skip
    """Every policy once, A B C, so that a machine that drifts drifts for all of them."""
    indices = sweep.round(number)
    prompts = [sweep.prompts[i] for i in indices]
    given: dict[str, dict[int, list[int]]] = {}
    for policy, worker in workers.items():
        worker.reset_stats()
        measures, tokens = _serve(worker, prompts, sweep)
        stats, cell = worker.stats(), cells[policy]
        for name, value in {**counters(stats), **measures}.items():
            cell.values.setdefault(name, [0.0] * number).append(value)  # a counter that was not there yet was zero
        for values in cell.values.values():
            values += [0.0] * (number + 1 - len(values))
        cell.layers = added(cell.layers, layer_counters(stats))
        given[policy] = dict(zip(indices, tokens, strict=True))
        advanced()
    for policy, by_prompt in given.items():
        if cells[policy].lossless:
            _check_same(policy, by_prompt, known)
    for policy, by_prompt in given.items():
        if not cells[policy].lossless and all(i in known for i in indices):
            same = sum(by_prompt[i] == known[i] for i in indices) / len(indices)
            cells[policy].values.setdefault("same_tokens", [0.0] * (number + 1))[number] = same


def _serve(worker: Any, prompts: Sequence[Prompt], sweep: Sweep) -> tuple[Measures, list[list[int]]]:
    """Batch after batch; means over the requests, and each one's tokens."""
    sums, tokens = {"ttft_s": 0.0, "tpot_s": 0.0}, list[list[int]]()
    for start in range(0, len(prompts), sweep.batch):
        batch = prompts[start : start + sweep.batch]
        measures, found = serve(worker.submit, batch, sweep.max_tokens)
        for name in sums:
            sums[name] += measures[name] * len(batch)
        tokens += found
    return {name: value / len(prompts) for name, value in sums.items()}, tokens


def _check_same(policy: str, given: Mapping[int, list[int]], known: dict[int, list[int]]) -> None:
    for index, tokens in given.items():
        if known.setdefault(index, tokens) != tokens:
            what = f"{policy} is lossless and gives other tokens than those before it for prompt {index + 1}"
            raise RuntimeFailure(what, "report this as a bug")


class _Evaluation:
    """Scores on held-out text; the lossless reference is made once, when it is first needed."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep
        self._evaluation: Any = None

    def __call__(self, worker: Any, progress: Progress | None) -> dict[str, Any]:
        from ...evaluate.quality import EvaluationOptions
        from ...evaluate.scoring import Evaluation

        if self._evaluation is None:
            options = EvaluationOptions(documents=self._sweep.quality_documents)
            self._evaluation = Evaluation(self._sweep.base.model_dir, options)
        figures: dict[str, Any] = self._evaluation.measure(worker, progress).as_dict()
        return figures
