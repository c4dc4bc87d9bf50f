"""Chats generated again turn by turn: each turn has the prompt that a loop by hand would make, whatever happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from chat_templates import THINKING
from input_helpers import CHAT_TEMPLATE, write_tokenizer
from run_helpers import MODEL, JobMaker, Shell, quiet, read_lines, updating
from stub_engine import StubEngine, answer_with, stub_factory, stub_length, stub_token

import batchgen
from batchgen.config.job import JobSpec
from batchgen.core.errors import UsageError
from batchgen.core.records import Request, SamplingParams
from batchgen.plan.dry_run import make_plan
from batchgen.run.merge import merge
from batchgen.text.tokenizer import Tokenizer

MAX_TOKENS = 20  # cuts about one answer of the stub in six
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str = "an old answer") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chat(row: int, num_turns: int) -> list[dict[str, Any]]:
    turns = [message for turn in range(num_turns) for message in (user(f"Row {row}, turn {turn}"), assistant())]
    return [SYSTEM, *turns] if row % 3 == 0 else turns[: len(turns) - (row % 5 == 4)]


def chats(count: int) -> list[dict[str, Any]]:
    return [{"id": f"c-{i}", "conversations": chat(i, 1 + i % 5), "note": i} for i in range(count)]


def spec_of(job: JobMaker, **sections: Any) -> JobSpec:
    source = {"prompt": None, "messages": "conversations", "regenerate": "assistant", **sections.pop("input", {})}
    return job.spec(input=source, sampling={"max_tokens": MAX_TOKENS, **sections.pop("sampling", {})}, **sections)


def by_hand(messages: list[dict[str, Any]], max_tokens: int = MAX_TOKENS) -> tuple[list[dict[str, Any]], list[str]]:
    """What a loop over the stub engine's answers makes of a chat: its messages, and why each turn ended."""
    tokenizer, said, reasons = Tokenizer.load(MODEL), list[dict[str, Any]](), list[str]()
    for message in [*messages, *([] if messages[-1]["role"] == "assistant" else [assistant()])]:
        if message["role"] != "assistant":
            said.append(message)
            continue
        [prompt] = tokenizer.render_chats([said])
        assert isinstance(prompt, str)
        [ids] = tokenizer.encode_batch([prompt], add_special_tokens=False)
        assert isinstance(ids, list)
        request = Request(0, tuple(ids), SamplingParams(max_tokens=max_tokens))
        length = stub_length(request)
        tokens = [stub_token(request, position, tokenizer.vocab_size) for position in range(min(length, max_tokens))]
        said.append(assistant(tokenizer.decode(tokens)))
        reasons.append("stop" if length <= max_tokens else "length")
        if length > max_tokens:
            break
    return said, reasons


@pytest.fixture
def done(job: JobMaker) -> list[dict[str, Any]]:
    """The records of 40 chats whose run nothing has disturbed."""
    job.write(chats(40))
    return job.elsewhere("whole", spec_of(job))


def test_each_turn_sees_the_new_ones_before_it(job: JobMaker, done: list[dict[str, Any]]) -> None:
    for record, row in zip(done, chats(40), strict=True):
        messages, reasons = by_hand(row["conversations"])
        assert record["messages"] == messages
        assert record["finish_reasons"] == reasons
        assert (record["text"], record["finish_reason"]) == (messages[-1]["content"], reasons[-1])
        assert record["note"] == row["note"]
    assert {reason for record in done for reason in record["finish_reasons"]} == {"stop", "length"}
    assert max(len(record["finish_reasons"]) for record in done) == 5


def test_usage_adds_up_all_turns(job: JobMaker, done: list[dict[str, Any]]) -> None:
    report = batchgen.read_report(job.folder / "whole")
    counts = [record["usage"] for record in done]
    assert report["tokens"]["completion"] == sum(usage["completion_tokens"] for usage in counts)
    assert report["tokens"]["prompt"] == sum(usage["prompt_tokens"] for usage in counts)
    assert sum(report["finish_reasons"].values()) == sum(len(record["finish_reasons"]) for record in done)


def test_the_template_makes_of_the_messages_what_the_model_saw(job: JobMaker) -> None:
    job.write([{"id": "a", "conversations": chat(1, 3)}])
    job.run(spec_of(job, input={"system": "Be kind."}), keeps_results=True)
    [record] = job.outputs()
    assert record["messages"][0] == {"role": "system", "content": "Be kind."}
    [prompt] = Tokenizer.load(MODEL).render_chats([record["messages"][:-1]])
    assert isinstance(prompt, str)
    [ids] = Tokenizer.load(MODEL).encode_batch([prompt], add_special_tokens=False)
    last = job.engines[0].finished[0]
    assert isinstance(ids, list) and last.num_prompt_tokens == len(ids)


