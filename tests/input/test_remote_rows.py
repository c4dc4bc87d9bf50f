"""Rows from remote files are those of the same file on this machine, from every cursor, whatever the server does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from input_helpers import CONTENTS, jsonl, parquet, sample_rows, source_of
from remote_servers import FileServer, Remote, fingerprinted, server_of, settle
from repeats import slow

from batchgen.config.job import InputSpec
from batchgen.core import remote
from batchgen.core.errors import ExitCode, InputError, RemoteError, UsageError
from batchgen.core.file_digests import Digests
from batchgen.core.records import Cursor
from batchgen.input import input_bytes
from batchgen.input.source import open_source

KINDS = ("moto", "web", slow("hf"), slow("gs"))
SERVED = ("s3", "web", slow("hf"), slow("gs"))  # whose faults the tests decide


every_kind = pytest.mark.parametrize("place", KINDS, indirect=True)
served = pytest.mark.parametrize("place", SERVED, indirect=True)
on_the_web = pytest.mark.parametrize("place", ["web"], indirect=True)


# ---------------------------------------------------------------- equal to local files


@every_kind
@pytest.mark.parametrize("name", CONTENTS)
def test_rows_are_those_of_the_same_local_file_from_every_cursor(place: Remote, name: str, tmp_path: Path) -> None:
    content = CONTENTS[name](sample_rows(8))
    (tmp_path / name).write_bytes(content)
    address = place.put(name, content)
    local, source = [*source_of(tmp_path / name).read()], fingerprinted(address)
    rows = [*source.read()]
    assert [{**vars_of(row), "source": ""} for row in rows] == [{**vars_of(row), "source": ""} for row in local]
    assert {row.source for row in rows} == {address}
    for place_in, row in enumerate(rows):
        assert [*source.read(row.after)] == rows[place_in + 1 :]
    assert [row.index for row in source.read(Cursor(0, 0, 0, 0), lambda index: index % 3 == 1)] == [1, 4, 7]
    assert source.num_rows() == source_of(tmp_path / name).num_rows()
    source.check_unchanged()
    assert source.paths == ()


def vars_of(row: Any) -> dict[str, Any]:
    return {name: getattr(row, name) for name in type(row).__dataclass_fields__}


@every_kind
def test_an_empty_file_has_no_rows(place: Remote) -> None:
    source = fingerprinted(place.put("empty.jsonl", b""))
    assert [*source.read()] == []
    source.check_unchanged()


@every_kind
def test_the_fingerprint_is_name_size_and_version_and_changes_with_the_content(place: Remote) -> None:
    address = place.put("deep/print.jsonl", jsonl(sample_rows(2)))
    [first] = source_of(address).fingerprint(Digests())["files"]
    assert first["file"] == "print.jsonl"
    assert first["bytes"] == len(jsonl(sample_rows(2)))
    assert source_of(address).fingerprint(Digests())["files"] == [first]
    place.put("deep/print.jsonl", jsonl(sample_rows(2)).replace(b"question", b"guestion"))
    [second] = source_of(address).fingerprint(Digests())["files"]
    assert {**second, "version": ""} == {**first, "version": ""}
    assert second["version"] != first["version"]


@pytest.mark.parametrize("place", ["moto", "hf", "gs"], indirect=True)
def test_globs_folders_and_lists_name_files_in_order(place: Remote) -> None:
    for name in ("many/b.jsonl", "many/a.jsonl", "many/a.txt", "many/deep/c.jsonl"):
        place.put(name, jsonl([{"id": name}]))
    for name in ("tables/b.parquet", "tables/deep/a.parquet", "tables/_hidden.parquet", "tables/.x/a.parquet"):
        place.put(name, parquet([{"id": name}]))
    place.put("many/odd[1].jsonl", jsonl([{"id": "odd"}]))

    def ids(*names: str) -> list[Any]:
        source = open_source(InputSpec(path=tuple(map(place.address, names))))
        return [row.columns["id"] for row in source.read()]  # type: ignore[union-attr]

    assert ids("many/[ab].jsonl") == ["many/a.jsonl", "many/b.jsonl"]
    assert ids("many/**/c.jsonl", "many/a.jsonl") == ["many/deep/c.jsonl", "many/a.jsonl"]
    assert ids("tables") == ids("tables/") == ["tables/b.parquet", "tables/deep/a.parquet"]
    assert ids("many/odd[1].jsonl") == ["odd"]
    for name, why in {
        "many/*.csv": "no file matches input",
        "many": "is a folder without .parquet files; name files, as in '.*many/.*jsonl'",
        "none.jsonl": "there is no such file",
    }.items():
        with pytest.raises(UsageError, match=why):
            ids(name)
    with pytest.raises(UsageError, match="is named twice"):
        ids("many/a.jsonl", "many/a*l")


@pytest.mark.parametrize("place", ["moto"], indirect=True)
def test_a_bucket_that_is_not_there_is_named(place: Remote) -> None:
    for path in ("s3://nobucket/x.jsonl", "s3://nobucket/*.jsonl"):
        said = r"s3://nobucket/.*(there is no such bucket|no file matches)|no file matches"
        with pytest.raises(UsageError, match=said):
            source_of(path)


# ---------------------------------------------------------------- no more than is needed


def ranges_of(server: FileServer) -> list[tuple[int, int]]:
    """First and last byte of each part that was asked for."""
    parts = [part.removeprefix("bytes=").partition("-") for _, part in server.requests if part]
    return [(int(first), int(last)) for first, _, last in parts]


@served
def test_a_large_file_is_fetched_in_blocks_from_the_cursor_on(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_bytes, "BLOCK_BYTES", 2000)
    rows = sample_rows(400)
    content = jsonl(rows)
    source = fingerprinted(place.put("large.jsonl", content))
    read = [*source.read()]
    server_of(place).reset(keep_files=True)
    assert [*source.read(read[299].after)] == read[300:]
    ranges = ranges_of(server_of(place))
    assert max(end - start + 1 for start, end in ranges) == 2000
    assert sum(end - start + 1 for start, end in ranges if start) <= len(content) - read[299].after.offset


@on_the_web
def test_only_the_row_groups_that_are_wanted_are_fetched(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_bytes, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("batchgen.input.formats.parquet._BUFFER_BYTES", 1000)
    table = pa.table({"prompt": [os.urandom(500).hex() for _ in range(400)]})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=40)
    content = sink.getvalue().to_pybytes()
    source = fingerprinted(place.put("large.parquet", content))
    server_of(place).reset(keep_files=True)
    [row] = source.read(None, lambda index: index == 50)
    assert row.columns["prompt"] == table["prompt"][50].as_py()  # type: ignore[union-attr]
    ranges = ranges_of(server_of(place))
    in_footer = [(start, end) for start, end in ranges if start >= len(content) - (1 << 16)]
    assert sum(end - start + 1 for start, end in in_footer) == 1 << 16
    assert 40_000 < sum(end - start + 1 for start, end in ranges if (start, end) not in in_footer) < 50_000


# ---------------------------------------------------------------- changes


def changed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "prompt": row["prompt"].replace("question", "guestion")} for row in rows]


@served
@pytest.mark.parametrize(("name", "change"), [*((name, "replaced") for name in CONTENTS), ("rows.jsonl", "removed")])
def test_a_file_that_changes_while_it_is_read_ends_the_run_before_a_new_row(
    place: Remote, name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_bytes, "BLOCK_BYTES", 2000)
    monkeypatch.setattr("batchgen.input.formats.parquet._BUFFER_BYTES", 500)
    rows = [{**row, "pad": os.urandom(300).hex()} for row in sample_rows(1000)]
    if name == "rows.txt":
        rows = [{**row, "prompt": row["prompt"] + row["pad"]} for row in rows]
    address = place.put(name, CONTENTS[name](rows))
    source = fingerprinted(address)
    reading = source.read()
    read = [next(reading)]
    if change == "removed":
        place.remove(name)
    else:
        place.put(name, CONTENTS[name](changed(rows)))
    with pytest.raises(InputError, match=f"{name} has changed while it was in use: .*run again to resume") as caught:
        read.extend(reading)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "\n" not in str(caught.value)
    assert len(read) < 1000
    assert not any("guestion" in str(row) or not hasattr(row, "columns") for row in read)
    with pytest.raises(InputError):
        source.check_unchanged()


@served
def test_a_change_after_the_last_row_was_read_is_noticed_too(place: Remote) -> None:
    rows = sample_rows(3)
    source = fingerprinted(place.put("rows.jsonl", jsonl(rows)))
    assert len([*source.read()]) == 3
    place.put("rows.jsonl", jsonl(changed(rows)))
    with pytest.raises(InputError, match=r"rows\.jsonl has changed .*its version was .* and is .* now"):
        source.check_unchanged()
    place.put("rows.jsonl", b"")
    with pytest.raises(InputError, match=r"it had \d+ bytes and has 0 now"):
        source.check_unchanged()


@pytest.mark.parametrize("place", ["s3", "web"], indirect=True)
def test_a_server_that_heeds_no_precondition_gives_no_byte_of_another_version(place: Remote) -> None:
    rows = sample_rows(3)
    source = fingerprinted(place.put("rows.jsonl", jsonl(rows)))
    server_of(place).heeds_if_match = False
    place.put("rows.jsonl", jsonl(changed(rows)))
    with pytest.raises(InputError, match=r"rows\.jsonl has changed"):
        [*source.read()]


# ---------------------------------------------------------------- faults


@served
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"])
@pytest.mark.parametrize("fault", ["reset", 503])
def test_faults_that_pass_change_no_row(place: Remote, name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fingerprinted(place.put(name, CONTENTS[name](sample_rows(8))))
    quicken(monkeypatch)
    expected = [*source.read()]
    assert len(expected) == 8
    server_of(place).faults = [fault, "ok", fault, fault]
    assert [*source.read()] == [*source.read()] == expected
    assert server_of(place).faults == []


def quicken(patch: pytest.MonkeyPatch) -> None:
    """The libraries' own waits before they try again are left out."""
    import asyncio

    sleep = asyncio.sleep

    async def short(delay: float, *args: Any) -> Any:
        return await sleep(min(delay, 0.01), *args)

    patch.setattr(asyncio, "sleep", short)
    patch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)


