"""The corpus of bad input: each bad row is one error row with the stated code and costs no neighbour; each bad file is
one clear line before any work.
"""

from __future__ import annotations

import datetime
import errno
import gzip
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import VOCAB_SIZE, builder_of, codes, jsonl, loaded, requests_of, sample_rows, source_of

from batchgen.config.job import InputSpec
from batchgen.core.errors import ExitCode, UsageError
from batchgen.core.records import Request, Row
from batchgen.input import content
from batchgen.input.rows import with_id

MAX_MODEL_LEN = 400
TEMPLATE = "{% if messages[0].role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}{{ messages }}"


def answers_of(path: Path, **keys: Any) -> list[Request | Row]:
    """What the runner would get for every row of an input: id, then prompt."""
    rows = source_of(path, format=keys.get("format", "auto")).read()
    spec = InputSpec(path=(str(path),), **keys)
    builder = builder_of(loaded(TEMPLATE), max_model_len=MAX_MODEL_LEN, **keys)
    return requests_of(builder, (with_id(row, spec) for row in rows))


def prompt_row(**columns: Any) -> bytes:
    return json.dumps({"prompt": "hi", **columns}).encode()


def chat_row(*messages: Any) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


def batch_row(body: Any = None, **fields: Any) -> bytes:
    line = {"custom_id": "r", "method": "POST", "url": "/v1/chat/completions", "body": body or {}, **fields}
    return json.dumps({name: value for name, value in line.items() if value != "absent"}).encode()


def batch_body(**fields: Any) -> bytes:
    return batch_row({"messages": [{"role": "user", "content": "hi"}], **fields})


