"""Cells of tables: those that cannot be read, ids of types that JSON lacks, and files that are no tables."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker

from batchgen.core.errors import UsageError
from batchgen.run.invocation import RunOptions


def parquet_job(job: JobMaker, table: dict[str, Any], **keys: Any) -> Any:
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table(table), path)
    return job.spec(input={"path": [str(path)], **keys}, output={"format": "jsonl"})


def unknown_zone(count: int) -> pa.Array:
    return pa.array([0] * count, pa.timestamp("us", tz="Mars/Phobos"))


def test_a_cell_that_no_prompt_needs_costs_no_row(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": ["a", "b"], "question": ["x", "y"], "at": unknown_zone(2)}
    assert job.run(parquet_job(job, columns), RunOptions()).exit_code == 0
    assert [row["at"] for row in job.outputs()] == [None, None]
    said = "column 'at' has cells that cannot be read: they are null in the outputs"
    assert capsys.readouterr().err.count(said) == 1


def test_a_column_that_is_not_kept_is_not_named(job: JobMaker, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"id": ["a"], "question": ["x"], "at": unknown_zone(1)}
    assert job.run(parquet_job(job, columns, columns=["question"]), RunOptions()).exit_code == 0
    assert "cannot be read" not in capsys.readouterr().err


def test_a_cell_of_the_prompt_that_cannot_be_read_fails_its_row(job: JobMaker) -> None:
    job.run(parquet_job(job, {"id": ["a"], "question": unknown_zone(1)}))
    (letter,) = job.errors()
    assert (letter["code"], "'question' (timestamp" in letter["message"]) == ("bad_type", True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, 7),
        (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    ],
)
def test_an_id_that_is_no_text_is_what_a_kept_column_has(job: JobMaker, value: Any, text: str | int) -> None:
    ids = (
        pa.ExtensionArray.from_storage(pa.uuid(), pa.array([value.bytes], pa.binary(16)))
        if isinstance(value, UUID)
        else [value]
    )
    columns = {"id": ids, "question": ["x"]}
    assert job.run(parquet_job(job, columns)).exit_code == 0
    assert [row["id"] for row in job.outputs()] == [text]


def test_an_encrypted_parquet_file_is_refused_in_true_words(job: JobMaker) -> None:
    path = job.folder / "rows.parquet"
    path.write_bytes(b"PARE" + b"\r\x00\x80" * 40 + b"PARE")
    with pytest.raises(UsageError, match="is an encrypted Parquet file, which cannot be read: decrypt it first"):
        job.run(job.spec(input={"path": [str(path)]}))
