"""The matrices of a checkpoint's dense part that stay in their published form.

Those are quantized matrices of linear layers and embeddings, one tensor for one parameter (`published_linear` says of
which modules). What transformers' conversion or a GGUF converter makes of several tensors is dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from ...actors.engine.model.published_linear import keeps_form
from ...kernels.forms import BLOCKS, FLOATS, MatrixForm
from .matrices import QuantizedEntry, Raw, plain_form
from .plan import Plan, RowTransform
from .tensors import BLOCK_BYTES


@dataclass(frozen=True)
class DenseMatrix:
    """One matrix that stays in its published form. rows: of the tensor that make it; None: all, in order."""

    entry: QuantizedEntry
    form: MatrixForm
    rows: RowTransform | None

    def parts(self) -> Raw:
        """Its parts, checked. Raises CheckpointError: as `QuantizedEntry.verified`."""
        parts = self.entry.verified()
        if self.rows is not None:
            parts = {"weight": self.rows([torch.from_numpy(parts["weight"])]).numpy()}
        return parts

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Its parts in order, checked; of one without scales apart some rows at a time. Raises as `parts`."""
        if self.rows is not None or self.entry.repack is not None or len(self.form.parts()) > 1:
            parts = self.parts()
            yield from (parts[part] for part in self.form.parts())
            return
        step = max(1, BLOCK_BYTES * self.form.outputs // max(1, self.form.nbytes()))
        for start in range(0, self.form.outputs, step):
            yield self.entry.of_rows(start, min(start + step, self.form.outputs)).verified()["weight"]


def dense_matrices(
    model: PreTrainedModel, plan: Plan, names: Sequence[str], aliases: Mapping[str, str]
) -> dict[str, DenseMatrix]:
    """Those of some parameters that stay in their published form.

    Args:
        aliases: further names of parameters that share storage, and whose it is.
    """
    modules, found = dict(model.named_modules()), {}
    for name in names:
        group = plan.makers[name]
        if group.converter is not None or len(group.sources) != 1:
            continue
        entry, rows = group.sources[0][2], group.transform
        if not isinstance(entry, QuantizedEntry) and len(entry.spec.shape) == 2 and entry.spec.dtype in FLOATS.values():
            entry = QuantizedEntry(entry.spec, plain_form(entry, *entry.spec.shape), {"weight": entry})
        if not isinstance(entry, QuantizedEntry) or entry.stack or entry.transposed:
            continue
        if rows is not None and not (isinstance(rows, RowTransform) and entry.form.kind in BLOCKS):
            continue
        form = replace(entry.form, outputs=group.targets[name].shape[0])
        paths = [one.removesuffix(".weight") for one in (name, *(a for a, of in aliases.items() if of == name))]
        if all(path in modules and keeps_form(modules[path], path, form) for path in paths):
            found[name] = DenseMatrix(entry, form, rows)
    return found
