"""Class labels, which ``datasets`` stores as numbers, are their names wherever a column is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import codes, source_of
from run_helpers import JobMaker

from batchgen.input.formats.arrow import rows_at
from batchgen.input.in_memory import json_lines

NAMES = ["World", "Sports", "Business"]
LABEL = {"names": NAMES, "_type": "ClassLabel"}
ROWS: list[dict[str, Any]] = [
    {"question": "a", "label": 0, "tags": [2, 0], "told": {"of": 1, "by": "x"}, "all": [{"k": 1}]},
    {"question": "b", "label": -1, "tags": [], "told": None, "all": []},
    {"question": "c", "label": None, "tags": [1, None], "told": {"of": None, "by": None}, "all": [{"k": None}]},
]
READ: list[dict[str, Any]] = [
    {"label": "World", "tags": ["Business", "World"], "told": {"of": "Sports", "by": "x"}, "all": [{"k": "Sports"}]},
    {"label": None, "tags": [], "told": None, "all": []},
    {"label": None, "tags": ["Sports", None], "told": {"of": None, "by": None}, "all": [{"k": None}]},
]
FORMS = ("parquet", "saved", "streamed", "described")


def dataset() -> Any:
    from datasets import ClassLabel, Dataset, Features, List, Value, disable_progress_bars

    disable_progress_bars()
    label = ClassLabel(names=NAMES)
    nested = {"tags": List(label), "told": {"of": label, "by": Value("string")}, "all": List({"k": label})}
    return Dataset.from_list(ROWS, features=Features({"question": Value("string"), "label": label, **nested}))


def written(folder: Path, form: str) -> str:
    """Where an input finds the rows: a file, a saved folder, or a folder whose README has the names."""
    if form == "saved":
        dataset().save_to_disk(folder / "saved")
        return str(folder / "saved")
    path = folder / "data" / "rows.parquet"
    path.parent.mkdir()
    dataset().to_parquet(path)
    if form == "described":
        pq.write_table(pq.read_table(path).select(["question", "label"]).replace_schema_metadata(None), path)
        named = "".join(f"            '{i}': {name}\n" for i, name in enumerate(NAMES))
        label = f"  - name: label\n    dtype:\n      class_label:\n        names:\n{named}"
        features = f"dataset_info:\n  features:\n  - name: question\n    dtype: string\n{label}"
        (path.parent / "README.md").write_text(f"---\n{features}---\n", encoding="utf-8")
    return str(path) if form == "parquet" else f"hf:{path.parent}"


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_their_names_at_any_depth_and_null_where_they_have_none(form: str, tmp_path: Path) -> None:
    rows = list(source_of(written(tmp_path, form)).read())
    assert codes(rows) == ["ok"] * len(ROWS)
    found = [{key: row.columns[key] for key in row.columns if key != "question"} for row in rows if not row.error]
    assert found == (READ if form != "described" else [{"label": row["label"]} for row in READ])


@pytest.mark.parametrize("kind", ["dataset", "iterable", "table"])
def test_labels_of_rows_in_memory_are_their_names(kind: str) -> None:
    given = dataset()
    rows = {"dataset": given, "iterable": given.to_iterable_dataset(), "table": given.with_format("arrow")[:]}[kind]
    found = [json.loads(line) for line in json_lines(rows, [])]
    assert [{name: row[name] for name in READ[0]} for row in found] == READ


@pytest.mark.parametrize(
    ("feature", "kind", "value", "expected"),
    [
        ({"feature": LABEL, "_type": "Sequence"}, pa.list_(pa.int64()), [2], ["Business"]),
        ([LABEL], pa.list_(pa.int8()), [2], ["Business"]),
        ({"feature": LABEL, "_type": "LargeList"}, pa.large_list(pa.int64()), [2], ["Business"]),
        (
            {"feature": {"k": LABEL}, "_type": "Sequence"},
            pa.struct([("k", pa.list_(pa.int64()))]),
            {"k": [1]},
            {"k": ["Sports"]},
        ),
        (LABEL, pa.int64(), 3, None),
        (LABEL, pa.string(), "World", "World"),
        *((broken, pa.int64(), 1, 1) for broken in ({"_type": "ClassLabel"}, LABEL | {"names": [1, 2]}, [], 7, None)),
    ],
)
def test_what_datasets_says_of_a_column_is_read_as_far_as_it_can_be(
    feature: Any, kind: pa.DataType, value: Any, expected: Any
) -> None:
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature}}})}
    batch = pa.record_batch([pa.array([value], kind)], pa.schema([("label", kind)], metadata))
    assert rows_at(batch, [0]) == [({"label": expected}, None)]


@pytest.mark.parametrize("metadata", ["", "{", "[]", '{"info": null}', '{"info": {"features": []}}', "[" * 10_000])
def test_metadata_that_say_nothing_leave_numbers(metadata: str) -> None:
    schema = pa.schema([("label", pa.int64())], {"huggingface": metadata})
    assert rows_at(pa.record_batch([pa.array([1])], schema), [0]) == [({"label": 1}, None)]


@pytest.mark.parametrize("form", FORMS)
def test_names_are_expected_and_kept(form: str, job: JobMaker) -> None:
    spec = job.spec(
        input={"path": [written(job.folder, form)], "id": None, "prompt": "{question}", "columns": ["label"]},
        output={"path": str(job.output)},
        eval={"expected": "label"},
        classify={"labels": NAMES},
    )
    outcome = job.run(spec)
    assert outcome.exit_code == 0
    assert [row["input_label"] for row in job.outputs()] == ["World", None, None]
    accuracy = json.loads((job.output / "report.json").read_bytes())["accuracy"]
    assert accuracy["total"] == 1
