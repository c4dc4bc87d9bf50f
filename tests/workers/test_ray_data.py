"""Ray Data's ``map_batches`` takes a loaded model: rows get what a run gives them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from loopback import is_inside
from run_helpers import ENVIRONMENT, MODEL, read_lines

from batchgen import LLM, generate

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # Ray warns of its own names
SAMPLED: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7}


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, with a cluster of two CPUs."""
    if not is_inside():
        yield None
        return
    os.environ["PYTHONPATH"] = ENVIRONMENT["PYTHONPATH"]  # of what Ray starts
    import ray

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("batch_format", ["pyarrow", "numpy", "pandas"])
def test_rows_of_a_pipeline_get_what_a_run_gives(ray: Any, batch_format: str) -> None:
    rows = [{"row": number, **row} for number, row in enumerate(read_lines(MODEL.parent / "questions.jsonl")[:60])]
    rows[7]["question"] = ""
    run = generate(rows, MODEL, "{question}", sampling=SAMPLED)
    wanted = {row["index"]: row["text"] for row in run.rows} | {row["index"]: row["code"] for row in run.errors}
    ds = ray.data.from_items(rows).map_batches(
        LLM,
        fn_constructor_kwargs={
            "model": str(MODEL),
            "prompt": "{question}",
            "sampling": SAMPLED,
            "input": {"id": "row"},
        },
        batch_size=16,
        batch_format=batch_format,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=1),
    )
    found = ds.take_all()
    assert len(found) == len(rows)
    assert {row["row"]: row["text"] if row["error"] is None else row["error"].split(":")[0] for row in found} == wanted
