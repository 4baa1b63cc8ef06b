"""The dense part of a model, run natively (`model.native`) or compiled region by region.

A region is a decoder layer with routed experts. `torch.compile` sees all of it but the attention, which keeps its cache
in Python objects, and the experts, an operator of their own (`model.model`). All layers share one compilation.

    default   kernels of a layer's norms, router, shared experts and residuals are fused
    graphs    in addition their launches are replayed as CUDA graphs, split at the experts, which read the routing on
              the host

Graphs are recorded for a few numbers of rows, to which smaller forwards are padded (`model.padding`); larger forwards
(mostly prompts) run without. Attention is not in them: its shapes grow with the context.

transformers' own compilation of continuous batching pads every batch and captures whole forwards, which the experts do
not allow. Regions do not depend on the batching.
"""

from __future__ import annotations

import inspect
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import nn

from ....errors import ConfigError
from ...settings import CompileMode
from .model import UNSAFE_IN_GRAPHS
from .native import NativeDense
from .padding import GRAPH_ROWS, recorded_prompts, run_padded, unpadded

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
        warm_up: prompts to be run before serving, so that no request waits for a recording.
    """

    def __init__(
        self, model: Any, experts: Sequence[nn.Module], mode: CompileMode, backend: Callable[..., Any] | None = None,
        threads: int = 1,
    ) -> None:  # fmt: skip
        self.notes: list[str] = []
        self.warm_up: list[list[int]] = recorded_prompts() if mode == "graphs" else []
        self._overridden: list[tuple[nn.Module, Callable[..., Any] | None]] = []  # and a module's own forward before
        self._native: NativeDense | None = None
        device = next(p.device for p in model.parameters() if not p.is_meta)
        if mode == "native" or (mode == "auto" and device.type == "cpu"):
            self._native = NativeDense(model, threads, required=mode == "native")
        if mode in ("off", "auto", "native"):
            return
        if backend is None:
            _refuse_unable(mode, device)
        if mode == "graphs":
            self.notes.append(f"forwards of more than {GRAPH_ROWS} rows run without CUDA graphs")
        regions = _regions(model, experts)
        if not regions:
            self.notes.append(f"{type(model).__name__} has no list of decoder layers, so nothing is compiled")
        compiled: dict[type[nn.Module], Callable[..., Any]] = {}
        for i, region in enumerate(regions):
            kind = type(region)
            if kind not in compiled:
                compiled[kind] = _compile(kind.forward, mode, backend)
            for child in region.children():
                if not _STATEFUL.isdisjoint(inspect.signature(child.forward).parameters):
                    own = unpadded(child.forward) if mode == "graphs" else child.forward
                    self._override(child, torch.compiler.disable(own))
            self._override(region, _region(region, compiled[kind], mode, first=i == 0))

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


def _region(
    layer: nn.Module, compiled: Callable[..., Any], mode: CompileMode, first: bool
) -> Callable[..., torch.Tensor]:
    """A forward to replace a decoder layer's; hidden states [B, S, H] come first. first: of the model's regions."""
    plain = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return compiled(layer, hidden_states, *args, **kwargs)

    if mode != "graphs":
        return forward

    def replayed(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if hidden_states.shape[:-1].numel() > GRAPH_ROWS:
            return plain(hidden_states, *args, **kwargs)
        if first:  # what graphs of the forward before left in their memory is no longer needed
            _ready_thread()
            torch.compiler.cudagraph_mark_step_begin()
        if len(hidden_states) > 1:  # rows of several sequences side by side: none of our batchers
            return compiled(layer, hidden_states, *args, **kwargs)
        return run_padded(lambda hidden: compiled(layer, hidden, *args, **kwargs), hidden_states)

    return replayed


def _compile(forward: Callable[..., Any], mode: CompileMode, backend: Callable[..., Any] | None) -> Callable[..., Any]:
    if backend is not None:
        return torch.compile(forward, backend=backend)
    if mode == "default":
        return torch.compile(forward)
    return torch.compile(forward, options={"triton.cudagraphs": True, "graph_partition": True})


def _regions(model: nn.Module, experts: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layers that hold these experts modules: the elements of a list of modules."""
    wanted, found = set(experts), list[nn.Module]()
    for owner in model.modules():
        if isinstance(owner, nn.ModuleList):
            found += [layer for layer in owner if not wanted.isdisjoint(layer.modules())]
    inner = {module for layer in found for module in layer.modules() if module is not layer}
    return [layer for layer in found if layer not in inner]


def _refuse_unable(mode: CompileMode, device: torch.device) -> None:
    if mode == "graphs":
        if device.type != "cuda":
            raise ConfigError(
                f"compile: graphs makes CUDA graphs, the model runs on {device}", "use compile: default or compile: off"
            )
        from torch._inductor import config

        if UNSAFE_IN_GRAPHS is None or not hasattr(config, "graph_partition"):
            raise ConfigError(
                f"torch {torch.__version__} cannot cut CUDA graphs at an operator",
                "use compile: default, or torch >= 2.9",
            )
    if device.type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise ConfigError("compile: default needs a C++ compiler for models on the CPU", "install g++, or compile: off")


def _ready_thread() -> None:
    """torch before 2.13 keeps graphs by thread, for threads only that imported this module or autograd's."""
    from torch._inductor import cudagraph_trees as trees

    if not hasattr(trees, "_initialize_tls") and not hasattr(trees.local, "tree_manager_containers"):
        trees.local.tree_manager_containers = {}
        trees.local.tree_manager_locks = defaultdict(Lock)
