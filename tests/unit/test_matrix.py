"""Every model type with transformers' experts interface has `generate`'s tokens, as docs/checkpoints.md says."""

from __future__ import annotations

import matrix
import pytest
import torch
from tiny_models import ALL_TYPES, tiny_model

torch.set_num_threads(1)
# one of each kind of cache; the others take minutes
_QUICK = (
    "qwen3_moe", "deepseek_v2", "qwen3_next", "lfm2_moe", "jamba", "nemotron_h", "mimo_v2_flash", "minimax",
    "deepseek_v32", "qwen4_exp", "deepseek_v4", "minimax_m3_vl",
)  # fmt: skip


@pytest.mark.parametrize("name", [n if n in _QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ALL_TYPES])
def test_requests_that_come_and_go_have_the_tokens_of_generate(name: str) -> None:
    served, _ = matrix.serve(name)
    line = matrix.line_of(name)
    assert line.startswith(f"| {served.way} |")
    assert line.endswith(f"| {served.cells} |")


@pytest.mark.slow
def test_every_module_of_transformers_is_served_or_left_out() -> None:
    assert len(matrix.modules()) == 64
    served = set().union(*(matrix.module_of(tiny_model(name)) for name in ALL_TYPES))
    assert served | set(matrix.LEFT_OUT) == matrix.modules()
