"""``report.json``: every key documented, phases that sum to the wall time, resumed runs that add up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from report_samples import ABOUT, engine, made, record
from run_helpers import MODEL, JobMaker, Shell, quiet, rows_of

from batchgen.core.errors import UsageError
from batchgen.output.rundir import RunDir
from batchgen.report.build import KEYS, advice, bound_by, build_report
from batchgen.report.facts import pace, tiles
from batchgen.report.rows import RowTotals
from batchgen.report.tables import render_report
from batchgen.report.usage import cost_of, follow
from batchgen.run.job import run_job
from batchgen.run.reports import read_report


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run by the real engine on the sample model."""
    job = JobMaker(tmp_path_factory.mktemp("real"))
    job.write([*rows_of(40), "{"])
    run_job(job.spec(engine={"threads": 1, "max_num_seqs": 8}, model={"path": str(MODEL)}), quiet())
    return read_report(RunDir(job.output))


def test_every_key_is_documented_and_every_documented_key_is_there(real: dict[str, Any]) -> None:
    assert real.keys() | {"accuracy", "adapter", "perplexity", "reused", "structured", "workers"} == KEYS.keys()


def test_the_series_accounts_for_every_step_and_token(real: dict[str, Any]) -> None:
    series, counts = real["series"], real["engine"]
    assert sum(series["steps"]) == counts["num_steps"]
    assert sum(series["tokens"]) == counts["num_prefill_tokens"] + counts["num_decode_tokens"]
    assert sum(series["prefill_tokens"]) == counts["num_prefill_tokens"]
    assert series["at_s"] == sorted(series["at_s"])
    assert series["at_s"][-1] <= real["wall_s"]


def test_cpu_hours_count_threads_and_gpu_hours_do_not() -> None:
    cpu = made()["device_hours_per_million_output_tokens"]
    assert cpu == {"unit": "cpu", "hours": round(2 * 10 / 3600 * 1e6 / 100, 4)}
    totals = RowTotals()
    totals.add_result(record(0))
    gpu = build_report(totals, {"wall_s": 3.6}, ABOUT | {"numerics": {"device": "cuda"}})
    assert gpu["device_hours_per_million_output_tokens"] == {"unit": "gpu", "hours": 200.0}


@pytest.mark.parametrize(
    ("rows", "kind"), [({}, "output"), ({"usage": {"prompt_tokens": 10, "completion_tokens": 0}}, "prompt")]
)
def test_the_cost_is_the_gpu_hours_of_all_workers_at_the_price(rows: dict[str, Any], kind: str) -> None:
    totals = RowTotals()
    totals.add_result(record(0, **rows))
    totals.add_result(record(1, timings={"prefill_s": 0.0, "cached_tokens": 10}, **rows))  # a copy, which cost nothing
    usage = {"wall_s": 3600.0, "device_s": 3 * 3600.0}
    report = build_report(totals, usage, ABOUT | {"numerics": {"device": "cuda"}})
    report["cost"] = cost_of(report, 2.1)
    each = 2.1 * report[f"device_hours_per_million_{kind}_tokens"]["hours"]
    assert report["cost"] == {"total": 6.3, f"per_million_{kind}_tokens": pytest.approx(each)}
    assert f"6.30 total, {each:,.2f} per million {kind} tokens" in " ".join(render_report(report).split())


def test_the_report_command_shows_the_cost_at_a_price(job: JobMaker, shell: Shell) -> None:
    job.write(rows_of(2))
    job.run()
    report = shell("report", job.output, "--price-per-hour", 36, "--json").json
    assert report["cost"]["total"] == pytest.approx(36 * report["device_s"] / 3600, abs=1e-5)
    shell("report", job.output, "--price-per-hour", "nan", code=2)
    shell("report", job.output, "--price-per-hour", 1, "--compare", job.output, code=2)


def test_a_step_of_both_kinds_is_shared_out_between_prefill_and_decode() -> None:
    counts = engine(phase_s={"forward": 6.0, "mask": 0.5, "sample": 1.0}, forward_prefill_s=4.0)
    seconds = made(engine=counts)["seconds"]
    assert seconds == {"other": 1.0, "prefill": 4.0, "decode": 2.0, "mask": 0.5, "sample": 1.0, "host": 1.5}


