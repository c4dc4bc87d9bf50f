"""Runs whose chat template prints the date or takes variables: a resume has the prompts of the run's beginning."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pyarrow as pa
import pytest
from chat_templates import DATED, THINKING
from input_helpers import write_tokenizer
from run_helpers import MODEL, JobMaker, Shell, quiet, rows_of
from stub_engine import stub_factory

from batchgen import LLM
from batchgen.bench.workload import from_file
from batchgen.config.job import JobSpec
from batchgen.core.errors import ModelError, ResumeMismatch, UsageError
from batchgen.core.records import SamplingParams
from batchgen.output.rundir import RunDir
from batchgen.plan.dry_run import make_plan
from batchgen.run import job as job_module
from batchgen.run.invocation import RunOptions
from batchgen.text import chat as chat_module
from batchgen.text.tokenizer import Tokenizer

OFF = {"enable_thinking": False}


class Calendar:
    """The clock as the run and the templates see it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2026, 5, 1, 23, 59, 58, 999_999).astimezone()
        calendar = self

        class Clock(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
                return calendar.now.astimezone(tz) if tz else calendar.now.astimezone().replace(tzinfo=None)

        monkeypatch.setattr(job_module, "datetime", Clock)
        monkeypatch.setattr(chat_module, "datetime", Clock)


@pytest.fixture
def calendar(monkeypatch: pytest.MonkeyPatch) -> Calendar:
    return Calendar(monkeypatch)


def spec_with(job: JobMaker, template: str, name: str = "out", **keys: object) -> JobSpec:
    """A job whose chats that template renders; the stub's answers depend on every token of a prompt."""
    job.output = job.folder / name
    tokenizer = write_tokenizer(job.folder / "tokenizer", chat_template=template)
    return job.spec(
        model={"tokenizer": str(tokenizer)}, output={"path": str(job.output)}, input={"prompt": "{question}", **keys}
    )


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts the process into another time zone."""

    def move(zone: str) -> None:
        monkeypatch.setenv("TZ", zone)
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()


def test_a_run_resumed_tomorrow_has_the_prompts_of_today(job: JobMaker, calendar: Calendar) -> None:
    job.write(rows_of(60))
    job.run(spec_with(job, DATED, "whole"))
    expected = job.outputs()
    spec = spec_with(job, DATED)
    assert job.run(spec, quiet(max_total_tokens=4000)).exit_code == 75
    calendar.now += timedelta(days=1)
    assert job.run(spec).exit_code == 0
    assert job.outputs() == expected
    job.run(spec_with(job, DATED, "tomorrow"))
    assert job.outputs() != expected  # the clock would have been noticed


def test_a_run_keeps_the_time_of_the_place_where_it_was_begun(
    job: JobMaker, calendar: Calendar, places: Callable[[str], None]
) -> None:
    job.write(rows_of(60))
    job.run(spec_with(job, DATED, "fixed", chat_template_kwargs={"date_string": "02 May 2026"}))
    expected = job.outputs()
    spec = spec_with(job, DATED)
    places("EAST-14")
    calendar.now = datetime.fromisoformat("2026-05-01T12:00:00+00:00")
    assert job.run(spec, quiet(max_total_tokens=4000)).exit_code == 75
    places("WEST11")
    assert job.run(spec).exit_code == 0
    assert job.outputs() == expected
    manifest = RunDir(job.output).read_manifest()
    assert manifest is not None and manifest.created_at == "2026-05-02T02:00:00+14:00"


@pytest.mark.parametrize("value", ["yesterday", 7, None, ["2026-05-01"]])
def test_a_manifest_without_a_time_is_named(job: JobMaker, value: object) -> None:
    job.write(rows_of(2))
    job.run()
    path = job.output / "job.json"
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), "created_at": value}), encoding="utf-8")
    if value is None:
        assert job.run().exit_code == 0
        return
    with pytest.raises(UsageError, match=r"created_at or rendered_at is not a date and time"):
        job.run()


@pytest.mark.parametrize(("template", "says"), [(DATED, True), (THINKING, False)])
def test_a_shard_says_that_its_prompts_hold_its_own_date(
    job: JobMaker, template: str, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(4))
    job.run(spec_with(job, template), RunOptions(shard=(1, 2), heartbeat_s=1e9))  # type: ignore[arg-type]
    assert ("begin all shards on the same day" in " ".join(capsys.readouterr().err.split())) == says


# ---------------------------------------------------------------- variables


def test_other_variables_are_another_job(job: JobMaker) -> None:
    job.write(rows_of(40))
    template = THINKING + "{{ tools_in_user_message }}"
    variables = {**OFF, "tools_in_user_message": {"a": 1, "b": 2}}
    spec = spec_with(job, template, chat_template_kwargs=variables)
    assert job.run(spec, quiet(max_total_tokens=600)).exit_code == 75
    printed_otherwise = [{"b": 2, "a": 1}, {"a": 1.0, "b": 2}, {"a": True, "b": 2}]
    for other in (None, OFF, *({**OFF, "tools_in_user_message": value} for value in printed_otherwise)):
        with pytest.raises(ResumeMismatch, match=r"input\.chat_template_kwargs"):
            job.run(spec_with(job, template, chat_template_kwargs=other))
    assert job.run(spec).exit_code == 0


def test_a_flag_and_a_job_file_take_variables_alike(
    job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: Shell
) -> None:
    job.write([{"question": "Hi"}])
    tokenizer = write_tokenizer(tmp_path / "tokenizer", chat_template=THINKING + DATED)
    monkeypatch.setenv("DAY", "today")
    text = f'[model]\npath = "{job.spec().model.path}"\ntokenizer = "{tokenizer}"\n[input]\npath = "{job.input}"\n'
    text += 'prompt = "{question}"\n'
    totals = []
    for extra, flags in [
        ('chat_template_kwargs = { enable_thinking = false, date_string = "${DAY}" }\n', []),
        ("", ["--chat-template-kwargs", '{"enable_thinking": false, "date_string": "today"}']),
        ("chat_template_kwargs = { enable_thinking = false }\n", ["--chat-template-kwargs", "{}"]),
        ("", []),
    ]:
        (tmp_path / "job.toml").write_text(text + extra, encoding="utf-8")
        totals.append(shell("plan", tmp_path / "job.toml", "--json", *flags).json["prompt_tokens"]["total"])
    assert totals[0] == totals[1] != totals[2] == totals[3]
    said = shell("plan", tmp_path / "job.toml", "--chat-template-kwargs", "{enable_thinking: false}", code=2)
    assert "must be an object of JSON values" in said.words


# ---------------------------------------------------------------- what a template would not show

# A branch for users and assistants, and none for any other.
DEAF = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}<|im_start|>assistant\n"
)
HIDDEN = "the model's chat template does not show it"


def test_run_and_plan_refuse_a_row_whose_turn_the_template_would_not_show(job: JobMaker) -> None:
    user = {"role": "user", "content": "Hi"}
    chats = [[user], [{"role": "system", "content": "Be terse."}, user], [user, {"role": "tool", "content": "12:00"}]]
    job.write([{"id": f"{n}", "chat": chat} for n, chat in enumerate(chats)])
    spec = spec_with(job, DEAF)
    spec = replace(spec, input=replace(spec.input, prompt=None, messages="chat"))
    assert make_plan(spec)["errors"] == {"template_error": 2}
    assert job.run(spec).exit_code == 3
    places = [(line["code"], line["message"].partition(":")[0]) for line in job.errors()]
    assert places == [("template_error", "chat[0].content"), ("template_error", "chat[1].content")]


def test_a_system_prompt_of_the_job_that_the_template_would_not_show_fails_its_rows(job: JobMaker) -> None:
    job.write(rows_of(2))
    assert job.run(spec_with(job, DEAF, system="Be terse.")).exit_code == 3
    assert [line["message"].partition(";")[0] for line in job.errors()] == [f"input.system: {HIDDEN}"] * 2


def test_tables_and_workloads_are_shown_whole_too(job: JobMaker) -> None:
    folder = write_tokenizer(job.folder / "tokenizer", chat_template=DEAF)
    chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    batch = pa.RecordBatch.from_pylist([{"messages": chat}, {"messages": chat[1:]}])
    model = {"path": str(MODEL), "tokenizer": str(folder)}
    answered = LLM(model, engine_factory=stub_factory())(batch)
    told = f"template_error: messages[0].content: {HIDDEN}"
    assert [error and error.partition(";")[0] for error in answered.column("error").to_pylist()] == [told, None]
    (job.folder / "work.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    with pytest.raises(UsageError, match=r"messages\[0\]\.content"):
        from_file(job.folder / "work.jsonl", SamplingParams(), tokenizer=Tokenizer.load(folder))


def test_an_evaluation_is_refused_where_its_description_would_not_be_shown(job: JobMaker) -> None:
    pytest.importorskip("lm_eval")
    from batchgen.lm_eval import BatchgenLM

    model = BatchgenLM(str(MODEL), tokenizer=str(write_tokenizer(job.folder / "tokenizer", chat_template=DEAF)))
    chat = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError, match=r"messages\[0\]\.content: the model's chat template does not show it"):
        model.apply_chat_template(chat)


# ---------------------------------------------------------------- a template that the job names


def test_a_file_takes_the_place_of_the_models_template_and_its_text_is_of_the_job(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run(spec_with(job, THINKING, "own"))
    own = job.outputs()
    file = job.folder / "chat.jinja"
    file.write_text(THINKING, encoding="utf-8")
    job.output = job.folder / "named"
    model = {"tokenizer": str(write_tokenizer(job.folder / "plain", chat_template=None))}
    spec = job.spec(input={"chat_template": str(file)}, model=model)
    assert spec.input.chat_template == THINKING
    job.run(spec)
    assert job.outputs() == own
    file.write_text(f"{THINKING}!", encoding="utf-8")
    with pytest.raises(ResumeMismatch, match="chat_template"):
        job.run(job.spec(input={"chat_template": str(file)}, model=model))


@pytest.mark.parametrize(
    ("text", "words"),
    [("", " is blank$"), (" \n", " is blank$"), ("auto", " holds 'auto', no template$"), ("none\n", " holds 'none'")],
)
def test_a_file_that_holds_no_template_is_refused_by_its_name(job: JobMaker, text: str, words: str) -> None:
    file = job.folder / "chat.jinja"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=rf"^--chat-template = .*: {re.escape(str(file))}{words}"):
        job.spec(input={"chat_template": str(file)})


def test_a_template_that_does_not_compile_is_named_by_its_key_and_file(job: JobMaker) -> None:
    job.write(rows_of(1))
    file = job.folder / "chat.jinja"
    file.write_text("{% for", encoding="utf-8")
    with pytest.raises(
        ModelError, match=rf"^--chat-template = {re.escape(str(file))}: the chat template does not compile: "
    ):
        job.run(job.spec(input={"chat_template": str(file)}))
