"""The C++ extension (`kernels/cpu/module.cpp`). Buffers are given by address; `kernels/cpu_ffn.py` checks them."""

from .expert_ffn import Group

def expert_ffn(
    hidden: int,
    gate_up: int,
    down: int,
    pairs: int,
    pair_count: int,
    groups: list[Group],
    top_k: int,
    slots: int,
    neurons: int,
    width: int,
    activation: int,
    y: int,
    /,
) -> None:
    """Raises ValueError: a group, a pair, a slot or the activation is out of range."""

def combine(y: int, weights: int, tokens: int, top_k: int, width: int, out: int, /) -> None: ...
