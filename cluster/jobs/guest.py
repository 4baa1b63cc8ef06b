"""`tiermoe run --attach`: one prompt to a runtime that `tiermoe up` keeps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from tokenizers import Tokenizer

from ...actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from ...errors import RequestError
from ..prompt import IncrementalText, encode_prompt, load_tokenizer
from ..ray_auth import adopt_mode
from ..versions import versions

_REQUEST_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class GuestJob:
    """A prompt for a runtime.

    Attributes:
        address: HOST:PORT of its Ray.
        deployment: its id; None where there is only one.
        model: folder with tokenizer.json; None: the runtime's expert store, if it is on this machine.
    """

    address: str
    deployment: str | None
    prompt: str
    sampling: SamplingParams
    model: str | None = None


def run_as_guest(job: GuestJob, text_out: TextIO) -> dict[str, Any]:
    """Attach, generate, leave; the record of `tiermoe run --json`.

    Its counters are the runtime's since it started, whoever sent the requests; `attached_to` says which.

    Raises:
        RuntimeFailure: there is no such runtime, or it failed. RequestError: the prompt does not fit.
    """
    begin_s = time.monotonic()
    adopt_mode(job.address)
    from ..attach import Attachment  # Ray, which reads the mode when it is imported

    with Attachment(job.address) as attachment:
        deployment = attachment.choose(job.deployment)
        plan = attachment.ask(deployment, "plan")
        tokenizer = load_tokenizer(_tokenizer_dir(plan, job.model))
        ids = encode_prompt(tokenizer, job.prompt)
        _check_length(len(ids), job.sampling.max_tokens, plan)
        startup_s = time.monotonic() - begin_s
        request = GenerationRequest(uuid.uuid4().hex, ids, job.sampling)
        generation, text = stream_text(
            lambda asked: attachment.generate(deployment, asked, _REQUEST_DEADLINE_S),
            tokenizer, job.prompt, request, text_out,
        )  # fmt: skip
        stats = attachment.ask(deployment, "stats")
    return {
        "attached_to": deployment,
        "model": str(plan["model"]),
        "policy": plan["policy"],
        "lossless": plan["lossless"],
        "prompt": job.prompt,
        "prompt_tokens": len(ids),
        "generated_tokens": len(generation.token_ids),
        "token_ids": generation.token_ids,
        "text": text,
        "finish": generation.finish,
        "ttft_s": generation.ttft_s,
        "tpot_s": generation.tpot_s,
        "startup_s": startup_s,
        "sampling": asdict(job.sampling),
        **stats.as_dict(),
        "plan": plan,
        "versions": versions(),
    }


def stream_text(
    generate: Callable[[GenerationRequest], Iterator[TokenEvent]],
    tokenizer: Tokenizer,
    prompt: str,
    request: GenerationRequest,
    out: TextIO,
) -> tuple[Generation, str]:
    """Write the prompt and its continuation as it comes; all events and the text of the continuation."""
    generation, text = Generation(request.request_id), IncrementalText(tokenizer)
    out.write(prompt)
    for event in generate(request):
        generation.add(event)
        out.write(text.add(event.token_ids))
        out.flush()
    out.write(text.finish() + "\n")
    out.flush()
    return generation, text.text


def _tokenizer_dir(plan: dict[str, Any], model: str | None) -> Path:
    folder = Path(model).expanduser() if model is not None else Path(plan["store_path"])
    if not (folder / "tokenizer.json").is_file():
        raise RequestError(
            f"no tokenizer.json in '{folder}' on this machine",
            f"pass --model the folder of {plan['model']}'s checkpoint",
        )
    return folder


def _check_length(prompt_tokens: int, max_tokens: int, plan: dict[str, Any]) -> None:
    limit = plan["max_prompt_tokens"]
    if prompt_tokens + max_tokens > limit:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the runtime's {limit}",
            "shorten the prompt or lower --max-tokens",
        )
