"""Jobs whose answers call tools: in every format of output, over samples, thoughts, resumes and retries."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from chat_templates import DATED, SILENT, THINKING, TOOLS
from input_helpers import write_tokenizer
from run_helpers import JobMaker, read_lines
from stub_engine import answer_with
from tokenizers import AddedToken

from batchgen.config.job import JobSpec
from batchgen.core.errors import BatchgenError, UsageError
from batchgen.run.loader import read_model
from batchgen.text.tokenizer import Tokenizer
from batchgen.text.tool_calls import ToolCalls

START, END = "<|tool_call_start|>", "<|tool_call_end|>"
CALL = f'{START}[weather(city="Zürich", days=[1, null])]{END}'
ASKED = {"name": "weather", "arguments": {"city": "Zürich", "days": [1, None]}}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def says(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a model that answers the row with a number by the text under that number, in LFM2's vocabulary."""

    def prepare(texts: list[str], template: str = SILENT, form: str = "jsonl", **output: Any) -> JobSpec:
        folder = write_tokenizer(job.folder / "tokenizer", chat_template=template)
        if template == SILENT:
            backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
            backend.add_tokens([AddedToken(START, special=True), AddedToken(END, special=True)])
            backend.save(str(folder / "tokenizer.json"))
        answer_with(monkeypatch, Tokenizer.load(folder), lambda asked: texts[asked.key % len(texts)])
        return job.spec(
            model={"tokenizer": str(folder)},
            input={"id": None, "prompt": None},
            output={"path": str(job.output), "format": form, **output},
            sampling={"max_tokens": 500},
        )

    return prepare


def rows(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"messages": MESSAGES, "tools": TOOLS, **columns}] * count


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    asked = {"messages": MESSAGES, "tools": TOOLS, **body}
    return [{"custom_id": str(n), "url": "/v1/chat/completions", "body": asked} for n in range(count)]


def choices(job: JobMaker) -> list[dict[str, Any]]:
    """The choices of all lines, seen to be what the openai package reads."""
    types = pytest.importorskip("openai.types.chat")
    bodies = [row["response"]["body"] for row in read_lines(job.output / "outputs.jsonl")]
    for body in bodies:
        types.ChatCompletion.model_validate(body, strict=True)
    return [choice for body in bodies for choice in body["choices"]]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_record_has_the_calls_and_the_rest_of_the_text(job: JobMaker, says: Any, form: str) -> None:
    job.write(rows(3))
    texts = [f"Wait. {CALL}", "It is warm.", f"So: {START}[weather(city=", f"{START}[]{END}"]
    job.run(says(texts, form=form, parse=["tool_calls"]))
    found = [(row["text"], row["tool_calls"], row.get("complete")) for row in job.outputs()]
    arguments = json.dumps(ASKED["arguments"], ensure_ascii=False) if form == "parquet" else ASKED["arguments"]
    assert found == [
        ("Wait.", [{"name": "weather", "arguments": arguments}], True),
        ("It is warm.", [], None),
        (f"So: {START}[weather(city=", [], False),
    ]
    if form == "parquet":
        item = pq.read_schema(job.output / "outputs.parquet").field("tool_calls").type.value_type
        assert [(field.name, field.type) for field in item] == [("name", pa.string()), ("arguments", pa.string())]


def test_openai_requests_with_tools_are_parsed_unasked(job: JobMaker, says: Any) -> None:
    job.write([*lines(4, n=2, temperature=1), lines(1, tool_choice="none")[0] | {"custom_id": "x"}])
    two = f"{CALL}{START}[now()]{END}"
    job.run(says([two, "It is warm.", f"Wait. {CALL}", f"{START}[weather(", CALL], form="openai-batch"))
    found = choices(job)[::2]  # the stub's second sample is a token shorter
    calls = found[0]["message"]["tool_calls"]
    assert [(call["id"], call["type"]) for call in calls] == [
        ("call_000000000000_0_0", "function"),
        ("call_000000000000_0_1", "function"),
    ]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [ASKED["arguments"], {}]
    assert [(c["message"]["content"], c["finish_reason"], c.get("complete")) for c in found] == [
        (None, "tool_calls", True),
        ("It is warm.", "stop", None),
        ("Wait.", "tool_calls", True),
        (f"{START}[weather(", "stop", False),
        ('[weather(city="Zürich", days=[1, null])]', "stop", None),  # not offered
    ]