def test_company_changes_no_turn(job: JobMaker, done: list[dict[str, Any]]) -> None:
    job.run(spec_of(job), max_num_seqs=1, look_ahead=1)
    assert job.outputs() == done


@pytest.mark.parametrize("limit", [300, 1500, 4000])
def test_a_stopped_run_continues_in_the_middle_of_chats(job: JobMaker, done: list[dict[str, Any]], limit: int) -> None:
    assert job.run(spec_of(job), quiet(max_total_tokens=limit)).exit_code == 75
    generated = job.engines[0].stats.num_output_tokens
    assert job.run(spec_of(job)).exit_code == 0
    assert job.outputs() == done
    assert generated + job.engines[0].stats.num_output_tokens == sum(
        record["usage"]["completion_tokens"] for record in done
    )


def test_a_crash_costs_only_the_turns_under_way(job: JobMaker, done: list[dict[str, Any]]) -> None:
    with pytest.raises(RuntimeError, match="out of luck"):
        job.run(spec_of(job), crashes_at=40)
    crashed = job.engines[0]
    lost = sum(len(tokens) for _, tokens, _ in crashed.running.values())
    assert job.run(spec_of(job)).exit_code == 0
    assert job.outputs() == done
    total = crashed.stats.num_output_tokens + job.engines[0].stats.num_output_tokens
    assert total - lost == sum(record["usage"]["completion_tokens"] for record in done)


def test_shards_merge_to_the_same_file(job: JobMaker, done: list[dict[str, Any]]) -> None:
    merge(job.shards(spec_of(job)), job.output)
    assert job.outputs() == done


# What fails


def errors_of(job: JobMaker, rows: list[dict[str, Any]], spec: JobSpec | None = None, **stub: Any) -> list[str]:
    job.write(rows)
    assert job.run(spec or spec_of(job), **stub).exit_code == 3
    return [f"{error['code']}: {error['message']}" for error in job.errors()]


def test_a_chat_that_cannot_fit_fails_before_its_first_turn(job: JobMaker) -> None:
    long = [user("a"), assistant(), user("b" * 9000), assistant(), user("c"), assistant()]
    [error] = errors_of(job, [{"id": "a", "conversations": long}])
    assert error.startswith("too_long: turn 2 of 3: the prompt has 9021 tokens")
    assert job.engines[0].num_started == 0


def test_a_chat_that_outgrows_the_context_fails_in_its_turn(job: JobMaker) -> None:
    found = [by_hand(chat(i, 4), 400)[1] for i in range(12)]
    assert any(reasons[:2] == ["stop", "stop"] for reasons in found)
    rows = [{"id": i, "conversations": chat(i, 4)} for i in range(12)]
    errors = errors_of(job, rows, spec_of(job, engine={"max_model_len": 120}, sampling={"max_tokens": 400}))
    assert errors and all(error.startswith("too_long: turn ") for error in errors)
    assert job.engines[0].num_started > len(rows)


@pytest.mark.parametrize(
    ("turn", "refusal"),
    [
        (3, "{% if messages|length > 3 %}{{ raise_exception('No.') }}{% endif %}"),
        (
            2,
            "{% for m in messages %}{% if m.role == 'assistant' and m.content|length > 12 %}"
            "{{ raise_exception('No.') }}{% endif %}{% endfor %}",
        ),
    ],
    ids=["a later turn", "an answer"],
)
def test_a_template_that_fails_says_in_which_turn(job: JobMaker, turn: int, refusal: str) -> None:
    template = job.folder / "template.jinja"
    template.write_text(refusal + CHAT_TEMPLATE, encoding="utf-8")
    spec = spec_of(job, input={"chat_template": str(template)}, sampling={"max_tokens": 30})
    [error] = errors_of(job, [{"id": "a", "conversations": chat(1, 3)}], spec)
    assert error.startswith(f"template_error: turn {turn} of 3: the chat template failed: No.")


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
REFUSED_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "a call": ({"conversations": [user("a"), CALL]}, "bad_param: conversations[1] calls a tool or has the result"),
    "tools": (
        {"conversations": chat(1, 1), "tools": [{"type": "function", "function": {"name": "f"}}]},
        "bad_param: tools: input.regenerate takes chats without tools",
    ),
    "samples": (
        {"conversations": chat(1, 1), "sampling": {"n": 2}},
        "bad_param: n does not fit input.regenerate",
    ),
    "a greeting": (
        {"conversations": [assistant("Hi"), user("a"), assistant()]},
        "empty_prompt: conversations[0] is the assistant's",
    ),
    "an answer to nothing": (
        {"conversations": [user(" "), assistant(), user("a"), assistant()]},
        "empty_prompt: conversations[1] is the assistant's, and no text comes before it",
    ),
    "a role in capitals": (
        {"conversations": [user("a"), {"role": "Assistant", "content": "b"}, user("c"), assistant()]},
        "bad_param: conversations[1].role is 'Assistant': input.regenerate takes the roles system, developer, user",
    ),
    "another speaker": (
        {"conversations": [{"from": "human", "value": "a"}, {"from": "bing", "value": "b"}]},
        "bad_param: conversations[1].role is 'bing'",
    ),
    "no chat": ({"conversations": None}, "bad_type: column 'conversations' is null"),
    "no column": ({"note": 1}, "missing_column: no column 'conversations'"),
}


