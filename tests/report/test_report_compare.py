"""The gates of ``report --compare``: which figures count, when a change is a regression, and when nothing is judged."""

from __future__ import annotations

import json
import re
from operator import itemgetter
from typing import Any

import pytest
from markupsafe import escape
from report_samples import ABOUT, made, record
from run_helpers import JobMaker, Shell, rows_of

from batchgen.core.errors import GateFailed, UsageError
from batchgen.report.build import advice, build_report
from batchgen.report.compare import (
    Gates,
    answer_changes,
    check_gates,
    compare_reports,
    comparison_tables,
    render_comparison,
)
from batchgen.report.rows import RowTotals
from batchgen.report.tables import render_report

SPEED, ACCURACY = Gates(speed=0.05), Gates(accuracy=1.0)
NO_ACCURACY = "both runs must compare rows"
OTHERS = "other rows or other right answers"


def report(rate: float = 100.0, failed: int = 0, exact: float | None = 0.9, **more: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "tokens_per_s": {"completion": rate, "total": 3 * rate},
        "rows": {"total": 100, "done": 100 - failed, "failed": failed},
        "accuracy": {"exact_match": exact, "total": 0 if exact is None else 100},
        "wall_s": 1000 / (rate or 1.0),
        **more,
    }


def gate(now: dict[str, Any], before: dict[str, Any], gates: Gates) -> bool:
    """True; raises GateFailed for a regression, UsageError where nothing is judged."""
    check_gates(compare_reports(now, before, gates))
    return True


def test_a_rate_may_fall_by_the_share_given_and_no_more() -> None:
    assert gate(report(rate=95.1), report(), SPEED)
    with pytest.raises(GateFailed, match=r"output tokens/s 100\.0 -> 94\.0"):
        gate(report(rate=94), report(), SPEED)


def test_loading_and_compiling_make_no_run_slower() -> None:
    """A fresh machine compiles kernels for 40 s; what counts is how fast it then generates."""
    before = made(**{"wall_s": 10.0, "seconds": {"generate": 8.0, "load": 2.0}})
    fresh = made(**{"wall_s": 50.0, "seconds": {"generate": 8.0, "load": 42.0}})
    slower = made(**{"wall_s": 20.0, "seconds": {"generate": 10.0, "load": 10.0}})
    assert gate(fresh, before, SPEED)
    with pytest.raises(GateFailed, match=r"output tokens/s 12\.5 -> 10\.0"):
        gate(slower, before, SPEED)


def test_accuracy_may_fall_by_the_points_given_and_no_more() -> None:
    assert gate(report(exact=0.89), report(), ACCURACY)
    with pytest.raises(GateFailed, match=r"regression: exact match 90\.00% -> 88\.90%"):
        gate(report(exact=0.889), report(), ACCURACY)


def test_a_gate_is_silent_about_what_it_was_not_asked_for() -> None:
    assert gate(report(rate=1), report(), ACCURACY)
    assert gate(report(exact=0.1), report(), SPEED)
    assert gate(report(rate=1, exact=0.1, failed=9), report(), Gates())
    assert {figure["is_regression"] for figure in compare_reports(report(rate=1), report())["figures"]} == {None}


@pytest.mark.parametrize("gates", [SPEED, ACCURACY])
def test_one_more_failed_row_is_a_regression_to_every_gate(gates: Gates) -> None:
    with pytest.raises(GateFailed, match="failed rows"):
        gate(report(failed=1), report(), gates)
    assert gate(report(), report(failed=1), gates)


