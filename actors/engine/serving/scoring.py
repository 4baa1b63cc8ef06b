"""Log-probabilities of given tokens, prefilled and decoded as in serving, without generating.

    prefill   the prefix's rows, `decode=False`: its last row predicts the first token after it
    decode    the tokens after it but the last, `decode=True`, forced: each row predicts the next

By causality one forward over many forced tokens equals one forward for each, so policies are measured as they serve, at
the speed of a prefill. A policy whose decisions depend on the rows beside a token needs `rows=1`: a forward for each
token. Models with a recurrent state always decode one token at a time.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ....errors import RequestError, RuntimeFailure
from ...policies.routing import SequenceRows
from ..model.attention import plain_attention_of
from ..model.lengths import lengths_of
from .kv_rows import CodedCache, marked

_numbers = itertools.count()


def score(
    model: Any, engine: Any, ids: Sequence[int], prefix: int, attention: str, chunk: int, rows: int | None = None
) -> torch.Tensor:
    """Log-probabilities [len(ids) - prefix, V], fp32 on the CPU, at each position after the prefix.

    Args:
        model: a transformers model, no request in flight.
        engine: its expert engine.
        ids: the tokens. prefix: how many of them are prefill; at least one, and at least one must follow.
        attention: an implementation that works with an ordinary cache, such as sdpa.
        chunk: most rows of a forward. rows: most rows of one after the prefix; None: `chunk`.

    Raises:
        RequestError: the prefix leaves no token before it or after it.
    """
    return score_continuations(model, engine, *_divided(ids, prefix), attention, chunk, rows)[0]


def _divided(ids: Sequence[int], prefix: int) -> tuple[Sequence[int], list[Sequence[int]]]:
    """The prefix and its one continuation. Raises RequestError: one of them is empty."""
    if not 0 < prefix < len(ids):
        raise RequestError(f"a prefix of {prefix} of {len(ids)} tokens", "leave at least one token on either side")
    return ids[:prefix], [ids[prefix:]]


@torch.no_grad()
def score_continuations(
    model: Any, engine: Any, prefix: Sequence[int], continuations: Sequence[Sequence[int]], attention: str, chunk: int,
    rows: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """`score` for several continuations of one prefix: [continuations, tokens, V]; the prefix runs once.

    Raises:
        RequestError: nothing before or after the prefix, or continuations of different lengths.
    """
    lengths = {len(tokens) for tokens in continuations}
    if not prefix or len(lengths) != 1 or 0 in lengths:
        raise RequestError(
            f"a prefix of {len(prefix)} tokens and continuations of {sorted(lengths)}",
            "give at least one token of each, and continuations of one length",
        )
    name, decoded_rows = f"score-{next(_numbers)}", chunk if rows is None else min(rows, chunk)
    with _plain_attention(model, attention):
        try:
            prompt = len(prefix)
            logits, cache = _feed(model, engine, name, prefix, _cache_of(model), chunk, prompt, decode=False)
            found = []
            for tokens in continuations:
                own = cache if len(continuations) == 1 else copy.deepcopy(cache)  # decoding writes to it
                fed, parts = tokens[:-1], [logits[-1:]]
                again = lengths_of(model).anew_in(prompt, prompt + len(fed))
                if again is not None:  # the token number `again` runs with all before it
                    number = again - prompt
                    parts += [_feed(model, engine, name, fed[: number - 1], own, decoded_rows, prompt, decode=True)[0]]
                    whole = [*prefix, *fed[:number]]
                    anew, own = _feed(model, engine, name, whole, _cache_of(model), chunk, again, decode=False)
                    parts, fed = [*parts, anew[-1:]], fed[number:]
                parts += [_feed(model, engine, name, fed, own, decoded_rows, again or prompt, decode=True)[0]]
                found.append(torch.cat(parts))
        finally:
            engine.end_sequence(name)
    return torch.log_softmax(torch.stack(found).float(), -1).cpu()


def score_with(worker: Any, ids: Sequence[int], prefix: int, rows: int | None = None) -> torch.Tensor:
    """`score` on a started `GpuWorker`.

    Raises:
        RequestError: see `score`. RuntimeFailure: the worker serves a request.
    """
    return score_continuations_with(worker, *_divided(ids, prefix), rows)[0]


def score_continuations_with(
    worker: Any, prefix: Sequence[int], continuations: Sequence[Sequence[int]], rows: int | None = None
) -> torch.Tensor:
    """`score_continuations` on a started `GpuWorker`; raises like `score_with`."""
    _refuse_while_serving(worker)
    model, chunk = worker.model, worker.settings.kv.max_batch_tokens
    with worker.engine.alone:
        return score_continuations(model, worker.engine, prefix, continuations, plain_attention_of(model), chunk, rows)


def _cache_of(model: Any) -> Any:
    """An empty cache that rounds as the one of requests does; None: that does not, and the model makes its own."""
    kind = marked(model)
    return None if kind is None else CodedCache(model, kind)


def _feed(
    model: Any, engine: Any, name: str, ids: Sequence[int], cache: Any, chunk: int, prompt: int, *, decode: bool
) -> tuple[torch.Tensor, Any]:
    """Run tokens after `cache` in forwards of at most `chunk` rows: logits [len(ids), V] and the new cache.

    prompt: tokens of the sequence's prompt, for `SequenceLengths.of`.
    """
    logits = [torch.empty(0, model.get_output_embeddings().weight.shape[0], device=model.device)]
    if getattr(model, "_is_stateful", False):
        chunk = 1 if decode else len(ids)
    lengths = lengths_of(model)
    for part in torch.tensor([list(ids)], dtype=torch.long, device=model.device).split(chunk, 1):
        if part.numel():
            engine.begin_forward([SequenceRows(name, 0, part.numel(), decode)])
            with lengths.of([(part.numel(), prompt)]):
                out = model(input_ids=part, past_key_values=cache, use_cache=True)
            logits.append(out.logits[0])
            cache = out.past_key_values
    return torch.cat(logits), cache


@contextmanager
def _plain_attention(model: Any, attention: str) -> Iterator[None]:
    serving = model.config._attn_implementation
    if serving == attention:
        yield
        return
    model.set_attn_implementation(attention)  # the manager's paged variant needs a paged cache
    try:
        yield
    finally:
        model.set_attn_implementation(serving)


def _refuse_while_serving(worker: Any) -> None:
    running = worker.health().get("running")
    if running is None:
        raise RuntimeFailure("the worker is not started", "call start first")
    if running:
        raise RuntimeFailure(f"the worker serves {running} requests", "score when none is in flight")
