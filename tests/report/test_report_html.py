"""The HTML report: one file that loads nothing, escapes everything, and has a picture for all there is to see."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_samples import engine, made
from run_helpers import JobMaker, Shell, quiet, rows_of

from batchgen.cli.main import call
from batchgen.core.errors import RowErrorCode
from batchgen.report.facts import answers
from batchgen.report.html import _series
from batchgen.report.html import _ticks as log_ticks
from batchgen.report.html import render_html as render_page
from batchgen.report.rows import Distribution


def render_html(report: dict[str, Any]) -> str:
    return render_page(report, "runs/a", [])


def with_series(**more: Any) -> dict[str, Any]:
    count = 400
    series = {"at_s": [i / 10 for i in range(count)], "span_s": [0.1] * count, "steps": [1] * count}
    series |= {"tokens": [50] * count, "prefill_tokens": [20] * count}
    series |= {"sequences": [5.0] * count, "kv_use": [0.4] * count}
    report = made(errors=3, engine=engine(series=series)) | more
    for name, first in {"prompt_tokens": 10.0, "completion_tokens": 5.0, "ttft_s": 0.3, "tpot_s": 0.01}.items():
        report["histograms"][name] = {"edges": [first, 2 * first, 4 * first], "counts": [3, 5]}
    return report


class Page(HTMLParser):
    """Collects what a browser would act on."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.titles: list[str] = []
        self._in_heading = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        self._in_heading = tag == "h2"

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.titles.append(data)
            self._in_heading = False


@pytest.fixture
def charts() -> None:
    pytest.importorskip("matplotlib", reason="the extra batchgen[report] is not installed")


def test_without_matplotlib_there_is_a_page_without_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.report.html.find_spec", lambda name: None)
    text = render_html(with_series())
    assert "<svg" not in text and "Failed rows" in Page(text).titles
    assert "the page has no charts: they need matplotlib" in text


def test_the_command_says_that_a_page_has_no_charts(
    job: JobMaker, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(2))
    job.run()
    for found in (None, "a module"):
        monkeypatch.setattr("batchgen.report.html.find_spec", lambda name, found=found: found)
        monkeypatch.setattr("batchgen.report.html.draw", lambda report: [])
        said = shell("report", job.output, "--html", job.folder / "page.html").err
        assert ("no charts" in said) == (found is None)


@pytest.mark.usefixtures("charts")
def test_the_page_loads_and_runs_nothing_has_every_picture_and_follows_the_readers_colours() -> None:
    report = with_series()
    report["series"]["steps"][3] = report["series"]["tokens"][3] = 0  # a second in which no step ended
    text = render_html(report)
    page = Page(text)
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert not re.search(r"url\((?!#)|@import", text)
    assert "default-src 'none'" in text
    assert page.tags.count("svg") == text.count('<svg role="img" aria-label="') == 8
    for title in ("Tokens per second", "How full the batch was", "Tokens per prompt", "Failed rows", "Slowest rows"):
        assert title in page.titles
    assert "prefers-color-scheme: dark" in text and "stroke: var(--decode)" in text and "#0a000" not in text
    assert ">seconds<" in text and ">milliseconds, logarithmic<" in text  # of a token
    assert render_html(report) == text, "the same report gives the same page"


def test_the_page_says_what_to_do_about_failed_rows() -> None:
    report = with_series()
    report["errors"] = {"duplicate_id": 2}
    assert RowErrorCode.DUPLICATE_ID.remedy in render_html(report)


