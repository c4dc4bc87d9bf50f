"""Numbers of an output record: log-probabilities, perplexity, vectors, and the scores of a classifier."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from batchgen.core.logprobs import Logprobs, lists_of, packed
from batchgen.core.records import Result
from batchgen.text.tokenizer import Tokenizer

_DIGITS = 6
_MIN_MEAN = -700.0  # exp(709.8) is the largest float


def token_fields(tokens: Logprobs, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """An object per token: token_id, token, logprob, and in top_logprobs the same fields for the likeliest tokens.

    ``bytes`` is added for a token that is a part of a character, since its text does not determine them.
    """

    def field(token_id: int, logprob: float) -> dict[str, Any]:
        text = None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
        content = tokenizer.token_bytes(token_id) if tokenizer and text and "\ufffd" in text else None
        part = {} if content is None else {"bytes": [*content]}
        return {"token_id": token_id, "token": text, **part, "logprob": rounded(logprob)}

    return [
        field(token.token_id, token.logprob) | {"top_logprobs": [field(*top) for top in token.top]} for token in tokens
    ]


def packed_fields(tokens: Logprobs, prefix: str = "") -> dict[str, Any]:
    """The numbers of ``token_fields`` as packed arrays: ``logprobs``, and ``top_ids`` and ``top_logprobs`` if any.

    The names follow ``prefix``; log-probabilities are not rounded.
    """
    count, num_top = len(tokens), tokens.num_top
    fields = {"logprobs": packed("float32", tokens.values, count)}
    if num_top:
        fields["top_ids"] = packed("int32", tokens.top_ids, count, num_top)
        fields["top_logprobs"] = packed("float32", tokens.top_values, count, num_top)
    return {f"{prefix}{name}": value for name, value in fields.items()}


def rounded(logprob: float) -> float:
    """A log-probability as it is written, never -0.0."""
    return round(logprob, _DIGITS) + 0.0


def softmax(scores: Sequence[float]) -> list[float]:
    """Probabilities that add up to 1."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def perplexity(tokens: Logprobs) -> float | None:
    """exp(-mean log-probability); None without tokens, or if it exceeds the largest float."""
    if not len(tokens):
        return None
    mean = math.fsum(tokens.own) / len(tokens)
    return round(math.exp(-mean), _DIGITS) if mean > _MIN_MEAN else None


def scored_fields(scores: Sequence[float], labels: Sequence[str]) -> dict[str, Any]:
    """The most likely of the labels with its probability, and the probabilities of all, which add up to 1."""
    fields = _label_fields(labels, softmax(scores))
    rounded_scores = {label: round(prob, _DIGITS) for label, prob in fields["scores"].items()}
    return fields | {"score": rounded_scores[fields["label"]], "scores": rounded_scores}


def _label_fields(labels: Sequence[str], scores: Sequence[float]) -> dict[str, Any]:
    best = max(scores)
    return {"label": labels[scores.index(best)], "score": best, "scores": dict(zip(labels, scores, strict=True))}


def vector_fields(result: Result, pooling: str | None, labels: Sequence[str]) -> dict[str, Any]:
    """``embedding``, or ``embeddings`` of several texts or (by ``pooling``) of tokens; or the scores of ``labels``.

    Vectors are packed arrays.
    """
    count, width = result.num_vectors, len(result.vector) // 4 // result.num_vectors
    if not labels and (pooling == "tokens" or count > 1):
        return {"embeddings": packed("float32", result.vector, count, width)}
    vector = packed("float32", result.vector, width)
    if not labels:
        return {"embedding": vector}
    scores = lists_of(vector)
    return _label_fields(labels, scores) if len(labels) > 1 else {"score": scores[0]}
