"""Inputs of many rows, a few of them bad, written without being held in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CHUNK = 10_000


def row(index: int) -> dict[str, Any]:
    return {"id": f"row-{index}", "topic": "numbers", "prompt_token_ids": [1, index % 600]}


def write_input(path: Path, count: int) -> None:
    """So many rows, every thousandth a bad one, written a chunk at a time."""
    chunks = ([row(i) for i in range(first, first + CHUNK)] for first in range(0, count, CHUNK))
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, pa.Table.from_pylist([row(0)]).schema) as writer:
            for chunk in chunks:
                writer.write_table(pa.Table.from_pylist(chunk))
        return
    with path.open("w", encoding="utf-8") as file:
        for chunk in chunks:
            file.writelines(f"{json.dumps(item)}\n" if item["id"][-3:] != "999" else "{\n" for item in chunk)