@pytest.mark.parametrize(
    ("now", "before", "gates", "why"),
    [
        (report(), report(exact=None), ACCURACY, NO_ACCURACY),
        (report(exact=None), report(), ACCURACY, NO_ACCURACY),
        (report(exact=0.5), report(exact=0.0), ACCURACY, NO_ACCURACY),
        (report(), report(rate=0.0), SPEED, "both runs must have computed tokens"),
        (report(), report(tokens_per_s=None), SPEED, "both runs must have computed tokens"),
        (report(tokens_per_s=None), report(), SPEED, "both runs must have computed tokens"),
    ],
)
def test_a_gate_over_nothing_is_an_error_and_no_pass(
    now: dict[str, Any], before: dict[str, Any], gates: Gates, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        gate(now, before, gates)


def test_each_gate_over_nothing_is_named_and_hides_no_regression() -> None:
    both, nothing = Gates(speed=0.05, accuracy=1), report(exact=None)
    with pytest.raises(UsageError, match=f"computed tokens; .*{re.escape(NO_ACCURACY)}"):
        gate(report(rate=0.0), nothing, both)
    with pytest.raises(GateFailed, match=f"regression: .* -> .*; .*{re.escape(NO_ACCURACY)}"):
        gate(report(rate=1), nothing, both)


def scored(rows: list[tuple[str, str | None]], model: str = "m") -> dict[str, Any]:
    """The report over rows, by id and right answer, that all have the text "a"."""
    totals = RowTotals(itemgetter("wanted"))
    for index, (row_id, wanted) in enumerate(rows):
        totals.add_result(record(index, text="a", wanted=wanted) | {"id": row_id})
    return build_report(totals, {"wall_s": 1.0}, {**ABOUT, "model": model})


COMPARED: list[tuple[str, str | None]] = [(f"q-{index}", "ab"[index % 2]) for index in range(12)]
OTHER_ROWS: dict[str, list[tuple[str, str | None]]] = {
    "fewer": COMPARED[:7],
    "other ids": [*COMPARED[:11], ("new", "b")],
    "ids that were changed over": [("q-1", "a"), ("q-0", "b"), *COMPARED[2:]],
    "another right answer": [*COMPARED[:11], ("q-11", "a")],
    "a row without": [*COMPARED[:11], ("q-11", None)],
}


@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_accuracy_over_other_rows_passes_no_gate(kind: str) -> None:
    rows = OTHER_ROWS[kind]
    with pytest.raises(UsageError, match=OTHERS):
        gate(scored(rows), scored(COMPARED), Gates(accuracy=100.0))
    assert gate(scored(rows), scored(COMPARED), Gates()), "without a gate there is nothing to refuse"


def test_accuracy_over_the_same_rows_in_another_order_or_by_another_model_is_judged() -> None:
    now, before = scored(COMPARED[::-1], "other"), scored(COMPARED)
    assert gate(now, before, ACCURACY)
    assert gate(now, {**before, "compared": None}, ACCURACY), "of a report before that key"


def test_a_row_that_fails_now_is_a_regression_and_no_usage_error() -> None:
    now = scored(COMPARED[:11])
    now["rows"] |= {"failed": 1, "total": 12}
    with pytest.raises(GateFailed, match="failed rows"):
        gate(now, scored(COMPARED), ACCURACY)


def test_the_command_exits_2_where_a_third_of_the_rows_was_compared(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(12))
    job.run()
    job.write([{**row, "answer": done["text"]} for row, done in zip(rows_of(12), job.outputs(), strict=True)])
    for name, sections in {"whole": {}, "few": {"input": {"limit": 4}}}.items():
        job.elsewhere(name, job.spec(eval={"expected": "answer"}, **sections))
    few, whole = job.folder / "few", job.folder / "whole"
    said = shell("report", few, "--compare", whole, "--max-regress-accuracy", 30, code=2)
    assert OTHERS in said.err
    assert "100.00%        100.00%  +0.0 pts\n" in said.out
    shell("report", whole, "--compare", whole, "--max-regress-accuracy", 30)


def test_an_exact_match_of_none_says_so_with_the_settings_that_would_help() -> None:
    found = made()
    found["accuracy"] = {"correct": 0, "total": 100, "exact_match": 0.0}
    (text,) = [text for text in advice(found) if "expected" in text]
    assert "(0 of 100)" in text
    assert "[classify] labels, structured_outputs" in text
    assert "0.00% (0 of 100)" in render_report(found)
    found["accuracy"] = {"correct": 0, "total": 0, "exact_match": None}
    assert any("nothing was compared" in text for text in advice(found))
    assert "no row was compared" in render_report(found)


def test_another_model_and_other_numerics_are_pointed_out() -> None:
    now, before = ({"dtype": "float32", "device": "cpu", "kernels": name} for name in ("avx2", "avx512"))
    found = compare_reports(report(model="other", numerics=now), report(numerics=before))
    assert found["differences"] == [
        "model, before m, now other",
        "numerics.kernels, before avx512, now avx2",
    ]
    assert found["differences"][0] in render_comparison(found)


@pytest.mark.parametrize(("threads", "differs"), [(None, False), (3, True)])
def test_a_run_whose_last_invocation_loaded_no_model_does_not_differ_in_its_threads(
    threads: int | None, differs: bool
) -> None:
    runs = report(threads=threads), report(threads=1)
    for now, before in (runs, runs[::-1]):
        assert bool(compare_reports(now, before)["differences"]) is differs


def test_the_table_fits_80_columns_and_marks_what_regressed() -> None:
    text = render_comparison(compare_reports(report(rate=10, model="x" * 100), report(), SPEED))
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("REGRESSION") == 2
    assert text.splitlines()[0].split() == ["before", "now", "change"]


def test_the_change_of_a_share_is_in_points_as_its_gate_counts_it() -> None:
    table = render_comparison(compare_reports(report(exact=0.88), report(), ACCURACY))
    assert "exact match                90.00%         88.00%  -2.0 pts  REGRESSION" in table


def test_the_command_exits_4_on_a_regression_0_without_gate(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(8))
    job.run()
    found = json.loads((job.output / "report.json").read_text())
    kept, gate = job.folder / "baseline.json", ("--max-regress-speed", "5%")  # a report by itself
    kept.write_text(json.dumps({n: v for n, v in found.items() if n not in ("compared", "empty_fields")}))
    assert "REGRESSION" not in shell("report", job.output, "--compare", kept, *gate).out, "before keys that came later"
    found["tokens_per_s"]["completion"] *= 10
    last = job.folder / "last"
    last.mkdir()
    (last / "report.json").write_text(json.dumps(found))
    shell("report", job.output, "--compare", last)
    figures = shell("report", job.output, "--compare", last, *gate, "--json", code=4).json["figures"]
    assert [figure["name"] for figure in figures if figure["is_regression"]] == ["output tokens/s"]


@pytest.mark.parametrize(
    "flags",
    [
        *("--max-regress-speed 5%", "--max-regress-accuracy 1"),
        *("--compare . --max-regress-accuracy nan", "--compare . --max-regress-accuracy 1%"),
    ],
)
def test_flags_that_would_judge_nothing_are_usage_errors(job: JobMaker, shell: Shell, flags: str) -> None:
    job.write(rows_of(1))
    job.run()
    said = shell("report", job.output, *(job.output if flag == "." else flag for flag in flags.split()), code=2).err
    assert "--max-regress-" in said


@pytest.mark.breadth
def test_a_page_has_the_comparison_and_the_answers_that_changed(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(8))
    before, page = job.folder / "before", job.folder / "page.html"
    found = [job.elsewhere("before"), job.elsewhere("now", job.spec(sampling={"max_tokens": 2}))]
    assert shell("report", job.folder / "now", "--compare", before, "--html", page).out == ""
    text = page.read_text(encoding="utf-8")
    assert f"<h2>Compared with {before}</h2>" in text and "tokens out" in text
    was, now = ({row["id"]: row["text"] for row in rows} for rows in found)
    changed = [row_id for row_id in now if now[row_id] != was[row_id]]
    shown = text[text.index("<h2>Answers that changed</h2>") : text.index("<h2>The first answers</h2>")]
    assert changed and all(f"<td>{row_id}</td>" in shown for row_id in changed)
    assert all(str(escape(texts[row_id])) in shown for texts in (was, now) for row_id in changed)


# ---------------------------------------------------------------- answers that changed


@pytest.mark.parametrize(("equal", "shown"), [(6000, "(100.0%)"), (5999, "(99.9%)"), (1, "(0.1%)"), (0, "(0.0%)")])
def test_a_share_is_whole_or_nothing_only_if_it_is(equal: int, shown: str) -> None:
    answers = {"rows": 6000, "equal": equal, "changed": []}
    words = comparison_tables({"figures": [], "answers": answers, "differences": []}, "")[1]
    assert dict(words.rows)["equal answers"] == f"{equal:,} of 6,000 in both {shown}"


def test_answers_that_changed_are_named_by_their_ids(job: JobMaker, shell: Shell) -> None:
    """The rows come in another order, and some are in one run alone."""
    rows = rows_of(8)
    job.write(rows[:7])
    job.elsewhere("before")
    for index, question in ((0, "Other?"), (6, "Another?")):
        rows[index] = {**rows[index], "question": question}
    job.write(rows[:0:-1] + rows[:1])
    job.elsewhere("now", job.spec(output={"format": "parquet"}))
    before, now = job.folder / "before", job.folder / "now"
    assert "equal answers 5 of 7 in both (71.4%) changed q-6, q-0" in shell("report", now, "--compare", before).words
    found = shell("report", before, "--compare", now, "--json").json["answers"]
    assert found == {"rows": 7, "equal": 5, "changed": ["q-0", "q-6"]}


def test_of_many_answers_that_changed_the_first_are_named() -> None:
    now, before = ([(f"q-{index}", text) for index in range(500)] for text in "ab")
    found = answer_changes(now, before)
    assert (found["rows"], found["equal"], len(found["changed"])) == (500, 0, 20)
    text = render_comparison(compare_reports(report(), report(), answers=found))
    assert max(map(len, text.splitlines())) <= 80


def test_an_answer_that_was_lost_is_a_change() -> None:
    before = [("a", "x"), ("b", ""), ("c", "y")]
    assert answer_changes([("a", ""), ("b", ""), ("c", "y")], before) == {"rows": 2, "equal": 1, "changed": ["a"]}


def test_a_sample_other_than_the_first_is_part_of_an_answer(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(6))
    specs = [job.spec(sampling={"n": 3, "temperature": 1.0, "seed": seed}) for seed in (1, 2)]
    runs = [job.elsewhere(name, spec) for name, spec in zip("ab", specs, strict=True)]
    found = shell("report", job.folder / "a", "--compare", job.folder / "b", "--json").json["answers"]
    texts = [[[sample["text"] for sample in row["samples"]] for row in rows] for rows in runs]
    assert len(found["changed"]) == sum(a != b for a, b in zip(*texts, strict=True)) > 0


def test_runs_that_score_prompts_are_compared_by_perplexity_and_not_by_their_empty_answers(
    job: JobMaker, shell: Shell
) -> None:
    job.write(rows_of(3))
    for name in ("one", "two"):
        job.elsewhere(name, job.spec(sampling={"max_tokens": 0, "prompt_logprobs": 0}))
    out = shell("report", job.folder / "one", "--compare", job.folder / "two").out
    assert re.search(r"^perplexity +[\d.,]+ +[\d.,]+ +\+0.00%$", out, re.MULTILINE)
    assert "equal answers" not in out


def test_a_comparison_has_no_value_of_python() -> None:
    numerics = [{"dtype": "bfloat16"}, {"dtype": "bfloat16", "weights": "int8"}]
    before, now = (report(numerics=each, input=["a.jsonl"]) for each in numerics)
    _, words = comparison_tables(compare_reports(now, {**before, "input": ["b.jsonl"], "adapter": "a"}), "")
    assert [text for _, text in words.rows] == [
        "adapter, before a, now not set",
        "numerics.weights, before not set, now int8",
        "input, before b.jsonl, now a.jsonl",
    ]
