"""Columns typed from a JSON schema: no value changes in them, and what has no type stays JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.job import InputSpec, JobSpec, ModelSpec, OutputSpec
from batchgen.core.json_line import encode_json
from batchgen.core.records import SamplingParams
from batchgen.core.structured import canonical
from batchgen.output.formats import output_format
from batchgen.output.formats.typed_json import encode, field_of, holds_json, is_json, loosened, type_of

POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": ["number", "null"]}}}
POINT_TYPE = pa.struct([("x", pa.float64()), ("y", pa.float64())])
TREE = {"type": "object", "properties": {"name": {"type": "string"}, "child": {"$ref": "#/$defs/tree"}}}
DEFINITIONS = {"$defs": {"point": POINT, "tree": TREE, "a/b": {"type": "boolean"}}}


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ({"type": "string", "format": "date"}, pa.string()),
        ({"type": "integer", "minimum": 0}, pa.int64()),
        ({"type": "number"}, pa.float64()),
        ({"type": ["number", "integer"]}, pa.float64()),
        ({"type": ["boolean", "null"]}, pa.bool_()),
        ({"enum": ["a", "b", None]}, pa.string()),
        ({"enum": [1, 2]}, pa.int64()),
        ({"const": True}, pa.bool_()),
        ({"type": "array", "items": {"type": "integer"}}, pa.list_(pa.int64())),
        (POINT, POINT_TYPE),
        ({"$ref": "#/$defs/point", "description": "A point."}, POINT_TYPE),
        ({"$ref": "#/$defs/a~1b"}, pa.bool_()),
        ({"allOf": [{"$ref": "#/$defs/point"}], "title": "P"}, POINT_TYPE),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, POINT_TYPE),
        ({"oneOf": [{"type": "string", "maxLength": 2}, {"enum": ["long"]}]}, pa.string()),
        ({"type": "array", "items": POINT}, pa.list_(POINT_TYPE)),
        *(
            (part, None)
            for part in (
                *({}, True, {"type": "object"}, {"type": "null"}, {"type": ["string", "integer"]}, {"enum": ["a", 1]}),
                *({"anyOf": [{"type": "string"}, {"type": "integer"}]}, {"anyOf": [POINT, {"type": "object"}]}),
                {"type": "array"},
                {"type": "array", "prefixItems": [{"type": "string"}], "items": {"type": "string"}},
                {**POINT, "additionalProperties": True},
                {**POINT, "additionalProperties": {"type": "number"}},
                {**POINT, "patternProperties": {"^z": {}}},
                *({"$ref": "https://example.com/schema"}, {"$ref": "#/$defs/nowhere"}),
                *({"$ref": "#/$defs/point", "properties": {}}, {"enum": 4}, {"type": "object", "properties": 3}),
            )
        ),
    ],
)
def test_a_part_of_a_schema_has_the_type_that_all_its_values_have(part: Any, kind: Any) -> None:
    whole = type_of({"type": "object", "properties": {"part": part}, **DEFINITIONS})
    field = whole.field("part") if whole is not None else None
    assert (None if field is None or is_json(field) else field.type) == kind


def test_a_recursion_is_json_where_it_begins_again() -> None:
    kind = type_of({"$ref": "#/$defs/tree", **DEFINITIONS})
    assert kind.names == ["name", "child"]
    assert is_json(kind.field("child"))
    value = {"name": "a", "child": {"name": "b", "child": {"name": "c"}}}
    field = field_of("parsed", kind)
    assert decode(field, encode(field, value)) == value


def test_definitions_that_unfold_without_end_do_not() -> None:
    pair = {
        f"d{i}": {"type": "object", "properties": {side: {"$ref": f"#/$defs/d{i + 1}"} for side in "lr"}}
        for i in range(30)
    }
    assert str(type_of({"$ref": "#/$defs/d0", "$defs": pair})).count("struct") < 1000
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(500):
        deep = {"type": "object", "properties": {"x": deep}}
    assert str(type_of(deep)).count("struct") < 100


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(({"type": "integer"}, value) for value in (2**63, -(10**400), 1.0, True)),
        *(({"type": "number"}, value) for value in (2**53 + 1, 10**400, False)),
        ({"type": "boolean"}, 1),
        ({"type": "string"}, 1),
        ({"type": "array", "items": {"type": "string"}}, "ab"),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1]),
        (POINT, {"x": 1, "z": 2}),
        (POINT, [["x", 1]]),
    ],
)
def test_the_part_that_a_value_would_be_changed_in_is_json(tmp_path: Path, part: Any, value: Any) -> None:
    schema = {"type": "object", "properties": {"other": {"type": "boolean"}, "part": part}}
    values = [{"other": True, "part": None}, {"other": False, "part": value}, None]
    table, rows = written(tmp_path / "out", schema, values_of(values))
    kind = table.schema.field("parsed").type
    assert (kind.field("other").type, holds_json(kind.field("part"))) == (pa.bool_(), True)
    assert repr([row["parsed"] for row in rows]) == repr(values)


def test_only_the_innermost_part_becomes_json(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"points": {"type": "array", "items": POINT}}}
    values = [{"points": [{"x": 1, "y": 2.5}]}, {"points": [{"x": 2**60 + 1, "y": 1.5}, {"x": None, "y": 3}]}]
    table, rows = written(tmp_path / "out", schema, values_of(values))
    point = table.schema.field("parsed").type.field("points").type.value_type
    assert (is_json(point.field("x")), point.field("y").type) == (True, pa.float64())
    assert [row["parsed"] for row in rows] == values


@pytest.mark.parametrize("value", [[1], "text", {"x": 1, "z": 2}])
def test_a_value_of_another_shape_makes_the_whole_column_json(tmp_path: Path, value: Any) -> None:
    table, rows = written(tmp_path / "out", POINT, values_of([{"x": 1.5, "y": None}, value]))
    assert is_json(table.schema.field("parsed"))
    assert [row["parsed"] for row in rows] == [{"x": 1.5, "y": None}, value]


SCALARS = {
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "integer": st.integers(-(2**63), 2**63 - 1),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53),
    "boolean": st.booleans(),
}


@st.composite
def schemas_and_values(draw: Any, depth: int = 3) -> tuple[dict[str, Any], st.SearchStrategy[Any]]:
    """A schema, and values that fit it."""
    kind = draw(st.sampled_from([*SCALARS, "any", "array", "object", "object"] if depth else [*SCALARS]))
    if kind == "any":
        return {}, st.recursive(st.none() | SCALARS["string"] | SCALARS["integer"], st.lists, max_leaves=4)
    if kind == "array":
        items, values = draw(schemas_and_values(depth - 1))
        return {"type": "array", "items": items}, st.lists(values, max_size=3)
    if kind == "object":
        names = draw(st.lists(SCALARS["string"], min_size=1, max_size=4, unique=True))
        parts = {name: draw(schemas_and_values(depth - 1)) for name in names}
        properties = {name: part for name, (part, _) in parts.items()}
        fields = {name: values for name, (_, values) in parts.items()}
        return {"type": "object", "properties": properties}, st.fixed_dictionaries({}, optional=fields)
    is_nullable = draw(st.booleans())
    values = SCALARS[kind] | st.none() if is_nullable else SCALARS[kind]
    return {"type": [kind, "null"] if is_nullable else kind}, values


def decode(field: Any, value: Any) -> Any:
    """The value that ``encode`` was given; null stands for properties that it lacked."""
    if value is None:
        return None
    if is_json(field):
        return json.loads(value)
    if pa.types.is_struct(field.type):
        return {item.name: decode(item, value.get(item.name)) for item in field.type}
    if pa.types.is_list(field.type):
        return [decode(field.type.value_field, item) for item in value]
    return value


def without_null(value: Any) -> Any:
    """A value with what is null left out, the one difference that a table cannot tell."""
    if isinstance(value, dict):
        return {name: without_null(item) for name, item in value.items() if item is not None}
    return [without_null(item) for item in value] if isinstance(value, list) else value


@given(st.data())
def test_what_fits_a_schema_comes_back_from_its_column(data: st.DataObject) -> None:
    schema, values = data.draw(schemas_and_values())
    rows = data.draw(st.lists(values | st.none(), max_size=4))
    field = field_of("parsed", type_of(schema))
    assert loosened(field, rows).equals(field, check_metadata=True)
    array = pa.array([encode(field, row) for row in rows], field.type)
    found = [decode(field, row) for row in array.to_pylist()]
    assert [without_null(row) for row in found] == [without_null(row) for row in rows]


# ---------------------------------------------------------------- in a file


def spec_of(schema: Any, form: str = "parquet") -> JobSpec:
    spec = JobSpec(ModelSpec("m"), InputSpec(("in",)), OutputSpec("", format=form, parse_json=True))
    return replace(spec, sampling=SamplingParams(structured_outputs=canonical({"json": schema}) if schema else ""))


def record(index: int, parsed: Any, **more: Any) -> dict[str, Any]:
    usage, timings = {"prompt_tokens": 1, "completion_tokens": 2}, {"total_s": 1.0}
    about = {"finish_reason": "stop", "complete": parsed is not None, "usage": usage, "timings": timings}
    return {"id": index, "index": index, "text": json.dumps(parsed), "parsed": parsed, **about, **more}


def written(path: Path, schema: Any, rows: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """The table of these rows, and the rows as a reader of the file decodes them."""
    form = output_format(spec_of(schema))
    with path.open("w+b") as file:
        form.write(file, [form.result_row(encode_json(row)) for row in rows])
    table = pq.read_table(path)
    fields = [field for field in table.schema if holds_json(field)]
    return table, [row | {item.name: decode(item, row[item.name]) for item in fields} for row in table.to_pylist()]


def values_of(values: list[Any]) -> list[dict[str, Any]]:
    return [record(index, value) for index, value in enumerate(values)]


@pytest.mark.parametrize("values", [[None, None], [{"x": 1, "y": None}, None], [{"x": 2.5}] * 3, []])
def test_the_type_of_the_column_is_that_of_the_schema_whatever_the_rows_hold(tmp_path: Path, values: list[Any]) -> None:
    table, rows = written(tmp_path / "out", POINT, values_of(values))
    assert table.schema.field("parsed").type == POINT_TYPE
    assert table.column_names[:4] == ["id", "index", "text", "parsed"]
    assert [without_null(row["parsed"]) for row in rows] == [without_null(value) for value in values]


def test_values_without_a_schema_are_json(tmp_path: Path) -> None:
    values = [1, 1.0, "a", None, {"a": [True, 2**70]}, []]
    table, rows = written(tmp_path / "out", None, values_of(values))
    assert is_json(table.schema.field("parsed"))
    assert table["parsed"].to_pylist() == ["1", "1.0", '"a"', None, '{"a": [true, 1180591620717411303424]}', "[]"]
    assert repr([row["parsed"] for row in rows]) == repr(values)


@pytest.mark.parametrize(("x", "is_typed"), [(2.5, True), (2**53 + 1, False)])
def test_values_of_samples_are_typed_too(tmp_path: Path, x: float, is_typed: bool) -> None:
    samples = [{"text": "", "parsed": {"x": x, "y": None}, "finish_reason": "stop", "complete": True}]
    samples += [{"text": "", "parsed": None, "finish_reason": "length", "complete": False, "token_ids": [3]}]
    table, [row] = written(tmp_path / "out", POINT, [record(0, None, samples=samples)])
    kind = table.schema.field("samples").type.value_type.field("parsed").type
    assert (kind == POINT_TYPE, is_json(kind.field("x"))) == (is_typed, not is_typed)
    assert [without_null(sample) for sample in row["samples"]] == [without_null(sample) for sample in samples]


def test_a_field_that_is_json_inside_a_typed_column_is_decoded(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"any": {}, "list": {"type": "array", "items": {}}}}
    values = [{"any": {"a": 1}, "list": [1, "a", None, {}]}, {"any": "text", "list": []}, None]
    table, rows = written(tmp_path / "out", schema, values_of(values))
    assert table["parsed"].to_pylist()[0]["any"] == '{"a": 1}'
    assert [row["parsed"] for row in rows] == values


@pytest.mark.parametrize("chat", [True, False])
def test_openai_lines_hold_the_value_where_the_sdk_has_it(chat: bool) -> None:
    spec = replace(spec_of(POINT, "openai-batch"), input=InputSpec(("in",), chat=chat))
    form = output_format(spec)
    samples = [record(0, {"x": 1}), record(0, None)]
    line = form.result_row(encode_json({**record(0, {"x": 1}), "samples": samples, "kept": 1}))
    choices = json.loads(line)["response"]["body"]["choices"]
    assert [(choice["message"] if chat else choice)["parsed"] for choice in choices] == [{"x": 1}, None]
    assert [choice["complete"] for choice in choices] == [True, False]
    assert json.loads(line)["kept_columns"] == {"kept": 1}
