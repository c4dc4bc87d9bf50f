"""The fields of an output record that hold a vector, the vectors of a text's tokens, or a classifier's scores."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from batchgen.core.records import Result


def vector_fields(result: Result, pooling: str | None, labels: Sequence[str]) -> dict[str, Any]:
    """``embedding``; ``embeddings`` of several texts, or of tokens by ``pooling``; with ``labels`` the best and all."""
    numbers = [float(f"{number:.9g}") for number in array("f", result.vector)]  # nine digits tell a float32
    if len(labels) > 1:
        best = max(numbers)
        scores = dict(zip(labels, numbers, strict=True))
        return {"label": labels[numbers.index(best)], "score": best, "scores": scores}
    if labels:
        return {"score": numbers[0]}
    if pooling == "tokens" or result.num_texts > 1:
        width = len(numbers) // (result.num_prompt_tokens if pooling == "tokens" else result.num_texts)
        return {"embeddings": [numbers[i : i + width] for i in range(0, len(numbers), width)]}
    return {"embedding": numbers}
