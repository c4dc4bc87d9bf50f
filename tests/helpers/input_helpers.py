"""Inputs of every format with the same rows, and a small byte-level tokenizer: what the tests of the reader share."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
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


CHAT, TEXT, VECTOR = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    TEXT: {"prompt": "Hi"},
    VECTOR: {"input": "Hi"},
}


def openai_line(url: str = CHAT, **body: Any) -> dict[str, Any]:
    """A request in OpenAI's form, which says "Hi" unless its body does."""
    return {"custom_id": "a", "method": "POST", "url": url, "body": {**_BODIES[url], **body}}


def as_text(rows: Sequence[Columns]) -> list[dict[str, str]]:
    """The same rows as a table holds them."""
    return [{name: v if isinstance(v, str) else json.dumps(v) for name, v in row.items()} for row in rows]


def table(rows: Sequence[Columns], delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, rows[0], delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(as_text(rows))
    return text.getvalue().encode()


# The content of a file with these rows, by the file's name.
CONTENTS: dict[str, Callable[[Sequence[Columns]], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)),
    "rows.jsonl.zst": lambda rows: zstd(jsonl(rows)),
    "rows.csv": table,
    "rows.tsv.gz": lambda rows: gzip.compress(table(rows, "\t")),
    "rows.parquet": parquet,
    "rows.txt": lambda rows: "".join(f"{row['prompt']}\n" for row in rows).encode(),
}


def writer(name: str, encode: Callable[[Sequence[Columns]], bytes]) -> Callable[[Sequence[Columns], Path], str]:
    """A function that writes rows as a file of this name into a folder, and returns its path."""

    def write(rows: Sequence[Columns], folder: Path) -> str:
        (folder / name).write_bytes(encode(rows))
        return str(folder / name)

    return write


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
    **{name.removeprefix("rows."): writer(name, encode) for name, encode in CONTENTS.items()},
    "parts": _write_parts,
    "saved dataset": _write_saved_dataset,
    "streamed dataset": _write_dataset_files,
}


def source_of(path: str | Path, **keys: Any) -> Source:
    return open_source(InputSpec(path=(str(path),), **keys))


def read_all_ways(path: Path | str, **keys: Any) -> list[Row]:
    """The rows of a file, after checking that reading from behind some of them, and single ones, gives the same."""
    source = source_of(path, **keys)
    rows = list(source.read())
    assert [row.index for row in rows] == list(range(len(rows)))
    for number in range(0, len(rows), max(1, len(rows) // 12)):
        same = list(source.read(rows[number].after))
        assert repr(same) == repr(rows[number + 1 :])  # repr: NaN is not equal to itself
        skipped = list(source.read(wanted={number}.__contains__))
        assert repr(skipped) == repr([rows[number]])
    return rows


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
    return problem(found) if isinstance(found, Row) else text_of(found, tokenizer)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    [found] = tokenizer.encode_batch([text], add_special_tokens=False)
    assert not isinstance(found, Exception)
    return found


def text_of(found: Request | Row, tokenizer: Tokenizer) -> str:
    """The prompt of a request, its special tokens written out."""
    assert isinstance(found, Request), found
    return tokenizer.decode(found.prompt_token_ids, skip_special_tokens=False)


def problem(found: Request | Row) -> str:
    """The code and message of a row's error."""
    assert isinstance(found, Row) and found.error is not None, found
    return f"{found.error.code}: {found.error.message}"


def requests_of(builder: RequestBuilder, rows: Iterable[Row]) -> list[Request | Row]:
    """The request of each row, or the row with its error."""
    return [request or row for row, request in builder.build([*rows])]


@cache
def loaded(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The tokenizer of ``write_tokenizer`` with a chat template, one for all tests that leave it as it is."""
    with TemporaryDirectory() as name:
        return Tokenizer.load(write_tokenizer(Path(name), chat_template=template))


def write_tokenizer(folder: Path, added: Mapping[str, bool] | None = None, **config: Any) -> Path:
    """A folder with a tokenizer of bytes and LFM2's special tokens; ``config`` goes into tokenizer_config.json.

    ``added`` are further tokens, by whether they are special.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {f"<|unused{n}|>": n for n in (2, 3, 4, 5)} | SPECIAL_TOKENS | {c: 8 + n for n, c in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges=[]))
    further = [AddedToken(token, special=skip, normalized=False) for token, skip in (added or {}).items()]
    backend.add_tokens([*(AddedToken(token, special=True) for token in SPECIAL_TOKENS), *further])
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