@served
@pytest.mark.parametrize("fault", [503, "reset"])
def test_a_lasting_fault_is_one_line_and_no_bad_row(place: Remote, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    for name in ("rows.jsonl", "rows.jsonl.gz", "rows.parquet"):
        server_of(place).lasting = None
        source = fingerprinted(place.put(name, CONTENTS[name](sample_rows(8))))
        server_of(place).lasting = fault
        rows: list[Any] = []
        with pytest.raises(RemoteError, match=rf"cannot read on in .*{name}: .*run again to resume") as caught:
            rows.extend(source.read())
        assert rows == []
        assert caught.value.exit_code == ExitCode.CRASH
        assert "\n" not in str(caught.value)


@served
def test_refusals_are_of_usage_before_a_run_and_resume_in_it(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    address = place.put("rows.jsonl", jsonl(sample_rows(8)))
    source = fingerprinted(address)
    server_of(place).lasting = 403
    with pytest.raises(RemoteError, match=r"access is refused.*run again to resume") as caught:
        [*source.read()]
    assert "hush" not in str(caught.value)
    server_of(place).lasting = None
    assert len([*source.read()]) == 8


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_credentials_that_do_not_hold_are_of_usage_with_what_to_do(
    place: Remote, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = place.put("rows.jsonl", jsonl(sample_rows(8)))
    server_of(place).denies = True
    with pytest.raises(UsageError, match=r"cannot find s3://.*access is refused .*; set AWS_PROFILE or") as caught:
        source_of(address)
    assert caught.value.exit_code == ExitCode.USAGE
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    settle("", place.url + "/", monkeypatch)  # a client without what the last one knows
    with pytest.raises(UsageError, match="no valid credentials"):
        source_of(address)


def test_a_server_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAITS_S", ())
    with pytest.raises(RemoteError, match=r"cannot open http://127.0.0.1:1/x.jsonl: the server cannot be reached"):
        source_of("http://127.0.0.1:1/x.jsonl")
