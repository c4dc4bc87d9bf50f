"""Files on web servers, which differ: in what they tell of a version, in ranges, in where they redirect to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from input_helpers import jsonl, parquet, sample_rows, source_of
from remote_servers import Remote, fingerprinted, server_of, settle

from batchgen.core import remote
from batchgen.core.errors import InputError, RemoteError, UsageError
from batchgen.core.shard import WHOLE
from batchgen.input import input_bytes, pinned_files
from batchgen.input.source import RowRange

on_the_web = pytest.mark.parametrize("place", ["web"], indirect=True)


@pytest.mark.parametrize("place", ["web", "s3"], indirect=True)
def test_a_slow_server_is_asked_again(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_files, "TIMEOUT_S", 0.2)
    if place.kind == "s3":
        monkeypatch.setattr(remote, "STILL_S", 0.2)
        settle("s3", f"{place.url}//", monkeypatch)  # a client that knows it
    server_of(place).slow_s = 0.5
    source = fingerprinted(place.put("rows.jsonl", jsonl(sample_rows(8))))
    server_of(place).faults = ["slow"]
    assert len([*source.read()]) == 8
    server_of(place).lasting = "slow"
    with pytest.raises(RemoteError, match=r"the server cannot be reached, or breaks off .*time"):
        [*source.read()]


@on_the_web
@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": None},
        {"ETag": None, "Last-Modified": "Sun, 22 Nov 2026 00:00:01 GMT"},
        {"ETag": 'W/"1"'},
        {"Content-Encoding": "identity"},
    ],
)
def test_a_weak_etag_or_a_date_will_do(place: Remote, headers: dict[str, str | None]) -> None:
    server_of(place).headers = headers
    source = fingerprinted(place.put("rows.jsonl", jsonl(sample_rows(8))))
    assert len([*source.read()]) == 8
    other = (
        {"ETag": 'W/"2"'} if headers.get("ETag") else {"ETag": None, "Last-Modified": "Sun, 22 Nov 2026 01:00:00 GMT"}
    )
    server_of(place).headers = other  # type: ignore[assignment]
    with pytest.raises(InputError, match="it is no longer the same version"):
        [*source.read()]


@on_the_web
def test_a_server_that_tells_no_version_or_no_size_is_refused(place: Remote) -> None:
    address = place.put("rows.jsonl", jsonl(sample_rows(8)))
    server_of(place).headers = {"ETag": None, "Last-Modified": None}
    with pytest.raises(UsageError, match=r"the server sends no ETag or Last-Modified, .*download it"):
        source_of(address)
    server_of(place).headers = {"Content-Range": "bytes 0-0/*"}
    with pytest.raises(UsageError, match="the server sends no size"):
        source_of(address)


@on_the_web
def test_a_server_without_ranges_will_do_for_small_files(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    server_of(place).has_ranges = False
    source = fingerprinted(place.put("rows.parquet", parquet(sample_rows(8))))
    rows = [*source.read()]
    assert len(rows) == 8
    assert [*source.read(rows[4].after)] == rows[5:]
    monkeypatch.setattr(pinned_files, "_WHOLE_BYTES", 100)
    said = r"the server does not support byte ranges: download the file to this machine first"
    with pytest.raises(RemoteError, match=said):
        [*source.read()]


@on_the_web
@pytest.mark.parametrize("part", ["bytes 5-9/{}", "bytes 0-9/99999999999999", "bytes x", "bytes */{}"])
def test_another_part_than_was_asked_for_is_no_row(place: Remote, part: str) -> None:
    content = jsonl(sample_rows(8))
    source = fingerprinted(place.put("rows.jsonl", content))
    server_of(place).headers = {"Content-Range": part.format(len(content))}
    with pytest.raises((RemoteError, InputError)):
        [*source.read()]


@on_the_web
def test_redirects_stay_on_the_web(place: Remote, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(jsonl(sample_rows(1)))
    server = server_of(place)
    address = place.put("rows.jsonl", jsonl(sample_rows(8)))
    server.moved = {"/here": address, "/loop": f"{place.url}/loop"}
    for number, target in enumerate((f"file://{tmp_path}/rows.jsonl", "ftp://127.0.0.1/x", "data:,x", "gopher://x")):
        server.moved[f"/{number}"] = target
        with pytest.raises(UsageError, match=r"cannot read .*: its redirects loop, .*not follow them"):
            source_of(f"{place.url}/{number}")
    assert len([*fingerprinted(f"{place.url}/here").read()]) == 8
    with pytest.raises(UsageError, match="redirects loop"):
        source_of(f"{place.url}/loop")


def test_a_redirect_never_leaves_encryption() -> None:
    from email.message import Message
    from urllib.request import Request

    redirects = pinned_files._Redirects()
    where: Any = (None, 302, "", Message())
    assert redirects.redirect_request(Request("https://host/x"), *where, "http://host/x") is None
    assert redirects.redirect_request(Request("http://host/x"), *where, "https://host/x") is not None


@on_the_web
def test_a_large_file_is_not_read_once_more_to_count_its_rows(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    source = fingerprinted(place.put("rows.jsonl", jsonl(sample_rows(8))))
    assert RowRange(source, WHOLE).count() == 8
    monkeypatch.setattr(input_bytes, "_CHEAP_BYTES", 10)
    assert RowRange(source, WHOLE).count() is None


@on_the_web
def test_a_name_with_spaces_and_letters_of_any_script_is_asked_for_as_urls_are(place: Remote) -> None:
    assert len([*fingerprinted(place.put("a b/é.jsonl", jsonl(sample_rows(2)))).read()]) == 2
    assert len([*fingerprinted(place.address("a%20b/%C3%A9.jsonl?page=1")).read()]) == 2
