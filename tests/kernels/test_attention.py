"""Paged attention by Triton, interpreted where there is no GPU, against torch's on gathered keys and values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from tiermoe.kernels.triton import attention
from tiermoe.kernels.triton.attention import Packed, attend

PAGE = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Batch:
    """Sequences of (past, queries) with their keys in shuffled pages of a cache, and NaN everywhere else."""

    def __init__(
        self, sequences: Sequence[tuple[int, int]], heads: int, kv_heads: int, width: int, window: int | None = None,
        dtype: torch.dtype = torch.float32, seed: int = 0,
    ) -> None:  # fmt: skip
        generator, chance = torch.Generator().manual_seed(seed), random.Random(seed)
        draw = lambda *size: torch.randn(*size, generator=generator).to(DEVICE, dtype)  # noqa: E731
        rows = sum(queries for _, queries in sequences)
        self.window, self.scale = window, width**-0.5
        self.query, self.k_new, self.v_new = draw(rows, heads, width), *(draw(rows, kv_heads, width) for _ in range(2))
        pages = [-(-past // PAGE) for past, _ in sequences]
        order = chance.sample(range(sum(pages) + 3), sum(pages))
        shape = ((sum(pages) + 3) * PAGE, kv_heads, width)
        self.k_cache, self.v_cache = (torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
        self.wanted, index, keys = [], list[int](), list[int]()
        first = 0
        for past, queries in sequences:
            mine, order = order[: -(-past // PAGE)], order[-(-past // PAGE) :]
            kept = past if window is None else min(past, window - 1)  # what a rolling cache keeps
            places = [mine[j // PAGE] * PAGE + j % PAGE for j in range(past)][past - kept :]
            k_past, v_past = draw(kept, kv_heads, width), draw(kept, kv_heads, width)
            self.k_cache[places], self.v_cache[places] = k_past, v_past
            index += places + [10**9] * queries  # the forward's own keys are not looked up
            keys.append(kept + queries)
            some = slice(first, first + queries)
            k, v = torch.cat([k_past, self.k_new[some]]), torch.cat([v_past, self.v_new[some]])
            self.wanted.append(self._plain(self.query[some], k, v))
            first += queries
        starts = [torch.tensor([0, *itertools.accumulate(n)], device=DEVICE, dtype=torch.int32)
                  for n in ([q for _, q in sequences], keys)]  # fmt: skip
        self.packed = Packed(
            starts[0], starts[1], torch.tensor(index, device=DEVICE), max(q for _, q in sequences), max(keys)
        )

    def _plain(self, query: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        queries, keys = len(query), len(k)
        distance = (keys - queries + torch.arange(queries))[:, None] - torch.arange(keys)[None, :]
        seen = (distance >= 0) & (distance < (self.window or keys + 1))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1).double(), k.transpose(0, 1).double(), v.transpose(0, 1).double(),
            attn_mask=seen.to(DEVICE), scale=self.scale, enable_gqa=True,
        )  # fmt: skip
        return out.transpose(0, 1)

    def attend(self, **more: torch.Tensor) -> torch.Tensor:
        return attend(
            self.query, self.k_new, self.v_new, self.k_cache, self.v_cache, self.packed, self.scale, self.window, **more
        )


@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "width", "window"),
    [
        ([(9, 1)], 4, 4, 16, None),
        ([(0, 1), (70, 1), (5, 1)], 6, 2, 32, None),  # a group of three; contexts of several steps and of none
        ([(0, 7), (3, 1), (12, 5)], 4, 1, 24, None),  # a prompt, a token, a chunk; a width that is no power of two
        ([(30, 1), (2, 1)], 4, 2, 16, 8),
        ([(30, 12), (0, 20)], 2, 2, 16, 6),  # chunks longer than the window
        ([(0, 40)], 8, 2, 16, None),  # more pairs than a program takes
    ],
)
def test_it_is_torchs_attention(
    sequences: list[tuple[int, int]], heads: int, kv_heads: int, width: int, window: int | None
) -> None:
    batch = Batch(sequences, heads, kv_heads, width, window)
    torch.testing.assert_close(batch.attend().double(), torch.cat(batch.wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_split_keys_are_joined(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 64)
    monkeypatch.setattr(attention, "_launches", {})
    batch = Batch([(200, 1), (3, 1), (127, 1)], 4, 2, 16, window)
    torch.testing.assert_close(batch.attend().double(), torch.cat(batch.wanted), rtol=1e-5, atol=1e-5)


def test_a_sequence_has_the_same_bits_alone_and_beside_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 64)
    monkeypatch.setattr(attention, "_launches", {})
    batch = Batch([(20, 1), (300, 1)], 4, 2, 16)
    together = batch.attend()
    packed = batch.packed
    alone = attend(
        batch.query[:1], batch.k_new[:1], batch.v_new[:1], batch.k_cache, batch.v_cache,
        Packed(packed.starts_q[:2], packed.starts_k[:2], packed.index, 1, 21), batch.scale,
    )  # fmt: skip
    assert torch.equal(alone, together[:1])


@pytest.mark.parametrize(("sequences", "window", "sinks"), [
    ([(300, 1), (3, 1), (127, 1)], None, False), ([(0, 150), (200, 70), (63, 1), (0, 1)], None, True),
    ([(300, 40), (5, 1)], 50, True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_program_that_takes_all_splits_gives_the_same_bits(
    sequences: list[tuple[int, int]], window: int | None, sinks: bool, dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Prompts whose partial sums would take gigabytes; a token's own attention must not depend on what is beside it."""
    monkeypatch.setattr(attention, "SPLIT", 64)
    batch = Batch(sequences, 4, 2, 16, window, dtype)
    more = {"sinks": torch.tensor([-1.0, 0.0, 1.0, 3.0], device=DEVICE)} if sinks else {}
    found = []
    for most in (1 << 40, 0):
        monkeypatch.setattr(attention, "_launches", {})
        monkeypatch.setattr(attention, "_SUMS_BYTES", most)
        found.append(batch.attend(**more))
        assert [key[-2] for key in attention._launches] == [most == 0]
    assert torch.equal(*found)
    if not sinks:
        near = 1e-5 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(found[1].double(), torch.cat(batch.wanted), rtol=near, atol=near)


