"""`tiermoe bench substitute`: what it costs to decide which missing experts of a layer are replaced."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.policies.buddymoe import MissRule
from ....actors.policies.buddymoe.substitution import Buddies, SubstitutionOptions, substitute
from ....actors.policies.routing import RerouteView
from .metrics import Bar, Case, Measures, Report, interleaved, rows_of

LIMIT_US = 30.0
SHAPES = ((1, 4, 32), (8, 8, 64), (64, 8, 256))
BARRED = (8, 8, 64)
_RANKS, _RESIDENT, _RHO, _WARMUP = 16, 0.5, 3, 2
_CALLS = {"sequential": 3, "torch, vectorised": 20}  # of one repetition; the others are faster
_OTHERS = 500


@dataclass(frozen=True)
class _Routing:
    """A layer's routing at random: ids and weights [T, K], probabilities [T, E], half of the experts resident."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    probabilities: NDArray[np.float32]
    resident: NDArray[np.bool_]
    buddies: Buddies

    @staticmethod
    def of(tokens: int, top_k: int, experts: int) -> _Routing:
        rng = np.random.default_rng(0)
        probabilities = rng.dirichlet(np.full(experts, 0.3), tokens).astype(np.float32)
        ids = np.argsort(-probabilities, axis=1)[:, :top_k].astype(np.int64)
        ranks = min(_RANKS, experts - 1)
        lists = [rng.permutation(np.delete(np.arange(experts), e))[:ranks] for e in range(experts)]
        similarity = -np.sort(-rng.random((experts, ranks), np.float32))
        buddies = Buddies(np.array(lists, np.int32), similarity)
        resident = rng.permutation(experts) < round(_RESIDENT * experts)
        return _Routing(ids, np.take_along_axis(probabilities, ids, axis=1), probabilities, resident, buddies)


def bench_substitute(repeats: int, progress: Progress | None) -> Report:
    """Microseconds of one layer's decision, on one thread: of the thread's time, so that other processes take none.

    `rule` is what the engine calls for each layer: the gate of the batch, those of the tokens (entropy and margin),
    and Algorithm 1 in C++. `rule, nothing missing`: the same where all experts are resident. `torch` is
    `kernels.substitute.substitute` on tensors of the CPU, which takes the same C++; `torch, vectorised` is what runs on
    devices without it; `sequential` is the reference. Triton is not timed: on a CPU it is interpreted.

    Args:
        repeats: counted rounds.

    Bars: `rule` and `torch` <= 30 us at T = 8, K = 8, E = 64.
    """
    import torch

    torch.set_num_threads(1)
    settings = {
        "threads": 1, "ranks": _RANKS, "resident": _RESIDENT, "rho": _RHO, "repeats": repeats, "time": "of the thread",
    }  # fmt: skip
    report = Report("substitute", "real", settings=settings)
    for shape in SHAPES:
        results = interleaved(_cases(_Routing.of(*shape)), repeats, _WARMUP, progress)
        report.rows += rows_of(results, tokens=shape[0], top_k=shape[1], experts=shape[2])
        if shape == BARRED:
            for name in ("rule", "torch"):
                value = results[name]["us_per_layer"].median
                report.bars.append(Bar(f"{name}: us a layer at T = 8, K = 8, E = 64", value, "<=", LIMIT_US))
    return report


def _cases(routing: _Routing) -> list[Case]:
    import torch

    from ....kernels.substitute import BuddyTensors, replaceable_arrays, substitute_arrays, substitute_tensors
    from ....kernels.substitute import substitute as substitute_on_device

    r, options, tau, top_k = routing, SubstitutionOptions(rho=_RHO, gamma=0.9), 0.2, routing.ids.shape[1]
    fast = {"replaceable": replaceable_arrays, "substitute": substitute_arrays}
    rule = MissRule([r.buddies], options, taus=[tau], beta=0.9, **fast)  # type: ignore[arg-type]
    view = RerouteView(r.resident, 0, top_k)
    whole = RerouteView(np.ones_like(r.resident), 0, top_k)
    missing, reach = ~r.resident, r.resident.astype(np.float32)
    ids, weights, mask, near = (torch.from_numpy(a) for a in (r.ids, r.weights, missing, reach))
    lists = BuddyTensors.of(r.buddies)
    return [
        _case("rule", lambda: rule.reroute(0, r.ids, r.weights, None, view)),
        _case("rule, nothing missing", lambda: rule.reroute(0, r.ids, r.weights, None, whole)),
        _case("torch", lambda: substitute_on_device(ids, weights, None, mask, near, lists, options, tau)),
        _case("torch, vectorised", lambda: substitute_tensors(ids, weights, None, mask, near, lists, options, tau)),
        _case(
            "sequential",
            lambda: substitute(r.ids, r.weights, None, missing, reach, r.buddies, options, tau),
        ),
    ]


def _case(name: str, decide: Callable[[], object]) -> Case:
    calls = _CALLS.get(name, _OTHERS)

    def measure() -> Measures:
        start = time.thread_time()
        for _ in range(calls):
            decide()
        return {"us_per_layer": (time.thread_time() - start) / calls * 1e6}

    return Case(name, measure)
