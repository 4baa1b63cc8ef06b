"""The dense part of a decode step on the CPU as one native program, without model code of ours.

    trace   the model once, on a few rows, with stand-ins for attention and experts        torch.fx
    lower   the trace to row operators                                                     dense.lowering
    bind    each layer's keys and values in the manager's paged cache
    run     a segment, the experts of a layer, the next segment, ...; layers that run natively as a whole go in one call
            with the segments behind them                                                  kernels/cpu/dense.cpp

A segment reaches from one layer's experts to the next layer's: residual, norms, projections, rotary embedding,
attention on the cache's blocks in place, router. Before its first use the program is compared with the model on a step
like that: its hidden states must be those of the model, and it must be faster. The output embeddings are a program of
their own, by the same rule.

Forwards of more than `MAX_ROWS` rows (mostly prompts), and those without a paged cache, run as before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ....errors import ConfigError
from ....kernels.dense import Program
from ..executors import CpuExecutor
from ..layer import MoeLayer
from ..model.lengths import lengths_of
from ..model.model import ExpertLayer, layer_of, replaced_layers
from ..model.state import unchanged
from .lowering import CannotLowerError, Lowering

MAX_ROWS = 64  # of a forward; above, matrix products of the library are faster
_TRACED_ROWS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)  # the first that no weight has as an axis
_ATTENTION = "tiermoe-trace"
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of the largest hidden state
_TRIALS, _TRIAL_S = 5, 1.0  # of each of both; seconds after which no further one begins

_library = torch.library.Library("tiermoe", "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, float scale, float softcap) -> Tensor")


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *unused: Any) -> torch.Tensor:
    """Stands for attention in a trace: q [1, heads, T, D], v [1, kv, T, Dv] -> [1, T, heads, Dv]."""
    return q.new_zeros(1, q.shape[2], q.shape[1], v.shape[3])


_library.impl("attend", _attend, "CPU")


class _StandIn:
    """Stands for a layer's experts: as cheap as can be, and different for each routing."""

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden * ((ids + 1).to(weights.dtype) * weights).mean(-1, keepdim=True).to(hidden.dtype)

    def forward_into(
        self, out: torch.Tensor, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> None:
        out.copy_(self.forward(hidden, ids, weights))


class _Head:
    """A model's output embeddings on few rows, as a program. threads: of it."""

    def __init__(self, module: nn.Module, lowered: Lowering, threads: int) -> None:
        self.eager = module.forward
        (((self._shape, self._dtype),),) = lowered.stores
        self._program = lowered.builder.build(MAX_ROWS, 0, {}, threads)
        # one sequence of so many rows; made once, since a small tensor costs a step 2 us
        self._spans = [torch.tensor([0, rows], dtype=torch.int32) for rows in range(MAX_ROWS + 1)]

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [1, T, V] of hidden states [1, T, H]."""
        batch, rows, _ = states.shape
        if batch > 1 or not 0 < rows <= MAX_ROWS:
            return self.eager(states)
        logits = torch.empty((rows, *self._shape), dtype=self._dtype)
        self._program.begin(rows, self._spans[rows], [])
        self._program.run(0, states.contiguous(), logits)
        return logits.view(1, rows, -1)


class Joined:
    """Runs layers, each natively as a whole, and the segments behind them in one call.

    Args:
        layers: of the model. stores: what its segments store, as (shape, dtype).

    Attributes:
        spent: of each layer's last pass the seconds that it waited for copies, ran kernels (where they are timed), and
            took.
        by_cpu: the last two by the thread's CPU time.
    """

    def __init__(self, program: Program, layers: Sequence[ExpertLayer], stores: Sequence[Any]) -> None:
        self._program, self.by_cpu = program, False
        self.layers = [layer for layer in layers if isinstance(layer, MoeLayer)]
        self._from: list[list[CpuExecutor]] = [[]]  # from each layer on, those that join
        for layer, stored in zip(reversed(self.layers), reversed(stores[: len(self.layers)]), strict=True):
            top_k = stored[-1][0]
            plain = [(top_k, torch.int64), (top_k, torch.float32)]
            native = layer.executor if isinstance(layer.executor, CpuExecutor) else None
            if native is not None and stored == [((native.width,), torch.float32), *plain] and stored == stores[0]:
                self._from.insert(0, [native, *self._from[0]])
            else:
                self._from.insert(0, [])
        self._handles = [[native.handle for native in natives] for natives in self._from]
        self.spent = np.zeros((len(self.layers), 3))

    def run(self, at: int, inputs: Sequence[torch.Tensor], out: torch.Tensor, last: torch.Tensor) -> int:
        """Run layers from `at` on: how many. inputs: hidden, ids, weights; out: [T, H]; last: of the last segment."""
        natives = self._from[at]
        layers = self.layers[at : at + len(natives)]
        if not natives or any(x.alone or "forward" in vars(x) for x in layers):
            return 0
        spent, ends, shared = self.spent[at:], at + len(natives) == len(self.layers), layers[0].shared
        shared.begin(inputs)
        shared.out = out
        try:
            ran = self._program.run_layers(
                at + 1, self._handles[at], inputs, out, last if ends else None, self.by_cpu, spent
            )
        finally:
            shared.inputs, shared.out = (), None
        if ran < 0:
            natives[-1 - ran].fail()
        if ends:
            shared.end_forward()
        return ran


class NativeDense:
    """A model's base module that runs small forwards natively.

    Args:
        model: on the CPU, with its experts attached.
        threads: of a program.
        required: use it also where it is slower, and make it an error (of `settle`) where it cannot be used.

    Attributes:
        notes: for the plan; complete once a step has run.
        joined: runs layers and segments in one call; None: no step has come yet.
    """

    def __init__(self, model: Any, threads: int, required: bool) -> None:
        self.notes: list[str] = []
        self._because = ""  # it is not used
        self._threads, self._required = threads, required
        self._model: Any = model
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._program: Program | None = None
        self.joined: Joined | None = None
        self._cache: Any = None
        self._decided: bool | None = None  # whether the program runs; None: no step has come yet
        self._replaced = False
        device = next(p.device for p in model.parameters() if not p.is_meta)
        try:
            if device.type != "cpu":
                raise CannotLowerError(f"the model runs on {device}")
            self._lowered, self._output, self._lowered_head = _trace(model, self._base)
        except CannotLowerError as error:
            self._refuse(str(error))
            return
        self._layers = [layer_of(handle) for handle in self._lowered.experts]
        self._embedding = model.get_input_embeddings()
        self._eager = self._base.forward
        self._base.forward = self._forward
        self._replaced = True

    def settle(self) -> None:
        """After the first request: what became of it.

        Raises:
            ConfigError: `required`, and the program cannot be used.
        """
        if self._replaced and self._decided is None:
            self._refuse("no forward with a paged cache came")
        if self._required and self._decided is False:
            raise ConfigError(f"compile: native cannot run this model: {self._because}", "use compile: auto or off")

    def close(self) -> None:
        """Restore the model. Safe to call twice."""
        if self._replaced:
            del self._base.forward  # the class's own again
            if self._lowered_head is not None:
                vars(self._head).pop("forward", None)  # where it was faster
            self._replaced = False

    def _refuse(self, because: str) -> None:
        self.close()
        self._decided, self._because = False, because
        self.notes.append(f"compile: auto runs the dense part eagerly ({because})")

    def _forward(self, input_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if input_ids is None or cache is None or self._decided is False or input_ids.shape[-1] > MAX_ROWS:
            return self._eager(input_ids=input_ids, **kwargs)
        if cache is not self._cache and not self._bind(cache):
            return self._eager(input_ids=input_ids, **kwargs)
        if self._decided is None:
            self._decide(input_ids, kwargs)
            if not self._decided:
                return self._eager(input_ids=input_ids, **kwargs)
        return self._run(input_ids, kwargs, self._layers)

    def _bind(self, cache: Any) -> bool:
        """Take the places of keys and values from a cache; False: it is of a kind that is not known."""
        builder = self._lowered.builder
        try:
            allocators = {layer: cache.layer_to_allocator[layer] for layer in builder.layers}
            views = [allocator._kv_token_views[layer] for layer, allocator in allocators.items()]
            tables = list(cache.cache_allocators.values())
            self._groups = [(t.index, t.layer_type, getattr(t, "sliding_window", 0)) for t in tables]
            if self._program is None:
                groups = {layer: allocator.index for layer, allocator in allocators.items()}
                self._program = builder.build(MAX_ROWS, len(tables), groups, self._threads)
                self.joined = Joined(self._program, self._layers, self._lowered.stores)
            coded: Any = getattr(next(iter(tables)), "coded", None)  # `serving.kv_rows`
            halves = self._model.dtype == torch.bfloat16
            for place, (keys, values) in enumerate(views):
                self._program.bind(place, keys, values, coded, halves)
        except (AttributeError, KeyError, ValueError) as error:  # as in another version of transformers
            self._refuse(f"the paged cache is of another kind: {error}")
            return False
        self._cache = cache
        return True

    def _run(self, input_ids: torch.Tensor, kwargs: dict[str, Any], layers: Sequence[ExpertLayer]) -> Any:
        """One step; the shapes of `kwargs` are those of transformers' `PagedAttentionArgs`."""
        program, rows = self._program, input_ids.shape[-1]
        assert program is not None
        program.begin(
            rows,
            kwargs["cu_seq_lens_q"],
            [
                (read if read.shape[0] else None, kwargs["write_index"][index], kwargs["cu_seq_lens_k"][kind], window)
                for index, kind, window in self._groups
                for read in (kwargs["read_index"][index],)
            ],
        )
        out = self._made(0, rows)
        positions = kwargs["position_ids"].to(torch.int32)
        program.run(0, self._embedding(input_ids).contiguous(), positions.contiguous(), *out)
        joined, at = self.joined if layers is self._layers else None, 0
        result, (last,) = torch.empty_like(out[0]), self._made(len(layers), rows)
        while at < len(layers):
            if joined is not None:
                at += joined.run(at, out, result, last)
            if at < len(layers):
                found = layers[at].forward(*out).contiguous()
                at += 1
                out = self._made(at, rows) if at < len(layers) else [last]
                program.run(at, found, *out)
        return self._output(last_hidden_state=last.view(1, rows, -1))

    def _made(self, segment: int, rows: int) -> list[torch.Tensor]:
        """What a segment stores for so many rows."""
        return [torch.empty((rows, *shape), dtype=dtype) for shape, dtype in self._lowered.stores[segment]]

    def _decide(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Compare the program with the model on a step like this, of other tokens (a padding token's state is zero).

        The rows of the cache that both write are written again by the step itself.
        """
        stand_in = _StandIn()
        rows = input_ids.shape[-1]
        spread = self._embedding.weight.shape[0] // (rows + 1)
        input_ids = (torch.arange(1, rows + 1, dtype=input_ids.dtype) * spread)[None]
        stand_ins = [stand_in] * len(self._layers)
        with unchanged(self._model), replaced_layers(self._lowered.experts, stand_in):
            expected, states, (eager, native) = _compared(
                lambda: self._eager(input_ids=input_ids, **kwargs).last_hidden_state,
                lambda: self._run(input_ids, kwargs, stand_ins).last_hidden_state,
            )
        if not (error := _difference(states, expected)) <= _TOLERANCE[expected.dtype]:
            self._refuse(f"the native program's hidden states differ by {error:.2g} of the largest")
            return
        if native >= eager and not self._required:
            self._refuse(f"a step takes {eager:.2f} ms, the native program {native:.2f} ms")
            return
        self._decided = True
        self._decide_head(expected)
        rule = "native" if self._required else "auto"
        self.notes.append(
            f"compile: {rule} runs the dense part natively ({native:.2f} ms a step, {eager:.2f} ms eagerly)"
        )

    def _decide_head(self, states: torch.Tensor) -> None:
        """Run the output embeddings natively where that is faster. states: hidden states of a step [1, T, H]."""
        if self._lowered_head is None:
            return
        head = _Head(self._head, self._lowered_head, self._threads)
        expected, logits, (eager, native) = _compared(lambda: head.eager(states), lambda: head.forward(states))
        if native < eager and _difference(logits, expected) <= _TOLERANCE[expected.dtype]:
            self._head.forward = head.forward


def _compared(eager: Callable[[], torch.Tensor], native: Callable[[], torch.Tensor]) -> tuple[Any, Any, list[float]]:
    """The first results of both, and the least milliseconds of each in turn."""
    results: list[torch.Tensor] = []
    times: list[list[float]] = [[], []]
    for _ in range(_TRIALS):
        for run, found in zip((eager, native), times, strict=True):
            begun = time.perf_counter()
            results.append(run())
            found.append(time.perf_counter() - begun)
        if sum(map(sum, times)) > _TRIAL_S:
            break
    return results[0], results[1], [min(found) * 1e3 for found in times]


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest number; NaN where one is not a number."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _trace(model: Any, base: Any) -> tuple[Lowering, Any, Lowering | None]:
    """The base module, lowered; the class of its output; the output embeddings, lowered, or None: they stay a module.

    Raises:
        CannotLowerError: the model has what a program cannot say.
    """
    embedding = model.get_input_embeddings()
    sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    rows = next((n for n in _TRACED_ROWS if n not in sizes), None)
    if rows is None or embedding is None or base is model:
        raise CannotLowerError("the model has no base module" if base is model else "its sizes are unusual")
    output: list[type] = []

    def forward(states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        found = base(inputs_embeds=states, position_ids=positions, use_cache=False)
        output.append(type(found))
        return found.last_hidden_state

    dtype, width = embedding.weight.dtype, embedding.weight.shape[1]
    if dtype not in (torch.float32, torch.bfloat16):
        raise CannotLowerError(f"numbers of type {dtype}")
    states, positions = torch.ones(1, rows, width, dtype=dtype), torch.arange(rows)[None]
    handles = [module.tiermoe_handle for module in model.modules() if hasattr(module, "tiermoe_handle")]
    if lengths_of(model).any:
        raise CannotLowerError("its rotary embedding depends on a sequence's length")
    with unchanged(model), _traced_attention(model), _only_tried(model), replaced_layers(handles, _StandIn()):
        dense = _lowered(forward, rows, states, positions)
    head = model.get_output_embeddings()
    try:
        with _only_tried(model):
            return dense, output[0], _lowered(lambda states: head(states), rows, states)
    except CannotLowerError:  # there is none, or it runs as a module
        return dense, output[0], None


@contextmanager
def _only_tried(model: Any) -> Iterator[None]:
    """A forward in this context leaves nothing behind.

    Raises CannotLowerError: it changes the model, which a program cannot say.
    """
    with unchanged(model) as changed:
        yield
    if changed:
        raise CannotLowerError(f"a forward changes {changed[0]}")


def _lowered(function: Callable[..., torch.Tensor], rows: int, *inputs: torch.Tensor) -> Lowering:
    """What a function does with `rows` rows. Raises CannotLowerError."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # each node has its value's shape in a fake tensor: without a context, of a mode of its own, which takes most of the
    # trace's time
    described = TracingContext(FakeTensorMode(allow_fallback_kernels=True))
    try:
        with torch.no_grad(), tracing(described):
            graph = make_fx(torch.func.functionalize(function))(*inputs)
    except Exception as error:  # what a model does in a trace is beyond any list
        raise CannotLowerError(f"{type(error).__name__} in a trace: {str(error).splitlines()[0][:120]}") from error
    graph.graph.eliminate_dead_code()
    return Lowering(graph, rows)


@contextmanager
def _traced_attention(model: Any) -> Iterator[None]:
    """Attention is one operator, `tiermoe::attend`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(_ATTENTION)
    except ValueError as error:
        raise CannotLowerError("its attention cannot be exchanged") from error
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    position_bias: Any = None, **unused: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' attention interface."""
    if position_bias is not None or attention_mask is not None:
        raise CannotLowerError("attention with a bias")
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    layer: Any = module.layer_idx
    return torch.ops.tiermoe.attend(query, key, value, sinks, layer, scale, float(softcap or 0.0)), None
