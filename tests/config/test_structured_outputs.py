"""How a job and its rows ask for structured outputs: every name and form of it, and what is refused, in which words."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.job import JobSpec
from batchgen.config.load import job_from_dict, load_job
from batchgen.config.sampling import ParamError, merge_params
from batchgen.core.errors import UsageError
from batchgen.core.records import SamplingParams
from batchgen.core.structured import canonical, parsed

PLACES = '[model]\npath = "m/n"\n[output]\npath = "out"\n[input]\npath = "in.jsonl"\n'  # six lines
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["x", "é", None, 1.5]}}}
JOB = SamplingParams(structured_outputs=canonical({"choice": ["yes", "no"]}))


def from_text(folder: Path, sampling: str, flags: dict[str, dict[str, Any]] | None = None) -> JobSpec:
    path = folder / "job.toml"
    path.write_text(PLACES + sampling, encoding="utf-8")
    return load_job(path, flags)


def from_flag(value: object) -> SamplingParams:
    flags = {"model": {"path": "m/n"}, "input": {"path": "in.jsonl"}, "output": {"path": "out"}}
    return load_job(None, {**flags, "sampling": {"structured_outputs": value}}).sampling


def asked(params: SamplingParams) -> dict[str, Any]:
    return parsed(params.structured_outputs)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a schema and a grammar; the working directory is another one."""
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA, indent=4), encoding="utf-8-sig")
    (tmp_path / "x.lark").write_text('start: "a"\r\n', encoding="utf-8")
    monkeypatch.chdir("/")
    monkeypatch.setenv("BG_SCHEMA", "schema")
    return tmp_path


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ('[sampling.structured_outputs]\njson = "schema.json"', {"json": SCHEMA}),
        ('[sampling]\nstructured_outputs.json = "schema.json"', {"json": SCHEMA}),
        ('[sampling]\nstructured_outputs = "schema.json"', {"json": SCHEMA}),
        ('[sampling.structured_outputs]\njson = "./${BG_SCHEMA}.json"', {"json": SCHEMA}),
        ("""[sampling.structured_outputs]\njson = '{"enum": ["${BG_SCHEMA}"]}'""", {"json": {"enum": ["schema"]}}),
        ('[sampling.structured_outputs.json]\nenum = ["${BG_SCHEMA}"]', {"json": {"enum": ["schema"]}}),
        ("""[sampling]\nstructured_outputs = ' {"json": "schema.json"}'""", {"json": SCHEMA}),
        ('[sampling.structured_outputs]\ngrammar = "x.lark"', {"grammar": 'start: "a"\n'}),
        ("""[sampling.structured_outputs]\ngrammar = 'start: "b"'""", {"grammar": 'start: "b"'}),
        ('[sampling.structured_outputs]\nregex = "a.json"', {"regex": "a.json"}),
        ('[sampling.structured_outputs]\nchoice = ["x.lark", "b"]', {"choice": ["x.lark", "b"]}),
        ("[sampling.structured_outputs]\njson = true", {"json": True}),
        ('[sampling.structured_outputs]\njson_object = true\nafter = "</t>"', {"json_object": True, "after": "</t>"}),
        ("[sampling]\nstructured_outputs = {}", {}),
        ('[sampling]\nstructured_outputs = ""', {}),
    ],
)
def test_a_job_file_names_files_or_holds_the_thing_itself(files: Path, sampling: str, expected: dict[str, Any]) -> None:
    spec = from_text(files, sampling)
    assert asked(spec.sampling) == expected
    again = json.loads(json.dumps(spec.to_dict()))
    assert job_from_dict(again) == spec
    assert json.loads(json.dumps(spec.output_keys()))["sampling.structured_outputs"] == spec.sampling.structured_outputs


def test_the_order_of_properties_stays_and_counts(files: Path) -> None:
    spec = from_text(files, '[sampling.structured_outputs]\njson = "schema.json"')
    assert [*asked(spec.sampling)["json"]["properties"]] == ["b", "a"]
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}  # type: ignore[attr-defined]
    (files / "schema.json").write_text(json.dumps(turned), encoding="utf-8")
    other = from_text(files, '[sampling.structured_outputs]\njson = "schema.json"')
    assert other.output_keys() != spec.output_keys() and asked(other.sampling) == asked(spec.sampling)


