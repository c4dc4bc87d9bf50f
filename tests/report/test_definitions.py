"""The figures of one report agree, in random jobs that are interrupted, resumed and partly wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from report_samples import ABOUT, engine, made, record, scored_record
from run_helpers import JobMaker, quiet

from batchgen.config.job import JobSpec
from batchgen.core.errors import ExitCode
from batchgen.engine.stats import MAX_POINTS, EngineStats, Point, StepSeries
from batchgen.output.finalize import read_records
from batchgen.output.rundir import RunDir
from batchgen.report.build import bound_by, build_report
from batchgen.report.rows import LATENCIES, Distribution, RowTotals, percentile
from batchgen.report.tables import render_report
from batchgen.report.usage import add_up, follow, since, split, tail_s, thin, usage_of
from batchgen.run.job import run_job
from batchgen.run.reports import read_report
from batchgen.run.status import read_status

PROMPTS = ('Write "ox" in capital letters.', "Count to nine.", "What is 3 plus 4? " * 9, "Spell shadow.")
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 3},
    "samples": {"temperature": 1.0, "n": 3},
    "equal samples": {"n": 2},
    "scored": {"max_tokens": 0, "prompt_logprobs": 0},
    "one token": {"max_tokens": 1},
    "wrong": {"temperature": -1.0},
}
ROWS = st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(sorted(ASKED))), min_size=1, max_size=14)


def num_samples(row: dict[str, Any]) -> int:
    return len(row.get("samples") or [row])


def check(report: dict[str, Any], records: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    """Raises AssertionError where the figures of a report contradict each other or its rows."""
    rows, tokens, copied = report["rows"], report["tokens"], report["copied_tokens"]
    assert (rows["done"], rows["failed"]) == (len(records), len(errors))
    assert rows["total"] == rows["done"] + rows["failed"]
    assert sum(report["finish_reasons"].values()) == sum(map(num_samples, records))
    assert tokens["prompt"] == sum(row["usage"]["prompt_tokens"] for row in records)
    assert tokens["completion"] == sum(row["usage"]["completion_tokens"] for row in records)
    assert tokens["total"] == tokens["prompt"] + tokens["completion"]
    assert 0 <= report["duplicates"] <= rows["done"]
    assert tokens["cached"] + copied["prompt"] <= tokens["prompt"]
    assert all(row["timings"]["cached_tokens"] <= row["usage"]["prompt_tokens"] for row in records)
    for kind in ("prompt", "completion"):
        computed = tokens[kind] - copied[kind]
        assert report["tokens_per_s"][kind] == pytest.approx(computed / report["wall_s"], rel=0.02, abs=0.02)
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"], rel=0.01, abs=0.01)
    engine_s = sum(report["seconds"][name] for name in ("prefill", "decode", "mask", "sample", "host"))
    assert engine_s == pytest.approx(report["generate_s"], rel=0.02, abs=0.02)
    assert all(0 <= seconds <= report["wall_s"] for seconds in report["seconds"].values())
    assert (report["tail_s"] or 0) <= report["wall_s"]
    if occupancy := report["occupancy"]:
        assert all(0 < occupancy[name] <= 1.0001 for name in ("sequences_share", "tokens_share"))
        assert occupancy["kv_use"] <= occupancy["max_kv_use"] + 1e-4 <= 1.0001
    check_bound(report)
    assert render_report(report)


def check_bound(report: dict[str, Any]) -> None:
    """The named bound is the largest part of the time, and of the batch's limits the one that is nearest."""
    seconds, said = report["seconds"], report["bound_by"]
    parts = {"the model": seconds["prefill"] + seconds["decode"]}
    parts |= {name: spent for name, spent in seconds.items() if name not in ("prefill", "decode")}
    words = {"load": "loading", "read": "reading", "write": "writing", "host": "between", "other": "outside"}
    words |= {"mask": "masks", "sample": "sampling", "the model": ""}
    largest = [name for name in parts if parts[name] >= max(parts.values()) - 0.002]  # the report's seconds are rounded
    assert any(words[name] in said for name in largest)
    if largest == ["the model"] and said != "KV memory":
        shares = {"max_num_seqs": "sequences_share", "the token budget": "tokens_share"}
        fullest = max(shares, key=lambda name: report["occupancy"][shares[name]])
        assert fullest in said


