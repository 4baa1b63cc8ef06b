"""A layer of split experts in native calls, which decide everything: victims, loads, and prefetch for the next layer.

What it does is the page of `layer.MoeLayer.forward`; where prefetch is not by the next router, its hook runs between
the two calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ...kernels import _cpu
from ...kernels.expert_ffn import CpuKernel, native_operands
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
        ahead: its prefetch; None: there is none.
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
        self._index, self._backend, self._cache, self.ahead = step.index, backend, backend.cache, ahead
        self._last, self.width = step.index == layers - 1, step.kernel.width
        found = None if ahead is None else ahead.probe(step.index)
        operands = None if found is None else found[0].operands
        at = None
        if operands is not None:
            at = operands[0].data_ptr(), 0 if operands[1] is None else operands[1].data_ptr()
        self._probes = found is not None and at is not None
        self.source = ahead.policy.name if ahead is not None and self._probes else None
        self.joins = ahead is None or self._probes or not ahead.reaches(step.index)
        probe = (0, 0, 0, 1, False) if found is None or at is None else (*at, *found[1:])
        self.handle = step.kernel.split_layer(split, step.index, layers, step.experts, probe)
        self._held = split, step.kernel, found  # the layer's memory
        self.waited_s = self.kernels_s = 0.0
        self.by_cpu = False

    def step(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, decode_only: bool, source: int
    ) -> torch.Tensor | list[int] | None:
        """As `NativeLayer.step`."""
        of = native_operands(hidden, ids, weights, self.width)
        if of is None:
            return None
        hidden, ids, weights = of
        tokens, top_k = ids.shape
        out, cache, ahead = torch.empty_like(hidden), self._cache, self.ahead
        given = self.handle, hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, decode_only
        self.waited_s = self.kernels_s = 0.0
        if ahead is not None:
            if not (self._probes and tokens <= MOST_ROWS and ahead.takes(self._index, tokens)):
                return self._in_turn(ahead, given, of, out)
            if ahead.idle(self._index):
                source = 0
        state, used, wasted, later, self.waited_s, self.kernels_s = _cpu.split_pass(
            *given, source, out.data_ptr(), self.by_cpu
        )
        self._judge(used, wasted)
        if state == _PAGE:
            return None
        if ahead is not None:
            cache.governor.allows()
            self._judge(0, later)
            if self._last:
                ahead.ended()
        return cache.loads.copying() if state == _CANCELLED else [] if state == _CLOSED else out

    def _in_turn(
        self, ahead: Prefetching, given: tuple[_cpu.SplitLayer, int, int, int, int, int, bool],
        inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> torch.Tensor | list[int] | None:  # fmt: skip
        """Two native calls, and Python's prefetch between them."""
        cache = self._cache
        state, used, wasted, _ = _cpu.split_begin(*given, 0)
        self._judge(used, wasted)
        if state == _PAGE:
            return None
        if state == _CLOSED:
            return []
        cache.count_passes()  # before what it predicts
        ahead.layer(self._index, self._backend.look(self._index, False, *inputs))
        hidden, _, weights = inputs
        found = _cpu.split_finish(self.handle, hidden.data_ptr(), weights.data_ptr(), out.data_ptr(), self.by_cpu)
        if found is None:
            return cache.loads.copying()
        self.waited_s, self.kernels_s = found
        return out

    def _judge(self, used: int, wasted: int) -> None:
        if used:
            self._cache.governor.used(used)
        if wasted:
            self._cache.governor.wasted(wasted)
