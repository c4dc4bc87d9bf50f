"""The section [embed] of a job: rows become vectors, or the scores of labels, instead of text."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.core.keys import BOOL, Kind, integer, key, one_of, string
from batchgen.core.records import POOLINGS


def _bool_or_auto(value: object) -> bool | None:
    if value == "auto":
        return None
    if not isinstance(value, bool):
        raise ValueError('must be "auto", true or false')
    return value


def _from_text(text: str) -> object:
    return {"true": True, "false": False}.get(text, text)


_BOOL_OR_AUTO = Kind(_bool_or_auto, "true|false|auto", _from_text, none="auto")
_DIMENSIONS = integer(1, 1 << 20)


@dataclass(frozen=True)
class EmbedSpec:
    """Settings for embedding texts; ``pooling`` is None for a job that generates text.

    "auto", and ``normalize`` None, use the checkpoint's. ``prompt`` precedes each text: the name of a prompt of the
    checkpoint, or else the text itself; for late interaction, the side, "query" or "document". ``dimensions`` keeps the
    first numbers of a vector. Texts longer than the model takes are cut if ``truncate``, else refused.
    """

    pooling: str | None = key(one_of("auto", *POOLINGS), "Which tokens' states make an embedding", None)
    prompt: str | None = key(
        string(empty=True),
        "Put before each text: a name of the checkpoint, else the text itself",
        None,
        flag="embed-prompt",
    )
    dtype: str = key(one_of("float32", "float16"), "Number type of embeddings", "float32", flag="embed-dtype")
    normalize: bool | None = key(_BOOL_OR_AUTO, "Divide embeddings by their length", None, flag="embed-normalize")
    dimensions: int | None = key(_DIMENSIONS, "Keep the first N numbers of each embedding", None)
    truncate: bool = key(BOOL, "Refuse texts that are too long, instead of cutting them", True)

    @property
    def is_on(self) -> bool:
        """Whether rows become vectors."""
        return self.pooling is not None