def test_an_answer_cut_off_behind_a_call_says_so(job: JobMaker, says: Any) -> None:
    job.write(lines(1, max_tokens=len(CALL.encode()) - len(START) - len(END) + 2))
    job.run(says([f"{CALL}And then"], form="openai-batch"))
    [choice] = choices(job)
    assert choice["finish_reason"] == "length" and choice["message"]["tool_calls"] and choice["complete"]


@pytest.mark.parametrize("splits", [True, False])
def test_a_call_that_is_only_thought_of_is_none(job: JobMaker, says: Any, splits: bool) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    thought = f"<think>\nShall I write {call}?\n</think>\n\n"
    job.write(rows(3))
    parse = ["tool_calls", "reasoning"] if splits else ["tool_calls"]
    job.run(says([f"{thought}No.", f"{thought}{call}", thought[:30]], THINKING, parse=parse))
    found = job.outputs()
    now = [{"name": "now", "arguments": {}}]
    assert [row["tool_calls"] for row in found] == [[], now, []]
    kept = "" if splits else thought
    assert [row["text"] for row in found] == [f"{kept}No.", kept, "" if splits else thought[:30]]


def test_a_model_whose_format_is_not_known_is_refused(job: JobMaker, says: Any) -> None:
    job.write(rows(1))
    with pytest.raises(UsageError, match=r"^output\.parse: neither tokenizer nor chat template .*LFM2, Mistral"):
        read_model(says([CALL], "{{ tools }}{{ messages }}", parse=["tool_calls"]))


def test_a_bare_call_is_read_where_llamas_template_asks_for_it(job: JobMaker, says: Any) -> None:
    job.write(rows(1))
    job.run(says(['{"name": "now", "parameters": {}}'], DATED, parse=["tool_calls"]))
    assert job.outputs()[0]["tool_calls"] == [{"name": "now", "arguments": {}}]


def test_an_escape_that_no_character_has_makes_a_malformed_call_not_a_failed_job(job: JobMaker, says: Any) -> None:
    texts = [f'{START}[f(a="{escape}")]{END}' for escape in (r"\U0001F600", r"\U00110000", r"\UFFFFFFFF")]
    job.write(rows(3))
    assert job.run(says(texts, parse=["tool_calls"])).exit_code == 0
    found = [(row["tool_calls"], row["text"], row["complete"]) for row in job.outputs()]
    assert found[0] == ([{"name": "f", "arguments": {"a": "\U0001f600"}}], "", True)
    assert found[1:] == [([], text, False) for text in texts[1:]]


@pytest.mark.parametrize("problem", [OverflowError("too large"), RecursionError("too deep"), KeyError("a")])
def test_whatever_goes_wrong_over_an_answer_fails_its_row_and_never_the_job(
    job: JobMaker, says: Any, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    job.write(rows(3))
    spec, read = says(["one", "two", "three"], parse=["tool_calls"]), ToolCalls.read

    def fails(self: ToolCalls, text: str, offered: Any) -> Any:
        if text == "two":
            raise problem
        return read(self, text, offered)

    monkeypatch.setattr(ToolCalls, "read", fails)
    assert job.run(spec).exit_code == 3
    assert [row["text"] for row in job.outputs()] == ["one", "three"]
    [error] = job.errors()
    assert (error["code"], error["index"]) == ("internal", 1) and type(problem).__name__ in error["message"]


@pytest.mark.parametrize("problem", [MemoryError(), OSError(28, "No space left on device")])
def test_memory_and_the_disk_are_no_fault_of_a_row(
    job: JobMaker, says: Any, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    job.write(rows(1))
    spec = says(["one"], parse=["tool_calls"])

    def fails(self: ToolCalls, text: str, offered: Any) -> Any:
        raise problem

    monkeypatch.setattr(ToolCalls, "read", fails)
    with pytest.raises((BatchgenError, type(problem))):
        job.run(spec)
    assert not (job.output / "outputs.jsonl").exists()
