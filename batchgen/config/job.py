"""The validated, frozen description of a job, from a TOML file and the flags of ``batchgen run``.

Each key is declared once, as a dataclass field (see ``core.keys``). Nothing here opens the input or the model.
"""
# ruff: noqa: RUF009 - key() is dataclasses.field with its metadata spelled once, and all sections are frozen

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from batchgen.config.cluster import ClusterSpec
from batchgen.config.output import EmbedSpec, EvalSpec, OutputSpec, listed
from batchgen.config.sampling import CLASSIFY_KEYS, SAMPLING_KEYS
from batchgen.core import keys
from batchgen.core.addresses import masked
from batchgen.core.errors import UsageError
from batchgen.core.keys import BOOL, Key, Kind, integer, integer_or_auto, key, keys_of, one_of, string
from batchgen.core.machine import QUANTIZATIONS, UNTRIED_DEVICES
from batchgen.core.records import SamplingParams
from batchgen.core.units import parse_size, shown


def _paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths:
        raise ValueError("must be a string or a list of strings, at least one")
    return paths


def _column_names(names: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in names and len(names) > 1:
        raise ValueError('must be a list of column names, or "*" alone for all columns')
    return tuple(dict.fromkeys(names))


def _delimiter(text: str) -> str:
    if len(text) > 1 or text in '"\r\n\0':
        raise ValueError('must be one character, such as ";", but not a quote or a line end')
    return text


def _encoding(text: str) -> str | None:
    try:
        "a".encode(text)
        name = codecs.lookup(text).name
        codecs.getincrementaldecoder(text)("surrogateescape").decode(b"a")  # some codecs cannot skip bad bytes
    except (LookupError, UnicodeError):
        raise ValueError('must be an encoding that Python knows, such as "cp1252" or "utf-16"') from None
    return None if name == "utf-8" else name


def _size_or_auto(value: object) -> int | None:
    if value == "auto":
        return None
    size = parse_size(value) if isinstance(value, str) else value
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= keys.INT64_MAX:
        raise ValueError('must be "auto" or a size such as "4GiB", of at least 1 byte and below 8 EiB')
    return size


def _device(value: object) -> str:
    if value not in _DEVICES and not (isinstance(value, str) and re.fullmatch(r"cuda:\d{1,4}", value, re.ASCII)):
        raise ValueError(f"must be one of {', '.join(_DEVICES)} or cuda:N")
    return str(value)


_DEVICES = ("auto", "cpu", "cuda", *UNTRIED_DEVICES)
_DEVICE = Kind(_device, "auto|cpu|cuda|cuda:N|mps|xpu", choices=_DEVICES)
_COLUMN = string("COLUMN")
_COLUMNS = keys.STRINGS.then(_column_names, metavar="A,B|*", from_text=listed, repeats=False)
_PATHS = keys.STRINGS.then(_paths, metavar="PATH")
_SIZE_OR_AUTO = Kind(_size_or_auto, "SIZE|auto", none="auto")
_POSITIVE_OR_AUTO = integer_or_auto(1)


@dataclass(frozen=True)
class ModelSpec:
    """The model, and the form in which it runs.

    A resume does not compare these values, but the content of ``path`` and ``adapter`` and the dtype, device and
    kernels that the model runs with; ``quantization`` is compared as written.
    """

    path: str = key(string("MODEL"), "Folder, .gguf file, Hub id or dummy:NAME", "", flag="model", resume="compared")
    revision: str = key(string(), "Branch, tag or commit on the Hub", "main", resume="compared")
    dtype: str = key(
        one_of("auto", "bfloat16", "float16", "float32"), "Number format to compute in", "auto", resume="compared"
    )
    quantization: str = key(one_of(*QUANTIZATIONS), "int8 weights; w8a8: int8 activations too", "none")
    adapter: str = key(string(empty=True), "LoRA folder or Hub id, added to the weights", "", resume="compared")
    device: str = key(_DEVICE, "Where the model runs", "auto", resume="compared")
    tokenizer: str = key(string(empty=True), "Folder or Hub id [the model's own]", "", resume="compared")
    batch_invariant: bool = True  # on a GPU; like the engine's policies, not a key of the job file

    @property
    def weights(self) -> str:
        """The form of linear weights: "auto" (as stored in the checkpoint) or "int8"."""
        return QUANTIZATIONS[self.quantization][0]

    @property
    def activations(self) -> str:
        """The form of inputs of linears: "auto" (as they are computed) or "int8"."""
        return QUANTIZATIONS[self.quantization][1]

    @property
    def named(self) -> dict[str, str]:
        """``model`` and, if there is one, ``adapter``, as reports name them."""
        return {"model": self.path} | ({"adapter": self.adapter} if self.adapter else {})


@dataclass(frozen=True)
class InputSpec:
    """The rows, and the way from a row to its prompt; at most one of ``prompt``, ``messages``, ``prompt_token_ids``.

    ``path`` entries are absolute (or ``-``, ``hf:...``, an address); only commands without an input have none.
    ``columns == ("*",)`` keeps all columns. ``chat_template`` is "auto", "none", or the text of a template.
    """

    path: tuple[str, ...] = key(
        _PATHS, "File, pattern, folder, URL, hf:NAME or - (stdin); may be repeated", (), flag="input", resume="compared"
    )
    format: str = key(
        one_of("auto", "jsonl", "csv", "parquet", "hf", "openai-batch", "text"),
        "Input format",
        "auto",
        flag="input-format",
    )
    delimiter: str | None = key(
        string("CHARACTER").then(_delimiter), "What separates cells [comma or tab]", None, resume="compared"
    )
    encoding: str | None = key(string("NAME").then(_encoding), "Encoding of text files, such as cp1252 [UTF-8]", None)
    id: str | None = key(_COLUMN, "Column that identifies a row [its number]", None)
    prompt: str | None = key(string(), "Column name, or template such as '{question}'", None)
    messages: str | None = key(_COLUMN, "Column with a chat, a list of messages", None)
    prompt_token_ids: str | None = key(_COLUMN, "Column with token ids, used unchanged", None)
    system: str | None = key(string(empty=True), "System prompt", None)
    chat_template: str = key(string("auto|none|FILE"), "Template of chats; none: raw prompts", "auto")
    chat_template_kwargs: Mapping[str, Any] | None = key(
        keys.TEMPLATE_KWARGS, "Variables of the chat template, such as '{\"enable_thinking\": false}'", None
    )
    continue_final_message: bool = key(BOOL, "Continue the last message of chats, the assistant's", False)
    regenerate: str | None = key(one_of("assistant"), "Generate the assistant's turns of chats again, in order", None)
    special_tokens: str = key(
        one_of("allow", "refuse"), "Special tokens that a row's text writes: allow them, or refuse the row", "allow"
    )
    columns: tuple[str, ...] = key(_COLUMNS, "Columns copied to the output", ("*",))
    limit: int | None = key(integer(1), "Take the first N rows only", None)

    @property
    def shown_path(self) -> list[str]:
        """The path as files and messages show it; see ``masked``."""
        return [*map(masked, self.path)]

    @property
    def is_templated(self) -> bool:
        """Whether a chat template is put around prompts."""
        return self.chat_template != "none"

    def system_before(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The job's system message in a list; empty without one, or if the chat has its own."""
        has_own = messages[0]["role"] in ("system", "developer")  # one name for it, or the other
        return [{"role": "system", "content": self.system}] if self.system and not has_own else []

    @property
    def is_mapped(self) -> bool:
        """Whether the job says where a row has its prompt."""
        return bool(self.prompt or self.messages or self.prompt_token_ids)

    @cached_property
    def request_columns(self) -> frozenset[str]:
        """The columns in which an object is part of the prompt or request; objects in other columns are data."""
        return frozenset(
            {self.messages or "messages", "body", "tools", "tool_choice", "chat_template_kwargs", "sampling"}
        )

    def spares(self, name: str) -> bool:
        """Whether a row can run without its column ``name``: it is not the id, and cannot be in the prompt."""
        needed = {self.id, self.messages, self.prompt_token_ids, self.prompt, *self.request_columns}
        if not self.is_mapped:
            needed |= {"prompt", "text", "prompt_token_ids", "custom_id", "url", "method"}
        return name not in needed and f"{{{name}" not in (self.prompt or "")

    @cached_property
    def may_have_batch_lines(self) -> bool:
        """Whether a row can be an OpenAI Batch request."""
        return self.format == "openai-batch" or (self.format == "auto" and not self.is_mapped)

    def is_batch_line(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row is an OpenAI Batch request: by the job's format, or by its shape if no prompt is mapped."""
        if self.format != "auto":
            return self.format == "openai-batch"
        return not self.is_mapped and "custom_id" in columns and isinstance(columns.get("body"), dict)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes and policies of the engine; None means "chosen for the machine".

    Only ``max_model_len`` and ``kv_cache_dtype`` ("auto": the type that the model computes in) can change outputs; a
    resume compares the latter as the engine really uses it. ``look_ahead`` limits requests pulled but not admitted; it
    and the policies are not keys of the job file. Raises UsageError for an unknown type and impossible sizes.
    """

    max_num_batched_tokens: int | None = key(
        integer_or_auto(1, 1 << 20), "Maximum number of tokens per step", None, resume="free"
    )
    max_num_seqs: int | None = key(
        integer_or_auto(1, 1 << 16), "Maximum number of running sequences", None, resume="free"
    )
    block_size: int | None = key(integer_or_auto(1, 1 << 16), "Tokens per KV block", None, resume="free")
    kv_cache_memory: int | None = key(_SIZE_OR_AUTO, "Memory for KV blocks, such as 4GiB", None, resume="free")
    kv_cache_dtype: str = key(
        one_of("auto", "bfloat16", "int8"), "Type of cached keys and values", "auto", resume="compared"
    )
    max_model_len: int | None = key(_POSITIVE_OR_AUTO, "Longest prompt plus output, in tokens", None)
    look_ahead: int | None = None
    threads: int | None = key(_POSITIVE_OR_AUTO, "CPU threads", None, resume="free")
    prefix_caching: bool = True
    share_duplicates: bool = True
    longest_first: bool = True
    forecast_memory: bool = True

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | str) and not isinstance(value, bool):
                kind: Kind = item.metadata.get("kind", _POSITIVE_OR_AUTO)
                try:
                    kind.parse(value)
                except ValueError as error:
                    raise UsageError(f"{item.name} {shown(value)}: {error}") from None


POLICIES = ("prefix-caching", "share-duplicates", "longest-first", "forecast-memory", "batch-invariant")
SECTIONS: dict[str, type[Any]] = {
    "model": ModelSpec,
    "input": InputSpec,
    "output": OutputSpec,
    "engine": EngineConfig,
    "cluster": ClusterSpec,
    "embed": EmbedSpec,
    "eval": EvalSpec,
}
KEYS: dict[str, dict[str, Key]] = {name: keys_of(cls) for name, cls in SECTIONS.items()}
KEYS |= {"sampling": SAMPLING_KEYS, "classify": CLASSIFY_KEYS}


@dataclass(frozen=True)
class JobSpec:
    """A job: everything that decides its outputs, and how they are made. ``sampling`` includes [classify]."""

    model: ModelSpec
    input: InputSpec
    output: OutputSpec
    sampling: SamplingParams = SamplingParams()
    engine: EngineConfig = EngineConfig()
    cluster: ClusterSpec = ClusterSpec()
    embed: EmbedSpec = EmbedSpec()
    eval: EvalSpec = EvalSpec()
    explicit_sampling_keys: tuple[str, ...] | None = None  # over the model's generation_config
    max_tokens_unset: bool = False  # OpenAI's requests may fill the context if neither they nor the job give max_tokens
    chat_template_source: str = field(default="input.chat_template", compare=False)  # where its text is, for errors

    def without(self, policies: Collection[str]) -> JobSpec:
        """The job with some of ``POLICIES`` switched off."""
        off: dict[str, Any] = {name.replace("-", "_"): False for name in policies}
        of_engine = {name: off.pop(name) for name in [*off] if hasattr(self.engine, name)}
        return replace(self, engine=replace(self.engine, **of_engine), model=replace(self.model, **off))

    def parses_tools(self, columns: Mapping[str, Any]) -> bool:
        """Whether a row's tool calls are parsed: if the job says so, or the row is a Batch request with tools."""
        is_line = self.input.is_batch_line(columns)
        request = columns["body"] if is_line else columns
        wants = "tool_calls" in self.output.parse or (is_line and bool(request.get("tools")))
        return wants and request.get("tool_choice") != "none"

    @cached_property
    def generates(self) -> bool:
        """Whether rows become text, and not vectors or scores of labels."""
        return not (self.embed.is_on or self.sampling.labels)

    @cached_property
    def packs_logprobs(self) -> bool:
        """Whether log-probabilities are packed arrays: if the job asks for them and its outputs are Parquet."""
        return self.output.format == "parquet" and self.sampling.has_logprobs

    def check_kind(self) -> None:
        """Refuse keys that only apply to text in a job for vectors or labels. Raises ``UsageError``."""
        if self.generates:
            return
        if self.embed.is_on and (self.sampling != SamplingParams() or self.explicit_sampling_keys is not None):
            other = "classify" if self.sampling.labels else "sampling"
            raise UsageError(f"[{other}] and [embed] exclude each other: a job gives text, labels or embeddings")
        for name in ("messages", "system", "chat_template_kwargs"):
            if self.embed.is_on and getattr(self.input, name) is not None:
                raise UsageError(f"input.{name} is for chats, and [embed] takes plain texts: give input.prompt")
        if self.sampling.labels and self.output.format == "openai-batch":
            raise UsageError(
                'output.format = "openai-batch" has no place for scores of labels: choose jsonl or parquet'
            )
        settings: dict[str, Any] = {"output.parse": self.output.parse, "output.token_ids": self.output.token_ids}
        settings["input.continue_final_message"] = self.embed.is_on and self.input.continue_final_message
        for name in [name for name, value in (settings | {"eval.extract": self.eval.extract}).items() if value]:
            gives = "[embed] gives embeddings" if self.embed.is_on else "[classify] gives labels"
            raise UsageError(f"{name} is for text, and {gives}: leave it out")

    def to_dict(self) -> dict[str, Any]:
        """Plain data as in the job file, every default filled in; ``load.job_from_dict`` reads it back.

        ``max_tokens`` is null if the limit differs from row to row.
        """
        parts = {section: getattr(self, section, self.sampling) for section in KEYS}
        data: dict[str, Any] = {
            section: {
                name: KEYS[section][name].written(getattr(part, name))
                for name in KEYS[section]
                if name != "generation_config"
            }
            for section, part in parts.items()
        }
        data["input"]["path"] = self.input.shown_path
        if self.max_tokens_unset:
            data["sampling"]["max_tokens"] = None
        return data

    def output_keys(self) -> dict[str, Any]:
        """The dotted keys whose values change outputs: a resume requires them unchanged.

        Objects are written as JSON text: another order of keys, or 1 in place of true, may change what templates print.
        """
        keys = {
            f"{section}.{name}": json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
            for section, values in self.to_dict().items()
            for name, value in values.items()
            if KEYS[section][name].resume == "same"
        }
        return keys | ({"output.format": self.output.format} if self.packs_logprobs else {})
