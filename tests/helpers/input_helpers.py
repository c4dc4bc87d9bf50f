"""Inputs of every format with the same rows, and a small byte-level tokenizer: what the tests of the reader share."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from batchgen.config.job import InputSpec
from batchgen.core.records import Cursor, Request, Row, SamplingParams
from batchgen.input.requests import RequestBuilder
from batchgen.input.source import Source, open_source
from batchgen.text.tokenizer import Tokenizer

Columns = Mapping[str, Any]

SPECIAL_TOKENS = {"<|pad|>": 0, "<|startoftext|>": 1, "<|im_start|>": 6, "<|im_end|>": 7}
VOCAB_SIZE = 8 + 256
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sample_rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q-{n}", "prompt": f"question {n}é", "nested": {"n": n, "list": [n, n + 1]}} for n in range(count)]


def jsonl(rows: Sequence[Columns]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def parquet(rows: Sequence[Columns]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink, row_group_size=max(3, len(rows) // 20))
    return bytes(sink.getvalue().to_pybytes())


def as_text(rows: Sequence[Columns]) -> list[dict[str, str]]:
    """The same rows as a table holds them."""
    return [{name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()} for row in rows]


def table(rows: Sequence[Columns], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_text(rows))
    return text.getvalue().encode()


def _write_text(rows: Sequence[Columns], folder: Path) -> str:
    (folder / "rows.txt").write_text("".join(f"{row['prompt']}\n" for row in rows), encoding="utf-8")
    return str(folder / "rows.txt")


def _write_bytes(
    name: str, encode: Callable[[bytes], bytes], lines: Callable[[Sequence[Columns]], bytes] = jsonl
) -> Callable[[Sequence[Columns], Path], str]:
    def write(rows: Sequence[Columns], folder: Path) -> str:
        (folder / name).write_bytes(encode(lines(rows)))
        return str(folder / name)

    return write


def _write_parquet(rows: Sequence[Columns], folder: Path) -> str:
    (folder / "rows.parquet").write_bytes(parquet(rows))
    return str(folder / "rows.parquet")


def _write_parts(rows: Sequence[Columns], folder: Path) -> str:
    half = len(rows) // 2
    (folder / "part-1.jsonl").write_bytes(jsonl(rows[:half]))
    (folder / "part-2.jsonl.gz").write_bytes(gzip.compress(jsonl(rows[half:])))
    return str(folder / "part-*")


def _write_saved_dataset(rows: Sequence[Columns], folder: Path) -> str:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def _write_dataset_files(rows: Sequence[Columns], folder: Path) -> str:
    (folder / "files").mkdir()
    (folder / "files" / "test.jsonl").write_bytes(jsonl(rows))
    return f"hf:{folder / 'files'}?split=test"


FORMATS: dict[str, Callable[[Sequence[Columns], Path], str]] = {
    "jsonl": _write_bytes("rows.jsonl", bytes),
    "jsonl.gz": _write_bytes("rows.jsonl.gz", gzip.compress),
    "jsonl.zst": _write_bytes("rows.jsonl.zst", zstd),
    "csv": _write_bytes("rows.csv", bytes, table),
    "tsv.gz": _write_bytes("rows.tsv.gz", gzip.compress, partial(table, delimiter="\t")),
    "parquet": _write_parquet,
    "parts": _write_parts,
    "text": _write_text,
    "saved dataset": _write_saved_dataset,
    "streamed dataset": _write_dataset_files,
}


def source_of(path: str | Path, **keys: Any) -> Source:
    return open_source(InputSpec(path=(str(path),), **keys))


def read_bytes(folder: Path, content: bytes, name: str = "rows.jsonl", **keys: Any) -> list[Row]:
    """The rows of a file with this content."""
    (folder / name).write_bytes(content)
    return list(source_of(folder / name, **keys).read())


def codes(rows: Sequence[Any]) -> list[str]:
    """The error code of each row, "ok" for a sound one."""
    return [str(row.error.code) if isinstance(row, Row) and row.error else "ok" for row in rows]


def row_of(columns: Columns, index: int = 0) -> Row:
    """A row of a file ``rows.jsonl``."""
    return Row(index, "rows.jsonl", index + 1, dict(columns), Cursor(0, 0, index + 1, index + 1))


def builder_of(tokenizer: Tokenizer | None, sampling: Any = None, **keys: Any) -> RequestBuilder:
    """What makes requests of rows, for a job with these keys of [input] and for a model of these sizes."""
    sizes: dict[str, Any] = {"max_model_len": 9999, "vocab_size": VOCAB_SIZE, "grammars": None}
    sizes |= {name: keys.pop(name) for name in sizes.keys() & keys.keys()}
    return RequestBuilder(InputSpec(path=("rows.jsonl",), **keys), sampling or SamplingParams(), tokenizer, **sizes)


def told(tokenizer: Tokenizer, columns: Columns, **keys: Any) -> str:
    """The prompt that a row becomes, or the code and message of its error."""
    [found] = requests_of(builder_of(tokenizer, **keys), [row_of(columns)])
    if isinstance(found, Row):
        assert found.error is not None
        return f"{found.error.code}: {found.error.message}"
    return tokenizer.decode(found.prompt_token_ids, skip_special_tokens=False)


def requests_of(builder: RequestBuilder, rows: Iterable[Row]) -> list[Request | Row]:
    """The request of each row, or the row with its error."""
    return [request or row for row, request in builder.build([*rows])]


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """A folder with a tokenizer of bytes and LFM2's special tokens; ``config`` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {f"<|unused{n}|>": n for n in (2, 3, 4, 5)} | SPECIAL_TOKENS | {c: 8 + n for n, c in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A", special_tokens=[("<|startoftext|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|startoftext|>", "eos_token": "<|im_end|>"}
    settings = {**tokens, "chat_template": CHAT_TEMPLATE, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