def test_what_bounds_a_run_is_named_with_its_flag() -> None:
    report = made(engine=engine(max_kv_use=1.0, num_preemptions=10), rows=50)
    assert bound_by(report) == "KV memory"
    assert "--kv-cache-memory" in report["advice"][0]
    assert [row["index"] for row in report["slowest"]] == list(range(49, 39, -1)), "the longest first"


def test_printed_rates_are_those_of_generating_and_name_what_loading_took() -> None:
    report = made(wall_s=50.0, seconds={"generate": 10.0, "load": 40.0})
    assert pace(report) == "100 tokens out in 10.0 s (10 tok/s); loading 40.0 s"
    text = " ".join(render_report(report).split())
    assert "took 50.0 s" in text and "10 tokens/s out, 30 in and out, while generating" in text
    assert "CPU-hours per million output tokens, 80% of it for loading" in text
    assert report["tokens_per_s"]["completion"] == 2.0, "over the wall time, as documented"


def test_reading_that_takes_long_is_named_beside_the_rate() -> None:
    report = made(wall_s=100.0, seconds={"generate": 10.0, "load": 1.0, "read": 89.0})
    assert pace(report).endswith("; loading 1.0 s; reading 1m 29s")


def tailed(seconds: float) -> dict[str, Any]:
    """A report of 10 s whose batch was full but for so many seconds at the end."""
    spans = [10.0 - seconds, seconds]
    series = {"at_s": [0.0, spans[0]], "span_s": spans, "sequences": [8.0, 1.0], "steps": [9, 9], "kv_use": [0.5, 0.1]}
    return made(engine=engine(series=series))


def test_a_long_tail_is_shown_and_a_short_one_is_not() -> None:
    assert tailed(3.0)["tail_s"] == 3.0
    assert "3.0 s at the end" in render_report(tailed(3.0))
    assert "at the end" not in render_report(tailed(0.04))


def test_the_tail_is_that_of_the_last_invocation_and_not_of_one_with_other_sizes_before() -> None:
    """First 60 rows at once, then a resume of 12 at once that ends with all of them."""

    def session(sequences: list[float]) -> dict[str, Any]:
        length = len(sequences)
        series = {"at_s": [10.0 * i for i in range(length)], "span_s": [10.0] * length, "sequences": sequences}
        series |= {"steps": [5] * length, "kv_use": [0.5] * length}
        counts = engine(series=series)
        return {"sessions": 1, "wall_s": 10.0 * length, "seconds": {"generate": 10.0 * length}, "engine": counts}

    usage = follow(session([60.0, 60.0]), session([12.0, 12.0, 12.0]))
    report = made(**usage)
    assert report["tail_s"] == 0.0
    assert made(**follow(usage, session([12.0, 2.0])))["tail_s"] == 10.0
    assert made(**follow(session([12.0, 2.0]), {"sessions": 1, "wall_s": 1.0}))["tail_s"] == 10.0


def test_what_was_spared_and_recomputed_is_told_where_the_engine_counts_it() -> None:
    report = made(engine=engine(num_cached_tokens=300, num_queried_tokens=1000, num_recomputed_tokens=55))
    assert report["prefix_cache"] == {"queried": 1000, "hit": 300, "hit_rate": 0.3}
    assert report["recomputed_tokens"] == 55
    text = " ".join(render_report(report).split())
    assert "30% of the prompt tokens of sequences by the prefix cache" in text
    without = made(engine=engine())
    assert (without["prefix_cache"], without["duplicates"], without["recomputed_tokens"]) == (None, 0, 0)
    assert "spared" not in render_report(without)


def test_cached_tokens_of_rows_and_engine_are_not_counted_twice() -> None:
    totals = RowTotals()
    totals.add_result(record(0, timings={"cached_tokens": 4}))
    assert build_report(totals, {"engine": engine(num_cached_tokens=4)}, ABOUT)["tokens"]["cached"] == 4


def test_the_sizes_of_the_engine_and_its_memory_are_told(real: dict[str, Any]) -> None:
    assert real["sizes"]["max_num_seqs"] == 8
    assert real["sizes"]["block_size"] > 0
    text = render_report(real)
    assert f"in blocks of {real['sizes']['block_size']} tokens" in text
    assert "MiB at most" in text


