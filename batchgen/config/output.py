"""The sections [embed], [output] and [eval] of a job: form and place of results, and the count of right answers."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.core import keys
from batchgen.core.addresses import bare, check_address, scheme_of
from batchgen.core.answers import check_rule
from batchgen.core.keys import BOOL, Kind, integer, key, one_of, string
from batchgen.core.records import POOLINGS
from batchgen.core.remote import WRITABLE


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

    "auto", or None for ``normalize``, means the checkpoint's value. ``prompt`` is put before each text: it names a
    prompt of the checkpoint or is the prompt itself; for late interaction it is the side, "query" or "document".
    ``dimensions`` keeps the first numbers of a vector. Too long texts are cut if ``truncate``, otherwise refused.
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


def listed(text: str) -> list[str]:
    """The comma-separated names in a flag's text."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _parts(names: tuple[str, ...]) -> tuple[str, ...]:
    parts = {_PART.parse(name) for name in names}
    return tuple(name for name in _PART.choices if name in parts)


def _destination(*schemes: str) -> Kind:
    """Addresses that files are written to, or "" for no address."""

    def parse(text: str) -> str:
        """The address, if files can be written to it. Raises ValueError, which says what is wrong with it."""
        scheme = scheme_of(text)
        if text and scheme is None:
            addresses = ", ".join(f"{name}://" for name in schemes)
            raise ValueError(f"is not a URL ({addresses}); leave it out to keep files on this machine only")
        if text:
            check_address(text, schemes)
        if bare(text) != text:
            raise ValueError("holds a query or a fragment: name one folder")
        if any(mark in text for mark in "*?[]"):
            raise ValueError("holds a character of patterns (* ? [ ]): name one folder")
        if scheme == "hf" and "@" in text:
            raise ValueError("names a revision: files are published to the main branch")
        return text.rstrip("/")

    return string("URL", empty=True).then(parse)


_PART = one_of("reasoning", "tool_calls", "json")
_PARTS = keys.STRINGS.then(_parts, metavar="A,B", from_text=listed, repeats=False)
_FOLDERS = keys.STRINGS.then(tuple, metavar="DIR")


@dataclass(frozen=True)
class OutputSpec:
    """Place and form of results; ``path`` is the absolute run directory, or "" if a command does not write one.

    ``parse`` names the parts of a text that are parsed: reasoning, tool_calls, json. The finished files are copied to
    ``publish``, unless it is "".
    """

    path: str = key(string("DIR"), "The run directory", "", flag="output", resume="free")
    format: str = key(
        one_of("auto", "jsonl", "csv", "parquet", "openai-batch"),
        "Output format",
        "auto",
        flag="output-format",
        resume="free",
    )
    logprobs_dtype: str = key(
        one_of("float32", "float16"), "Number type of log-probabilities in Parquet", "float32", resume="free"
    )
    token_ids: bool = key(BOOL, "Add the generated token ids", False)
    parse: tuple[str, ...] = key(_PARTS, "What is taken out of the text: reasoning, tool_calls, json", ())
    reuse: tuple[str, ...] = key(
        _FOLDERS, "Run directory whose equal rows are reused; may be repeated", (), resume="free"
    )
    publish: str = key(
        _destination(*WRITABLE), "Copy the finished files to s3://, gs://, hf://datasets/", "", resume="free"
    )

    @property
    def has_text_ids(self) -> bool:
        """Whether ids are written as text, like OpenAI's ``custom_id``, so that 5 and "5" are the same id."""
        return self.format == "openai-batch"


@dataclass(frozen=True)
class EvalSpec:
    """Settings of the count of right answers.

    ``expected`` names a column that is kept and compared with the text, or with the answer that the rule ``extract``
    (``core.answers``) finds in it; the report counts exact matches.
    """

    expected: str | None = key(string("COLUMN"), "Column with the right answer, to compare", None)
    extract: str | None = key(string("RULE").then(check_rule), "Find the answer: last_number, or a regex", None)
