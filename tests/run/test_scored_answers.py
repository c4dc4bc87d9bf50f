"""``eval.extract`` in whole runs: in the records of every format, in the report, and in its hints."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import pyarrow.parquet as pq
import pytest
from report_samples import ABOUT, record, scored_record
from run_helpers import JobMaker, rows_of, without_timings

from batchgen.core.errors import UsageError
from batchgen.report.accuracy import interval
from batchgen.report.build import advice, build_report
from batchgen.report.rows import RowTotals
from batchgen.report.tables import render_report

RULE = r"(\w+)"  # the last word of what the stub says


@pytest.mark.parametrize("form", ["jsonl", "parquet", "openai-batch"])
def test_every_format_has_what_was_extracted_beside_the_column_of_right_answers(form: str, job: JobMaker) -> None:
    job.write(rows_of(6))
    spec = job.spec(
        output={"format": form}, eval={"extract": RULE, "expected": "answer"}, sampling={"n": 2, "temperature": 1}
    )
    report = job.run(spec).report
    assert report is not None and report["accuracy"]["total"] == 6
    path = job.output / ("outputs.parquet" if form == "parquet" else "outputs.jsonl")
    for index, whole in enumerate(without_timings(path)):
        row = whole | whole.get("kept_columns", {})
        row |= whole["response"]["body"]["choices"][0] if form == "openai-batch" else {}
        assert row["answer"] == str(index**2)
        assert isinstance(row["extracted"], str)
        assert "samples" not in row or row["samples"][0]["extracted"] == row["extracted"]
    if form == "parquet":
        assert pq.read_schema(path).names[:5] == ["id", "index", "fingerprint", "text", "extracted"]


@pytest.mark.parametrize("rule", ["parsed.n", "lastnumber"])
def test_a_rule_that_cannot_work_is_refused_before_anything_runs(rule: str, job: JobMaker) -> None:
    job.write(rows_of(1))
    with pytest.raises(UsageError, match=f"--extract = '{rule}': must be last_number"):
        job.run(job.spec(eval={"extract": rule}))
    assert not job.output.exists()


# ---------------------------------------------------------------- the report


def scored(pairs: list[tuple[str, Any]], answer: str | None = None) -> dict[str, Any]:
    """The report over rows of a text, or answer, and what is expected."""
    totals = RowTotals(itemgetter("wanted"), answer)
    for index, (text, wanted) in enumerate(pairs):
        totals.add_result(record(index, text=text, extracted=text or None, wanted=wanted))
    return build_report(totals, {"wall_s": 1.0}, ABOUT)


def test_where_no_answer_is_right_the_settings_that_help_are_named() -> None:
    pairs = [("It costs $1,234.", "1234")] * 3
    (text,) = [text for text in advice(scored(pairs)) if "expected" in text]
    assert text.startswith("no answer equals [eval] expected (0 of 3); ") and "[eval] extract" in text
    assert not any("expected" in text for text in advice(scored([*pairs, ("x", "x")])))


def test_where_answers_are_bare_already_the_advice_names_no_setting_for_it() -> None:
    for report in (scored([("4", "5")], "last_number"), labelled([("good", "bad")])):
        (text,) = [text for text in advice(report) if "expected" in text]
        assert text == "no answer equals [eval] expected (0 of 1); its wrong rows show both"


@pytest.mark.parametrize(
    ("text", "wanted"), [("true", True), ("5", 5.0), ("-0.5", -0.5), ('{"a": "é"}', {"a": "é"}), ("1e+300", 1e300)]
)
def test_a_right_answer_that_is_no_text_is_compared_as_json_writes_it(text: str, wanted: object) -> None:
    for report in (scored([(text, wanted)]), labelled([(wanted, text)]), scored([(text, wanted)], "(.+)")):
        assert report["accuracy"]["exact_match"] == 1
    assert labelled([(wanted, "x")])["accuracy"]["wrong"][0]["expected"] == text


@pytest.mark.parametrize("form", ["jsonl", "openai-batch"])
@pytest.mark.parametrize("name", ["text", "model", "input_text"])
def test_the_right_answer_is_that_of_its_column_however_the_record_names_it(
    job: JobMaker, form: str, name: str
) -> None:
    columns = {"text": "SHADOW", "model": "T-Ford", "input_text": "zzz"}
    job.write([{"id": "a", "question": "Why?", **columns}])
    report = job.run(job.spec(output={"format": form}, eval={"expected": name})).report
    assert report is not None
    assert [row["expected"] for row in report["accuracy"]["wrong"]] == [columns[name]]


def test_the_report_shows_the_interval_and_five_wrong_rows() -> None:
    found = scored([(str(index % 10), "1") for index in range(100)], "last_number")
    assert found["accuracy"] == {
        **{"correct": 10, "total": 100, "exact_match": 0.1, "interval": [0.055229, 0.174366], "without_answer": 0},
        "wrong": [{"id": f"r{i}", "index": i, "answer": str(i), "expected": "1"} for i in (0, 2, 3, 4, 5)],
    }
    text = render_report(found)
    assert "10.00% (10 of 100; 95% interval 5.5% to 17.4%)" in text and "r2: 2 (expected 1)" in text


@pytest.mark.parametrize(("correct", "total"), [(0, 1), (1, 1), (0, 300), (300, 300), (287, 300)])
def test_the_interval_holds_the_share_and_is_never_a_point(correct: int, total: int) -> None:
    low, high = interval(correct, total)
    assert 0 <= low <= correct / total <= high <= 1
    assert low < high


def test_a_wrong_row_shows_what_was_compared_of_a_whole_solution() -> None:
    found = scored([("129", "On Sunday he ran 40 and 38 miles, so #### 78"), ("", "so 5")], "last_number")
    assert [row["expected"] for row in found["accuracy"]["wrong"]] == ["78", "5"]
    text = " ".join(render_report(found).split())
    assert "r0: 129 (expected 78), r1: no answer (expected 5)" in text


def test_of_several_samples_the_report_says_which_one_counts_and_what_the_others_are_good_for() -> None:
    totals = RowTotals(itemgetter("wanted"), "last_number")
    answers = [("7", "8", "8", "8"), ("8", "8", "7", "6"), ("1", "2", "3", None), ("8,", "9", "$8", "9"), (None,) * 4]
    for index, found in enumerate(answers):
        samples = [{"finish_reason": "stop", "extracted": answer, "text": "?"} for answer in found]
        totals.add_result(record(index, text="?", extracted=found[0], samples=samples, wanted="8"))
    report = build_report(totals, {"wall_s": 1.0}, ABOUT)
    shares = {"n": 4, "mean": round((3 + 2 + 0 + 2 + 0) / 20, 6), "majority": 0.6, "best": 0.6}
    assert report["accuracy"]["samples"] == shares
    text = " ".join(render_report(report).split())
    assert (
        "interval 11.8% to 76.9%), of the first sample, mean of all 35.00%, majority 60.00%, best of 4 60.00%" in text
    )
    assert "samples" not in scored([("8", "8")])["accuracy"]


# ---------------------------------------------------------------- labels


def labelled(pairs: Sequence[tuple[object, str]], **more: Any) -> dict[str, Any]:
    """The report over scored labels: expected label, found one."""
    totals = RowTotals(itemgetter("wanted"))
    for index, (wanted, found) in enumerate(pairs):
        totals.add_result({**scored_record(index, found), "wanted": wanted, **more})
    return build_report(totals, {"wall_s": 1.0}, ABOUT)


PAIRS = [("good", "good")] * 8 + [("good", "bad")] * 2 + [("bad", "bad")] * 3 + [("bad", "neutral")]


def test_labels_are_counted_expected_and_found_with_figures_for_each() -> None:
    found = labelled(PAIRS)["accuracy"]
    assert found["labels"] == [
        {"label": "good", "expected": 10, "found": 8, "correct": 8, "precision": 1.0, "recall": 0.8},
        {"label": "bad", "expected": 4, "found": 5, "correct": 3, "precision": 0.6, "recall": 0.75},
        {"label": "neutral", "expected": 0, "found": 1, "correct": 0, "precision": 0.0, "recall": None},
    ]
    assert found["confusions"] == [
        {"expected": "good", "found": "bad", "rows": 2},
        {"expected": "bad", "found": "neutral", "rows": 1},
    ]
    lines = render_report(labelled(PAIRS)).splitlines()
    start = lines.index("Labels expected (down) and found (across)")
    assert [line.split() for line in lines[start + 1 : start + 5]] == [
        ["good", "bad", "neutral"],
        ["good", "8", "2", "0"],
        ["bad", "0", "3", "1"],
        ["neutral", "0", "0", "0"],
    ]


@pytest.mark.parametrize("num_labels", [2, 7, 12, 13, 60])
def test_the_table_of_labels_is_bounded_and_fits_80_columns(num_labels: int) -> None:
    names = [f"a label with a long name, {number}" for number in range(num_labels)]
    pairs = [(name, names[(index + step) % num_labels]) for step in range(3) for index, name in enumerate(names)]
    report = labelled(pairs * 50)
    text = render_report(report)
    assert max(map(len, text.splitlines())) <= 80
    assert len(report["accuracy"]["labels"]) <= 96 and report["accuracy"]["num_labels"] == num_labels
    assert ("taken for others, the most frequent" in text) == (num_labels > 2)
    assert len(text.splitlines()) < 75


def test_labels_that_each_row_has_for_itself_are_not_counted() -> None:
    report = labelled([(f"the answer to {index}", f"another one, {index}") for index in range(1200)])
    assert "labels" not in report["accuracy"]


def test_free_texts_and_numbers_are_no_labels_and_a_structured_choice_is(job: JobMaker) -> None:
    assert "labels" not in scored([("7", "8")], "last_number")["accuracy"]
    job.write(rows_of(4))
    report = job.run(
        job.spec(eval={"expected": "answer"}, sampling={"structured_outputs": {"choice": ["0", "1"]}})
    ).report
    assert report is not None and report["accuracy"]["num_labels"] >= 4
