"""What ``batchgen plan`` says of a job, found without a token being generated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from large_inputs import write_input
from run_helpers import ENVIRONMENT, MODEL, JobMaker, Shell, quiet, rows_of

from batchgen.cli.main import call
from batchgen.core.errors import GateFailed, UsageError
from batchgen.core.units import Shard
from batchgen.plan import estimate
from batchgen.plan.dry_run import check_time, make_plan, render_plan
from batchgen.plan.estimate import Reservoir
from batchgen.run.job import run_job


def plan_of(job: JobMaker, **sections: Any) -> dict[str, Any]:
    """The plan of a run that keeps nothing of what is there."""
    return make_plan(job.spec(**sections), overwrites=True)


def test_a_plan_says_what_an_update_would_keep_and_compute(job: JobMaker) -> None:
    job.write(rows_of(30))
    job.run(fails=frozenset({3}))
    job.write([*rows_of(32), "{"])
    plan = make_plan(job.spec())
    assert plan["rows"] == {"total": 33, "good": 3, "bad": 1, "reused": 29}
    assert "29 kept, 3 to compute" in render_plan(plan)
    limited = make_plan(job.spec(sampling={"max_tokens": 8}))["rows"]
    whole = [row for row in job.outputs() if row["usage"]["completion_tokens"] <= 8]
    assert limited["reused"] == sum(row["finish_reason"] == "stop" for row in whole)
    assert make_plan(job.spec(sampling={"stop": ["x"]}))["rows"]["reused"] == 0


def test_a_plan_says_which_columns_of_a_request_are_not_read_as_the_run_does(job: JobMaker) -> None:
    messages = [{"role": "user", "content": "Name a color as JSON."}]
    job.write([{"id": 1, "messages": messages, "response_format": {"type": "json_object"}, "max_tokens": 3}])
    plan = plan_of(job, input={"prompt": None, "messages": "messages"})
    (note,) = plan["notes"]
    assert note.startswith("columns of a request next to 'messages' are copied and not read: 'response_format'")
    assert "column 'sampling'" in " ".join(render_plan(plan).split())


@pytest.mark.parametrize(("changed", "advice"), [({}, ""), ({"temperature": 0.5}, " --update")])
def test_a_plan_advises_an_update_where_a_run_would_be_refused_without(
    job: JobMaker, shell: Shell, changed: dict[str, Any], advice: str
) -> None:
    job.write(rows_of(3))
    job.run()
    job.write(rows_of(5))
    path = job.toml(sampling=changed)
    assert shell("plan", path).err.splitlines()[-1] == f"batchgen: next: batchgen run {path}{advice}"


def test_a_plan_says_what_the_chat_template_shows(job: JobMaker) -> None:
    job.write(rows_of(3))
    line = "template     system yes, tools no, calls no, results yes, thoughts no"
    assert line in render_plan(plan_of(job, input={"chat_template": "auto"})).splitlines()
    assert "template" not in render_plan(plan_of(job, input={"chat_template": "none"}))


def test_a_plan_without_rows_to_compute_gives_no_token_rates(job: JobMaker) -> None:
    job.write(rows_of(3))
    job.run()
    text = render_plan(make_plan(job.spec()))
    assert "3 kept, 0 to compute" in text and "tokens/s" not in text and "(0 rows/s)" not in text


def plan_of_ids(job: JobMaker, **sections: Any) -> dict[str, Any]:
    """The plan of rows that bring their token ids."""
    return make_plan(job.spec(input={"prompt": None, "prompt_token_ids": "prompt_token_ids"}, **sections))


def long_text(words: int) -> str:
    return " ".join(f"w{i}" for i in range(words))


def test_every_bad_row_is_named_by_line_and_code(job: JobMaker) -> None:
    rows: list[Any] = rows_of(600)
    rows[10] = "{"
    rows[299] = {"id": "no-question"}
    rows[511] = {"id": "q-510", "question": "again"}
    rows[599] = {"id": "params", "question": "hot", "sampling": {"temperature": -1}}
    job.write(rows)
    plan = plan_of(job)
    assert plan["rows"] == {"total": 600, "good": 596, "bad": 4}
    found = [(row["line"], row["code"]) for row in plan["bad_rows"]]
    assert found == [(11, "bad_json"), (300, "missing_column"), (512, "duplicate_id"), (600, "bad_param")]
    job.run()
    assert [(letter["line"], letter["code"]) for letter in job.errors()] == found, "those of the run itself"


def test_prompt_tokens_are_those_the_run_counts(job: JobMaker) -> None:
    job.write(rows_of(40))
    plan = plan_of(job)
    outcome = job.run()
    assert outcome.report is not None
    assert plan["prompt_tokens"]["total"] == outcome.report["tokens"]["prompt"]


def test_the_histogram_counts_every_good_row_once(job: JobMaker) -> None:
    job.write([{"id": i, "question": long_text(i)} for i in range(1, 60)])
    prompts = plan_of(job)["prompt_tokens"]
    assert sum(found["rows"] for found in prompts["histogram"]) == 59
    assert prompts["p50"] <= prompts["p90"] <= prompts["p99"] <= prompts["max"]


def test_without_weights_the_plan_says_how_many_tokens_and_rows_fit(job: JobMaker) -> None:
    job.write(rows_of(20))
    given = plan_of(job, engine={"kv_cache_memory": "1MiB"})
    kv = given["kv"]
    assert kv["memory_bytes"] <= 1 << 20
    assert kv["tokens_that_fit"] * kv["bytes_per_token"] == pytest.approx(kv["memory_bytes"], rel=0.01)
    assert kv["rows_that_fit"] == kv["memory_bytes"] // kv["mean_row_bytes"]
    assert f"hold {kv['tokens_that_fit']:,} tokens, {kv['rows_that_fit']:,} such rows" in render_plan(given)
    found = plan_of(job, model={"device": "cpu"})
    assert found["kv"]["tokens_that_fit"] > kv["tokens_that_fit"]
    assert "by what is free now" in render_plan(found)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_kv_plan_is_what_the_engine_then_takes(job: JobMaker, kv_cache_dtype: str) -> None:
    job.write(rows_of(5))
    sizes = {"kv_cache_memory": "1MiB", "block_size": 16, "max_num_seqs": 4, "threads": 1}
    spec = job.spec(engine={**sizes, "kv_cache_dtype": kv_cache_dtype}, model={"device": "cpu"})
    kv = make_plan(spec)["kv"]
    outcome = run_job(spec, quiet())
    assert outcome.report is not None
    taken = outcome.report["sizes"]
    assert (kv["memory_bytes"], kv["max_num_seqs"], kv["block_size"]) == (taken["kv_bytes"], 4, 16)
    assert kv["tokens_that_fit"] == taken["num_blocks"] * 16
    numerics = outcome.report["numerics"]
    assert kv["dtype"] == numerics.get("kv_cache_dtype", numerics["dtype"])
    assert numerics.get("kv_cache_dtype", "auto") == taken["kv_cache_dtype"] == kv_cache_dtype


def test_weights_take_their_share_of_what_is_free(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write([{"id": 1, "prompt_token_ids": [5] * 50}])
    monkeypatch.setattr(estimate, "available_bytes", lambda: 2 << 30)
    monkeypatch.setattr(estimate, "visible_gpus", lambda device: [])
    kv = plan_of_ids(job, model={"path": "dummy:LFM2-350M", "dtype": "bfloat16"})["kv"]
    half_of_rest = ((2 << 30) - 2 * 354.5e6) / 2
    assert kv["memory_bytes"] == pytest.approx(half_of_rest, rel=0.05)  # slots take some
    kv = plan_of_ids(job, model={"path": "dummy:LFM2-350M", "dtype": "float32", "quantization": "w8a16"})["kv"]
    assert kv["memory_bytes"] == pytest.approx(((2 << 30) - 1.0625 * 354.5e6 - 2 * 65536 * 1024) / 2, rel=0.06)


def test_weights_that_do_not_fit_are_named_unless_another_machine_is_planned_for(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write([{"id": 1, "prompt_token_ids": [5] * 50}])
    monkeypatch.setattr(estimate, "available_bytes", lambda: 2 << 30)
    model = {"path": "dummy:Qwen3-8B", "dtype": "bfloat16", "device": "cpu"}
    said = r"dummy:Qwen3-8B: the weights take 1[56]\.\d GB, this machine has 2.1 GB free"
    with pytest.raises(UsageError, match=said):
        plan_of_ids(job, model=model)
    assert plan_of_ids(job, model=model, engine={"kv_cache_memory": "1GiB"})["kv"]["rows_that_fit"] > 0


def test_a_gpus_memory_is_not_guessed(job: JobMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(rows_of(5))
    named = plan_of(job, model={"device": "cuda"})
    monkeypatch.setattr(estimate, "visible_gpus", lambda device: ["0"])
    monkeypatch.setattr(estimate, "version", lambda name: "2.9.0")
    found = plan_of(job)
    for plan in (named, found):
        assert (plan["kv"]["memory_bytes"], plan["kv"]["rows_that_fit"]) == (None, None)
        assert "--calibrate measures the free memory" in " ".join(render_plan(plan).split())
    assert plan_of(job, engine={"kv_cache_memory": "1MiB"})["kv"]["rows_that_fit"] > 0


def test_output_tokens_are_bounded_by_max_tokens_and_the_context(job: JobMaker) -> None:
    job.write(
        [
            {"id": 1, "prompt_token_ids": [5] * 50},
            {"id": 2, "prompt_token_ids": [5] * 10, "sampling": {"max_tokens": 3}},
        ]
    )
    outputs = plan_of_ids(job, engine={"max_model_len": 60})["output_tokens"]
    assert (outputs["at_most"], outputs["expected"]) == (13, 13)
    assert "upper bound" in outputs["basis"]


def test_rows_that_ignore_end_tokens_have_a_fixed_output(job: JobMaker) -> None:
    job.write(rows_of(3))
    outputs = plan_of(job, sampling={"max_tokens": 7, "ignore_eos": True})["output_tokens"]
    assert (outputs["expected"], outputs["basis"]) == (21, "fixed by the job")
    outputs = plan_of(job, sampling={"max_tokens": 7, "ignore_eos": True, "max_repeats": 4})["output_tokens"]
    assert outputs["basis"] != "fixed by the job", "where they may end at a stop"


def test_an_expected_output_is_taken_but_not_beyond_each_rows_limit(job: JobMaker) -> None:
    job.write([{"id": 1, "question": "a"}, {"id": 2, "question": "b", "sampling": {"max_tokens": 3}}])
    plan = make_plan(job.spec(), output_tokens=5)
    assert plan["output_tokens"]["expected"] == 8


def test_without_a_run_or_calibration_there_is_no_estimate_but_a_way_to_one(job: JobMaker) -> None:
    job.write(rows_of(3))
    plan = plan_of(job)
    assert plan["estimate"] is None
    assert "--calibrate" in render_plan(plan)
    with pytest.raises(UsageError, match="--calibrate"):
        check_time(plan, 60)


def test_a_run_of_labels_gives_no_rate_and_the_plan_does_not_say_that_there_is_no_run(job: JobMaker) -> None:
    job.write(rows_of(3))
    labels = {"classify": {"labels": ["a", "b"]}}
    assert job.run(job.spec(**labels)).report is not None
    assert plan_of(job, **labels)["no_estimate"].startswith(
        "the output folder has no finished run that wrote text with"
    )


def test_the_last_run_of_the_same_model_gives_rate_and_lengths(job: JobMaker) -> None:
    job.write(rows_of(30))
    outcome = job.run(step_s=0.005)
    assert outcome.report is not None
    plan, seconds = plan_of(job), outcome.report["seconds"]
    parts = (seconds["load"], outcome.report["generate_s"], plan["read"]["wall_s"])
    assert plan["estimate"]["wall_s"] == pytest.approx(sum(parts), rel=0.05, abs=0.1)
    assert "last run" in plan["output_tokens"]["basis"]


def test_workers_elsewhere_share_the_engines_time_while_rows_last(job: JobMaker) -> None:
    job.write(rows_of(100))
    job.run(step_s=0.005)

    def planned(**cluster: Any) -> tuple[float, dict[str, int], str]:
        plan = plan_of(job, cluster=cluster, engine={"max_num_seqs": 8})
        return plan["estimate"]["engine_s"], plan["workers"], render_plan(plan)

    alone_s, workers, text = planned()
    assert workers is None
    assert "workers" not in text
    engine_s, workers, _ = planned(ray="auto", workers=2)
    assert workers == {"number": 2, "at_most": 3}
    assert engine_s == pytest.approx(alone_s / 2, abs=0.002)
    engine_s, workers, text = planned(ray="auto", workers=64)
    assert engine_s == pytest.approx(alone_s / 3, abs=0.002)
    assert "64 computing at once; beyond 3 some are idle" in text
    assert planned(workers=2)[0] == pytest.approx(alone_s), "they share the processors of this machine"


def test_by_default_every_gpu_computes_and_no_ray_cluster_counts(
    job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows_of(400))
    job.run(step_s=0.001)

    def planned(**cluster: Any) -> dict[str, Any]:
        return plan_of(job, cluster=cluster, engine={"max_num_seqs": 4, "kv_cache_memory": "1MiB"})

    alone_s = planned()["estimate"]["engine_s"]
    monkeypatch.setattr(estimate, "visible_gpus", lambda device: [str(number) for number in range(8)])
    monkeypatch.setattr(estimate, "version", lambda name: "2.9.0")
    plan = planned(workers="auto")
    assert plan["workers"]["number"] == 8
    assert plan["estimate"]["engine_s"] == pytest.approx(alone_s / 8, abs=0.002)
    assert planned(workers="auto", gpus_per_worker=2)["workers"]["number"] == 4
    plan = planned(ray="auto")
    assert plan["workers"]["number"] is None
    with pytest.raises(UsageError, match=r"--fail-if-over needs an estimate: .* give --workers"):
        check_time(plan, 1.0)
    monkeypatch.setattr(estimate, "version", lambda name: "2.9.0+cpu")
    assert planned(workers="auto")["workers"]["number"] == 1


def test_a_long_message_is_shown_whole_below_its_label(job: JobMaker) -> None:
    job.write([*rows_of(2), {"id": "x", "question": "How?", "sampling": {"logit_bias": {"7": 101}}}])
    text = render_plan(plan_of(job))
    message = plan_of(job)["bad_rows"][0]["message"]
    assert len(message) > 80
    assert message in " ".join(line.strip() for line in text.splitlines())


def test_a_report_of_another_model_is_no_basis(job: JobMaker) -> None:
    job.write(rows_of(5))
    job.run(step_s=0.001)
    assert plan_of(job)["estimate"] is not None
    assert plan_of(job, model={"quantization": "w8a16"})["estimate"] is None
    report = json.loads((job.output / "report.json").read_text())
    (job.output / "report.json").write_text(json.dumps(report | {"model": "another"}))
    assert plan_of(job)["estimate"] is None


def test_the_time_gate_lets_pass_what_is_within_it_and_exits_4_beyond(job: JobMaker) -> None:
    job.write(rows_of(30))
    job.run(step_s=0.005)
    toml = job.toml()
    assert call(["plan", str(toml), "--fail-if-over", "1h"]) == 0
    assert call(["plan", str(toml), "--fail-if-over", "0.001s"]) == 4
    with pytest.raises(GateFailed, match="allowed"):
        check_time(plan_of(job), 0.001)


def test_a_shard_plans_its_own_rows(job: JobMaker) -> None:
    job.write(rows_of(10))
    plan = make_plan(job.spec(), shard=Shard(1, 3))
    assert plan["rows"]["total"] == 4


def test_the_text_fits_80_columns_whatever_the_rows(job: JobMaker) -> None:
    job.write([{"id": "i" * 100, "question": long_text(500)}, *rows_of(20), "{", "[]"])
    assert max(map(len, render_plan(plan_of(job)).splitlines())) <= 80


def test_an_input_of_bad_rows_only_is_planned_too(job: JobMaker) -> None:
    job.write(["{", "}"])
    plan = plan_of(job)
    assert plan["rows"] == {"total": 2, "good": 0, "bad": 2}
    assert "no row is to be computed" in render_plan(plan)


def test_a_plan_writes_nothing_and_loads_neither_torch_nor_numba(job: JobMaker) -> None:
    job.write(rows_of(3))
    program = (
        "import sys\nfrom batchgen.cli.main import call\n"
        "assert call(sys.argv[1:]) == 0\nassert not {'torch', 'numba'} & {*sys.modules}, 'these take seconds'"
    )
    command = [sys.executable, "-c", program, "plan", "--model", MODEL, "--input", job.input, "--prompt", "id"]
    before = sorted(job.folder.iterdir())
    subprocess.run(command, env=ENVIRONMENT, cwd=job.folder, check=True, capture_output=True)
    assert sorted(job.folder.iterdir()) == before


PROGRAM = """
import json, resource, sys
from batchgen.plan.dry_run import make_plan
from batchgen.config.load import load_job
flags = {"model": {"path": sys.argv[1]}, "input": {"path": [sys.argv[2]]}, "output": {"path": "."}}
plan = make_plan(load_job(None, flags))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"peak_bytes": peak, "rows": plan["rows"], "bad": [row["line"] for row in plan["bad_rows"]]}))
"""


@pytest.mark.slow
def test_many_rows_take_little_more_memory_than_ten_thousand_and_every_bad_one_is_found(tmp_path: Path) -> None:
    def peak_bytes(count: int) -> int:
        write_input(tmp_path / "input.jsonl", count)
        command = [sys.executable, "-c", PROGRAM, str(MODEL), str(tmp_path / "input.jsonl")]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert found["rows"] == {"total": count, "good": count * 999 // 1000, "bad": count // 1000}
        assert found["bad"] == list(range(1000, count + 1, 1000))
        return int(found["peak_bytes"])

    assert peak_bytes(60_000) - peak_bytes(10_000) <= 10 << 20


# ---------------------------------------------------------------- structured outputs


def test_a_plan_and_a_run_name_the_rows_whose_schema_is_refused(job: JobMaker) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({"json": {"type": "object", "properties": {"a": {"type": "string"}}}}, ""),
        ({"regex": "[ab]+"}, ""),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#/$defs/missing"}}, "missing"),
        ({"regex": "(?=a)b"}, "look"),
        ({"regex": "a", "choice": ["b"]}, "not regex and choice"),
    ]
    rows = [
        row | {"sampling": {"structured_outputs": given}} for row, (given, _) in zip(rows_of(6), asked, strict=True)
    ]
    job.write(rows)
    plan = make_plan(job.spec())
    assert [(row["line"], row["code"]) for row in plan["bad_rows"]] == [(line, "bad_param") for line in range(3, 7)]
    messages = [row["message"] for row in plan["bad_rows"]]
    assert all(reason in message for (_, reason), message in zip(asked[2:], messages, strict=True))
    assert "bad_param 4: line 3, 4, 5, 6" in render_plan(plan)
    assert job.run().exit_code == 3
    assert [(letter["message"], letter["row"]) for letter in job.errors()] == [*zip(messages, rows[2:], strict=True)]


# ---------------------------------------------------------------- streams in bounded memory


def test_a_sample_is_the_whole_stream_while_that_is_small_and_uniform_after() -> None:
    def sample(count: int) -> list[int]:
        reservoir = Reservoir(100)
        for item in range(count):
            reservoir.add(item)
        return reservoir.items

    assert sample(100) == list(range(100))
    many = sample(10_000)
    assert len(many) == 100
    assert sum(many) / 100 == pytest.approx(5_000, rel=0.2)
