"""One chat, one prompt: whatever form its row is stored in, and as transformers renders it, or it is refused in all."""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import PUBLISHED, fix_date
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import (
    FORMATS,
    builder_of,
    jsonl,
    openai_line,
    parquet,
    problem,
    source_of,
    table,
    write_tokenizer,
    writer,
)
from repeats import share_of

from batchgen.config.job import InputSpec
from batchgen.core.errors import UsageError
from batchgen.input.in_memory import json_lines
from batchgen.text.tokenizer import Tokenizer

NOW = datetime(2026, 5, 1)
REASONING = ("reasoning_content", "thinking", "reasoning")
MEDIA = ("images", "audio", "video")
Row = dict[str, Any]
Drawn = Callable[[st.SearchStrategy[Any]], Any]


# ---------------------------------------------------------------- rows: each text and number is there once


def message(draw: Drawn, words: Iterator[str], num: int) -> Row:
    role = draw(st.sampled_from(["user", "assistant", "tool", "system", "developer", "function", "context"]))
    if num == 0 and draw(st.booleans()):
        role = "user"
    found: Row = {"role": role, "content": content(draw, words, role)}
    if role == "assistant":
        found |= said(draw, words)
    if role in ("tool", "function") and draw(st.booleans()):
        found["tool_call_id"] = draw(st.sampled_from(["call00001", None]))
    if draw(st.integers(0, 5)) == 0:
        found[draw(st.sampled_from(["name", "refusal", "audio", "tool_calls", "thinking", "weight"]))] = None
    if draw(st.integers(0, 11)) == 0:
        found |= carried(draw, words, role)
    return found


def carried(draw: Drawn, words: Iterator[str], role: str) -> Row:
    """What a turn says beside its content: pictures and sounds, which no prompt can have, and refusals."""
    if role == "assistant" and draw(st.booleans()):
        return {"refusal": next(words)}
    name = draw(st.sampled_from(MEDIA))
    return {name: draw(st.sampled_from([[], [{"id": next(words)}]] if name == "images" else ["", next(words)]))}


def content(draw: Drawn, words: Iterator[str], role: str) -> Any:
    kind = draw(st.sampled_from(["text", "text", "text", "parts", "empty", "null"]))
    if kind == "null" and role == "assistant":
        return None
    if kind == "parts":
        names = draw(st.lists(st.sampled_from(["text", "input_text"]), min_size=1, max_size=2))
        nulls = {"image_url": None} if draw(st.booleans()) else {}
        return [{"type": name, "text": next(words), **nulls} for name in names]
    return "" if kind == "empty" else next(words) + draw(st.sampled_from(["", " é", "\n東京"]))


def said(draw: Drawn, words: Iterator[str]) -> Row:
    """What an assistant's message may have beside a content."""
    found: Row = {}
    kind = draw(st.sampled_from(["none", "none", "empty", "null", "calls", "older"]))
    if kind in ("empty", "null"):
        found["tool_calls"] = [] if kind == "empty" else None
    elif kind == "calls":
        found["tool_calls"] = [call(draw, words) for _ in range(draw(st.integers(1, 2)))]
    elif kind == "older":
        found["function_call"] = call(draw, words)["function"]
    if draw(st.integers(0, 3)) == 0:
        found[draw(st.sampled_from(REASONING))] = draw(st.sampled_from([next(words), None, ""]))
    return found


def call(draw: Drawn, words: Iterator[str]) -> Row:
    names = draw(st.lists(st.sampled_from(["city", "days", "deep"]), unique=True))
    values = {"city": next(words), "days": int(next(words)[1:-1]) + 10_000, "deep": {"list": [next(words)]}}
    arguments: Any = {name: values[name] for name in names}
    form = draw(st.sampled_from(["object", "text", "nothing"]))
    if form == "text":
        arguments = json.dumps(arguments)
    elif form == "nothing":
        arguments = draw(st.sampled_from([None, "", "null"]))
    return {"id": "call00001", "type": "function", "function": {"name": next(words), "arguments": arguments}}


