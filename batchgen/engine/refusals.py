"""Refusals: why a request can never run to its end on an engine, found before any of it is computed."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.core.errors import RowError, RowErrorCode
from batchgen.core.records import Request
from batchgen.engine.config import SchedulerConfig
from batchgen.engine.sequence import Sequence


def unusable(request: Request, vocab_size: int, makers: Mapping[str, object]) -> RowError | None:
    """Why the model cannot run a request, or None; ``makers`` of what some parameters need are None without any."""
    for tokens in filter(None, request.token_lists):
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < vocab_size:
                return RowError(RowErrorCode.BAD_PARAM, f"token id {token} is not among the model's {vocab_size}")
    for name, maker in makers.items():
        if getattr(request.params, name) and maker is None:
            return RowError(RowErrorCode.BAD_PARAM, f"{name} needs a tokenizer, and this model has none")
    return None


def too_long(sequence: Sequence, config: SchedulerConfig) -> RowError | None:
    """Why a sequence does not fit into the model's context or the pool, or None."""
    limit = config.max_model_len
    if not sequence.num_prompt_tokens:
        return RowError(RowErrorCode.EMPTY_PROMPT, "the prompt has no tokens")
    length = sequence.num_prompt_tokens if sequence.generates else sequence.num_tokens
    if length > limit - sequence.generates:
        what = "the prompt has" if sequence.generates else "prompt and choice have"
        message = f"{what} {length} tokens; with max_model_len {limit} at most {limit - sequence.generates} fit"
        return RowError(RowErrorCode.TOO_LONG, message)
    needed = most_tokens(sequence, limit)
    if needed > config.max_num_tokens:
        message = (
            f"prompt and max_tokens need KV memory for {needed} tokens; "
            f"the pool holds {config.max_num_tokens}: raise kv_memory or lower max_tokens"
        )
        return RowError(RowErrorCode.TOO_LONG, message)
    return None


def most_tokens(sequence: Sequence, max_model_len: int) -> int:
    """Most tokens whose state the sequence will ever hold: the last one is never computed, unless given."""
    if not sequence.generates:
        return sequence.num_tokens
    wanted = sequence.num_prompt_tokens + sequence.request.params.max_tokens
    return (wanted if wanted < max_model_len else max_model_len) - 1
