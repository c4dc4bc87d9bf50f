"""Files on web servers, which differ: in what they tell of a version, in ranges, in where they redirect to."""

from __future__ import annotations

import pytest
from input_helpers import jsonl, sample_rows, source_of
from remote_servers import Remote, fingerprinted, server_of, settle

from batchgen.core import remote
from batchgen.core.errors import InputError, RemoteError, UsageError
from batchgen.core.units import WHOLE
from batchgen.input import input_bytes
from batchgen.input.source import RowRange

on_the_web = pytest.mark.parametrize("place", ["web"], indirect=True)


@pytest.mark.parametrize("place", ["web", "s3"], indirect=True)
def test_a_slow_server_is_asked_again(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STILL_S", 0.2)
    if place.kind == "s3":
        settle("s3", f"{place.url}//", monkeypatch)  # a client that knows it
    server_of(place).slow_s = 0.5
    source = fingerprinted(place.put("rows.jsonl", jsonl(sample_rows(8))))
    server_of(place).faults = ["slow"]
    assert len([*source.read()]) == 8
    server_of(place).lasting = "slow"
    with pytest.raises(RemoteError, match=r"the server cannot be reached, or breaks off .*[tT]ime"):
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
    server_of(place).headers = {"Content-Encoding": "gzip"}  # of what is sent, which is not what is stored
    with pytest.raises(UsageError, match="the server sends no size"):
        source_of(address)


@on_the_web
def test_a_server_without_ranges_gives_a_block_and_no_more(place: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    server_of(place).has_ranges = False
    source = fingerprinted(place.put("rows.jsonl", jsonl(sample_rows(8))))
    assert len([*source.read()]) == 8
    monkeypatch.setattr(input_bytes, "BLOCK_BYTES", 100)
    said = r"the server does not support byte ranges: download the file to this machine first"
    with pytest.raises(RemoteError, match=said):
        [*source.read()]


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
