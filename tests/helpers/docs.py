"""The generated pages of ``batchgen/docs``: ``python tests/helpers/docs.py`` writes them from the code's declarations.

It also puts the job files into the page of recipes, as a wheel has no ``jobs``.

What the code does not say is in ``docs.toml`` beside this file. A name there that the code does not know, and a field
of the code that is missing there, is an error.
"""

from __future__ import annotations

import json
import re
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click.testing import CliRunner

from batchgen.cli.help import DOCS
from batchgen.cli.main import cli
from batchgen.config.job import KEYS, JobSpec
from batchgen.config.load import load_job
from batchgen.config.record_fields import RECORD_KEYS, VECTOR_KEYS
from batchgen.core.errors import ExitCode, RowError, RowErrorCode
from batchgen.core.keys import BOOL, Key
from batchgen.core.logprobs import PACKED_KEYS
from batchgen.core.records import Cursor, FinishReason, Result, Row, Sample, Timings
from batchgen.output.record_builder import RecordBuilder
from batchgen.plan.dry_run import make_plan
from batchgen.report.build import KEYS as REPORT_KEYS
from batchgen.text.answer_facts import AnswerFacts
from batchgen.workers.driver import _POISON

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "sample_data" / "tiny-lfm2"
TEXTS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
SECTIONS = ("model", "input", "sampling", "classify", "embed", "engine", "output", "eval", "cluster")
_TITLES = {"job-file": "The job file", "commands": "The commands", "records": "What a run writes"}
_NOTE = "<!-- generated: change the code or tests/helpers/docs.toml, then run python tests/helpers/docs.py -->"


def job_file() -> Iterator[str]:
    """Every key of the job file: a table of each section, then every key under a heading of its own."""
    for section in SECTIONS:
        yield from (f"## [{section}]", TEXTS["section"][section].strip(), _overview(section))
        for item in KEYS[section].values():
            yield from (f"### {section}.{item.name}", _meaning(section, item), _facts(item))


def _overview(section: str) -> str:
    """The keys of a section with their defaults, a line each."""
    rows = [(item.name, _default(item), _help(item)) for item in KEYS[section].values()]
    return _table(("key", "default", "meaning"), rows)


def _default(item: Key) -> str:
    default = item.written(item.default)
    return "" if default in (None, "", ()) else f"`{json.dumps(default)}`"


def _help(item: Key) -> str:
    text = item.help.partition(" [")[0]
    return f"`{str(not item.default).lower()}`: {text[0].lower()}{text[1:]}" if item.kind is BOOL else text


def _meaning(section: str, item: Key) -> str:
    return " ".join(
        [f"{_help(item)}.", *([TEXTS["more"][section][item.name]] if item.name in TEXTS["more"][section] else [])]
    )


def _facts(item: Key) -> str:
    """Values, default, flag and what a resume may change; the values are told by the kind's own refusal."""
    try:
        item.kind.parse(object())
    except ValueError as error:
        values = str(error).removeprefix("must be ").replace("finite number of", "number of")
    for ending in (" that is not empty", " and at most 2**63 - 1", ", of at least 1 byte and below 8 EiB"):
        values = values.removesuffix(ending)
    flag = f"--{'no-' if item.default is True else ''}{item.flag} {item.kind.metavar}".strip()
    resume = "" if item.resume == "same" else f" On resume: {item.resume}."
    return f"Values: {values}. Default: {_default(item) or 'none'}. Flag: `{flag}`.{resume}"


def commands() -> Iterator[str]:
    """The help of every command, and once the options that all commands with a job take."""
    for name, command in cli.commands.items():
        sections = dict.fromkeys(section for section, is_key, _ in map(_parts, command.params) if is_key)
        yield from (f"## {name}", f"```\n{_help_of(name, command, is_of_job=False)}\n```")
        if sections:
            yield f"It takes the [options of a job](#options-of-a-job) too: {', '.join(sections)}."
    shared = _help_of("run", cli.commands["run"], is_of_job=True)
    shown = shared[shared.index("\nModel:") : shared.rindex("\n\nOther:")].strip()
    yield from ("## Options of a job", TEXTS["section"]["options"].strip(), f"```\n{shown}\n```")


def _parts(option: click.Parameter) -> tuple[str, str, str]:
    """Section, "__" and key of an option for a key of the job; others have no "__"."""
    return (option.name or "").partition("__")


def _help_of(name: str, command: click.Command, *, is_of_job: bool) -> str:
    """The whole help of a command with its options of a job, or with its others."""
    is_help = {option: "--help-all" in option.opts for option in command.params}
    shown = copy(command)
    shown.params = [option for option in is_help if is_help[option] or bool(_parts(option)[1]) == is_of_job]
    group = copy(cli)
    group.commands = {name: shown}
    flag = "--help-all" if any(is_help.values()) else "--help"
    return CliRunner().invoke(group, [name, flag], prog_name="batchgen", terminal_width=78).output.strip()


