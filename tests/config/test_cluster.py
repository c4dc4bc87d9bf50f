"""The section [cluster]: what its values may be, and that a run may change all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen.config.job import KEYS, JobSpec
from batchgen.config.load import job_from_dict, load_job, override
from batchgen.core.errors import UsageError

_NEEDED = {"model": {"path": "/m"}, "input": {"path": ["/in.jsonl"]}, "output": {"path": "/out"}}


def spec_of(**cluster: Any) -> JobSpec:
    return load_job(None, {**_NEEDED, "cluster": cluster})


@pytest.mark.parametrize(
    ("workers", "bounds"), [(8, (1, 8)), ("8", (1, 8)), ("2:8", (2, 8)), ("3:3", (3, 3)), ("auto", None), ("", None)]
)
def test_workers_are_a_number_a_range_or_chosen(workers: object, bounds: tuple[int, int] | None) -> None:
    cluster = spec_of(workers=workers).cluster
    assert (cluster.bounds, cluster.is_used) == (bounds, workers != "")


def test_a_ray_cluster_is_used_without_a_number_of_workers() -> None:
    cluster = spec_of(ray="10.0.0.1:6379").cluster
    assert cluster.is_used
    assert cluster.bounds is None


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        *(
            ("workers", value, "must be a number of workers")
            for value in (0, -1, "2:1", "0:2", "2:", ":2", "x", True, 1.5)
        ),
        ("workers", "70000", "up to 65536"),
        ("workers", "\u0663", "must be a number"),
        *(("ray", value, "must be auto or HOST:PORT") for value in ("head", "head:", "a b:1", 5)),
        ("ray", "ray://head:10001", "the driver must be on a node of the cluster"),
        *((key, "0s", "must be a duration") for key in ("patience", "load_patience")),
        *(("patience", value, "must be a duration") for value in ("", "soon", True, 0, -1, [])),
        *(("resources", value, "must be an object") for value in ("{", "[1]", {"spot": 0}, {"spot": True}, {"a": "b"})),
        ("worker_cpus", 0, "must be"),
        ("worker_gpus", -1, "must be"),
    ],
)
def test_impossible_values_are_refused_by_name(key: str, value: object, why: str) -> None:
    with pytest.raises(UsageError, match=f"--{key.replace('_', '-')} = .*{why}"):
        spec_of(**{key: value})


def test_no_key_of_the_cluster_changes_outputs() -> None:
    assert not any(key.outputs for key in KEYS["cluster"].values())
    given = {
        "workers": "2:4",
        "ray": "auto",
        "worker_cpus": 2,
        "worker_gpus": 0,
        "patience": "3s",
        "load_patience": "9m",
    }
    spec = spec_of(**given, resources={"spot": 0.01})
    assert spec.output_keys() == spec_of().output_keys()
    assert job_from_dict(spec.to_dict()) == spec, "job.json holds it whole"


def test_a_job_file_and_flags_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    text = '[cluster]\nworkers = "2:4"\npatience = "1m30s"\nresources = { spot = 0.5 }\n'
    file.write_text(text, encoding="utf-8")
    spec = load_job(file, {**_NEEDED, "cluster": {"workers": "3", "resources": '{"gpu_a": 1}'}})
    assert (spec.cluster.bounds, spec.cluster.patience_s) == ((1, 3), 90.0)
    assert spec.cluster.resources == {"gpu_a": 1.0}
    assert override(spec, {"cluster": {"workers": "5"}}).cluster.bounds == (1, 5)