@pytest.mark.parametrize("name", REFUSED_ROWS)
def test_a_row_that_has_no_turns_of_text_fails(job: JobMaker, name: str) -> None:
    row, wanted = REFUSED_ROWS[name]
    errors = errors_of(job, [{"id": "good", "conversations": chat(1, 1)}, {"id": "bad", **row}])
    assert len(errors) == 1 and errors[0].startswith(wanted)
    assert len(job.outputs()) == 1


REFUSED_JOBS: dict[str, dict[str, Any]] = {
    "input.messages": {"input": {"messages": None, "prompt": "{note}"}},
    "sampling.n": {"sampling": {"n": 2}},
    "sampling.logprobs": {"sampling": {"logprobs": 1}},
    "sampling.prompt_logprobs": {"sampling": {"prompt_logprobs": 1}},
    "sampling.structured_outputs": {"sampling": {"structured_outputs": {"regex": "a"}}},
    "sampling.labels": {"classify": {"labels": ["a", "b"]}},
    "[embed]": {"embed": {"pooling": "mean"}, "input": {}},
    "input.continue_final_message": {"input": {"continue_final_message": True}},
    "input.chat_template": {"input": {"chat_template": "none"}},
    "output.token_ids": {"output": {"token_ids": True}},
    "output.parse = tool_calls": {"output": {"parse": ["tool_calls"]}},
    "output.parse = json": {"output": {"parse": ["json"]}},
    "output.format": {"output": {"format": "openai-batch"}},
}


@pytest.mark.parametrize("name", REFUSED_JOBS)
def test_what_does_not_fit_is_refused_when_the_job_is_read(job: JobMaker, name: str) -> None:
    job.write(chats(1))
    with pytest.raises(UsageError) as refused:
        spec_of(job, **{section: dict(values) for section, values in REFUSED_JOBS[name].items()})
    assert name.partition(" = ")[0] in str(refused.value) and "\n" not in str(refused.value)


def test_a_loaded_model_refuses_it_and_names_the_call_that_takes_it() -> None:
    with pytest.raises(UsageError, match=r"input.regenerate is a key of jobs: batchgen.generate takes it"):
        batchgen.LLM(str(MODEL), input={"regenerate": "assistant"})


# What else takes such jobs


def test_rows_in_memory_are_taken(job: JobMaker, done: list[dict[str, Any]]) -> None:
    made = batchgen.generate(
        chats(40),
        str(MODEL),
        engine_factory=stub_factory(),
        input={"messages": "conversations", "regenerate": "assistant", "id": "id"},
        max_tokens=MAX_TOKENS,
        quiet=True,
    )
    names = ("id", "fingerprint", "messages", "finish_reasons")
    assert [[row[name] for name in names] for row in made] == [[row[name] for name in names] for row in done]


def test_a_chat_may_be_json_text_or_of_sharegpt(job: JobMaker, done: list[dict[str, Any]]) -> None:
    names = {"user": "human", "assistant": "gpt"}
    rows = chats(40)
    for row in rows:
        row["conversations"] = [
            {"from": names.get(message["role"], message["role"]), "value": message["content"]}
            for message in row["conversations"]
        ]
        if row["note"] % 2:
            row["conversations"] = json.dumps(row["conversations"])
    job.write(rows)
    assert job.run(spec_of(job, input={"columns": ["note"]})).exit_code == 0
    names_of = ("id", "messages", "finish_reasons", "fingerprint")
    assert [[row[name] for name in names_of] for row in job.outputs()] == [
        [row[name] for name in names_of] for row in done
    ]


