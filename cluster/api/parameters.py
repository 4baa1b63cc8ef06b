"""Parameters of other servers: which are ignored, and which are accepted only if they change nothing.

vLLM, llama.cpp, TGI, Ollama and OpenAI's own service each know parameters that this server does not carry out. Clients
send them unasked. A parameter that changes no token and no field of the answer is ignored, and the client is told
(`Warning` header) and counted. A parameter that would change the answer is accepted at the values at which it does not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

IGNORED = frozenset({
    # OpenAI
    "user", "store", "metadata", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "include_obfuscation",
    # vLLM
    "priority", "request_id", "cache_salt", "guided_decoding_backend", "spaces_between_special_tokens",
    "length_penalty", "early_stopping",
    # llama.cpp, TGI and Ollama
    "cache_prompt", "id_slot", "n_keep", "t_max_predict_ms", "n_cache_reuse", "n_indent", "keep_alive",
    "decoder_input_details",
    # they shape what is off below
    "repeat_last_n", "penalize_nl", "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
})  # fmt: skip

_LONG_NAME = 64

# parameter -> the values at which it changes nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (None, 1), "suffix": (None, ""), "functions": (None, []),
    "function_call": (None, "none", "auto"), "audio": (None,),
    "modalities": (None, ["text"]), "reasoning_effort": (None,),
    "verbosity": (None, "medium"), "web_search_options": (None,),
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False), "include": (None, []),
    "reasoning": (None,), "prompt": (None,), "truncation": (None, "disabled"), "max_tool_calls": (None,),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    # vLLM
    "use_beam_search": (None, False), "echo": (None, False),
    "truncate_prompt_tokens": (None,), "prompt_logprobs": (None,), "allowed_token_ids": (None,),
    "bad_words": (None, []), "add_generation_prompt": (None, True), "continue_final_message": (None, False),
    "documents": (None,), "chat_template": (None,), "mm_processor_kwargs": (None,),
    "guided_whitespace_pattern": (None,), "structural_tag": (None,),
    "include_reasoning": (None, True), "return_token_ids": (None, False), "return_tokens_as_token_ids": (None, False),
    "kv_transfer_params": (None,), "vllm_xargs": (None, {}), "logits_processors": (None, []),
    # llama.cpp
    "n_predict": (None, -1), "n_probs": (None, 0), "min_keep": (None, 0), "typical_p": (None, 1), "tfs_z": (None, 1),
    "repeat_penalty": (None, 1), "mirostat": (None, 0), "dynatemp_range": (None, 0), "xtc_probability": (None, 0),
    "dry_multiplier": (None, 0), "samplers": (None,),
    "timings_per_token": (None, False), "return_tokens": (None, False), "return_progress": (None, False),
    "post_sampling_probs": (None, False), "reasoning_format": (None, "none", "auto"), "lora": (None, []),
    # TGI
    "do_sample": (None, True), "return_full_text": (None, False), "details": (None, False), "watermark": (None, False),
    "truncate": (None,), "top_n_tokens": (None, 0), "max_new_tokens": (None,), "adapter_id": (None,),
}  # fmt: skip


def sift(given: Mapping[str, Any], own: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...], str | None]:
    """(what a body's own fields are to read, the names that are ignored, a name whose value cannot be honoured).

    Args:
        given: a request's parameters.
        own: the names that the body reads itself.
    """
    kept, ignored = {}, []
    for name, value in given.items():
        if name in own or (name not in IGNORED and name not in NEUTRAL):
            kept[name] = value
        elif name in IGNORED:
            ignored.append(name)
        elif not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            return kept, tuple(ignored), name
    return kept, tuple(ignored), None


def _same(value: Any, neutral: Any) -> bool:
    """Whether they are equal; True is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def nearest(name: str, own: Iterable[str]) -> str | None:
    """The known parameter that a misspelt one is likely to mean."""
    if len(name) > _LONG_NAME:  # the comparison takes time that grows with the square of it
        return None
    found = difflib.get_close_matches(name.lower(), sorted({*own, *IGNORED, *NEUTRAL}), 1, 0.75)
    return found[0] if found else None


def warning(ignored: Iterable[str]) -> dict[str, str]:
    """The response headers that name what was ignored."""
    names = ", ".join(ignored)
    return {"Warning": f'299 tiermoe "ignored parameters: {names}"'} if names else {}
