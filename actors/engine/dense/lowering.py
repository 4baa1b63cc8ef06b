"""A traced model as a program of row operators (`kernels/dense.py`).

The trace (`torch.fx`, ATen operators) is of T rows, where no other axis has size T. So a tensor that depends on the
input has one axis of size T, and is a vector for each row: its other axes, in order. Views and transpositions that
keep their order are nothing, reductions and products work on a row, and what mixes rows is refused; attention and the
experts are operators of their own. Tensors that do not depend on the input are computed once, here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ....kernels.dense import BINARY, REDUCE, TYPES, UNARY, Builder, Shape, Value
from ..model.published_linear import PublishedMatrix, matrix_of

_FLOATS = (torch.float32, torch.bfloat16)
_TYPES = (*_FLOATS, torch.int64, torch.int32, torch.bool)


class CannotLowerError(Exception):
    """The trace has what a program cannot say."""


class Lowering:
    """Lowers one graph.

    Args:
        graph: of `make_fx`. Its placeholders are loads of the first segment, its one output a store of the last.
        rows: T.

    Attributes:
        builder: has the steps. experts: the handle of the call after each segment but the last. The call takes what the
            segment stores, as tensors of `stores`, and the next segment loads its result.

    Raises:
        CannotLowerError: see above.
    """

    def __init__(self, module: fx.GraphModule, rows: int) -> None:
        self._module, self._rows = module, rows
        self._found: dict[fx.Node, Any] = {}  # a Value; a tensor or number that is constant; a sequence of them
        self.builder = Builder()
        self.experts: list[int] = []
        self.stores: list[list[tuple[Shape, torch.dtype]]] = []
        self._loads = 0  # of the segment
        for node in module.graph.nodes:
            if node.op == "placeholder":
                out = self._new(node)
                self.builder.step("load", TYPES[self._type(node, load=True)], out, p=[self._loads])
                self._found[node] = out
                self._loads += 1
            elif node.op == "get_attr":
                self._found[node] = operator.attrgetter(node.target)(module)
            elif node.op == "call_function":
                self._found[node] = self._call(node)
            elif node.op == "output":
                self._store([node.args[0]])
                self.builder.end_segment()
            else:
                raise CannotLowerError(f"{node.op} {node.target}")

    # --- shapes and types ------------------------------------------------------------------------------------

    def _full(self, node: fx.Node) -> Shape:
        return tuple(node.meta["tensor_meta"].shape)

    def _axis(self, full: Shape) -> int:
        """The place of the rows' axis."""
        if full.count(self._rows) != 1:
            raise CannotLowerError(f"a tensor {list(full)}, which mixes rows")
        return full.index(self._rows)

    def _row(self, full: Shape) -> Shape:
        at = self._axis(full)
        return full[:at] + full[at + 1 :]

    def _axis_of_row(self, node: fx.Node, axis: int) -> int:
        """A row's axis for an axis of the tensor."""
        full = self._full(node)
        axis, rows = axis % len(full), self._axis(full)
        if axis == rows:
            raise CannotLowerError("an operator over rows")
        return axis - (axis > rows)

    def _last(self, node: fx.Node, axes: Any) -> int:
        """The size of the row's last axis, which must be the only one in `axes`."""
        row = self._row(self._full(node))
        found = [self._axis_of_row(node, axis) for axis in ([axes] if isinstance(axes, int) else axes or [])]
        if found != [len(row) - 1]:
            raise CannotLowerError(f"an operator over axes {found} of {list(row)}")
        return row[-1]

    def _type(self, node: fx.Node, load: bool = False) -> torch.dtype:
        dtype: torch.dtype = node.meta["tensor_meta"].dtype
        if dtype not in _TYPES:
            raise CannotLowerError(f"numbers of type {dtype}")
        return torch.int32 if load and dtype == torch.int64 else dtype

    def _new(self, node: fx.Node) -> Value:
        return self.builder.new(self._row(self._full(node)))

    def _rounds(self, node: fx.Node) -> bool:
        return self._type(node) == torch.bfloat16

    # --- operands --------------------------------------------------------------------------------------------

    def _value(self, node: Any) -> Value:
        found = self._found[node]
        if not isinstance(found, Value):
            raise CannotLowerError(f"{node} is constant")
        return found

    def _constant(self, node: Any) -> torch.Tensor:
        found = self._found[node] if isinstance(node, fx.Node) else node
        if not isinstance(found, torch.Tensor) or self._rows in found.shape:
            raise CannotLowerError(f"{node} is not constant")
        return found

    def _operand(self, argument: Any, out: fx.Node) -> tuple[Value, Shape]:
        """An operand of an elementwise operator, and its shape in a row of the result, with 1 where it is spread."""
        full = self._full(out)
        rows = self._axis(full)
        if isinstance(argument, fx.Node) and isinstance(self._found[argument], Value):
            value = self._found[argument]
            own = self._full(argument)
            own = (1,) * (len(full) - len(own)) + own
            if own[rows] != self._rows:
                raise CannotLowerError("rows meet another axis")
        else:
            tensor = torch.as_tensor(self._found[argument] if isinstance(argument, fx.Node) else argument)
            own = (1,) * (len(full) - tensor.dim()) + tuple(tensor.shape)
            if own[rows] != 1:
                raise CannotLowerError("a constant that differs by row")
            value = self.builder.constant(tensor)
        return value, own[:rows] + own[rows + 1 :]

    def _spread(self, value: Value, own: Shape, to: Shape) -> tuple[Value, int, int]:
        """(operand, div, mod): element i of the result takes its element i // div % mod."""
        kept = [a for a, (x, y) in enumerate(zip(own, to, strict=True)) if x == y and y != 1]
        if any(x not in (1, y) for x, y in zip(own, to, strict=True)):
            raise CannotLowerError(f"{list(own)} spread to {list(to)}")
        inside = range(kept[0], kept[-1] + 1) if kept else range(0)
        if any(to[a] != 1 and own[a] == 1 for a in inside):
            value = self._whole(value, own, to)
            return value, 1, value.width
        return value, (math.prod(to[kept[-1] + 1 :]) if kept else 1), math.prod(own)

    def _whole(self, value: Value, own: Shape, to: Shape) -> Value:
        """An operand in the shape of the result."""
        if own == to:
            return value.seen(to)
        steps = _strides(own)
        out = self.builder.new(to)
        self._copy(out, value, to, [0 if x == 1 else s for x, s in zip(own, steps, strict=True)], 0)
        return out

    def _copy(self, out: Value, a: Value, sizes: Shape, strides: Sequence[int], start: int) -> None:
        """out[i] = a[start + i . strides], with i in `sizes` in order."""
        axes = _merged(sizes, strides)
        if len(axes) > 3:
            raise CannotLowerError(f"a copy over {len(axes)} axes")
        axes = [(1, 0)] * (3 - len(axes)) + axes
        p = [0, start, *[s for s, _ in axes], *[t for _, t in axes], axes[2][0]]
        self.builder.step("copy", 0, out, a, p=p)

    # --- operators -------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        inputs = [self._found[n] for n in node.all_input_nodes]
        if node.target is operator.getitem:
            return self._found[node.args[0]][node.args[1]]
        if not any(_varies(found) for found in inputs):
            return node.target(*fx.node.map_arg(node.args, self._get), **fx.node.map_arg(node.kwargs, self._get))
        name = node.target._schema.name  # "aten::add"
        namespace, _, name = name.partition("::")
        if namespace == "tiermoe":
            return {"attend": self._attend, "form_linear": self._published_product}.get(name, self._experts)(node)
        lower = _RULES.get(name)
        if lower is None or namespace != "aten":
            raise CannotLowerError(f"operator {node.target}")
        return lower(self, node, name)

    def _get(self, node: fx.Node) -> Any:
        return self._found[node]

    def _same(self, node: fx.Node, name: str) -> Value:
        """A view, or a change of type."""
        source = node.args[0]
        value, before, after = self._value(source), self._full(source), self._full(node)
        to = self._row(after)
        if value.width != math.prod(to):
            own = (1,) * (len(after) - len(before)) + before
            rows = self._axis(after)
            return self._whole(value, own[:rows] + own[rows + 1 :], to)
        if name not in _REORDER and math.prod(before[: self._axis(before)]) != math.prod(after[: self._axis(after)]):
            raise CannotLowerError(f"a view of {list(before)} as {list(after)}, which mixes rows")
        old, new = source.meta["tensor_meta"].dtype, self._type(node)
        if new == torch.bfloat16 and old != new:
            out = self.builder.new(to)
            self.builder.step("unary", UNARY.index("copy"), out, value, rounded=True)
            return out
        if old in _FLOATS and new == torch.bool:
            out = self.builder.new(to)
            self.builder.step("unary", UNARY.index("ne"), out, value, f=[0.0])
            return out
        if old in _FLOATS and new not in _FLOATS:
            raise CannotLowerError(f"numbers of {old} as {new}")
        return value.seen(to)

    def _reorder(self, node: fx.Node, name: str) -> Value:
        """t, transpose, permute."""
        source = node.args[0]
        full = self._full(source)
        order = list(range(len(full)))
        if name == "permute":
            order = [axis % len(full) for axis in node.args[1]]
        else:
            one, two = (0, 1) if name == "t" else (node.args[1] % len(full), node.args[2] % len(full))
            order[one], order[two] = order[two], order[one]
        rows = self._axis(full)
        axes = [axis - (axis > rows) for axis in order if axis != rows]
        row = self._row(full)
        wide = [axis for axis in axes if row[axis] != 1]
        if wide == sorted(wide):
            return self._same(node, name)
        value, out, steps = self._value(source), self._new(node), _strides(row)
        self._copy(out, value, out.shape, [steps[axis] for axis in axes], 0)
        return out

    def _part(self, node: fx.Node, source: fx.Node, axis: int, start: int, step: int, shape: Shape) -> Value:
        """A slice of one axis of a row, in `shape`, whose other axes are those of the source."""
        value, row = self._value(source), self._row(self._full(source))
        if shape == row and start == 0 and step == 1:
            return value
        out = self.builder.new(shape)
        if not out.width:
            return out  # nothing, which only a concatenation takes
        steps = list(_strides(row))
        begin = start * steps[axis]
        steps[axis] *= step
        sizes = shape if len(shape) == len(row) else (*shape[:axis], 1, *shape[axis:])
        self._copy(out, value, sizes, steps, begin)
        return out

    def _slice(self, node: fx.Node, name: str) -> Value:
        source, axis, start, _, step = _arguments(node, dim=0, start=None, end=None, step=1)
        full = self._full(source)
        if full[axis] == self._rows:
            if self._full(node) != full:
                raise CannotLowerError("a slice of rows")
            return self._value(source)
        start = min(max(0, (start or 0) + (full[axis] if (start or 0) < 0 else 0)), full[axis])
        return self._part(node, source, self._axis_of_row(source, axis), start, step, self._row(self._full(node)))

    def _select(self, node: fx.Node, name: str) -> Value:
        source, axis, index = node.args[:3]
        size = self._full(source)[axis]
        axis = self._axis_of_row(source, axis)
        return self._part(node, source, axis, index % size, 1, self._row(self._full(node)))

    def _split(self, node: fx.Node, name: str) -> list[Value]:
        source, sizes, axis = _arguments(node, sizes=None, dim=0)
        full = self._full(source)
        if isinstance(sizes, int):
            sizes = [min(sizes, full[axis] - at) for at in range(0, full[axis], sizes)]
        row, axis = self._row(full), self._axis_of_row(source, axis)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            self._part(node, source, axis, start, 1, (*row[:axis], size, *row[axis + 1 :]))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _unbind(self, node: fx.Node, name: str) -> list[Value]:
        source, axis = _arguments(node, dim=0)
        row, axis = self._row(self._full(source)), self._axis_of_row(source, axis)
        return [self._part(node, source, axis, i, 1, (*row[:axis], *row[axis + 1 :])) for i in range(row[axis])]

    def _cat(self, node: fx.Node, name: str) -> Value:
        parts, axis = _arguments(node, dim=0)
        out = self._new(node)
        axis = self._axis_of_row(node, axis)
        stride = math.prod(out.shape[axis:])  # of the axes before the joined one
        at = 0
        for part in parts:
            value = self._found[part]
            if not isinstance(value, Value):
                raise CannotLowerError("rows joined with a constant")
            if not value.width:
                continue
            inner = math.prod(out.shape[axis + 1 :]) * (1 if name == "stack" else value.shape[axis])
            self.builder.step("copy", 0, out, value, p=[at, 0, 1, value.width // inner, inner, 0, inner, 1, stride])
            at += inner
        return out

    def _slice_scatter(self, node: fx.Node, name: str) -> Value:
        into, source, axis, start, _, step = _arguments(node, src=None, dim=0, start=None, end=None, step=1)
        out, rows = self._new(node), self._axis(self._full(node))
        if axis % len(self._full(node)) == rows and self._full(source) == self._full(node):
            return self._value(source)
        axis = self._axis_of_row(node, axis)
        self.builder.step("unary", UNARY.index("copy"), out, self._value(into))
        value = self._value(source)
        inner = math.prod(out.shape[axis + 1 :])
        size = value.shape[axis] * inner
        stride = math.prod(out.shape[axis:])
        if step != 1:
            raise CannotLowerError("every other part replaced")
        self.builder.step(
            "copy", 0, out, value, p=[(start or 0) * inner, 0, 1, value.width // size, size, 0, size, 1, stride]
        )
        return out

    def _copy_of(self, node: fx.Node, name: str) -> Value:
        """copy(into, source): the source in the shape of `into`."""
        value, own = self._operand(node.args[1], node)
        return self._whole(value, own, self._row(self._full(node)))

    def _product(self, node: fx.Node, name: str) -> Value:
        bias = node.args[0] if name == "addmm" else None
        a, b = node.args[1:3] if name == "addmm" else node.args[:2]
        if node.kwargs or len(node.args) > (3 if name == "addmm" else 2):
            raise CannotLowerError("a scaled product")
        value, weight = self._value(a), self._constant(b).t()
        out = self._new(node)
        if self._full(a)[0] != self._rows:
            raise CannotLowerError("a product over rows")
        weight = weight if weight.is_contiguous() else weight.contiguous()
        kept = None if bias is None else self.builder.constant(self._constant(bias).reshape(-1).expand(out.width))
        if weight.dtype not in _FLOATS:
            raise CannotLowerError(f"weights of {weight.dtype}")
        self.builder.linear(out, value, weight, kept, self._rounds(node))
        return out

    def _published_product(self, node: fx.Node) -> Value:
        source, handle, _ = node.args
        if self._axis(self._full(source)) == len(self._full(source)) - 1:
            raise CannotLowerError("a product over rows")
        out, matrix = self._new(node), matrix_of(handle)
        assert isinstance(matrix, PublishedMatrix)  # the program runs on the CPU
        self.builder.form_linear(out, self._value(source), matrix.form, matrix.parts)
        return out

    def _outer(self, node: fx.Node, name: str) -> Value:
        """A batched product over an axis of size 1, as of positions and frequencies: an elementwise one."""
        a = node.args[0]
        first = self._full(a) if isinstance(self._found[a], Value) else tuple(self._found[a].shape)
        if first[-1] != 1:
            raise CannotLowerError("a batched product")
        return self._binary(node, "mul")

    def _binary(self, node: fx.Node, name: str) -> Value:
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 and name in ("add", "sub", "rsub") else 1)
        if alpha != 1 or node.kwargs.get("rounding_mode") is not None:
            raise CannotLowerError(f"{name} with a factor or a rounding")
        a, b = node.args[:2] if name != "rsub" else (node.args[1], node.args[0])
        out, rounded = self._new(node), self._rounds(node)
        name = {"rsub": "sub"}.get(name, name)
        if isinstance(b, int | float) and (name in ("add", "sub", "mul", "div") or name in UNARY):
            kind, number = {
                "add": ("shift", b), "sub": ("shift", -b), "mul": ("scale", b), "div": ("div", b),
            }.get(name, (name, b))  # fmt: skip
            if kind in UNARY:
                self.builder.step("unary", UNARY.index(kind), out, self._value(a), f=[float(number)], rounded=rounded)
                return out
        (one, own), (two, other) = self._operand(a, node), self._operand(b, node)
        if name in ("add", "mul", "maximum", "minimum") and own != out.shape:
            one, own, two, other = two, other, one, own
        one, *spread = self._spread(one, own, out.shape)
        two, *more = self._spread(two, other, out.shape)
        self.builder.step("binary", BINARY.index(name), out, one, two, p=[*spread, *more], rounded=rounded)
        return out

    def _unary(self, node: fx.Node, name: str) -> Value:
        value, out, f = self._value(node.args[0]), self._new(node), [0.0, 0.0]
        if name == "gelu" and node.kwargs.get("approximate", "none") == "tanh":
            name = "gelu_tanh"
        if name == "pow":
            exponent = node.args[1]
            known = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
            name, f = known.get(exponent, "power"), [float(exponent), 0.0]
        if name == "softplus":
            f = [float(x) for x in _arguments(node, beta=1.0, threshold=20.0)[1:]]
        if name == "bitwise_not":
            if self._type(node) != torch.bool:
                raise CannotLowerError("bits of a number")
            name = "logical_not"
        self.builder.step("unary", UNARY.index(name), out, value, f=f, rounded=self._rounds(node))
        return out

    def _clamp(self, node: fx.Node, name: str) -> Value:
        value, low, high = _arguments(node, min=None, max=None)
        if any(isinstance(bound, fx.Node) for bound in (low, high)):
            found = value
            for bound, kind in ((low, "maximum"), (high, "minimum")):
                if bound is None:
                    continue
                out = self._new(node)
                one, own = self._operand(value, node) if found is value else (found, out.shape)
                two, other = self._operand(bound, node)
                one, *spread = self._spread(one, own, out.shape)
                two, *more = self._spread(two, other, out.shape)
                self.builder.step("binary", BINARY.index(kind), out, one, two, p=[*spread, *more])
                found = out
            return found
        bounds = [-math.inf if low is None else float(low), math.inf if high is None else float(high)]
        out = self._new(node)
        self.builder.step("unary", UNARY.index("clamp"), out, self._value(value), f=bounds, rounded=self._rounds(node))
        return out

    def _filled(self, node: fx.Node, name: str) -> Value:
        out = self._new(node)
        number = {"zeros_like": 0.0, "new_zeros": 0.0, "new_empty": 0.0, "ones_like": 1.0}.get(name)
        if number is None:
            number = float(node.args[1])
        self.builder.step("unary", UNARY.index("fill"), out, f=[number])
        return out

    def _reduce(self, node: fx.Node, name: str) -> Value:
        source, axes, _ = _arguments(node, dim=None, keepdim=False)
        inner = self._last(source, axes)
        kind = {"amax": "maximum", "amin": "minimum"}.get(name, name)
        out = self._new(node)
        step_of = REDUCE.index(kind)
        self.builder.step("reduce", step_of, out, self._value(source), p=[inner], rounded=self._rounds(node))
        return out

    def _softmax(self, node: fx.Node, name: str) -> Value:
        out = self._new(node)
        inner = self._last(node.args[0], node.args[1])
        self.builder.step("softmax", 0, out, self._value(node.args[0]), p=[inner], rounded=self._rounds(node))
        return out

    def _norm(self, node: fx.Node, name: str) -> list[Value | None]:
        source, shape, weight, bias, eps = _arguments(node, shape=None, weight=None, bias=None, eps=1e-5)
        full = self._full(source)
        if len(shape) != 1:
            raise CannotLowerError("a norm over several axes")
        inner = self._last(source, len(full) - 1)
        kept = [None if w is None else self.builder.constant(self._constant(w)) for w in (weight, bias)]
        value = self._value(source)
        out = self.builder.new(value.shape)
        rounded = source.meta["tensor_meta"].dtype == torch.bfloat16
        self.builder.step("norm", 0, out, value, kept[0], kept[1], p=[inner], f=[eps], rounded=rounded)
        return [out, None, None]  # the others are for a backward pass

    def _topk(self, node: fx.Node, name: str) -> list[Value]:
        if name == "max":
            source, axis, keep = _arguments(node, dim=-1, keepdim=False)
            count, largest = 1, True
        else:
            source, count, axis, largest, _ = _arguments(node, k=1, dim=-1, largest=True, sorted=True)
            keep = True
        inner = self._last(source, axis)
        if not largest:
            raise CannotLowerError("the smallest")
        value = self._value(source)
        shape = (*value.shape[:-1], count)
        values, indices = self.builder.new(shape), self.builder.new(shape)
        self.builder.step("topk", 0, values, value, indices, p=[inner, count])
        kept = shape if keep else shape[:-1]
        return [values.seen(kept), indices.seen(kept)]

    def _gather(self, node: fx.Node, name: str) -> Value:
        source, axis, index = node.args[:3]
        inner = self._last(source, axis)
        value, at, out = self._value(source), self._value(index), self._new(node)
        if value.shape[:-1] != at.shape[:-1]:
            raise CannotLowerError("gather of other rows")
        self.builder.step("gather", 0, out, value, at, p=[inner, at.shape[-1]])
        return out

    def _scatter(self, node: fx.Node, name: str) -> Value:
        into, axis, index, source = node.args[:4]
        inner, at, out = self._last(into, axis), self._value(index), self._new(node)
        kept, number = None, 0.0
        if isinstance(source, fx.Node):
            kept = self._value(source)
            if kept.shape != at.shape:
                raise CannotLowerError("scatter of other rows")
        else:
            number = float(source)
        self.builder.step("scatter", 0, out, self._value(into), at, kept, p=[inner, at.shape[-1]], f=[number])
        return out

    def _where(self, node: fx.Node, name: str) -> Value:
        mask, one, two = node.args[:3] if name == "where" else (node.args[1], node.args[2], node.args[0])
        out = self._new(node)
        a, b, c = (self._whole(*self._operand(part, node), out.shape) for part in (mask, one, two))
        self.builder.step("select", 0, out, a, b, c, rounded=self._rounds(node))
        return out

    # --- attention and experts -------------------------------------------------------------------------------

    def _attend(self, node: fx.Node) -> Value:
        query, key, value, sinks, layer, scale, softcap = node.args
        out = self._new(node)
        q, k, v = (self._heads(part) for part in (query, key, value))
        kept = None if sinks is None else self._constant(sinks)
        self.builder.attend(out, q, k, v, kept, layer, scale, softcap, self._rounds(node))
        return out

    def _heads(self, node: fx.Node) -> Value:
        """[1, heads, T, D] as [heads, D]."""
        value = self._value(node)
        if len(value.shape) != 3 or value.shape[0] != 1:
            raise CannotLowerError(f"attention on rows {list(value.shape)}")
        return value.seen(value.shape[1:])

    def _experts(self, node: fx.Node) -> Value:
        self._store(node.args[:3])
        self.experts.append(node.args[3])
        self.builder.end_segment()
        out = self._new(node)
        self.builder.step("load", TYPES[self._type(node)], out, p=[0])
        self._loads = 1
        return out

    def _store(self, nodes: Sequence[fx.Node]) -> None:
        """Store values for the outside, as their own types, at the addresses after those of the loads."""
        self.stores.append([])
        for i, node in enumerate(nodes):
            value, dtype = self._value(node), self._type(node)
            if dtype not in TYPES:
                raise CannotLowerError(f"{dtype} at the end of a segment")
            self.builder.step("store", TYPES[dtype], None, value, p=[self._loads + i])
            self.stores[-1].append((value.shape, dtype))


def _varies(found: Any) -> bool:
    return isinstance(found, Value) or (isinstance(found, list | tuple) and any(_varies(part) for part in found))


def _strides(shape: Shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _merged(sizes: Shape, strides: Sequence[int]) -> list[tuple[int, int]]:
    """The axes (size, stride), without those of size 1, and those that follow each other as one."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes or [(1, 1)]


def _arguments(node: fx.Node, **defaults: Any) -> list[Any]:
    """The first argument, and the others by position or name."""
    given = list(node.args[1:])
    named = [node.kwargs.get(name, default) for name, default in defaults.items()]
    return [node.args[0], *given, *named[len(given) :]]


_REORDER = ("t", "transpose", "permute")
_SAME = (
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "alias", "detach", "clone", "contiguous", "_to_copy",
    "expand", "lift_fresh_copy",
)  # fmt: skip
Rule = Callable[[Lowering, fx.Node, str], Any]
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, Lowering._same),
    **dict.fromkeys(_REORDER, Lowering._reorder),
    **dict.fromkeys(("mm", "addmm"), Lowering._product),
    **dict.fromkeys(("add", "sub", "rsub", "mul", "div", "maximum", "minimum"), Lowering._binary),
    **dict.fromkeys(("gt", "ge", "lt", "le", "eq", "ne"), Lowering._binary),
    **dict.fromkeys(
        ("neg", "rsqrt", "sqrt", "exp", "log", "sigmoid", "silu", "gelu", "tanh", "relu", "abs", "cos", "sin",
         "reciprocal", "pow", "softplus", "logical_not", "bitwise_not"), Lowering._unary,
    ),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_empty"), Lowering._filled),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), Lowering._reduce),
    **dict.fromkeys(("topk", "max"), Lowering._topk),
    **dict.fromkeys(("where", "masked_fill"), Lowering._where),
    **dict.fromkeys(("split", "split_with_sizes"), Lowering._split),
    **dict.fromkeys(("cat", "stack"), Lowering._cat),
    "bmm": Lowering._outer,
    "slice": Lowering._slice,
    "select": Lowering._select,
    "unbind": Lowering._unbind,
    "slice_scatter": Lowering._slice_scatter,
    "copy": Lowering._copy_of,
    "clamp": Lowering._clamp,
    "_softmax": Lowering._softmax,
    "native_layer_norm": Lowering._norm,
    "gather": Lowering._gather,
    "scatter": Lowering._scatter,
}  # fmt: skip