def test_the_page_shows_the_run_its_prompts_answers_mistakes_failed_rows_and_job(job: JobMaker) -> None:
    job.write([*rows_of(7), {"id": "bad", "question": ""}])
    job.run(job.spec(input={"prompt": "Say: {question}"}, eval={"expected": "answer"}))
    page = job.folder / "report.html"
    assert call(["report", str(job.output), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and str(job.output) in text and f"<h1>{job.output.name}</h1>" in text
    titles = {"Wrong answers: the first 5 of 7", "The first answers", "Rows that failed", "The job"}
    assert titles <= {*Page(text).titles}
    assert all(f"<td>q-{index}</td>" in text and f"Say: What is {index} times" in text for index in range(5))
    assert "exact match, 95% interval 0.0% to" in text
    assert "input.jsonl:8" in text and "empty_prompt: question, which" in text
    assert re.search(r"input\.prompt</td><td class=\"text\">Say: \{question\}", text)


@pytest.mark.parametrize(("name", "index"), [("outputs.jsonl", 0), ("errors.jsonl", 2)])
def test_a_page_without_rows_of_files_that_cannot_be_read_says_why(
    job: JobMaker, shell: Shell, name: str, index: int
) -> None:
    job.write([*rows_of(2), {"id": "bad", "question": ""}])
    job.run()
    page = job.folder / "report.html"
    (job.output / name).write_text(f'{{"index": {index}}}\n')
    said = shell("report", job.output, "--html", page).err
    assert "the page shows no rows: " in said and "is not as it was written" in said
    assert "The first answers" not in page.read_text(encoding="utf-8")


def test_a_page_shows_the_failed_rows_of_an_openai_batch(job: JobMaker, shell: Shell) -> None:
    row = {"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {"prompt": ""}}
    job.write([row, {**row, "custom_id": None}])
    keys = {"format": "openai-batch", "prompt": None, "id": None, "chat_template": None}
    job.run(job.spec(input=keys, output={"format": "openai-batch"}))
    page = job.folder / "report.html"
    assert not shell("report", job.output, "--html", page).err
    shown = page.read_text(encoding="utf-8")
    assert "empty_prompt: " in shown and "<td>bad</td>" in shown and "<td>None</td>" not in shown


def test_prompts_are_made_of_the_columns_of_the_input_and_of_no_answer(job: JobMaker) -> None:
    job.write([{"id": "a", "topic": "tea", "input_topic": "none", "text": "mine", "input_text": "other"}])
    page = job.folder / "report.html"
    for prompt, columns in (("Say {topic}", ["*"]), ("Say {text}", ["*"]), ("Say {text}", [])):
        job.run(job.spec(input={"prompt": prompt, "columns": columns}), quiet(overwrite=True))
        assert call(["report", str(job.output), "--html", str(page)]) == 0
        text = page.read_text(encoding="utf-8")
        assert ("Say tea" in text, "Say mine" in text) == ("topic" in prompt, columns != [] and "{text}" in prompt)
        assert text.count("Say ") == 1 + bool(columns)


def test_texts_of_the_job_are_escaped_and_answers_cut_with_the_score_of_a_label() -> None:
    records = [
        {"id": "a", "text": "<b>" + "x" * 900, "answer": "y"},
        {"id": "b", "label": "yes", "score": 0.75, "scores": {"yes": 0.75, "no": 0.25}},
        {"id": "c", "token_ids": [1, 2]},
    ]
    table = answers("The first answers", [("", record) for record in records], lambda record: record.get("answer"))
    assert [row[1] for row in table.rows[1:]] == ["yes (75.0%)", "[1, 2]"]
    assert len(table.rows[0][1]) == 400
    report = with_series(model="<script>alert(1)</script>", input=["<img src=x>"])
    report["slowest"][0]["id"] = "<b>id</b>"
    text = render_page(report, "runs/a", [table])
    assert not any(tag in text for tag in ("<b>x", "<script", "<img", "<b>id"))
    assert 'class="text">yes (75.0%)' in text


@given(st.floats(1e-5, 1e5), st.floats(1.03, 1e6))
def test_a_logarithmic_axis_has_at_least_two_round_ticks(low: float, ratio: float) -> None:
    edges = Distribution()
    for value in (low, low * ratio):
        edges.add(value)
    found = log_ticks(edges.histogram()["edges"])
    assert 2 <= len(found) <= 20
    assert found == sorted(found)


@pytest.mark.usefixtures("charts")
def test_lengths_that_are_all_alike_have_no_histogram() -> None:
    report = made()
    assert report["histograms"]["prompt_tokens"]["counts"] == [20]
    titles = Page(render_html(report)).titles
    assert "Tokens per prompt" not in titles
    assert "Total time of a row" in titles


@pytest.mark.usefixtures("charts")
def test_times_of_a_long_run_are_in_minutes() -> None:
    long = with_series(wall_s=4000.0)
    long["series"] = {**long["series"], "at_s": [10.0 * i for i in range(400)], "span_s": [10.0] * 400}
    assert render_html(long).count(">minutes") == 3


def test_nothing_is_drawn_in_the_time_between_two_invocations() -> None:
    report = with_series()
    series = report["series"]
    series["at_s"] = [at + 30 * (at >= 20) for at in series["at_s"]]
    before = {name: [*column] for name, column in series.items()}
    drawn = _series(report)
    (gap,) = (i for i, steps in enumerate(drawn["steps"]) if not steps)
    assert (drawn["at_s"][gap], drawn["span_s"][gap]) == (pytest.approx(20), pytest.approx(30))
    assert sum(drawn["tokens"]) == sum(before["tokens"])
    assert series == before  # the report itself stays as it is


def test_a_report_without_rows_or_series_still_gives_a_page() -> None:
    report = made(rows=0, seconds={}, wall_s=0.0)
    assert "nothing was run" in render_html(report)


def test_a_page_replaces_a_page_and_nothing_else(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(3))
    job.run()
    page, outputs = job.folder / "report.html", job.output / "outputs.jsonl"
    before = outputs.read_bytes()
    for _ in range(2):
        found = shell("report", job.output, "--html", page, "--json").json
        assert found["rows"]["done"] == 3, "a page and JSON at once"
    assert "not a report page that batchgen wrote" in shell("report", job.output, "--html", outputs, code=2).err
    assert outputs.read_bytes() == before
    said = shell("report", job.output, "--html", job.folder / "nowhere" / "report.html", code=1).err
    assert "nowhere" in said and "write the page elsewhere" in said
    assert "finished rows" not in said, "it does not ask for another run"
