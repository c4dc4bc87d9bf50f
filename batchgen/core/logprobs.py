"""Arrays of numbers: log-probabilities of tokens, from the sampler to the record, and packed arrays in a record.

A packed array is an object with ``dtype``, ``shape`` and ``base64``, lowest byte first; other formats get lists.
"""

from __future__ import annotations

from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_RECORD_BYTES = 1 << 28  # of the log-probabilities of one record, which is in memory as a whole
ALWAYS_TOP = 20  # likeliest tokens per position that are always accepted, whatever max_tokens is: OpenAI's limit
PACKED_BYTES = 8  # of an id with its log-probability
JSON_BYTES = 64  # of the object with both and the token's text
PACKED_KEYS = frozenset(  # fields of a record that may be packed
    {"embedding", "embeddings", "logprobs", "top_ids", "top_logprobs", "assistant_mask"}
    | {"prompt_token_ids", "prompt_logprobs", "prompt_top_ids", "prompt_top_logprobs"}
)
_CODES: dict[str, Any] = {"int32": "i", "float32": "f", "bool": "?"}  # of ``memoryview``
_KEYS = {"dtype", "shape", "base64"}


class TokenLogprob(NamedTuple):
    """Natural log-probability of a token, and (token id, log-probability) of the likeliest tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, and the ``num_top`` likeliest tokens at the position of each.

    They are bytes of arrays: ``token_ids`` int32 and ``values`` float32 [num_tokens], ``top_ids`` int32 and
    ``top_values`` float32 [num_tokens, num_top], the likeliest first. As a sequence they are ``TokenLogprob``.
    """

    token_ids: bytes = b""
    values: bytes = b""
    top_ids: bytes = b""
    top_values: bytes = b""
    num_top: int = 0

    @classmethod
    def of(cls, tokens: Iterable[TokenLogprob]) -> Logprobs:
        """The log-probabilities of tokens, each with the same number of likeliest tokens."""
        each = list(tokens)
        top = [pair for token in each for pair in token.top]
        return cls(
            array("i", (token.token_id for token in each)).tobytes(),
            array("f", (token.logprob for token in each)).tobytes(),
            array("i", (token_id for token_id, _ in top)).tobytes(),
            array("f", (value for _, value in top)).tobytes(),
            len(top) // max(len(each), 1),
        )

    @classmethod
    def joined(cls, parts: Sequence[Logprobs], num_top: int) -> Logprobs:
        """The log-probabilities of all parts; empty without parts, with ``num_top`` likeliest tokens."""
        return cls(
            b"".join(part.token_ids for part in parts),
            b"".join(part.values for part in parts),
            b"".join(part.top_ids for part in parts),
            b"".join(part.top_values for part in parts),
            parts[0].num_top if parts else num_top,
        )

    @property
    def own(self) -> array[float]:
        return array("f", self.values)

    def __len__(self) -> int:
        return len(self.values) // 4

    def __iter__(self) -> Iterator[TokenLogprob]:
        top = [*zip(array("i", self.top_ids), array("f", self.top_values), strict=True)]
        for i, (token_id, value) in enumerate(zip(array("i", self.token_ids), self.own, strict=True)):
            yield TokenLogprob(token_id, value, tuple(top[i * self.num_top : (i + 1) * self.num_top]))


def record_bytes(nums_top: Iterable[int | None], nums_tokens: Iterable[int], *, is_packed: bool) -> int:
    """About how many bytes log-probabilities take in a record; ``nums_top`` is None for a part without them."""
    pairs = sum((1 + top) * count for top, count in zip(nums_top, nums_tokens, strict=True) if top is not None)
    return pairs * (PACKED_BYTES if is_packed else JSON_BYTES)


def packed(dtype: str, data: bytes, *shape: int) -> dict[str, Any]:
    """The packed array of ``data``, log-probabilities or a vector: numbers of int32 or float32, or bools as bytes."""
    return {"dtype": dtype, "shape": [*shape], "base64": b64encode(data).decode()}


def is_packed(value: object) -> bool:
    """Whether a value of a record is a packed array."""
    return isinstance(value, dict) and value.keys() == _KEYS and str(value["dtype"]) in _CODES


def numbers_of(value: Mapping[str, Any]) -> memoryview[Any]:
    """All numbers of a packed array, one after the other. Raises ValueError or TypeError if its bytes are damaged."""
    return memoryview(b64decode(value["base64"], validate=True)).cast(_CODES[value["dtype"]])


def unpacked(record: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """A record with lists in place of the packed arrays of the fields ``names``, also in its samples."""
    plain = {name: lists_of(value) if name in names else value for name, value in record.items()}
    if names and record.get("samples"):
        plain["samples"] = [unpacked(sample, names) for sample in record["samples"]]
    return plain


def lists_of(value: Any) -> Any:
    """A packed array as a list of numbers, or as a list of such lists. Another value is returned as it is."""
    if not is_packed(value):
        return value
    shape: list[int] = value["shape"]
    numbers: list[Any] = numbers_of(value).tolist()
    if value["dtype"] == "float32":
        numbers = [float(f"{number:.9g}") for number in numbers]  # nine digits tell a float32
    if len(shape) < 2:
        return numbers
    return [numbers[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]
