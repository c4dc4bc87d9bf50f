"""Kept columns of a Parquet input have their own types in Parquet outputs."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker, quiet

AT = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
COLUMNS = {
    "zoned": pa.array([AT, None], pa.timestamp("us", tz="Europe/Berlin")),
    "millis": pa.array([AT.replace(tzinfo=None), None], pa.timestamp("ms")),
    "day": pa.array([date(2026, 1, 2), None], pa.date32()),
    "clock": pa.array([time(3, 4, 5, 678000), None], pa.time32("ms")),
    "price": pa.array([Decimal("1.50"), None], pa.decimal128(10, 2)),
    "picture": pa.array([b"\x00\xff", None], pa.binary()),
    "small": pa.array([-3, None], pa.int16()),
    "huge": pa.array([2**64 - 1, None], pa.uint64()),
    "single": pa.array([0.1, None], pa.float32()),
}


def parquet_job(job: JobMaker, **columns: Any) -> Any:
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table({"id": ["a", "b"], "question": ["x", "y"], **columns}), path)
    return job.spec(input={"path": [str(path)]}, output={"format": "parquet"})


def test_types_that_json_lacks_are_those_of_the_input(job: JobMaker) -> None:
    assert job.run(parquet_job(job, **COLUMNS)).exit_code == 0
    table = pq.read_table(job.output / "outputs.parquet")
    assert {name: table[name].type for name in COLUMNS} == {name: column.type for name, column in COLUMNS.items()}
    assert {name: table[name].to_pylist() for name in COLUMNS} == {
        name: column.to_pylist() for name, column in COLUMNS.items()
    }


def test_types_survive_a_resume(job: JobMaker) -> None:
    days = pa.array([date(2026, 1, 2)] * 200)
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table({"id": range(200), "question": ["x"] * 200, "day": days}), path)
    spec = job.spec(input={"path": [str(path)]}, output={"format": "parquet"})
    assert job.run(spec, quiet(max_total_tokens=400)).exit_code == 75
    assert job.run(spec).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet")["day"].to_pylist() == days.to_pylist()


def test_values_that_do_not_fit_the_type_are_written_as_json_has_them(job: JobMaker) -> None:
    assert job.run(parquet_job(job, single=pa.array([0.5, float("nan")], pa.float32()))).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet")["single"].to_pylist()[0] is not None


@pytest.mark.parametrize("kind", [pa.timestamp("us", tz="Mars/Phobos"), pa.duration("s")])
def test_a_column_of_a_type_that_cannot_be_restored_costs_no_row(job: JobMaker, kind: pa.DataType) -> None:
    assert job.run(parquet_job(job, other=pa.array([None, None], kind))).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet").num_rows == 2


def test_files_whose_types_differ_give_what_their_values_share(job: JobMaker) -> None:
    first, second = job.folder / "a.parquet", job.folder / "b.parquet"
    pq.write_table(pa.table({"id": ["a"], "question": ["x"], "day": pa.array([date(2026, 1, 2)])}), first)
    pq.write_table(pa.table({"id": ["b"], "question": ["x"], "day": ["soon"]}), second)
    spec = job.spec(input={"path": [str(first), str(second)]}, output={"format": "parquet"})
    assert job.run(spec).exit_code == 0
    assert pq.read_table(job.output / "outputs.parquet")["day"].to_pylist() == ["2026-01-02", "soon"]
