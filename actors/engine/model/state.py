"""What a module keeps outside its parameters: recorded, and put back.

A forward may assign: a buffer's numbers, an attribute of the module, of its class or of its configuration, an entry of
a list. A forward that is only tried (a trace, a comparison) must leave none of that behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.Generator)  # nothing of a forward's
_CONTAINERS = (dict, list, deque, set)
_OTHERS = (__name__.partition(".")[0], "threading")  # packages whose objects are no part of a model
_ABSENT = object()


class State:
    """What a module and those in it hold now: attributes, containers and configurations, and the numbers of tensors.

    Parameters keep their places; their numbers are not recorded, as they are large and a forward reads them.

    Args:
        shared: also what others may hold too, a configuration and a class; nobody else changes them until `restore`.
    """

    def __init__(self, root: nn.Module, shared: bool = True) -> None:
        self._root, self._shared = root, shared
        self._holders: list[tuple[str, Any, Any]] = []  # (name, dictionary, list, set or class; a shallow copy)
        self._tensors: list[tuple[str, torch.Tensor, torch.Tensor]] = []  # (name, tensor, its numbers)
        self._seen: set[int] = set()
        for name, module in root.named_modules():
            self._record_dict(name or type(root).__name__, vars(module))
            if shared:
                self._record_class(type(module))

    def restore(self) -> list[str]:
        """Put all of it back; the names of what had changed."""
        changed = [name for name, tensor, numbers in self._tensors if not _same_numbers(tensor, numbers)]
        return self.reset() + changed

    def reset(self) -> list[str]:
        """Put all of it back, without comparing numbers, for which a GPU would be waited for; what else had changed."""
        changed = []
        for name, holder, before in self._holders:
            changed += _put_back(name, holder, before)
        with torch.no_grad():
            for _, tensor, numbers in self._tensors:
                tensor.copy_(numbers)
        return changed

    def _record_dict(self, name: str, found: dict[Any, Any]) -> None:
        if self._is_new(found):
            self._holders.append((name, found, dict(found)))
            for key, value in found.items():
                self._record(f"{name}.{key}", value)

    def _record_class(self, cls: type) -> None:
        if not cls.__module__.startswith("torch.") and self._is_new(cls):
            own = dict(vars(cls))
            self._holders.append((cls.__name__, cls, own))
            for key, value in own.items():
                if isinstance(value, (*_CONTAINERS, torch.Tensor)):
                    self._record(f"{cls.__name__}.{key}", value)

    def _record(self, name: str, value: Any) -> None:
        if isinstance(value, (*_PLAIN, *_CLOSED, nn.Parameter, nn.Module)):
            return  # modules are recorded by their own names
        if isinstance(value, torch.Tensor):
            if not value.is_meta and self._is_new(value):
                self._tensors.append((name, value, value.detach().clone()))
        elif isinstance(value, dict):
            self._record_dict(name, value)
        elif isinstance(value, (*_CONTAINERS, tuple)):
            if not self._is_new(value):
                return
            if not isinstance(value, tuple):
                self._holders.append((name, value, set(value) if isinstance(value, set) else list(value)))
            for i, item in enumerate(value):
                self._record(f"{name}.{i}", item)
        elif self._shared and hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _OTHERS:
            self._record_dict(name, vars(value))  # a configuration

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))  # what it is of is held by `_holders`, so that the number stays its own
        return True


@contextmanager
def unchanged(root: nn.Module) -> Iterator[list[str]]:
    """Afterwards `root` and the CPU's random numbers are as before; the list then names what had changed."""
    changed: list[str] = []
    state = State(root)
    with torch.random.fork_rng(devices=[]):
        try:
            yield changed
        finally:
            changed += state.restore()


def _put_back(name: str, holder: Any, before: Any) -> list[str]:
    if isinstance(holder, (dict, type)):
        now = holder if isinstance(holder, dict) else dict(vars(holder))
        keys = [k for k in (*before, *(k for k in now if k not in before)) if not _same(now, before, k)]
        if isinstance(holder, type):
            for key in keys:
                setattr(holder, key, before[key]) if key in before else delattr(holder, key)
        elif keys:
            holder.clear()
            holder.update(before)  # in the order of before
        return [f"{name}.{key}" for key in keys]
    if holder == before if isinstance(holder, set) else _same_items(holder, before):
        return []
    holder.clear()
    (holder.update if isinstance(holder, set) else holder.extend)(before)
    return [name]


def _same_items(now: Any, before: list[Any]) -> bool:
    return len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True))


def _same(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    a, b = now.get(key, _ABSENT), before.get(key, _ABSENT)
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)


def _same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return torch.equal(a, b) or bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))