def tool(draw: Drawn, words: Iterator[str]) -> Row:
    named = [next(words) for _ in range(draw(st.integers(0, 2)))]
    properties = {
        name: {"type": "string", "enum": ["a"]} if draw(st.booleans()) else {"type": "string"} for name in named
    }
    parameters = {"type": "object", "properties": properties, "required": named[:1]}
    described = {"description": next(words)} if draw(st.booleans()) else {}
    return {"type": "function", "function": {"name": next(words), **described, "parameters": parameters}}


@st.composite
def chats(draw: Drawn) -> list[Row]:
    words = (f"w{number}x" for number in itertools.count())
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: Row = {"messages": [message(draw, words, num) for num in range(draw(st.integers(1, 4)))]}
        row["tools"] = draw(st.sampled_from([None, [], "some"]))
        if row["tools"]:
            row["tools"] = [tool(draw, words) for _ in range(draw(st.integers(1, 2)))]
        row["chat_template_kwargs"] = draw(st.sampled_from([None, None, {"enable_thinking": False}]))
        rows.append(row)
    return rows


# ---------------------------------------------------------------- the forms that rows are stored in


def as_json_lines(rows: Sequence[Row], folder: Path) -> str:
    return FORMATS["jsonl"]([{k: v for k, v in row.items() if v is not None} for row in rows], folder)


def requests(rows: Sequence[Row]) -> list[Row]:
    return [openai_line(**row) for row in rows]


def of_texts(row: Row) -> Row:
    """A row whose messages and tools are JSON text each, as is left of ``arrow.json`` without its type."""
    return {
        name: [json.dumps(item) for item in value] if name in ("messages", "tools") and value else value
        for name, value in row.items()
    }


def lists_of_texts(rows: Sequence[Row]) -> bytes:
    columns = {name: [of_texts(row)[name] for row in rows] for name in ("messages", "tools")}
    kwargs = [json.dumps(row["chat_template_kwargs"]) if row["chat_template_kwargs"] else None for row in rows]
    table = pa.table({name: pa.array(column, pa.list_(pa.string())) for name, column in columns.items()})
    sink = io.BytesIO()
    pq.write_table(table.append_column("chat_template_kwargs", pa.array(kwargs, pa.string())), sink)
    return sink.getvalue()


def in_memory(rows: Any) -> bytes:
    return b"".join(json_lines(rows, InputSpec().request_columns))


def dataset(rows: Sequence[Row]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(list(rows), on_mixed_types="use_json")


def of_datasets(rows: Sequence[Row]) -> bytes:
    sink = io.BytesIO()
    dataset(rows).to_parquet(sink)
    return sink.getvalue()


def as_saved_dataset(rows: Sequence[Row], folder: Path) -> str:
    dataset(rows).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def as_streamed_dataset(rows: Sequence[Row], folder: Path) -> str:
    (folder / "files").mkdir()
    as_json_lines(rows, folder / "files")
    return f"hf:{folder / 'files'}"


TEXTS = [
    writer("requests.jsonl", lambda rows: jsonl(requests(rows))),
    writer("rows.csv", lambda rows: table([{k: "" if v is None else v for k, v in row.items()} for row in rows])),
    writer(
        "texts.parquet",
        lambda rows: parquet([{k: None if v is None else json.dumps(v) for k, v in row.items()} for row in rows]),
    ),
    writer("texts.jsonl", lambda rows: jsonl(list(map(of_texts, rows)))),
    writer("lists.parquet", lists_of_texts),
]
TYPED = [  # these cannot hold any chat
    writer("rows.parquet", parquet),
    writer("requests.parquet", lambda rows: parquet(requests(rows))),
    writer("datasets.parquet", of_datasets),
    as_saved_dataset,
    writer("frame.jsonl", lambda rows: in_memory(pd.read_parquet(io.BytesIO(of_datasets(rows))))),
    writer("table.jsonl", lambda rows: in_memory(pa.Table.from_pylist(list(rows)))),
]
_NO_FORM = (pa.ArrowException, TypeError, ValueError, UsageError)  # the last of what lost its type on the way


class Made:
    """A template in a tokenizer of ours and of transformers; made once, as each has a process."""

    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        template = "{#- as calls begin: <|tool_call_start|> -#}" + PUBLISHED[name]
        write_tokenizer(folder / name, chat_template=template)
        self.ours = Tokenizer.load(folder / name, NOW)
        self.theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder / name)
        self._builder = builder_of(self.ours, max_model_len=99_999)

    def answers(self, path: str) -> list[str]:
        """Per row its prompt, or why there is none."""
        records: list[Any] = list(source_of(path).read())
        assert not [record for record in records if record.error], records
        return [self._told(row) for row, _ in self._builder.build(records)]

    def _told(self, row: Any) -> str:
        if row.error:
            return problem(row).replace("body.", "")
        return self.ours.decode(row.prompt_token_ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Made]]:
    with pytest.MonkeyPatch.context() as patch:
        fix_date(NOW, patch)
        yield {name: Made(name, tmp_path_factory.mktemp("tokenizers")) for name in PUBLISHED}