BAD_LINES: dict[str, tuple[bytes, str]] = {
    "object cut short": (b'{"prompt": "hi"', "bad_json"),
    "string cut short": (b'{"prompt": "hi', "bad_json"),
    "trailing comma": (b'{"prompt": "hi",}', "bad_json"),
    "single quotes": (b"{'prompt': 'hi'}", "bad_json"),
    "bare word": (b"prompt", "bad_json"),
    "two objects": (b'{"prompt": "a"} {"prompt": "b"}', "bad_json"),
    "comma between lines": (b'{"prompt": "a"},', "bad_json"),
    "NUL bytes": (b"\0" * 50, "bad_json"),
    "NUL in a string": (b'{"prompt": "a\0b"}', "bad_json"),
    "tab in a string": (b'{"prompt": "a\tb"}', "bad_json"),
    "number of 5000 digits": (b'{"prompt": "hi", "n": ' + b"9" * 5000 + b"}", "bad_json"),
    "nested 150 deep": (b'{"prompt": "hi", "a": ' + b"[" * 150 + b"]" * 150 + b"}", "bad_json"),
    "nested 100,000 deep": (b'{"prompt": "hi", "a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "bad_json"),
    "unclosed 100,000 deep": (b"[" * 100_000, "bad_json"),
    "byte order mark in the middle": (b'\xef\xbb\xbf{"prompt": "hi"}', "bad_json"),
    "a bad escape": (b'{"prompt": "\\x41"}', "bad_json"),
    "Latin-1": (b'{"prompt": "caf\xe9"}', "bad_encoding"),
    "overlong UTF-8": (b'{"prompt": "\xc0\xaf"}', "bad_encoding"),
    "surrogate in UTF-8": (b'{"prompt": "\xed\xa0\x80"}', "bad_encoding"),
    "beyond Unicode": (b'{"prompt": "\xf4\x90\x80\x80"}', "bad_encoding"),
    "UTF-8 cut short": (b'{"prompt": "\xe6\x9d', "bad_encoding"),
    "UTF-16 line": ('{"prompt": "hi"}'.encode("utf-16"), "bad_encoding"),
    "lone high surrogate": (b'{"prompt": "\\ud83d"}', "bad_encoding"),
    "lone low surrogate": (b'{"prompt": "a\\ude00b"}', "bad_encoding"),
    "surrogates in the wrong order": (b'{"prompt": "\\ude00\\ud83d"}', "bad_encoding"),
    "lone surrogate in a key": (b'{"prompt": "hi", "\\udfff": 1}', "bad_encoding"),
    "lone surrogate deep inside": (b'{"prompt": "hi", "a": [{"b": "\\uD800"}]}', "bad_encoding"),
    "a list": (b'["prompt", "hi"]', "bad_type"),
    "a string": (b'"prompt"', "bad_type"),
    "a number": (b"42", "bad_type"),
    "null": (b"null", "bad_type"),
    "not a number": (b"NaN", "bad_type"),
    "prompt is a number": (prompt_row(prompt=42), "bad_type"),
    "prompt is an object": (prompt_row(prompt={"text": "hi"}), "bad_type"),
    "prompt is a list": (prompt_row(prompt=["hi"]), "bad_type"),
    "prompt is true": (prompt_row(prompt=True), "bad_type"),
    "messages is a string": (b'{"messages": "hi"}', "bad_type"),
    "a message is a string": (chat_row("hi"), "bad_type"),
    "a message without a role": (chat_row({"content": "hi"}), "bad_type"),
    "a role that is a number": (chat_row({"role": 1, "content": "hi"}), "bad_type"),
    "a message without content": (chat_row({"role": "user"}), "bad_type"),
    "content that is a number": (chat_row({"role": "user", "content": 5}), "bad_type"),
    "an image": (chat_row({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "bad_type"),
    "a content part that is a string": (chat_row({"role": "user", "content": ["hi"]}), "bad_type"),
    "ids as text": (b'{"prompt_token_ids": "1 2 3"}', "bad_type"),
    "ids as floats": (b'{"prompt_token_ids": [1.0, 2.0]}', "bad_type"),
    "ids as booleans": (b'{"prompt_token_ids": [true]}', "bad_type"),
    "ids nested": (b'{"prompt_token_ids": [[1]]}', "bad_type"),
    "no prompt": (b'{"question": "hi"}', "missing_column"),
    "no columns": (b"{}", "missing_column"),
    "prompt is null": (prompt_row(prompt=None), "empty_prompt"),
    "prompt is NaN": (prompt_row(prompt=float("nan")), "empty_prompt"),
    "empty prompt": (prompt_row(prompt=""), "empty_prompt"),
    "blank prompt": (prompt_row(prompt=" \n\t\u2003"), "empty_prompt"),
    "no messages": (chat_row(), "empty_prompt"),
    "messages that say nothing": (chat_row({"role": "user", "content": " "}), "empty_prompt"),
    "no ids": (b'{"prompt_token_ids": []}', "empty_prompt"),
    "a template that refuses": (chat_row({"role": "robot", "content": "hi"}), "template_error"),
    "negative id": (b'{"prompt_token_ids": [-1]}', "bad_param"),
    "id beyond the vocabulary": (b'{"prompt_token_ids": [1, %d]}' % VOCAB_SIZE, "bad_param"),
    "id beyond 64 bits": (b'{"prompt_token_ids": [%d]}' % 2**70, "bad_param"),
    "temperature NaN": (prompt_row(sampling={"temperature": float("nan")}), "bad_param"),
    "max_tokens of 0": (prompt_row(sampling={"max_tokens": 0}), "bad_param"),
    "unknown sampling key": (prompt_row(sampling={"temprature": 1}), "bad_param"),
    "prompt of too many tokens": (prompt_row(prompt="word " * 100), "too_long"),
    "chat of 5 MB": (prompt_row(prompt="x" * 5_000_000), "too_long"),
    "too many ids": (b'{"prompt_token_ids": [' + b"8, " * MAX_MODEL_LEN + b"8]}", "too_long"),
    "batch: GET": (batch_row(method="GET"), "bad_param"),
    "batch: a chat for embeddings": (batch_row(url="/v1/embeddings"), "missing_column"),
    "batch: responses": (batch_row(url="/v1/responses"), "bad_param"),
    "batch: url is null": (batch_row(url=None), "bad_type"),
    "batch: no url, and nothing in the body": (batch_row(url="absent"), "missing_column"),
    "batch: custom_id is a number": (batch_row(custom_id=7), "bad_type"),
    "batch: body without messages": (batch_row({"prompt": "hi"}), "missing_column"),
    "batch: tools": (batch_body(tools=[{"type": "function"}]), "bad_param"),
    "batch: stream": (batch_body(stream=True), "bad_param"),
    "batch: a response_format that does not exist": (batch_body(response_format={"type": "yaml"}), "bad_param"),
    "batch: a field that does not exist": (batch_body(temprature=1), "bad_param"),
    "batch: max_tokens of 0": (batch_body(max_completion_tokens=0), "bad_param"),
    "batch: several prompts": (batch_row({"prompt": ["a", "b"]}, url="/v1/completions"), "bad_type"),
    "batch: completion without text": (batch_row({"prompt": ""}, url="/v1/completions"), "empty_prompt"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_one_error_row_and_costs_no_neighbour(name: str, tmp_path: Path) -> None:
    line, code = BAD_LINES[name]
    good = [b'{"prompt": "before"}', b'{"prompt": "after"}']
    (tmp_path / "rows.jsonl").write_bytes(good[0] + b"\n" + line + b"\n" + good[1] + b"\n")
    answers = answers_of(tmp_path / "rows.jsonl")
    assert codes(answers) == ["ok", code, "ok"]
    bad = answers[1]
    assert isinstance(bad, Row) and bad.error
    assert (bad.index, bad.line, bad.source) == (1, 2, str(tmp_path / "rows.jsonl"))
    assert bad.error.message and "\n" not in bad.error.message and len(bad.error.message) < 400


@pytest.mark.parametrize(
    ("row", "keys", "code"),
    [
        ({"a": "x"}, {"prompt": "{b}"}, "missing_column"),
        ({"a": {"b": 1}}, {"prompt": "{a[c]}"}, "missing_column"),
        ({"a": [1]}, {"prompt": "{a[1]}"}, "missing_column"),
        ({"a": [1]}, {"prompt": "{a[999999999999999999999]}"}, "template_error"),
        ({"a": [1]}, {"prompt": "{a[-1]}"}, "template_error"),
        ({"a": [1]}, {"prompt": "{a[x]}"}, "template_error"),
        ({"a": "text"}, {"prompt": "{a[0]}"}, "template_error"),
        ({"a": 5}, {"prompt": "{a[b][c]}"}, "template_error"),
        ({"a": None}, {"prompt": "{a[b]}"}, "template_error"),
        ({"a": None}, {"prompt": "{a}"}, "empty_prompt"),
        ({"a": {"b": None}}, {"prompt": "{a[b]}"}, "empty_prompt"),
        ({"a": ""}, {"prompt": "{a}"}, "empty_prompt"),
        ({"a": " ", "b": None}, {"prompt": "What is {a}, and {b} or {a}?"}, "empty_prompt"),
        ({"a": None}, {"prompt": "a"}, "empty_prompt"),
        ({"prompt": "hi"}, {"prompt": "a"}, "missing_column"),
        ({"prompt": "hi"}, {"messages": "a"}, "missing_column"),
        ({"prompt": "hi"}, {"prompt_token_ids": "a"}, "missing_column"),
        ({"prompt": "hi"}, {"id": "a"}, "missing_column"),
        ({"prompt": "hi", "a": None}, {"id": "a"}, "bad_type"),
        ({"prompt": "hi", "a": 1.5}, {"id": "a"}, "bad_type"),
        ({"prompt": "hi", "a": ["x"]}, {"id": "a"}, "bad_type"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {"chat_template": "none"}, "missing_column"),
        ({"prompt": "hi"}, {"format": "openai-batch"}, "missing_column"),
        ({"custom_id": "a", "method": "POST"}, {"format": "openai-batch"}, "missing_column"),
    ],
    ids=str,
)
def test_a_row_that_does_not_fit_the_job_is_an_error_row(
    row: dict[str, Any], keys: dict[str, Any], code: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl([row]))
    assert codes(answers_of(tmp_path / "rows.jsonl", **keys)) == [code]


@pytest.mark.parametrize("column", ["prompt", "messages", "prompt_token_ids", "sampling", "max_tokens", "meta"])
def test_parquet_columns_of_odd_types_are_rows_or_error_rows(column: str, tmp_path: Path) -> None:
    now = datetime.datetime(2024, 5, 1, 12, 30)
    odd: dict[str, pa.Array] = {
        "binary": pa.array([b"\xff\x00"]),
        "timestamp": pa.array([now]),
        "timestamp ns": pa.array([1], pa.timestamp("ns", "Europe/Berlin")),
        "timestamp out of range": pa.array([2**62], pa.timestamp("us")),
        "date": pa.array([now.date()]),
        "time": pa.array([now.time()]),
        "duration": pa.array([5], pa.duration("us")),
        "decimal": pa.array(["1.50"]).cast(pa.decimal128(5, 2)),
        "half": pa.array([1.5], pa.float32()).cast(pa.float16()),
        "uint64": pa.array([2**64 - 1], pa.uint64()),
        "dictionary": pa.array(["x"]).dictionary_encode(),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
        "null": pa.nulls(1),
        "list of struct": pa.array([[{"role": "user", "content": b"\xff"}]]),
        "fixed size": pa.array([[1, 2]], pa.list_(pa.int64(), 2)),
        "not UTF-8": pa.array([b"caf\xe9"]).view(pa.string()),
    }
    for name, array in odd.items():
        columns = {"prompt": pa.array(["hi"]), column: array}
        pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
        [answer] = answers_of(tmp_path / "rows.parquet")
        code = codes([answer])[0]
        if column in ("meta", "max_tokens"):  # data, which no prompt needs
            assert code == "ok"
        elif name == "not UTF-8":
            assert code == "bad_encoding"
        elif name == "timestamp out of range":
            assert code == "bad_type"
        elif name == "null":
            assert code == ("empty_prompt" if column == "prompt" else "ok")
        else:
            assert code in ("ok", "bad_type", "bad_param", "missing_column")
        assert not (column == "prompt" and name == "binary" and code == "ok")


def test_a_chat_longer_than_any_context_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_CHARS", 20)
    rows = [{"messages": [{"role": "user", "content": "a" * length}]} for length in (9, 21)]
    (tmp_path / "rows.jsonl").write_bytes(jsonl(rows))
    assert codes(answers_of(tmp_path / "rows.jsonl")) == ["ok", "too_long"]


def test_one_unreadable_value_in_parquet_costs_its_row_only(tmp_path: Path) -> None:
    text = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())
    pq.write_table(pa.table({"prompt": text, "n": [1, 2, 3]}), tmp_path / "rows.parquet")
    for keys in ({}, {"prompt": "Say {prompt}"}):
        rows = list(source_of(tmp_path / "rows.parquet", **keys).read())
        assert codes(rows) == ["ok", "bad_encoding", "ok"]
        assert rows[1].error and rows[1].columns == {"n": 2}


def test_a_damaged_row_group_is_as_many_error_rows_and_the_others_are_read(tmp_path: Path) -> None:
    table = pa.table({"prompt": [f"question {n} " + os.urandom(20).hex() for n in range(9)]})
    options = {"row_group_size": 3, "compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, tmp_path / "rows.parquet", **options)
    content = bytearray((tmp_path / "rows.parquet").read_bytes())
    content[content.find(b"question 4 ") + 12] ^= 1
    (tmp_path / "rows.parquet").write_bytes(content)
    source = source_of(tmp_path / "rows.parquet")
    rows = list(source.read())
    assert codes(rows) == ["ok"] * 3 + ["bad_encoding"] * 3 + ["ok"] * 3
    assert [row.index for row in rows] == list(range(9))
    assert list(source.read(rows[4].after)) == rows[5:]


def _write(content: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content) and None


def _write_bad_name(path: Path) -> None:
    pq.write_table(pa.table({"name": [1]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"name", b"na\xffe"))


def _write_bad_width(path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), path)
    kept = pq.read_metadata(path).metadata[b"ARROW:schema"]
    bad = b64encode(b64decode(kept).replace(b"\x40\0\0\0", b"\x07\0\0\0"))
    path.write_bytes(path.read_bytes().replace(kept, bad))


BAD_FILES: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any], str]] = {
    "missing": ("rows.jsonl", lambda path: None, {}, "no input file"),
    "missing, as hf": ("org/name", lambda path: None, {"format": "hf"}, "written hf:NAME"),
    "glob without a match": ("*.jsonl", lambda path: None, {}, "no file matches"),
    "glob that matches a folder": ("ro*", lambda path: (path.parent / "rows").mkdir(), {}, "no file matches"),
    "empty folder": ("rows", lambda path: path.mkdir(), {}, "folder without .parquet files"),
    "broken link": ("rows.jsonl", lambda path: path.symlink_to("nowhere"), {}, "no input file"),
    "link to itself": ("rows.jsonl", lambda path: path.symlink_to(path), {}, "input"),
    "name of 300 letters": ("x" * 300, lambda path: None, {}, "File name too long"),
    "named pipe": ("rows.jsonl", os.mkfifo, {}, "not a regular file"),
    "empty Parquet": ("rows.parquet", _write(b""), {}, "as Parquet"),
    "text named Parquet": ("rows.parquet", _write(b"hello\n"), {}, "as Parquet"),
    "Parquet cut short": ("rows.parquet", _write(b"PAR1" + b"\0" * 100), {}, "as Parquet"),
    "Parquet with a name that is not UTF-8": ("rows.parquet", _write_bad_name, {}, "as Parquet"),
    "Parquet of 7-bit integers": ("rows.parquet", _write_bad_width, {}, "as Parquet: Integers with less than 8 bits"),
    "Parquet said to be JSON": ("rows", _write(b"PAR1" + b"\0" * 100), {"format": "jsonl"}, "is a Parquet file"),
    "UTF-16 text": ("rows.txt", _write("hi\n".encode("utf-16")), {"format": "text"}, "is UTF-16"),
    "Parquet given a delimiter": ("rows", _write(b"PAR1" + b"\0" * 100), {"delimiter": ";"}, "as Parquet"),
    "compressed CSV cut in its header": ("rows.csv.gz", _write(gzip.compress(b"a\n")[:11]), {}, "file is damaged here"),
    "bzip2": ("rows.jsonl.bz2", _write(b"BZh91AY"), {}, "recompress it"),
    "binary": ("rows", _write(b"\x7fELF\0\0\0"), {}, "looks like binary"),
    "hf with an unknown option": ("hf:org/name?splits=test", lambda path: None, {}, "cannot read 'hf:org/name?***"),
    "hf without a name": ("hf:?split=test", lambda path: None, {}, "cannot read 'hf:?split=test'"),
    "file said to be hf": (
        "rows.jsonl",
        lambda path: path.write_text("{}\n"),
        {"format": "hf"},
        'format = "hf"; leave',
    ),
    "folder said to be hf": ("rows", lambda path: path.mkdir(), {"format": "hf"}, "without .parquet"),
    "damaged dataset": ("d/state.json", lambda path: path.parent.mkdir() or path.write_bytes(b"{"), {}, "cannot open"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_one_clear_line_before_any_work(name: str, tmp_path: Path) -> None:
    path, make, keys, message = BAD_FILES[name]
    entry = path if path.startswith("hf:") else str(tmp_path / path)
    if not path.startswith("hf:"):
        make(tmp_path / path)
    with pytest.raises(UsageError) as caught:
        source_of(entry.removesuffix("/state.json"), **keys)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_file_without_read_permission_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl(sample_rows(1)))

    def refuse(self: Path, *_: Any, **__: Any) -> None:  # file modes do not stop root, whom CI often runs as
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match=r"cannot read input .*rows\.jsonl: Permission denied"):
        source_of(tmp_path / "rows.jsonl")
