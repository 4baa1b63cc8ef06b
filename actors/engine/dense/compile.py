"""The dense part of a model, run natively (`dense.native`) or compiled region by region.

A region is a decoder layer with routed experts. `torch.compile` sees all of it but the attention, which keeps its cache
in Python objects, and the experts, an operator of their own (`model.model`). All layers share one compilation.

Kernels of a layer's norms, router, shared experts and residuals are fused. transformers' own compilation of continuous
batching pads every batch and captures whole forwards, which the experts do not allow. Regions do not depend on the
batching. CUDA graphs are of whole decode steps, without a compiler (`serving.recorded`).
"""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ....errors import ConfigError
from ...settings import CompileMode
from .native import NativeDense

_STATEFUL = frozenset(("past_key_values", "past_key_value", "cache_params", "position_embeddings"))  # arguments


class CompiledDense:
    """The dense part of one model, in the way of `mode`.

    Args:
        model: on its device, with its experts attached.
        experts: its experts modules.
        threads: of a native program.
        backend: of torch.compile, for tests; None: inductor.

    Raises:
        ConfigError: this machine, this torch or this model cannot do it.

    Attributes:
        notes: for the plan; complete once `settle` was called.
    """

    def __init__(
        self, model: Any, experts: Sequence[nn.Module], mode: CompileMode, backend: Callable[..., Any] | None = None,
        threads: int = 1,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self._overridden: list[tuple[nn.Module, Callable[..., Any] | None]] = []  # and a module's own forward before
        self._native: NativeDense | None = None
        device = next(p.device for p in model.parameters() if not p.is_meta)
        if mode == "native" or (mode == "auto" and device.type == "cpu"):
            self._native = NativeDense(model, threads, required=mode == "native")
        if mode != "default":
            return
        no_compiler = shutil.which("g++") is None and shutil.which("clang++") is None
        if backend is None and device.type == "cpu" and no_compiler:
            raise ConfigError(
                "compile: default needs a C++ compiler for models on the CPU", "install g++, or compile: off"
            )
        regions = _regions(model, experts)
        if not regions:
            self.notes.append(f"{type(model).__name__} has no list of decoder layers, so nothing is compiled")
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        for region in regions:
            kind = type(region)
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, backend=backend or "inductor")
            for child in region.children():
                if not _STATEFUL.isdisjoint(inspect.signature(child.forward).parameters):
                    self._override(child, torch.compiler.disable(child.forward))
            self._override(region, partial(compiled[kind], region))

    def _override(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._overridden.append((module, vars(module).get("forward")))
        module.forward = forward

    def settle(self) -> list[str]:
        """Notes for the plan, once a first request has run.

        Raises:
            ConfigError: mode native, and the requests do not run so.
        """
        if self._native is not None:
            self._native.settle()
            self.notes = self._native.notes
        return self.notes

    def close(self) -> None:
        """Restore the model. Safe to call twice."""
        if self._native is not None:
            self._native.close()
        while self._overridden:
            module, before = self._overridden.pop()
            del module.forward  # the class's own again
            if before is not None:
                module.forward = before


def _regions(model: nn.Module, experts: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layers that hold these experts modules: the elements of a list of modules."""
    wanted, found = set(experts), list[nn.Module]()
    for owner in model.modules():
        if isinstance(owner, nn.ModuleList):
            found += [layer for layer in owner if not wanted.isdisjoint(layer.modules())]
    inner = {module for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if layer not in inner]