def test_a_flag_is_json_or_the_path_of_a_schema(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    assert asked(from_flag("schema.json")) == {"json": SCHEMA}
    assert asked(from_flag('{"json": "schema.json", "after": "x"}')) == {"json": SCHEMA, "after": "x"}
    assert asked(from_flag('{"choice": ["yes", "no"]}')) == {"choice": ["yes", "no"]}
    in_file = '[sampling.structured_outputs]\nregex = "a"'
    spec = from_text(files, in_file, {"sampling": {"structured_outputs": '{"choice": ["b"]}'}})
    assert asked(spec.sampling) == {"choice": ["b"]}
    assert from_text(files, in_file, {"sampling": {"structured_outputs": "{}"}}).sampling == SamplingParams()


def test_a_schema_may_come_through_a_pipe(files: Path) -> None:
    os.mkfifo(files / "pipe")
    with subprocess.Popen(["sh", "-c", f"cat '{files}/schema.json' > '{files}/pipe'"]):
        assert asked(from_flag(str(files / "pipe"))) == {"json": SCHEMA}


TABLE = "[sampling.structured_outputs]\n"
NO = r"9: sampling\.structured_outputs\.json = 'no\.json': cannot read "


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        (
            TABLE + '# a comment\njson = "no.json"',
            NO + r"\S+/no\.json: No such file",
        ),
        (
            '[sampling]\nn = 1\nstructured_outputs = { json = "no.json" }',
            NO,
        ),
        ('[sampling]\nstructured_outputs."json" = "no.json"', r"8: .*: cannot read "),
        ('[sampling]\nstructured_outputs = "no.json"', r"8: .*: cannot read "),
        (TABLE + 'grammar = "no.lark"', r"8: sampling\.structured_outputs\.grammar = .*: cannot read "),
        (TABLE + 'json = "/dev/zero"', r"8: .*: /dev/zero is a device, not a file"),
        (TABLE + 'json = "."', r"8: .*: Is a directory"),
        (TABLE + 'json = "https://x.org/s"', r"8: .*: https:// is not a local path"),
        (TABLE + 'json = "a\\u0000b"', r"8: .*: holds a NUL"),
        (TABLE + 'json = "bytes"', r"8: .*: \S+/bytes is not a text file in UTF-8 \(byte 2\)"),
        (TABLE + 'json = "torn"', r"8: .*: \S+/torn:3: not valid JSON: Expecting"),
        (TABLE + 'json = "asks"', r"8: .*: \S+/asks is a whole structured_outputs, not a JSON schema"),
        (TABLE + 'json = "null"', r"8: .*: \S+/null holds null, which asks for nothing"),
        (TABLE + 'json = "deep"', r"8: .*: \S+/deep is nested too deeply"),
        (TABLE + 'json = "huge"', r"8: .*: \S+/huge is larger than 1 MiB"),
        (TABLE + 'json = "large"', r"7: .*'large'.*: has 7\d,\d{3} bytes of JSON text; at most 65,536 are taken"),
        (TABLE + 'json = "list"', r"7: .*: must have a JSON schema as its json"),
        (TABLE + "json = '{\"a\": '", r"7: .*: has a string as json that is not valid JSON"),
        (TABLE + "json = 2026-01-01", r"7: .*: must have a JSON schema as its json"),
        (TABLE + "json = { enum = [2026-01-01] }", r"7: .*: is not a JSON value: it holds a date"),
        (TABLE + "json = { enum = [nan] }", r"7: .*: is not a JSON value"),
        (TABLE + "jsn = true", r"7: .*: has an unknown key 'jsn' \(known: json, "),
        (TABLE + 'regex = "a"\nchoice = ["b"]', r"7: .*: must have exactly one of .*, not regex and choice"),
        ("[sampling.structured_outputs.json]\nx = 1\n[sampling.structured_outputs]\ny = 1", r"7: .*key 'y'"),
        ("[sampling]\nstructured_outputs = 7", r"8: .*: must be an object, such as"),
        (TABLE + 'json = "${BG_NOWHERE}"', r"7: .*the environment has no BG_NOWHERE"),
        ("[sampling.structured_outputs.json" + ".a" * 5000 + "]\nb = 1", "7: .*: nested too deeply"),
        ("[sampling]\nguided_json = 'a'", r"8: .*unknown key \(in a job it is structured_outputs = { json = "),
        (
            "[sampling]\nguided_whitespace_pattern = 'a'",
            r"8: .*it is structured_outputs = { whitespace_pattern = ",
        ),
        ("[sampling]\nresponse_format = 'a'", r"8: .*unknown key \(in a job it is structured_outputs = { json = "),
        (TABLE + 'regex = "a"\n[sampling]\nignore_eos = true', r"10: sampling\.ignore_eos: ignore_eos = True doe"),
    ],
)
def test_a_job_that_asks_for_what_cannot_be_is_refused_by_its_line(
    files: Path, sampling: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BG_NOWHERE", raising=False)
    (files / "bytes").write_bytes(b"ab\xff")
    (files / "torn").write_text('{\n"a": 1,\n"b" 2}')
    (files / "deep").write_text("[" * 100_000)
    (files / "null").write_text("null")
    (files / "asks").write_text('{"regex": "[0-9]+"}')
    (files / "huge").write_bytes(b" " * (1 << 20) + b"{}")
    (files / "large").write_text(json.dumps({"enum": ["x" * 70_000]}))
    (files / "list").write_text("[]")
    with pytest.raises(UsageError, match=rf"^\S+/job\.toml:{words}") as refusal:
        from_text(files, sampling)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 300 + 2 * len(str(files))


STRICT = {"name": "n", "strict": True, "schema": SCHEMA}
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"structured_outputs": json.dumps({"json": SCHEMA})}, {"json": SCHEMA}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}}, {"json": SCHEMA}),
    ({"structured_outputs": {}}, {}),
    ({"structured_outputs": ""}, {}),
    ({"structured_outputs": None}, {"choice": ["yes", "no"]}),
    ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, {"json": SCHEMA}),
    ({"response_format": json.dumps({"type": "json_schema", "json_schema": STRICT})}, {"json": SCHEMA}),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": {}}, {}),
    ({"response_format": None}, {"choice": ["yes", "no"]}),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {}}, {"json_object": True}),
]


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_a_row_replaces_what_the_job_asks_for_under_any_name(row: dict[str, Any], expected: dict[str, Any]) -> None:
    merged = merge_params(JOB, row)
    assert asked(merged) == expected
    assert merge_params(JOB, {"structured_outputs": merged.structured_outputs}) == merged