def in_one_order(rows: Sequence[Row]) -> list[Row]:
    """The rows with their keys in the order in which they are first seen: a struct of Arrow has no other."""
    orders: dict[str, dict[str, None]] = {}

    def see(value: Any, path: str) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(value, dict):
                orders.setdefault(path, {})[key] = None
            if isinstance(item, dict | list):
                see(item, f"{path}.{key if isinstance(value, dict) else 0}")

    def ordered(value: Any, path: str) -> Any:
        if isinstance(value, dict):
            keys = [key for key in orders.get(path, ()) if key in value]
            return {key: ordered(value[key], f"{path}.{key}") for key in keys}
        return [ordered(item, f"{path}.0") for item in value] if isinstance(value, list) else value

    see(list(rows), "")
    found: list[Row] = ordered(list(rows), "")
    return found


def check_forms(made: Made, rows: Sequence[Row], forms: Sequence[Callable[[Sequence[Row], Path], str]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = made.answers(as_json_lines(rows, folder))
        as_arrow = made.answers(as_json_lines(in_one_order(rows), folder))
        for form in forms:
            try:
                path = form(rows, folder)
            except _NO_FORM:
                continue
            for answer, *expected in zip(made.answers(path), written, as_arrow, strict=True):
                assert answer in (expected if form in TYPED else expected[:1]), path


@given(chats(), st.sampled_from(sorted(PUBLISHED)))
@settings(max_examples=40, deadline=None)
def test_a_chat_has_one_prompt_in_all_forms_of_text(templates: dict[str, Made], rows: list[Row], name: str) -> None:
    check_forms(templates[name], rows, TEXTS)


@given(chats(), st.sampled_from(sorted(PUBLISHED)))
@settings(max_examples=25, deadline=None)
def test_a_chat_has_one_prompt_in_all_forms_with_types(templates: dict[str, Made], rows: list[Row], name: str) -> None:
    check_forms(templates[name], rows, TYPED)


@pytest.mark.nightly
@given(chats(), st.sampled_from(sorted(PUBLISHED)))
@settings(max_examples=150, deadline=None)
def test_many_chats_have_one_prompt_in_all_forms(templates: dict[str, Made], rows: list[Row], name: str) -> None:
    check_forms(templates[name], rows, [*TEXTS, *TYPED, as_streamed_dataset])


# ---------------------------------------------------------------- what transformers makes of them


def cleaned(row: Row) -> Row | None:
    """A row as the documents say it is taken; None if it has no text at all."""
    messages = [_cleaned(item) for item in row["messages"]]
    if not any(text.strip() for item in messages for text in _texts(item["content"])):
        return None
    variables = {"tools": row["tools"] or None, **(row["chat_template_kwargs"] or {})}
    return {"messages": messages, **{key: value for key, value in variables.items() if value is not None}}


def _cleaned(given: Row) -> Row:
    found = {key: value for key, value in given.items() if value is not None}
    calls = found.pop("tool_calls", [])
    if "function_call" in found:
        calls = [{"type": "function", "function": found.pop("function_call")}]
    text = found.get("content", "") or found.pop("refusal", "")
    if isinstance(text, list):
        text = [{"type": "text", "text": part["text"]} for part in text]
    for item in calls:
        arguments = item["function"]["arguments"]
        parsed = json.loads(arguments) if arguments and isinstance(arguments, str) else arguments
        item["function"] = {**item["function"], "arguments": parsed or {}}
    return {**found, "content": text, **({"tool_calls": calls} if calls else {})}


def _texts(value: Any) -> list[str]:
    if isinstance(value, list):
        return [part["text"] for part in value]
    return [value]


def forms_of(row: Row) -> Iterator[Row]:
    """A chat with its lists of parts as they are or joined, each of OpenAI's roles as it is or by its other name."""
    for renamed in ({}, {"developer": "system"}, {"function": "tool"}, {"developer": "system", "function": "tool"}):
        for join in (lambda content: content, lambda content: "\n".join(_texts(content))):
            messages = [
                {**item, "role": renamed.get(item["role"], item["role"]), "content": join(item["content"])}
                for item in row["messages"]
            ]
            yield {**row, "messages": messages}


def wanted(row: Row) -> set[str]:
    """The texts and numbers that a prompt of the row must have, thoughts aside."""
    spoken = [{key: value for key, value in item.items() if key not in REASONING} for item in row["messages"]]
    text = json.dumps([spoken, row.get("tools")])
    return {
        word for word in text.replace('"', " ").replace("\\", " ").split() if word[0] == "w" and word[-1] == "x"
    } | {
        number
        for item in spoken
        for one in item.get("tool_calls", [])
        for number in _numbers(one["function"]["arguments"])
    }


def _numbers(arguments: Mapping[str, Any]) -> list[str]:
    return [str(value) for value in arguments.values() if isinstance(value, int)]


def whole_prompts(made: Made, row: Row) -> list[str]:
    """What transformers renders of the forms of a chat, where all of it is in there and no part is as it is written."""
    found = []
    for form in forms_of(row):
        variables = {key: value for key, value in form.items() if key != "messages"}
        try:
            prompt = made.theirs.apply_chat_template(
                form["messages"], tokenize=False, add_generation_prompt=True, **variables
            )
        except Exception:  # templates may raise anything
            continue
        is_dumped = any(mark in prompt for mark in ("{'type': 'text'", '{"type": "text"'))
        if not is_dumped and all(word in prompt for word in wanted(row)):
            found.append(prompt)
    return found


def check_against_transformers(made: Made, rows: Sequence[Row]) -> None:
    with tempfile.TemporaryDirectory() as name:
        answers = made.answers(as_json_lines(rows, Path(name)))
    for row, answer in zip(rows, answers, strict=True):
        if any(item.get(name) for item in row["messages"] for name in MEDIA):
            assert answer.startswith("bad_type: ") and answer.endswith(": only text is supported"), (row, answer)
            continue
        if (clean := cleaned(json.loads(json.dumps(row)))) is None:
            assert answer.startswith("empty_prompt"), (row, answer)
            continue
        expected = whole_prompts(made, clean)
        # All texts may be there, and a turn of another role stand as that of a user: only a probe can tell.
        has_others = any(item["role"] in ("developer", "function", "context") for item in clean["messages"])
        has_thoughts = any(item.get(key) for item in clean["messages"] for key in REASONING)
        if answer.startswith("template_error") and "reasoning" in answer.partition(":")[2].partition(":")[0]:
            assert has_thoughts, (row, answer)
        elif answer.startswith("bad_param: "):
            assert "this model's chat template cannot take tools" in answer or "no such variable" in answer
        elif answer.startswith("template_error: "):
            assert expected == [] or has_others, (row, answer)
        else:
            assert answer in expected[: None if has_others else 1], (row, answer)


@given(chats(), st.sampled_from(sorted(PUBLISHED)))
@settings(max_examples=60, deadline=None)
def test_a_chat_has_the_prompt_of_transformers_or_is_refused(
    templates: dict[str, Made], rows: list[Row], name: str
) -> None:
    check_against_transformers(templates[name], rows)


@pytest.mark.slow
@given(chats(), st.sampled_from(sorted(PUBLISHED)))
@settings(max_examples=share_of(1000), deadline=None)
def test_many_chats_have_the_prompt_of_transformers_or_are_refused(
    templates: dict[str, Made], rows: list[Row], name: str
) -> None:
    check_against_transformers(templates[name], rows)
