"""Ids of types that JSON lacks, and files that are no tables."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from run_helpers import JobMaker

from batchgen.core.errors import UsageError


def parquet_job(job: JobMaker, columns: dict[str, Any], **keys: Any) -> Any:
    path = job.folder / "rows.parquet"
    pq.write_table(pa.table(columns), path)
    return job.spec(input={"path": [str(path)], **keys}, output={"format": "jsonl"})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7.0, 7),
        (Decimal("1.50"), "1.50"),
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), "2026-01-02T03:00:00+00:00"),
    ],
)
def test_an_id_that_is_no_text_is_what_a_kept_column_has(job: JobMaker, value: Any, text: str | int) -> None:
    columns = {"id": [value], "question": ["x"]}
    assert job.run(parquet_job(job, columns)).exit_code == 0
    assert [row["id"] for row in job.outputs()] == [text]


def test_an_encrypted_parquet_file_is_refused_in_true_words(job: JobMaker) -> None:
    path = job.folder / "rows.parquet"
    path.write_bytes(b"PARE" + b"\r\x00\x80" * 40 + b"PARE")
    with pytest.raises(UsageError, match="is an encrypted Parquet file, which cannot be read: decrypt it first"):
        job.run(job.spec(input={"path": [str(path)]}))