def check_run(job: JobMaker, spec: JobSpec, rows: list[tuple[str, str]]) -> None:
    report, status = read_report(RunDir(job.output)), read_status(job.output)
    greedy = [row for row in rows if "temperature" not in ASKED[row[1]]]
    assert report["duplicates"] <= len(greedy) - len(set(greedy))
    check(report, [found for _, found in read_records(RunDir(job.output), spec)], job.errors())
    assert status["tokens"]["completion"] == report["tokens"]["completion"]
    assert (status["tokens_per_s"] > 0) == (report["computed_tokens"] > 0) == bool(report["engine"]["num_steps"])


@settings(deadline=None, max_examples=10, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
@given(ROWS, st.integers(1, 60), st.integers(1, 4), st.sampled_from(["jsonl", "parquet", "openai-batch"]))
def test_the_figures_of_a_report_agree_with_each_other_and_with_the_rows(
    rows: list[tuple[str, str]], stops_after: int, max_num_seqs: int, form: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = JobMaker(Path(folder))
        lines = [{"id": str(i), "question": text, "sampling": ASKED[kind]} for i, (text, kind) in enumerate(rows)]
        job.write([*lines, "{"])
        sizes = {"threads": 1, "max_num_seqs": max_num_seqs, "block_size": 4, "max_num_batched_tokens": 32}
        spec = job.spec(sampling={"max_tokens": 8}, engine=sizes, output={"format": form})
        outcome, num_sessions = run_job(spec, quiet(max_total_tokens=stops_after)), 1
        while outcome.exit_code == ExitCode.STOPPED:
            outcome, num_sessions = run_job(spec, quiet()), 2
        check_run(job, spec, rows)
        assert read_report(RunDir(job.output))["sessions"] == num_sessions


def test_copies_are_counted_apart_and_have_no_latencies() -> None:
    totals = RowTotals()
    totals.add_result(record(0))
    copy = {"cached_tokens": 10, **dict.fromkeys(LATENCIES, 0.0), "queue_s": 9.0, "ttft_s": 9.0, "total_s": 9.0}
    for index in range(1, 4):
        totals.add_result(record(index, timings=copy))
    report = build_report(totals, {"wall_s": 10.0, "seconds": {"generate": 10.0}}, ABOUT)
    assert (report["duplicates"], report["copied_tokens"]) == (3, {"prompt": 30, "completion": 15})
    assert (report["tokens"]["prompt"], report["tokens"]["cached"], report["tokens"]["completion"]) == (40, 0, 20)
    assert report["tokens_per_s"] == {"prompt": 1.0, "completion": 0.5, "total": 1.5}
    assert report["latency_s"]["total_s"]["p99"] == pytest.approx(1.0, rel=0.01)
    assert [row["index"] for row in report["slowest"]] == [0]
    said = " ".join(render_report(report).split())
    assert "3 rows like another one, copied (30 tokens in, 15 out)" in said
    assert "0 tokens/s out, 2 in and out, without copies" in said


def test_every_sample_has_its_finish_reason_in_the_report() -> None:
    totals = RowTotals()
    samples = [{"finish_reason": "stop"}, {"finish_reason": "length"}, {"finish_reason": "length"}]
    totals.add_result(record(0, samples=samples))
    totals.add_result(record(1))
    report = build_report(totals, {"wall_s": 1.0, "seconds": {"other": 1.0}}, ABOUT)
    assert report["finish_reasons"] == {"length": 2, "stop": 2}
    assert any("2 of 4 answers were cut off" in text for text in report["advice"])
    alone = RowTotals()
    alone.add_result(record(0, finish_reason="length"))
    report = build_report(alone, {"wall_s": 1.0, "seconds": {"other": 1.0}}, ABOUT)
    assert any("1 of 1 answer was cut off" in text for text in report["advice"])


def test_a_job_that_scores_generates_nothing_and_costs_by_its_prompts() -> None:
    totals = RowTotals()
    for index in range(4):
        totals.add_result(scored_record(index, "yes"))
    report = build_report(totals, {"wall_s": 36.0, "seconds": {"generate": 36.0}}, ABOUT)
    assert (report["tokens"]["completion"], report["tokens"]["prompt"]) == (0, 40)
    assert report["device_hours_per_million_output_tokens"] == {"unit": "cpu", "hours": None}
    assert report["device_hours_per_million_prompt_tokens"] == {"unit": "cpu", "hours": 500.0}
    text = render_report(report)
    assert "tokens/s out" not in text
    assert "500.00 CPU-hours per million prompt tokens" in text


def test_a_batch_is_as_full_as_its_fullest_limit_by_time_and_not_by_steps() -> None:
    """Ten seconds of full prompts and ten thousand short steps of one row at the end, which took two."""
    stats = EngineStats(max_num_seqs=64, max_num_batched_tokens=256)
    for steps, step_s, tokens, sequences in ((10, 1.0, 256, 20), (1000, 0.002, 1, 1)):
        for _ in range(steps):
            stats.phase_s["forward"] = stats.phase_s.get("forward", 0.0) + step_s
            stats.add_step(tokens, 0, sequences, kv_use=0.5)
    report = made(engine=stats.to_dict() | {"series": {}})
    assert report["occupancy"]["tokens_share"] == pytest.approx(10 / 12, abs=0.01)
    assert report["bound_by"] == "the model's own work, most of it prefill; steps held 83% of the token budget"


@pytest.mark.parametrize("account", ["load", "read", "write", "host", "mask", "sample", "other", "prefill", "decode"])
def test_the_largest_part_of_the_time_is_the_bound(account: str) -> None:
    report = made(engine=engine())
    report["seconds"] = dict.fromkeys(report["seconds"], 1.0) | {account: 2.1}
    check_bound(report | {"bound_by": bound_by(report)})


# ---------------------------------------------------------------- percentiles, histograms, the largest items


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_do_not_exceed(values: list[int], percent: int) -> None:
    counts = [(value, values.count(value)) for value in sorted(set(values))]
    found = percentile(counts, len(values), percent)
    assert found == next(v for v, _ in counts if 100 * sum(w <= v for w in values) >= percent * len(values))


def test_no_values_have_no_percentile() -> None:
    assert Distribution().percentiles() == {"p50": None, "p90": None, "p99": None}


@given(st.lists(st.floats(1e-3, 1e3), min_size=1))
def test_percentiles_of_a_distribution_are_right_within_one_percent(values: list[float]) -> None:
    distribution = Distribution()
    for value in [0.0, *values]:
        distribution.add(value)
    exact = sorted([0.0, *values])
    for percent in (50, 90, 99):
        right = exact[-(-len(exact) * percent // 100) - 1]
        assert abs(distribution.percentiles()[f"p{percent}"] - right) <= 0.0051 * right + 1e-6


def test_a_histogram_counts_every_value_once() -> None:
    distribution = Distribution()
    for value in range(1, 2000):
        distribution.add(value)
    histogram = distribution.histogram()
    assert sum(histogram["counts"]) == 1999
    assert len(histogram["edges"]) == len(histogram["counts"]) + 1 <= 31
    assert histogram["edges"][0] <= 1
    assert histogram["edges"][-1] >= 1999


@given(st.lists(st.integers(0, 9), max_size=30))
def test_the_slowest_rows_are_kept_and_of_equal_ones_the_first(times: list[int]) -> None:
    totals = RowTotals()
    for index, total_s in enumerate(times):
        totals.add_result(record(index, timings={"total_s": float(total_s)}))
    assert [row["index"] for row in totals.slowest] == sorted(range(len(times)), key=lambda i: -times[i])[:10]


# ---------------------------------------------------------------- usage over invocations


def series_of(steps: list[int]) -> dict[str, Any]:
    count = len(steps)
    ones = [1.0] * count
    tokens = [3 * n for n in steps]
    return {"at_s": list(range(count)), "span_s": ones, "steps": steps, "tokens": tokens, "kv_use": ones}


@given(st.lists(st.integers(1, 9), min_size=1, max_size=200), st.integers(1, 50))
def test_thinning_keeps_all_sums_and_stays_within_bounds(steps: list[int], most: int) -> None:
    thinned = thin(series_of(steps), most)
    assert all(len(column) <= most for column in thinned.values())
    assert sum(thinned["tokens"]) == 3 * sum(steps)
    assert sum(thinned["span_s"]) == len(steps)
    assert set(thinned["kv_use"]) == {1.0}


@given(st.integers(1, 5 * MAX_POINTS))
def test_the_recorder_holds_few_points_and_counts_every_step(num_steps: int) -> None:
    series = StepSeries()
    for number in range(num_steps):
        series.add(Point(float(number), 1.0, 1, 10, 4, 2, 0.5))
    columns = series.to_columns()
    assert len(columns["at"]) <= MAX_POINTS
    assert sum(columns["steps"]) == num_steps
    assert sum(columns["tokens"]) == 10 * num_steps
    assert set(columns["kv_use"]) == {0.5}
    assert columns["at"] == sorted(columns["at"])


def test_later_invocations_follow_earlier_ones_in_time() -> None:
    first = {"wall_s": 100.0, "engine": {"series": series_of([1, 1])}}
    both = follow(first, {"wall_s": 10.0, "engine": {"series": series_of([1])}})
    assert both["wall_s"] == 110
    assert both["engine"]["series"]["at_s"] == [0, 1, 100]


def test_limits_are_not_summed() -> None:
    assert add_up({"max_num_seqs": 8, "steps": 1}, {"max_num_seqs": 4, "steps": 1}) == {"max_num_seqs": 8, "steps": 2}


def test_instants_become_seconds_of_the_run() -> None:
    stats = EngineStats(8, 64)
    stats.phase_s["forward"] = 2.0
    stats.add_step(30, 10, sequences=4, kv_use=0.25)
    counts = since(stats.to_dict(), stats.series.to_columns()["at"][0] - 5)
    assert counts["series"]["at_s"] == [5]
    assert counts["forward_prefill_s"] == 1.5


def test_the_usage_of_a_report_is_the_usage_it_was_built_from() -> None:
    report = {
        "sessions": 2,
        "wall_s": 9.0,
        "seconds": {"load": 1.0, "prefill": 2.0, "decode": 3.0, "mask": 0.5, "sample": 1.0, "host": 1.5},
        "generate_s": 8.0,
        "engine": {"num_forced_tokens": 5, "phase_s": {"mask": 0.5}},
        "series": {"at_s": [0.0]},
        "max_rss_bytes": 7,
        "tail_s": 0.5,
    }
    usage = usage_of(report)
    assert usage["seconds"] == {"load": 1.0, "generate": 8.0}
    assert usage["engine"] == {**report["engine"], "series": {"at_s": [0.0]}}
    twice = follow(usage, usage)
    assert (twice["tail_s"], twice["engine"]["num_forced_tokens"]) == (1.0, 10)
    assert split(twice["seconds"], twice["engine"])["mask"] == 1.0


def running(sequences: list[float]) -> dict[str, Any]:
    return {"span_s": [2.0] * len(sequences), "sequences": sequences}


def test_the_tail_begins_where_half_of_the_most_sequences_ran_for_the_last_time() -> None:
    assert tail_s(running([1, 8, 8, 4, 3, 1])) == 4.0
    assert tail_s(running([1, 8, 2, 8, 5])) == 0.0  # a dip that is filled again is no tail
    assert tail_s({}) is None


def test_a_session_that_only_runs_the_last_rows_is_all_tail() -> None:
    first = {"wall_s": 10.0, "engine": {"series": {**series_of([1, 1]), "sequences": [8.0, 8.0]}}}
    last = {"wall_s": 3.0, "engine": {"series": {**series_of([1, 1, 1]), "sequences": [2.0, 2.0, 1.0]}}}
    assert tail_s(follow(first, last)["engine"]["series"]) == 3.0