def test_an_update_keeps_chats_whose_other_messages_are_the_same(job: JobMaker, done: list[dict[str, Any]]) -> None:
    assert job.run(spec_of(job)).exit_code == 0
    rows = chats(40)
    rows[11]["conversations"][1] = assistant("another old answer")
    rows[12]["conversations"][-2] = user("another question")
    job.write(rows)
    assert job.run(spec_of(job), updating()).exit_code == 0
    kept = [record for record in read_lines(job.output / "outputs.jsonl") if record["timings"].get("reused")]
    assert {record["index"] for record in kept} == {*range(40)} - {12}
    assert [record["messages"] for record in job.outputs()] == [by_hand(row["conversations"])[0] for row in rows]


def test_an_update_to_another_limit_computes_all_chats(job: JobMaker) -> None:
    job.write(chats(8))
    job.run(spec_of(job))
    assert job.run(spec_of(job, sampling={"max_tokens": 30}), updating()).exit_code == 0
    assert [record["messages"] for record in job.outputs()] == [
        by_hand(row["conversations"], 30)[0] for row in chats(8)
    ]


def test_a_plan_says_how_many_turns_there_are(job: JobMaker) -> None:
    job.write([*chats(10), {"id": "x", "conversations": [user("a"), assistant(), user("b" * 9000), assistant()]}])
    plan = make_plan(spec_of(job))
    assert plan["turns"] == {"total": 30, "max": 5}
    assert plan["output_tokens"]["at_most"] == 30 * MAX_TOKENS
    assert plan["errors"] == {"too_long": 1}
    assert "turn 2 of 2" in plan["bad_rows"][0]["message"]


def test_a_trial_shows_the_last_prompt_and_the_last_answer(job: JobMaker, shell: Shell) -> None:
    job.write(chats(3))
    flags = ("--messages", "conversations", "--regenerate", "assistant", "--max-tokens", 30)
    shown = shell("try", job.input, "-m", MODEL, *flags, engine=stub_factory()).out
    assert "row 2 (line 3), turn 3, " in shown and "Row 2, turn 0" in shown and "an old answer" not in shown


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_other_formats_hold_the_messages(job: JobMaker, done: list[dict[str, Any]], form: str) -> None:
    assert job.run(spec_of(job, output={"format": form})).exit_code == 0
    if form == "parquet":
        found = [[*map(dict, row["messages"])] for row in job.outputs()]
    else:
        import csv

        with (job.output / "outputs.csv").open(encoding="utf-8", newline="") as file:
            found = [json.loads(row["messages"]) for row in csv.DictReader(file)]
    assert found == [record["messages"] for record in done]


# Thoughts, draws


@pytest.fixture
def thinking(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a job over one chat of two turns that thinks before each answer; the prompts of its requests are kept."""
    folder = write_tokenizer(job.folder / "tokenizer", chat_template=THINKING)
    tokenizer = Tokenizer.load(folder)
    answer_with(monkeypatch, tokenizer, lambda asked: f"<think>\nHm {asked.turn}.\n</think>\n\nNo {asked.turn}.")

    def run(**output: Any) -> list[str]:
        asked = submitted(monkeypatch)
        job.write([{"id": "a", "conversations": [user("a"), assistant(), user("b"), assistant()]}])
        spec = spec_of(job, model={"tokenizer": str(folder)}, output=output, sampling={"max_tokens": 90})
        assert job.run(spec).exit_code == 0
        return [tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) for request in asked]

    return run


def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that stub engines get from here on."""
    asked: list[Request] = []
    submit = StubEngine.submit
    monkeypatch.setattr(StubEngine, "submit", lambda engine, request: (asked.append(request), submit(engine, request)))
    return asked


def test_thoughts_are_taken_out_before_a_turn_goes_back(job: JobMaker, thinking: Callable[..., list[str]]) -> None:
    prompts = thinking(parse=["reasoning"])
    assert "No 0." in prompts[1] and "Hm 0." not in prompts[1]
    [record] = job.outputs()
    assert [message for message in record["messages"] if message["role"] == "assistant"] == [
        {"role": "assistant", "content": f"No {turn}.", "reasoning_content": f"Hm {turn}."} for turn in (0, 1)
    ]


def test_thoughts_stay_in_the_text_where_they_are_not_parsed(job: JobMaker, thinking: Callable[..., list[str]]) -> None:
    thinking()
    [record] = job.outputs()
    assert record["messages"][1]["content"] == "<think>\nHm 0.\n</think>\n\nNo 0."


def test_each_turn_draws_for_itself(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = submitted(monkeypatch)
    job.write([{"id": 7, "conversations": chat(1, 3)}])
    job.run(spec_of(job, sampling={"temperature": 1.0, "max_tokens": 30}))
    assert asked[0].rng_key == 7 and len({request.rng_key for request in asked}) == 3
