"""Identity of results: the key of a row's random numbers, its limit, and a fingerprint of all that decides its result.

A row can take the result of an earlier row with the same fingerprint, if the answer fits the row's limit of tokens.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from batchgen.core.keys import INT64_MAX
from batchgen.core.records import FinishReason, SamplingParams


def rng_key_of(row_id: str | int | None, index: int) -> int:
    """Key of a row's randomness: its id, or its index if the row lacks an id.

    Integers from 0 are their own key, so that an id column of row numbers draws the same as a job without ids; other
    ids are hashed. An id draws the same wherever its row is in the input.
    """
    if row_id is None:
        return index
    if isinstance(row_id, int) and 0 <= row_id <= INT64_MAX:
        return row_id
    return int.from_bytes(blake2b(json.dumps(row_id).encode(), digest_size=8).digest()) >> 1


def rng_key_of_turn(rng_key: int, number: int) -> int:
    """Key of the randomness of a row's turn, counted from 0: the first one draws the same as a row with one answer."""
    if not number:
        return rng_key
    return int.from_bytes(blake2b(b"%d turn %d" % (rng_key, number), digest_size=8).digest()) >> 1


def limit_of(params: SamplingParams, num_prompt_tokens: int, max_model_len: int) -> int:
    """The most tokens that a sample may have: ``max_tokens``, or fewer if the context has less room."""
    return min(params.max_tokens, max(max_model_len - num_prompt_tokens, 0))


def fingerprint(
    rng_key: int, params: SamplingParams, prompt_token_ids: Sequence[int], limit: int, facts: str = ""
) -> str:
    """A digest, as 32 hex digits, of all that decides a row's result apart from the model and how it computes.

    With one sample the limit is left out (``still_holds``); ``rng_key`` and seed count only if tokens are sampled.
    ``facts``: the version of the library that masks tokens, and what the chat template says about the answer.
    """
    drawn = b"%d" % rng_key if _is_drawn(params) else b""
    limited = b"%d" % limit if params.n > 1 else b""
    settings = b"\0".join((_params_name(params), drawn, limited, facts.encode(), b""))
    return blake2b(settings + array("i", prompt_token_ids).tobytes(), digest_size=16).hexdigest()


def still_holds(record: Mapping[str, Any], params: SamplingParams, limit: int) -> bool:
    """Whether a record with the row's fingerprint can be reused under ``limit``, in tokens.

    An answer that ended by itself can be reused under any limit that it fits in; an answer that was cut off, only under
    the same limit. Chats have their limits in the fingerprint. Raises KeyError or TypeError for foreign records.
    """
    if params.n > 1 or "finish_reason" not in record or "finish_reasons" in record:
        return True
    count = record["usage"]["completion_tokens"]
    return bool(count == limit if record["finish_reason"] == FinishReason.LENGTH else count <= limit)


def may_go_on(record: Mapping[str, Any], params: SamplingParams, limit: int) -> tuple[int, ...]:
    """The tokens of an answer that was cut off, which a row with a higher limit continues; () if it cannot."""
    tokens = record.get("token_ids") or ()
    is_cut = params.n == 1 and record.get("finish_reason") == FinishReason.LENGTH
    return tuple(tokens) if is_cut and 0 < len(tokens) == record["usage"]["completion_tokens"] < limit else ()


def _is_drawn(params: SamplingParams) -> bool:
    return not (params.is_greedy or params.labels or params.max_tokens == 0)


@lru_cache(maxsize=256)
def _params_name(params: SamplingParams) -> bytes:
    named = replace(params, max_tokens=min(params.max_tokens, 1), seed=params.seed if _is_drawn(params) else 0)
    return repr(named).encode(errors="backslashreplace")