@pytest.mark.parametrize(
    ("row", "key", "message"),
    [
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", ""),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "not json and regex"),
        ({"structured_outputs": [1]}, "structured_outputs", "[1] must be an object, such as"),
        ({"structured_outputs": {"json": "schema.json"}}, "structured_outputs", "string as json that is not valid"),
        ({"structured_outputs": "schema.json"}, "structured_outputs", "must be an object"),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs", "asks for a structural_tag"),
        ({"response_format": {"type": "grammar"}}, "response_format", 'whose type is "text", "json_object" or'),
        ({"response_format": "json"}, "response_format", 'whose type is "text", "json_object" or'),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must hold json_schema.schema"),
        ({"guided_json": 5}, "guided_json", 'guided_json is structured_outputs = {"json": ...} here, as in vLLM'),
        ({"structured_outputs": {"json": {"enum": ["x" * 70_000]}}}, "structured_outputs", "at most 65,536 are taken"),
    ],
)
def test_a_row_that_asks_twice_or_wrongly_is_refused_by_name(row: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(ParamError) as caught:
        merge_params(JOB, row)
    said = str(caught.value)
    assert caught.value.key == key and "\n" not in said and len(said) < 300
    first = next(iter(row))
    assert message in said and (message or said.startswith(f"{first} and {key} both say what the text must look like"))


@pytest.mark.parametrize(
    ("key", "value"), [("labels", ["a", "b"]), ("ignore_eos", True), ("min_tokens", 2), ("max_tokens", 0)]
)
def test_what_no_structured_row_can_have_is_refused_with_both_remedies(key: str, value: object) -> None:
    others: dict[str, Any] = {"prompt_logprobs": 0} if key == "max_tokens" else {}
    with pytest.raises(ParamError) as caught:
        merge_params(JOB, {key: value, **others})
    assert caught.value.key == key
    assert str(caught.value).endswith(
        f"does not go with structured_outputs: change {key}, or give structured_outputs = {{}} for free text"
    )
    free = merge_params(JOB, {key: value, **others, "response_format": {"type": "text"}})
    assert free == merge_params(SamplingParams(), {key: value, **others})
    with pytest.raises(ParamError, match=rf"^{key} = .* does not go with structured_outputs") as caught:
        merge_params(free, {"structured_outputs": {"regex": "a"}})  # a row's, over the job's
    assert caught.value.key == "structured_outputs"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.none() | st.text(min_size=1, max_size=3))
def test_a_canonical_text_stays_as_it_is_and_comes_back_from_a_manifest(schema: dict[str, Any], after: str) -> None:
    try:
        params = merge_params(SamplingParams(), {"structured_outputs": {"json": schema, "after": after}})
    except ParamError as error:  # a number that Python reads as infinite, a lone surrogate
        assert "is not a JSON value" in str(error)
        return
    assert asked(params) == {"json": schema} | ({"after": after} if after else {})
    text = json.loads(json.dumps(params.structured_outputs))
    assert merge_params(SamplingParams(), {"structured_outputs": text}) == params
