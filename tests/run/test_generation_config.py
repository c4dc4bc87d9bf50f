"""What a model recommends: read from its generation_config.json, taken when asked for, and said when it is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_helpers import MODEL, JobMaker, quiet, rows_of, toml_of

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict, load_job
from batchgen.config.sampling import recommended_values
from batchgen.core.errors import ModelError, ResumeMismatch, UsageError
from batchgen.output.rundir import RunDir
from batchgen.plan.dry_run import make_plan
from batchgen.run.invocation import RunOptions
from batchgen.run.loader import read_model

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [7], "transformers": "4"}
SAMPLES = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
LOUD = RunOptions(heartbeat_s=1e9)


def model_with(folder: Path, generation: Any) -> Path:
    """The sample model, its generation_config.json another; None for none."""
    made = folder / "model"
    shutil.copytree(MODEL, made, dirs_exist_ok=True)
    path = made / "generation_config.json"
    path.unlink(missing_ok=True)
    if generation is not None:
        path.write_text(generation if isinstance(generation, str) else json.dumps(generation), encoding="utf-8")
    return made


def spec_with(job: JobMaker, generation: Any, **sampling: Any) -> JobSpec:
    path = str(model_with(job.folder, generation))
    return job.spec(model={"path": path}, sampling={"max_tokens": 16, **sampling})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (QWEN3, SAMPLES),
        ({"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": None, "temperature": None, "top_k": 50}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 50}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({"eos_token_id": 7}, {"temperature": 0.0}),
        ({"typical_p": 0.5, "suppress_tokens": [], "max_length": 20}, {"temperature": 0.0}),
        (
            {"top_k": -1, "temperature": 1, "typical_p": 1.0, "num_beams": 1, "note": "x"},
            {"top_k": 0, "temperature": 1.0},
        ),
        (None, None),
    ],
)
def test_a_models_values_are_those_of_its_generation_config(tmp_path: Path, generation: Any, expected: Any) -> None:
    assert recommended_values(model_with(tmp_path, generation)) == expected


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "hot"}, r"generation_config\.json: temperature = 'hot' must be a finite number"),
        ({"temperature": -1}, r"temperature = -1 must be"),
        ('{"temperature": NaN}', r"temperature = nan must be"),
        ({"temperature": {"a": [1]}}, r"temperature = \{'a': \[1\]\} must be"),
        ({"top_p": 0}, r"top_p = 0 must be"),
        ({"top_k": 10**30}, r"top_k = 10+ must be"),
        ({"top_k": True}, r"top_k = True must be"),
        ({"min_p": [0.1]}, r"min_p = \[0\.1\] must be"),
        ({"repetition_penalty": 0}, r"repetition_penalty = 0 must be"),
        ({"num_beams": 4}, r"num_beams = 4 is not done here; take it out of a copy, or leave out"),
        ({"no_repeat_ngram_size": 2}, r"no_repeat_ngram_size = 2 is not done here"),
        ({"suppress_tokens": [5]}, r"suppress_tokens = \[5\] is not done here"),
        ({"stop_strings": ["a"]}, r"stop_strings = \['a'\] is not done here"),
        ({"do_sample": True, "typical_p": 0.5}, r"typical_p = 0\.5 is not done here"),
        ({"do_sample": "yes"}, r"do_sample = 'yes' must be true or false"),
        ('{"top_k": ' + "9" * 5000 + "}", r"generation_config\.json: not valid JSON"),
        ('{"temperature": ' + "[" * 9999 + "]" * 9999 + "}", r"generation_config\.json: not valid JSON \(nested"),
        ("[]", r"generation_config\.json: expected a JSON object"),
        (" " * (1 << 20) + "{}", r"generation_config\.json: has 1,048,578 bytes"),
    ],
)
def test_an_impossible_generation_config_is_named_with_its_key(job: JobMaker, generation: Any, message: str) -> None:
    job.write(rows_of(1))
    with pytest.raises(ModelError, match=message):
        job.run(spec_with(job, generation, generation_config="auto"))
    assert not job.output.exists()


def test_impossible_values_stop_no_job_that_does_not_ask_for_them(job: JobMaker) -> None:
    job.write(rows_of(2))
    assert job.run(spec_with(job, {"top_p": 0, "temperature": 1.0})).exit_code == 0


@given(
    st.dictionaries(
        st.sampled_from([*SAMPLES, "min_p", "do_sample"]),
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
            lambda inner: st.lists(inner, max_size=2),
        ),
    )
)
def test_any_generation_config_is_taken_or_named(tmp_path_factory: pytest.TempPathFactory, found: Any) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "generation_config.json").write_text(json.dumps(found))
    try:
        values = recommended_values(folder)
    except ModelError as error:
        assert "generation_config.json: " in str(error) and "\n" not in str(error)
    else:
        assert values is not None and "temperature" in values


@pytest.mark.parametrize(
    ("before", "beside", "expected"),
    [
        ({}, {}, SAMPLES),
        ({"temperature": 1.5, "min_p": 0.25}, {}, {**SAMPLES, "min_p": 0.25}),
        ({"temperature": 1.5}, {"top_k": 3, "temperature": 0.0}, {**SAMPLES, "top_k": 3, "temperature": 0.0}),
        ({"generation_config": "auto", "top_k": 5}, {"generation_config": None}, {**SAMPLES, "top_k": 5}),
    ],
)
def test_what_stands_beside_the_models_values_or_comes_later_wins(
    job: JobMaker, tmp_path: Path, before: dict[str, Any], beside: dict[str, Any], expected: dict[str, Any]
) -> None:
    job.write(rows_of(1))
    (tmp_path / "job.toml").write_text(toml_of({"sampling": before}), encoding="utf-8")
    base = spec_with(job, QWEN3)
    flags = {
        "model": {"path": base.model.path},
        "input": {"path": [str(job.input)]},
        "output": {"path": str(job.output)},
    }
    spec = load_job(tmp_path / "job.toml", {**flags, "sampling": {"generation_config": "auto", **beside}})
    sampling = read_model(spec).resolved(spec).sampling
    assert {name: getattr(sampling, name) for name in expected} == expected


def test_a_run_samples_as_its_model_recommends_and_its_manifest_holds_the_values(job: JobMaker) -> None:
    job.write(rows_of(30))
    spec = spec_with(job, QWEN3, generation_config="auto", seed=3)
    assert job.run(spec, quiet(max_total_tokens=400)).exit_code == 75
    kept = job_from_dict(RunDir(job.output).last_manifest().job).sampling
    assert {name: getattr(kept, name) for name in SAMPLES} == SAMPLES
    with pytest.raises(ResumeMismatch, match=r"sampling\.temperature: was 0\.6, now 0\.0"):
        job.run(spec_with(job, QWEN3, seed=3))
    assert job.run(spec).exit_code == 0
    named = job.spec(model={"path": spec.model.path}, sampling={**SAMPLES, "max_tokens": 16, "seed": 3})
    assert job.outputs() == job.elsewhere("named", named)


def test_values_that_a_model_does_not_have_are_refused(job: JobMaker) -> None:
    job.write(rows_of(1))
    said = r'^sampling\.generation_config = "auto": the model has no generation_config\.json with values '
    with pytest.raises(UsageError, match=said):
        job.run(spec_with(job, None, generation_config="auto"))
    with pytest.raises(UsageError, match=r"has no generation_config"):
        make_plan(job.spec(model={"path": "dummy:LFM2-350M"}, sampling={"generation_config": "auto"}))


@pytest.mark.parametrize(
    ("generation", "sampling", "says"),
    [
        (QWEN3, {}, True),
        (QWEN3, {"generation_config": "auto"}, False),
        (QWEN3, {"temperature": 0.7}, False),
        ({**QWEN3, "do_sample": False}, {}, False),
        ({"eos_token_id": 7}, {}, False),
        (None, {}, False),
    ],
)
def test_a_greedy_run_says_once_what_its_model_recommends(
    job: JobMaker, generation: Any, sampling: Any, says: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows_of(30))
    spec = spec_with(job, generation, **sampling)
    told = []
    for options in (RunOptions(heartbeat_s=1e9, limits=quiet(max_total_tokens=400).limits), LOUD, LOUD):
        job.run(spec, options)
        told.append(
            "recommends temperature = 0.6, top_p = 0.95, top_k = 20; rows are greedy" in capsys.readouterr().err
        )
    assert told == [says, False, False]
