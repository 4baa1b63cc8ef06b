"""A layer of split experts in native calls, which decide everything: victims, loads, and prefetch for the next layer.

What it does is the page of `layer.MoeLayer.forward`; where prefetch is not the speculative one, its hook runs between
the two calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, cast

import torch

from ...errors import RuntimeFailure
from ...kernels import _cpu
from ...kernels.expert_ffn import CpuKernel
from ...kernels.router import MOST_ROWS
from .prefetching import Prefetching
from .split import Configuring

if TYPE_CHECKING:
    from .dispatch import DeviceBackend
    from .layer import MoeLayer

_PAGE, _CLOSED, _CANCELLED = 0, 2, 3  # states of `_cpu.split_pass`


class SplitLayer:
    """As `layer.NativeRun`.

    Attributes:
        waited_s, kernels_s: seconds that the last pass has waited for copies, and run kernels.
        by_cpu: kernels by the thread's CPU time.
    """

    decides = plans = True
    orders = False

    @staticmethod
    def of(step: MoeLayer, backend: DeviceBackend) -> SplitLayer | None:
        """None: the policies of this layer are not for native code."""
        hooks, split = step.hooks, backend.cache.split
        ahead = hooks.ahead[0] if len(hooks.ahead) == 1 else None
        known = all(isinstance(watcher, Configuring) for watcher in hooks.watch)
        layers = len(backend.cache.stats.layers)
        if split is None or not known or layers < 2 or not isinstance(step.kernel, CpuKernel):
            return None
        if hooks.reroute or len(hooks.ahead) > 1 or not (ahead is None or isinstance(ahead, Prefetching)):
            return None
        for watcher in hooks.watch:
            split.on_passed = cast(Configuring, watcher).passed
        return SplitLayer(step, backend, ahead, split.handle, layers)

    def __init__(
        self, step: MoeLayer, backend: DeviceBackend, ahead: Prefetching | None, split: _cpu.Split, layers: int
    ) -> None:
        assert isinstance(step.kernel, CpuKernel)
        self._index, self._backend, self._cache, self._ahead = step.index, backend, backend.cache, ahead
        self._last, self._check, self._width = step.index == layers - 1, step.check, step.kernel.width
        found = None if ahead is None else ahead.probe(step.index)
        operands = None if found is None else found[0].operands
        at = None
        if operands is not None:
            at = operands[0].data_ptr(), 0 if operands[1] is None else operands[1].data_ptr()
        self._probes = found is not None and at is not None
        probe = (0, 0, 0, 1) if found is None or at is None else (*at, *found[1:])
        self._made = step.kernel.split_layer(split, step.index, layers, step.experts, probe)
        self._held = split, step.kernel, found  # the layer's memory
        self.waited_s = self.kernels_s = 0.0
        self.by_cpu = False

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]; None: the page must run the pass."""
        float32 = torch.float32
        if hidden.dtype is not float32 or weights.dtype is not float32 or ids.dtype is not torch.int64:
            return None
        tokens = len(ids)
        if hidden.shape != (tokens, self._width) or weights.shape != ids.shape:
            raise ValueError(f"{tuple(hidden.shape)} rows, {tuple(ids.shape)} ids and {tuple(weights.shape)} weights")
        hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
        self.waited_s = self.kernels_s = 0.0
        cache, ahead = self._cache, self._ahead
        probes = self._probes and tokens <= MOST_ROWS and ahead is not None and ahead.takes(self._index, tokens)
        try:
            if probes or ahead is None:
                out = self._whole(hidden, ids, weights, probes)
            else:
                out = self._in_turn(ahead, hidden, ids, weights)
        except BaseException:
            cache.abandon()
            raise
        if out is None:
            return None
        if self.waited_s:
            stats = cache.stats.layers[self._index]
            stats.blocked_io_s += self.waited_s
            stats.io_path_s += self.waited_s
        if self._last:
            cache.count_passes()
        if self._check:
            cache.check_integrity()
        return out

    def _whole(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, probes: bool
    ) -> torch.Tensor | None:
        """One native call; probes: it prefetches by the router's scores."""
        cache, ahead, source = self._cache, self._ahead, 0
        if probes and ahead is not None and not ahead.idle(self._index):
            source = cache.counters.pending.number(cache.stats.source(ahead.policy.name))
        out = torch.empty_like(hidden)
        state, used, wasted, later, self.waited_s, self.kernels_s = self.step(hidden, ids, weights, source, out)
        self._judge(used, wasted)
        if state == _PAGE:
            return None
        if probes and ahead is not None:
            cache.governor.allows()
            self._judge(0, later)
            if self._last:
                ahead.ended()
        if state == _CLOSED:
            self._fail_closed()
        if state == _CANCELLED:
            self._fail_cancelled()
        return out

    def step(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, source: int, out: torch.Tensor
    ) -> tuple[int, int, int, int, float, float]:
        tokens, top_k = ids.shape
        return _cpu.split_pass(
            self._made, hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, self._cache.decode_only,
            source, out.data_ptr(), self.by_cpu,
        )  # fmt: skip

    def _in_turn(
        self, ahead: Prefetching, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor | None:
        """Two native calls, and Python's prefetch between them."""
        cache, (tokens, top_k) = self._cache, ids.shape
        state, used, wasted, _ = _cpu.split_begin(
            self._made, hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, cache.decode_only, 0
        )
        self._judge(used, wasted)
        if state == _PAGE:
            return None
        if state == _CLOSED:
            self._fail_closed()
        cache.count_passes()  # before what it predicts
        ahead.layer(self._index, self._backend.look(self._index, False, hidden, ids, weights))
        out = torch.empty_like(hidden)
        found = _cpu.split_finish(self._made, hidden.data_ptr(), weights.data_ptr(), out.data_ptr(), self.by_cpu)
        if found is None:
            self._fail_cancelled()
        self.waited_s, self.kernels_s = found
        return out

    def _judge(self, used: int, wasted: int) -> None:
        if used:
            self._cache.governor.used(used)
        if wasted:
            self._cache.governor.wasted(wasted)

    def _fail_closed(self) -> NoReturn:
        raise RuntimeFailure("the expert cache is closed", "start a new worker")

    def _fail_cancelled(self) -> NoReturn:
        loads = self._cache.loads
        assert loads.native is not None
        loads.fail_cancelled(loads.native.under_way)
