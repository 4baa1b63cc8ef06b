"""How many bits each expert near data gets under an average width."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

_LEVELS = 4  # of the search: n4, n3, n2, n1
_ROUNDING = 1e-9  # n (average - 1) may fall this short of a whole number by float arithmetic alone


def prefix_split(losses: ArrayLike, widths: Sequence[int], average: float) -> list[int]:
    """PREFIXSPLIT of "Context-Aware MoE Inference on CXL-Enabled GPU-NDP Systems", section 4.2.

    Symbols: experts i = 1..n in descending importance; L_i(b) = `losses`; Delta_i(b) = L_i(1) - L_i(b), the gain over
    1 bit; C_b(k) its prefix sums; n_b the number of experts at b bits; R = floor(n (average - 1)) increments.

    Rule: the n4 most important experts get 4 bits, the next n3 get 3, then n2 get 2 and n1 get 1. Every n4 and n3 is
    tried, n2 and n1 follow from 3 n4 + 2 n3 + n2 = R and n4 + n3 + n2 + n1 = n, and the largest gain
    G = C4(n4) + [C3(n4+n3) - C3(n4)] + [C2(n4+n3+n2) - C2(n4+n3)] wins. The whole budget is spent even where more bits
    lose more, as in the paper. Ties: the fewest at 4 bits, then the fewest at 3, so the most even assignment.

    Other widths work alike if they follow each other, as (2, 3, 4): the lowest takes the place of 1 bit.
    O(n^2), vectorised; n = 256 takes about a millisecond.

    Args:
        losses: float [n, W], the loss of each expert at each width.
        widths: the W widths, ascending by 1; at most 4.
        average: in bits, between the lowest and the highest width; n average need not be whole.

    Returns:
        The width of each expert, [n], never ascending.

    Raises:
        ValueError: shapes, widths, average or a value out of range.
    """
    _check_widths(widths, average)
    table = np.asarray(losses, np.float64)
    count = len(table)
    if count == 0:
        return []
    if table.shape != (count, len(widths)) or not np.isfinite(table).all():
        raise ValueError(f"losses must be finite numbers [{count}, {len(widths)}], not {list(table.shape)}")
    gains = table[:, :1] - table  # Delta [n, W]; column 0 is zero
    increments = math.floor(count * (average - widths[0]) + _ROUNDING)
    counts = _search(_prefix_sums(gains), increments, len(widths))
    above = [widths[0] + step for step in (3, 2, 1)]
    out = [width for width, n in zip(above, counts, strict=True) for _ in range(n)]
    return out + [widths[0]] * (count - len(out))


def uniform(count: int, bits: int) -> list[int]:
    """The same width for each of `count` experts."""
    return [bits] * count


def _search(sums: NDArray[np.float64], increments: int, widths: int) -> tuple[int, int, int]:
    """(n4, n3, n2) of the largest gain.

    Args:
        sums: C [4, n + 1] by increments over the lowest width; rows above the highest width are not used.
        increments: R, at most (widths - 1) n.
        widths: how many there are; 3: none at 4 bits, 2: none at 3.
    """
    _, c2, c3, c4 = sums
    count = sums.shape[1] - 1
    most4 = min(count, increments // 3) if widths > 3 else 0
    most3 = min(count, increments // 2) if widths > 2 else 0
    n4 = np.arange(most4 + 1)[:, None]
    n3 = np.arange(most3 + 1)[None, :]
    n2 = increments - 3 * n4 - 2 * n3  # [n4, n3]
    top3, top2 = n4 + n3, n4 + n3 + n2
    feasible = (n2 >= 0) & (top2 <= count)  # n2 >= 0 bounds n4 + n3 as well, for n1 >= 0
    top3, top2 = np.where(feasible, top3, 0), np.where(feasible, top2, 0)
    gain = c4[n4] + (c3[top3] - c3[n4]) + (c2[top2] - c2[top3])
    # argmax takes the first of equals: the smallest n4, then the smallest n3
    best = int(np.argmax(np.where(feasible, gain, -np.inf)))
    best4, best3 = divmod(best, most3 + 1)
    return best4, best3, increments - 3 * best4 - 2 * best3


def _prefix_sums(gains: NDArray[np.float64]) -> NDArray[np.float64]:
    count, widths = gains.shape
    sums = np.zeros((_LEVELS, count + 1))
    np.cumsum(gains.T, axis=1, out=sums[:widths, 1:])
    return sums


def _check_widths(widths: Sequence[int], average: float) -> None:
    if not 1 <= len(widths) <= _LEVELS or list(widths) != list(range(widths[0], widths[0] + len(widths))):
        raise ValueError(f"widths are {list(widths)}; give up to four that follow each other, as 1, 2, 3, 4")
    if not widths[0] <= average <= widths[-1]:
        raise ValueError(f"the average width is {average}; give {widths[0]} to {widths[-1]} bits")
