"""Parameters of other servers: which are ignored, and which are accepted only if they change nothing.

OpenAI's own service, vLLM, SGLang, llama.cpp, TGI, Ollama, LM Studio, OpenRouter and LiteLLM each know parameters that
this server does not carry out. Clients send them unasked. A parameter that changes no token and no field of the answer
is ignored, and the client is told (`Warning` header) and counted; so is a hint that no server must follow. A parameter
that would change what was asked for is accepted at the values at which it does not. Those of a model's reasoning are
in `thinking`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

IGNORED = frozenset({
    # OpenAI: accounts, caches, moderation, hints
    "user", "store", "metadata", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "safety_identifier", "include_obfuscation", "verbosity", "include", "max_tool_calls",
    "moderation", "access_programs",
    # of a model's reasoning, where there is no chat template
    "reasoning_effort", "reasoning", "thinking", "think", "enable_thinking", "thinking_budget", "thinking_token_budget",
    "include_reasoning", "separate_reasoning", "reasoning_format", "stream_reasoning", "chat_template_kwargs",
    # vLLM and SGLang: places in a queue, caches, settings of what is not there
    "priority", "request_id", "guided_decoding_backend", "spaces_between_special_tokens",
    "length_penalty", "early_stopping", "mm_processor_kwargs", "media_io_kwargs", "data_parallel_rank", "rid",
    "extra_key", "bootstrap_host", "bootstrap_port", "bootstrap_room", "log_metrics",
    # llama.cpp, TGI, Ollama and LM Studio: memory, threads, slots, loading
    "cache_prompt", "id_slot", "n_keep", "t_max_predict_ms", "n_cache_reuse", "n_indent", "keep_alive",
    "decoder_input_details", "num_ctx", "num_keep", "num_gpu", "num_thread", "num_batch", "num_gqa", "main_gpu", "numa",
    "low_vram", "f16_kv", "vocab_only", "use_mmap", "use_mlock", "n_ctx", "ttl", "draft_model", "context_length",
    # OpenRouter and LiteLLM: which of several models and providers, how often, for whom
    "provider", "models", "route", "transforms", "usage", "session_id", "trace", "fallbacks", "num_retries",
    "max_retries", "timeout", "request_timeout", "stream_timeout", "drop_params", "additional_drop_params",
    "allowed_openai_params", "custom_llm_provider", "litellm_session_id", "litellm_trace_id", "litellm_call_id", "tags",
    "caching", "cache", "cache_control", "anthropic_beta", "betas", "extra_headers", "incremental_output",
    # Anthropic: accounts, caches, places
    "inference_geo", "speed", "user_profile_id", "workspace_id", "diagnostics", "billing_policy",
    "fallback_credit_token", "task_budget",
    # they shape what is off below
    "repeat_last_n", "penalize_nl", "penalize_newline", "mirostat_tau", "mirostat_eta", "dynatemp_exponent",
    "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
})  # fmt: skip

_LONG_NAME = 64

# parameter -> the values at which it changes nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "best_of": (None, 1), "suffix": (None, ""), "functions": (None, []),
    "function_call": (None, "none", "auto"), "audio": (None,),
    "modalities": (None, ["text"]), "web_search_options": (None,),
    "previous_response_id": (None,), "conversation": (None,), "background": (None, False),
    "background_options": (None, {}), "image": (None, {}),
    "prompt": (None,), "truncation": (None, "disabled", "auto"), "context_management": (None, []),
    "tools": (None, []), "tool_choice": (None, "none", "auto"), "parallel_tool_calls": (None, True, False),
    "logprobs": (None, False), "top_logprobs": (None, 0), "n": (None, 1), "stream_options": (None, {}),
    # vLLM
    "use_beam_search": (None, False), "echo": (None, False),
    "truncate_prompt_tokens": (None, -1), "prompt_logprobs": (None,), "allowed_token_ids": (None,),
    "bad_words": (None, []), "add_generation_prompt": (None, True), "continue_final_message": (None, False),
    "documents": (None,), "chat_template": (None,),
    "guided_whitespace_pattern": (None,), "structural_tag": (None,), "return_prompt_text": (None, False),
    "return_token_ids": (None, False), "return_tokens_as_token_ids": (None, False), "logprob_token_ids": (None, []),
    "kv_transfer_params": (None, {}), "vllm_xargs": (None, {}), "logits_processors": (None, []),
    # SGLang
    "ebnf": (None,), "stop_regex": (None, []), "no_stop_trim": (None, False),
    "return_hidden_states": (None, False), "return_routed_experts": (None, False), "input_ids": (None,),
    "session_params": (None, {}), "lora_path": (None,), "custom_logit_processor": (None,), "custom_params": (None, {}),
    # llama.cpp
    "n_predict": (None, -1), "n_probs": (None, 0), "min_keep": (None, 0), "typical_p": (None, 1), "tfs_z": (None, 1),
    "top_n_sigma": (None, -1), "repeat_penalty": (None, 1), "mirostat": (None, 0), "dynatemp_range": (None, 0),
    "xtc_probability": (None, 0), "dry_multiplier": (None, 0), "samplers": (None,),
    "timings_per_token": (None, False), "return_tokens": (None, False), "return_progress": (None, False),
    "post_sampling_probs": (None, False), "lora": (None, []), "thinking_forced_open": (None, False),
    # TGI
    "do_sample": (None, True), "return_full_text": (None, False), "details": (None, False), "watermark": (None, False),
    "truncate": (None,), "top_n_tokens": (None, 0), "max_new_tokens": (None,), "adapter_id": (None,),
    # Ollama
    "num_predict": (None, -1), "format": (None, ""), "raw": (None, False), "template": (None, ""), "images": (None, []),
    # OpenRouter, Mistral, Qwen, Anthropic, xAI, Azure, LiteLLM
    "plugins": (None, []), "top_a": (None, 0), "preset": (None,), "safe_prompt": (None, False), "random_seed": (None,),
    "enable_search": (None, False), "system": (None, ""), "stop_sequences": (None, []), "mcp_servers": (None, []),
    "search_parameters": (None,), "deferred": (None, False), "data_sources": (None, []), "guardrails": (None, []),
    "mock_response": (None,), "max_tokens_to_sample": (None,), "container": (None,), "compaction": (None,),
    "thread": (None,),
}  # fmt: skip

_INSTEAD = {
    "n_predict": "max_tokens", "num_predict": "max_tokens", "max_new_tokens": "max_tokens",
    "max_tokens_to_sample": "max_tokens", "repeat_penalty": "repetition_penalty", "random_seed": "seed",
    "stop_sequences": "stop", "functions": "tools", "function_call": "tool_choice", "system": "messages",
    "format": "response_format", "ebnf": "grammar", "template": "chat_template_kwargs",
}  # fmt: skip
_EXACT = 2**53
_NESTED = ("extra_body", "options")  # further parameters: of OpenAI's client where it is not one, and Ollama's


def sift(given: Mapping[str, Any], own: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...], str | None]:
    """(what a body's own fields are to read, the names that are ignored, a name whose value cannot be honoured).

    Args:
        given: a request's parameters.
        own: the names that the body reads itself.
    """
    kept, ignored = {}, []
    for nested in _NESTED:
        if isinstance(more := given.get(nested), dict):
            given = more | {name: value for name, value in given.items() if name != nested}
        elif nested in given and more is None:
            given = {name: value for name, value in given.items() if name != nested}
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
    for known in (own, {*IGNORED, *NEUTRAL}):  # what has an effect is rather meant
        if found := difflib.get_close_matches(name.lower(), sorted(known), 1, 0.75):
            return found[0]
    return None


def instead(name: str) -> str:
    """The remedy of a request whose value for this parameter cannot be honoured."""
    return f"use '{_INSTEAD[name]}'" if name in _INSTEAD else "leave it out"


def warning(ignored: Iterable[str]) -> dict[str, str]:
    """The response headers that name what was ignored."""
    names = ", ".join(ignored)
    return {"Warning": f'299 tiermoe "ignored parameters: {names}"'} if names else {}


def integral(value: Any) -> Any:
    """JSON has one kind of number, and some clients write 64 as 64.0: the same with integers, also in lists.

    Beyond 2^53 a float is no exact number, and stays one.
    """
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    if isinstance(value, list) and not {float, list}.isdisjoint(map(type, value)):
        return [integral(part) for part in value]
    return value