def records() -> Iterator[str]:
    """Fields, codes and exit codes of all that a run writes for scripts."""
    texts = TEXTS["section"]
    row, failed = _example_records()
    yield from ("## Output records", texts["outputs"].strip(), _json(row))
    yield _table(("field", "meaning"), _complete("outputs", RECORD_KEYS | PACKED_KEYS | VECTOR_KEYS))
    yield texts["outputs_formats"].strip()
    yield from ("### timings", _table(("field", "meaning"), _complete("timings", (*row["timings"], "reused"))))
    yield from ("## errors.jsonl", texts["errors"].strip(), _table(("field", "meaning"), _complete("errors", failed)))
    yield from ("## Error codes", texts["codes"])
    messages = example_errors()
    for code in RowErrorCode:
        yield from (f"### {code}", f"{code.meaning} {code.remedy}")
        line = TEXTS["example"].get(code)
        if line is None:
            yield f"The message is `{messages[code]}`."
        else:
            yield from (f"This row fails with `{messages[code]}`:", f"```json\n{line}\n```")
    exits = [(str(int(code)), code.meaning, code.todo) for code in ExitCode]
    yield from ("## Exit codes", texts["exit_codes"], _table(("code", "meaning", "what a script does"), exits))
    yield from ("## report.json", texts["report"], _table(("key", "meaning"), REPORT_KEYS.items()))
    yield from ("## plan --json", texts["plan"], _table(("key", "meaning"), _complete("plan", example_plan())))


def _complete(name: str, fields: Iterable[str]) -> Iterable[tuple[str, str]]:
    """The texts of a table in the .toml, which must be those of ``fields``."""
    texts: Mapping[str, str] = TEXTS[name]
    assert texts.keys() == {*fields}, sorted(texts.keys() ^ {*fields})
    return texts.items()


def _example_records() -> tuple[dict[str, Any], dict[str, Any]]:
    """A record of a row, and one of a failed row."""
    spec = _spec(Path("questions.jsonl"), {})
    tokenizer: Any = SimpleNamespace(
        decode=lambda ids: "SHADOW", answer_facts=AnswerFacts.of("", lambda token: None), token_id=lambda token: None
    )
    builder = RecordBuilder(spec, tokenizer)
    columns = {"id": "q-004", "task": "upper", "question": 'Write "shadow" in capital letters.', "answer": "SHADOW"}
    row = Row(4, "questions.jsonl", 5, columns, Cursor(0, 0, 0, 5), "q-004")
    timings = Timings(0.03, 1.302, 0.222, 1.332, 0.037, 1.554)
    result = Result(4, 22, (Sample((1,) * 7, FinishReason.STOP),), timings)
    found = builder.result(row, result)
    found["fingerprint"] = "42b890a73812415f9bf77b88b900c4a2"  # that of jobs/quickstart.toml
    return found, builder.error(row.failed(RowError(RowErrorCode.INTERNAL, "")))


def _spec(path: Path, more: Mapping[str, Any]) -> JobSpec:
    settings = {"path": str(path), "id": "id", "prompt": "{country[name]}", **more}
    flags = {"model": {"path": str(MODEL)}, "input": settings, "engine": {"max_model_len": 30}}
    return load_job(None, flags, needs=("model", "input"))


def example_plan() -> dict[str, Any]:
    """The plan of a job with the rows of ``docs.toml``."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        good = '{"id": 1, "country": {"name": "Togo"}}'
        path.write_text("\n".join([good, *TEXTS["example"].values(), ""]), encoding="utf-8")
        return make_plan(_spec(path, {}))


def example_errors() -> dict[str, str]:
    """A message of each code, as the rows of ``docs.toml`` get it."""
    found = {row["code"]: row["message"] for row in example_plan()["bad_rows"]}
    assert found.keys() == TEXTS["example"].keys(), found
    return {**found, RowErrorCode.INTERNAL: _POISON}


def _json(record: Mapping[str, Any]) -> str:
    """An object over several lines, a field per line."""
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    lines = ",\n".join(textwrap.fill(field, 74, subsequent_indent="   ") for field in fields)
    return f"```json\n{{{lines[1:]}}}\n```"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [[head[0], *head[1:]], ["---"] * len(head), *([f"`{first}`", *rest] for first, *rest in rows)]
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in cells)
    return "\n".join(f"| {line} |" for line in lines).replace("| --- | --- |", "|---|---|").replace(" --- |", "---|")


PAGES: dict[str, Callable[[], Iterator[str]]] = {"job-file": job_file, "commands": commands, "records": records}


def page(name: str) -> str:
    """The text of a generated page."""
    blocks = [_NOTE, f"# {_TITLES[name]}", TEXTS["page"][name].strip(), *PAGES[name]()]
    return "\n\n".join(blocks) + "\n"


def with_jobs(text: str) -> str:
    """A page whose lines that begin with the name of a job file have the file below them, as it is in ``jobs``."""

    def shown(line: re.Match[str]) -> str:
        job = (REPOSITORY / "jobs" / line[2]).read_text(encoding="utf-8")
        return f"{line[1]}\n```toml\n{job}```\n"

    return re.sub(r"^(Files?: `jobs/(\w+\.toml)`[^\n]*\n)(?:\n```toml\n.*?^```\n)?", shown, text, flags=re.M | re.S)


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / f"{name}.md").write_text(page(name), encoding="utf-8")
    recipes = DOCS / "recipes.md"
    recipes.write_text(with_jobs(recipes.read_text(encoding="utf-8")), encoding="utf-8")
