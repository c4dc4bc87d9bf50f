"""The validated, frozen description of a job: what a TOML file and the flags of ``batchgen run`` both say.

A key is declared once, as a dataclass field carrying its kind, help line and whether it changes outputs; the
loader, the flags and the resume check all read that declaration. It opens no input and knows no model.
"""
# ruff: noqa: RUF009 - key() is dataclasses.field with the metadata spelled once, and SamplingParams is frozen

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from batchgen.core.errors import UsageError
from batchgen.core.openai import is_batch_shape
from batchgen.core.records import SamplingParams
from batchgen.core.units import parse_size

Auto = Literal["auto"]

_MAX_INTEGER = 2**63 - 1
RECORD_KEYS = frozenset(
    {"id", "index", "text", "finish_reason", "usage", "timings", "token_ids", "logprobs", "samples"}
    | {"choices", "prompt_logprobs", "perplexity"}
)  # what an output record holds itself; a kept column of such a name is written as input_<name>


@dataclass(frozen=True, slots=True)
class Kind:
    """What values a key takes: ``parse`` turns a TOML value into the field's type or raises ``ValueError``.

    ``from_text`` turns a flag's text into what TOML would have held; ``metavar`` stands for the value in help.
    """

    parse: Callable[[object], Any]
    metavar: str
    from_text: Callable[[str], object] = str
    choices: tuple[str, ...] = ()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _filled(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a string that is not empty")
    return value


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _at_most(value: object) -> str:
    """The upper bound, for those who met it."""
    return f" and at most {_MAX_INTEGER}" if isinstance(value, int) and value > _MAX_INTEGER else ""


def _positive(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        raise ValueError(f"must be an integer of at least 1{_at_most(value)}")
    return value


def _positive_or_auto(value: object) -> int | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        raise ValueError(f'must be "auto" or an integer of at least 1{_at_most(value)}')
    return value


def _size_or_auto(value: object) -> int | Auto:
    if value == "auto":
        return "auto"
    if isinstance(value, str):
        value = parse_size(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_INTEGER:
        raise ValueError(f'must be "auto" or a size such as "4GiB"{_at_most(value)}')
    return value


def _texts(value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not items or not all(isinstance(item, str) and item for item in items):
        raise ValueError("must be a string or a list of strings, none of them empty")
    return tuple(items)


def _columns(value: object) -> tuple[str, ...]:
    if value in ([], ()):
        return ()
    names = _texts(value)
    if "*" in names and len(names) > 1:
        raise ValueError('must be a list of column names, or "*" alone for all columns')
    return tuple(dict.fromkeys(names))


def _int_text(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        return text  # the kind's own message is better than a conversion error


def _one_of(*choices: str) -> Kind:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return str(value)

    return Kind(parse, "|".join(choices), choices=choices)


def _device(value: object) -> str:
    if value not in _DEVICES and not (isinstance(value, str) and re.fullmatch(r"cuda:\d{1,4}", value, re.ASCII)):
        raise ValueError(f"must be one of {', '.join(_DEVICES)} or cuda:N")
    return str(value)


_DEVICES = ("auto", "cpu", "cuda")
DEVICE = Kind(_device, "auto|cpu|cuda|cuda:N", choices=_DEVICES)
TEXT = Kind(_text, "TEXT")
FILLED = Kind(_filled, "TEXT")
COLUMN = Kind(_filled, "COLUMN")
MODEL = Kind(_filled, "MODEL")
FOLDER = Kind(_filled, "DIR")
BOOL = Kind(_bool, "")
POSITIVE = Kind(_positive, "N", _int_text)
POSITIVE_OR_AUTO = Kind(_positive_or_auto, "N|auto", _int_text)
SIZE_OR_AUTO = Kind(_size_or_auto, "SIZE|auto")
PATHS = Kind(_texts, "PATH")
COLUMNS = Kind(_columns, "A,B|*", lambda text: [name.strip() for name in text.split(",") if name.strip()])


def key(kind: Kind, text: str, default: Any = MISSING, *, flag: str = "", outputs: bool = True) -> Any:
    """Declare a key: its kind, help line, default, flag when not ``--name``, and whether it changes outputs."""
    metadata = {"kind": kind, "help": text, "flag": flag, "outputs": outputs}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSpec:
    """Which model, and in what form it runs.

    On resume it is compared by the content that ``path`` leads to, and by the dtype and device that it really runs in.
    """

    path: str = key(MODEL, "Model: folder, Hub id or dummy:NAME", flag="model", outputs=False)
    revision: str = key(FILLED, "Branch, tag or commit on the Hub", "main", outputs=False)
    dtype: str = key(
        _one_of("auto", "bfloat16", "float16", "float32"), "Number format of weights", "auto", outputs=False
    )
    device: str = key(DEVICE, "Where the model runs", "auto", outputs=False)
    tokenizer: str = key(TEXT, "Folder or Hub id [the model's own]", "", outputs=False)
    batch_invariant: bool = key(BOOL, "On a GPU: no row depends on its batch", False)


@dataclass(frozen=True)
class InputSpec:
    """Which rows, and how a row becomes a prompt.

    ``path`` entries are absolute (or ``-``, or ``hf:...``); ``keep_columns == ("*",)`` keeps all columns.
    At most one of ``prompt``, ``messages``, ``prompt_token_ids`` is set.
    """

    path: tuple[str, ...] = key(
        PATHS, "File, glob, folder, - for stdin, or hf:NAME; may be repeated", flag="input", outputs=False
    )
    format: str = key(
        _one_of("auto", "jsonl", "parquet", "hf", "openai-batch", "text"), "Input format", "auto", flag="input-format"
    )
    id: str | None = key(COLUMN, "Column with a unique id", None)
    prompt: str | None = key(FILLED, "Column name, or template such as '{question}'", None)
    messages: str | None = key(COLUMN, "Column with a chat", None)
    prompt_token_ids: str | None = key(COLUMN, "Column with token ids, taken as they stand", None)
    system: str | None = key(TEXT, "System prompt", None)
    chat: bool = key(BOOL, "Wrap prompts in the model's chat template", True)
    keep_columns: tuple[str, ...] = key(COLUMNS, "Columns copied to the output", ())
    limit: int | None = key(POSITIVE, "Take the first N rows only", None)

    @property
    def is_mapped(self) -> bool:
        """Whether the job says where a row has its prompt."""
        return bool(self.prompt or self.messages or self.prompt_token_ids)

    def is_batch_line(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row is an OpenAI Batch request: by the job's format, or by its shape where no prompt is mapped."""
        if self.format != "auto":
            return self.format == "openai-batch"
        return not self.is_mapped and is_batch_shape(columns)


@dataclass(frozen=True)
class EngineSpec:
    """Sizes and policies of the engine. None of them changes outputs."""

    max_num_batched_tokens: int | Auto = key(POSITIVE_OR_AUTO, "Most tokens a step computes", "auto", outputs=False)
    max_num_seqs: int | Auto = key(POSITIVE_OR_AUTO, "Most sequences running at once", "auto", outputs=False)
    block_size: int | Auto = key(POSITIVE_OR_AUTO, "Tokens in a KV block", "auto", outputs=False)
    kv_memory: int | Auto = key(SIZE_OR_AUTO, "Memory for KV blocks, such as 4GiB", "auto", outputs=False)
    max_model_len: int | Auto = key(POSITIVE_OR_AUTO, "Longest context, in tokens", "auto")
    threads: int | Auto = key(POSITIVE_OR_AUTO, "CPU threads", "auto", outputs=False)
    prefix_caching: bool = key(BOOL, "Compute equal beginnings of prompts once", True, outputs=False)
    share_duplicates: bool = key(BOOL, "Compute identical greedy rows once", True, outputs=False)
    longest_first: bool = key(BOOL, "Admit the longest expected rows first", True, outputs=False)
    forecast_memory: bool = key(BOOL, "Admit rows only as memory will last", True, outputs=False)


@dataclass(frozen=True)
class OutputSpec:
    """Where results go and in what form; ``path`` is the run directory, absolute.

    ``expected`` names a column that is kept and compared with the text: exact match goes into the report.
    """

    path: str = key(FOLDER, "The run directory", flag="output", outputs=False)
    format: str = key(
        _one_of("jsonl", "parquet", "openai-batch"), "Output format", "jsonl", flag="output-format", outputs=False
    )
    order: str = key(_one_of("input", "completion"), "Order of the output rows", "input", outputs=False)
    token_ids: bool = key(BOOL, "Add the generated token ids", False)
    expected: str | None = key(COLUMN, "Column to compare the text with", None)

    @property
    def has_text_ids(self) -> bool:
        """Whether rows are known by the text of their ids, so that 5 and "5" are one id: OpenAI's ``custom_id`` is."""
        return self.format == "openai-batch"


@dataclass(frozen=True)
class JobSpec:
    """A whole job: everything that decides its outputs, and how they are made. See ``load_job``."""

    model: ModelSpec
    input: InputSpec
    output: OutputSpec
    sampling: SamplingParams = SamplingParams()
    engine: EngineSpec = EngineSpec()
    sampling_columns: tuple[str, ...] = ()  # ``sampling.columns``: see ``SAMPLING_COLUMNS``

    def to_dict(self) -> dict[str, Any]:
        """Plain data as in the job file, every default filled in; ``job_from_dict`` reads it back."""
        data = dataclasses.asdict(self)
        data["sampling"]["columns"] = data.pop("sampling_columns")
        return data

    def output_keys(self) -> dict[str, Any]:
        """The dotted keys whose values change outputs: what a resume must find unchanged."""
        chosen = {
            f"{name}.{item.name}": getattr(getattr(self, name), item.name)
            for name, cls in SECTIONS.items()
            for item in fields(cls)
            if item.metadata["outputs"]
        }
        sampling = {f"sampling.{name}": value for name, value in dataclasses.asdict(self.sampling).items()}
        return chosen | sampling | {SAMPLING_COLUMNS: self.sampling_columns}


SAMPLING_COLUMNS = "sampling.columns"
"""The key that names columns which hold sampling values; ``("*",)``: every column of such a name the prompt leaves."""

SECTIONS: dict[str, type[Any]] = {"model": ModelSpec, "input": InputSpec, "engine": EngineSpec, "output": OutputSpec}


def is_default(key: str, value: object) -> bool:
    """Whether ``value``, maybe read from JSON, is that of a job which says nothing of the dotted ``key``."""
    value = tuple(value) if isinstance(value, list) else value
    if key == SAMPLING_COLUMNS:
        return value == ()
    section, _, name = key.partition(".")
    cls = SamplingParams if section == "sampling" else SECTIONS.get(section)
    return any(item.name == name and item.default == value for item in fields(cls)) if cls else False


def flag_name(item: Field[Any]) -> str:
    """The long flag of a key without its dashes: the key with dashes unless declared otherwise."""
    return item.metadata["flag"] or item.name.replace("_", "-")


def job_from_dict(data: Mapping[str, Any], source: object = "job.json") -> JobSpec:
    """The spec that ``to_dict`` described, as read back from JSON (lists become tuples).

    Where ``sampling.columns`` is absent, an earlier version wrote it: that one took every column so named. Raises
    UsageError naming ``source`` on keys this version does not know and on values of other types.
    """
    try:
        sampling = dict(data["sampling"])
        columns = COLUMNS.parse(sampling.pop("columns", ["*"]))
        parts = {name: _section(name, data[name]) for name in SECTIONS}
        params = SamplingParams(**{key: _tupled(value) for key, value in sampling.items()})
    except KeyError as error:
        raise UsageError(f"cannot read {source}: it lacks {error}; was it edited?") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"cannot read {source}: {error}; was it edited?") from None
    return JobSpec(sampling=params, sampling_columns=columns, **parts)


def _section(name: str, values: Mapping[str, Any]) -> Any:
    """A section read back. Raises TypeError or ValueError naming what is wrong."""
    section = SECTIONS[name](**{key: _tupled(value) for key, value in values.items()})
    for item in fields(section):
        value = getattr(section, item.name)
        try:
            if value != item.default:
                item.metadata["kind"].parse(value)
        except ValueError as error:
            raise ValueError(f"{name}.{item.name} {error}") from None
    return section


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