def structured(*samples: list[bool | None], **counts: Any) -> dict[str, Any]:
    """A report of rows with these samples, None for a free one."""
    totals = RowTotals()
    for index, complete in enumerate(samples):
        found = [{"finish_reason": "stop"} | ({} if each is None else {"complete": each}) for each in complete]
        totals.add_result(record(index, **found[0], **({"samples": found} if len(found) > 1 else {})))
    return build_report(totals, {"wall_s": 10.0, "seconds": {"generate": 9.0}, "engine": engine(**counts)}, ABOUT)


def test_rows_with_structured_outputs_are_counted_and_those_cut_off_told_of_with_advice() -> None:
    counts = {"num_output_tokens": 200, "num_forced_tokens": 50}
    report = structured([True], [False], [None], [True, True], [True, False], [None, None], **counts)
    assert report["structured"] == {"rows": 4, "samples": 6, "incomplete": 2, "forced_tokens": 50, "forced_share": 0.25}
    assert report["advice"][0].startswith("2 of 6 structured answers ended before they were complete: raise max_tokens")
    assert "6 answers, 2 not complete, 25% of tokens forced" in " ".join(render_report(report).split())
    [said, *_] = structured([False], **counts)["advice"]
    assert said.startswith("1 of 1 structured answer ended before it was complete:")
    whole = structured([True], [None], **counts)
    assert not any("structured" in text for text in whole["advice"])
    assert "1 answer, all complete" in render_report(whole)
    report = structured([False], [False], num_output_tokens=200) | {"finish_reasons": {"length": 2}}
    assert len([text for text in advice(report) if "2 of 2" in text]) == 1, "told of once"
    none = structured([None], num_output_tokens=5, num_forced_tokens=0)
    assert "structured" not in none and "structured" not in render_report(none)


def test_the_text_says_first_how_long_how_fast_and_what_failed() -> None:
    lines = render_report(made(errors=3, engine=engine())).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["took", "speed", "failed", "bound"]


def test_the_text_fits_80_columns(real: dict[str, Any]) -> None:
    crowded = made(errors=5, rows=1000, engine=engine(max_kv_use=1.0, num_preemptions=100))
    name = "A processor with a name longer than anybody would ever want to read " * 3
    crowded |= {"machine": {**crowded["machine"], "processor": name}}  # reports of one process share theirs
    for report in (real, crowded):
        assert max(map(len, render_report(report).splitlines())) <= 80


DATED = [json.dumps({**made(), "finished_at": value}) for value in (5, None, "yesterday")]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 4}', '{"version": "4"}', '{"version": 1}', *DATED]
)
def test_a_file_that_is_no_report_was_edited_or_is_of_another_version_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(made()))
    assert read_report(RunDir(tmp_path))["rows"]["total"] == 20
    path.write_text(content)
    said = " is a report of version 1; this batchgen reads version 4" if content == '{"version": 1}' else ""
    with pytest.raises(
        UsageError, match=r"not as it was written .* was it edited\?" if content in DATED else rf"json{said}"
    ):
        read_report(RunDir(tmp_path))


def test_a_run_without_results_still_has_a_report() -> None:
    report = build_report(RowTotals(), {}, ABOUT)
    assert report["bound_by"] == "nothing was run"
    assert render_report(report)


def test_the_text_names_the_kernels_where_they_are_known() -> None:
    report = made()
    assert "bfloat16 on cpu (" not in " ".join(render_report(report).split())
    report["numerics"] = {**report["numerics"], "kernels": "avx512"}
    assert "bfloat16 on cpu (avx512)" in " ".join(render_report(report).split())
    integers = {"weights": "int8", "activations": "int8", "kv_cache_dtype": "int8"}
    report["numerics"] = {**report["numerics"], **integers}
    named = "bfloat16 on cpu, int8 weights, int8 activations, int8 keys and values (avx512)"
    assert named in " ".join(render_report(report).split())


def test_the_perplexity_of_prompts_is_over_all_their_tokens_together() -> None:
    totals = RowTotals()
    for index, logprobs in enumerate(([-1.0], [-3.0, -3.0, -3.0])):
        scored = [{"logprob": logprob} for logprob in logprobs]
        totals.add_result(record(index, prompt_logprobs=scored, perplexity=math.exp(-logprobs[0])))
    report = build_report(totals, {"wall_s": 10.0}, ABOUT)
    assert report["perplexity"] == {"value": round(math.exp(2.5), 6), "tokens": 4}
    assert "perplexity   12.1825 over 4 tokens of prompts" in render_report(report)
    assert ("perplexity", "12.1825") in tiles(report)