def test_half_precision() -> None:
    batch = Batch([(40, 1), (7, 3)], 4, 2, 16, dtype=torch.bfloat16)
    torch.testing.assert_close(batch.attend().double(), torch.cat(batch.wanted), rtol=3e-2, atol=3e-2)


def test_sinks_take_their_share() -> None:
    batch = Batch([(9, 1), (0, 3)], 4, 2, 16)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0], device=DEVICE)
    found = batch.attend(sinks=sinks)
    plain, first = batch.attend(), 0
    for (past, queries), keys in zip([(9, 1), (0, 3)], [10, 3], strict=True):
        places = batch.packed.index[int(batch.packed.starts_k[first and 1]) :][:past]
        some = slice(first, first + queries)
        k = torch.cat([batch.k_cache[places], batch.k_new[some]]).repeat_interleave(2, dim=1)
        scores = torch.einsum("qhd,khd->qhk", batch.query[some], k) * batch.scale
        ahead = torch.arange(keys, device=DEVICE)[None, :] > past + torch.arange(queries, device=DEVICE)[:, None]
        total = scores.masked_fill(ahead[:, None, :], float("-inf")).exp().sum(-1)  # [q, heads]
        share = total / (total + sinks.exp())
        torch.testing.assert_close(found[some], plain[some] * share[:, :, None], rtol=1e-4, atol=1e-5)
        first += queries


def test_shapes_are_checked() -> None:
    batch = Batch([(4, 1)], 4, 2, 16)
    batch.k_new = batch.k_new.double()
    with pytest.raises(ValueError, match="differ in type"):
        batch.attend()
    batch.k_new = batch.k_new[:, :, :8]
    with pytest.raises(ValueError, match="keys"):
        batch.attend()
