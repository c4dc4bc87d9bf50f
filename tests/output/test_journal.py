"""The journal as its users see it: what was appended is there after reopening, once, and damage costs only itself."""

import json
import os
import shutil
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.errors import StorageError
from batchgen.core.json_line import encode_json
from batchgen.core.records import Cursor
from batchgen.core.units import WHOLE, Shard
from batchgen.output import journal as journal_module
from batchgen.output.journal import Counts, Journal, JournalEntry
from batchgen.output.segments import Damage, Line, RowIndex, encode_line, scan, segments


def cursor(index: int) -> Cursor:
    return Cursor(file=0, offset=100 * (index + 1), row=0, index=index + 1)


def entry(index: int, kind: Literal["result", "error"] = "result", **payload: Any) -> JournalEntry:
    return JournalEntry(index, cursor(index), kind, encode_json({"index": index, **payload}))


def filled(folder: Path, indexes: Iterable[int], shard: Shard = WHOLE) -> list[Path]:
    journal = Journal.open(folder, shard)
    for index in indexes:
        journal.append(entry(index))
    journal.close()
    return sorted(folder.glob("*.seg"))


def payloads(journal: Journal) -> dict[int, Any]:
    return {index: json.loads(journal.payload(index)) for index in journal.done}


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_scanned_to_the_last_byte_without_a_record(content: bytes) -> None:
    found = list(scan(BytesIO(content)))
    assert all(isinstance(item, Damage) for item in found)
    assert sum(item.size for item in found) == len(content)


@given(st.lists(st.tuples(st.integers(0, 10**12), st.text(max_size=20)), max_size=6), st.binary(max_size=40), st.data())
def test_garbage_between_lines_costs_no_line(rows: list[Any], garbage: bytes, data: st.DataObject) -> None:
    lines = [encode_line(b"r", index, cursor(index), json.dumps(text).encode()) for index, text in rows]
    at = data.draw(st.integers(0, len(lines)))
    content = b"".join(lines[:at]) + (garbage + b"\n" if garbage else b"") + b"".join(lines[at:])
    found = [item.row for item in scan(BytesIO(content)) if isinstance(item, Line)]
    assert found == [index for index, _ in rows]


def test_a_flip_of_any_bit_is_noticed_and_costs_only_the_lines_it_touches() -> None:
    lines = [encode_line(b"re"[i % 2 :][:1], i, cursor(i), b'{"text": "%d"}' % i) for i in range(4)]
    content = b"".join(lines)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines))]
    for position in range(len(content)):
        hit = max(i for i, start in enumerate(starts) if start <= position)
        lost = {hit, hit + 1} if content[position : position + 1] == b"\n" else {hit}
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            kept = [item.row for item in scan(BytesIO(bytes(flipped))) if isinstance(item, Line)]
            assert kept == [i for i in range(len(lines)) if i not in lost]


def test_a_torn_tail_of_every_length_is_cut_reported_and_its_row_appended_again(fast_folder: Path) -> None:
    (segment,) = filled(fast_folder / "whole", range(3))
    content = segment.read_bytes()
    for size in range(len(content) + 1):
        folder = fast_folder / str(size)
        folder.mkdir()
        (folder / segment.name).write_bytes(content[:size])
        journal = Journal.open(folder)
        num_whole, end = content[:size].count(b"\n"), content.rfind(b"\n", 0, size) + 1
        assert list(journal.done) == list(range(num_whole))
        assert (folder / segment.name).read_bytes() == content[:end]
        assert ["unfinished record" in message for message in journal.recovery] == [True] * (end < size)
        for index in range(num_whole, 3):
            journal.append(entry(index))
        journal.close()
        again = Journal.open(folder)
        assert payloads(again) == {index: {"index": index} for index in range(3)}
        assert again.recovery == []
        again.close()


def test_a_damaged_record_is_reported_with_its_place_and_the_rest_kept(tmp_path: Path) -> None:
    (segment,) = filled(tmp_path, range(5))
    content = bytearray(segment.read_bytes())
    line_starts = [0] + [at + 1 for at, byte in enumerate(content) if byte == 10]
    content[line_starts[2] + 30] ^= 4
    segment.write_bytes(content)
    journal = Journal.open(tmp_path)
    assert list(journal.done) == [0, 1, 3, 4]
    (message,) = journal.recovery
    assert f"{segment.name} is damaged at byte {line_starts[2]}" in message
    journal.append(entry(2))
    assert list(journal.done) == [0, 1, 2, 3, 4]
    journal.close()


def test_damage_that_appears_after_opening_is_never_read_as_a_row(tmp_path: Path) -> None:
    (segment,) = filled(tmp_path, range(3))
    journal = Journal.open(tmp_path)
    content = bytearray(segment.read_bytes())
    content[-10] ^= 1
    segment.write_bytes(content)
    with pytest.raises(StorageError, match="no longer matches its checksum"):
        journal.payload(2)
    journal.close()


def test_a_row_ends_once_and_in_its_own_shard(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, shard=Shard(2, 3))
    with pytest.raises(ValueError, match="row 3 is not in this shard"):
        journal.append(entry(3))
    assert 3 not in journal.done and not list(tmp_path.glob("*.seg"))
    journal.append(entry(1))
    with pytest.raises(ValueError, match="row 1 is in the journal already"):
        journal.append(entry(1, "error"))
    journal.close()
    (segment,) = tmp_path.glob("*.seg")
    with pytest.raises(StorageError, match=rf"{segment.name}: row 1 is not of this shard"):
        Journal.open(tmp_path, shard=Shard(1, 3))


def test_reading_resumes_before_the_first_gap(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "empty")
    assert journal.resume_cursor is None
    journal.append(entry(1))
    assert journal.resume_cursor is None, "the first row is missing"
    journal.close()
    filled(tmp_path, [0, 1, 2, 4, 7])
    journal = Journal.open(tmp_path)
    assert journal.done.first_gap == 3
    assert journal.resume_cursor == cursor(2)
    journal.append(entry(3))
    assert journal.resume_cursor == cursor(4)
    journal.close()
    filled(tmp_path / "shard", [1, 4, 7, 13], shard=Shard(2, 3))
    journal = Journal.open(tmp_path / "shard", shard=Shard(2, 3))
    assert (journal.done.first_gap, journal.resume_cursor) == (10, cursor(7))
    journal.close()


def test_journals_that_go_on_from_one_state_never_name_two_segments_alike(tmp_path: Path) -> None:
    filled(tmp_path / "here", range(3))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here = filled(tmp_path / "here", [3])
    there = filled(tmp_path / "there", [4])
    assert {path.name for path in here} & {path.name for path in there} == {here[0].name}
    shutil.copy(there[1], tmp_path / "here")
    assert [*Journal.open(tmp_path / "here").done] == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 60), max_size=80), st.integers(1, 4), st.data())
def test_the_row_index_is_a_set_with_a_first_gap(indexes: list[int], count: int, data: st.DataObject) -> None:
    number = data.draw(st.integers(1, count))
    mine = [index for index in indexes if index % count == number - 1]
    done = RowIndex(Shard(number, count))
    for index in mine:
        done.add(index, segment=index + 1, offset=index * 1000, is_error=index % 2 == 0)
    assert list(done) == sorted(set(mine))
    assert all((index in done) == (index in mine) for index in range(-3, 64))
    assert done.first_gap == next(i for i in range(number - 1, 1000, count) if i not in mine)
    assert done.num_errors == len({index for index in mine if index % 2 == 0})
    assert all(done.location(index).offset == index * 1000 for index in mine)


def test_rows_are_readable_before_they_are_committed_and_outlive_their_process(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    for index, text in enumerate("ab"):
        journal.append(entry(index, text=text))
        assert json.loads(journal.payload(index)) == {"index": index, "text": text}
    assert Journal.read(tmp_path).counts == Counts(results=2)
    journal.close()


def test_partials_survive_and_go_when_their_row_finishes(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.save_partials({4: (1, 2, 3), 5: (9,)})
    journal.save_partials({4: (1, 2, 3, 4)})
    journal.append(entry(5))
    assert journal.partials == {4: (1, 2, 3, 4)}
    journal.close()
    again = Journal.open(tmp_path)
    assert again.partials == {4: (1, 2, 3, 4)}
    again.close()


def test_tokens_that_grow_are_written_once_and_go_with_those_before_them(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    turns = [tuple(range(1000, 1000 + 50 * n)) for n in range(1, 41)]
    for token_ids in turns:
        journal.add_partial(4, token_ids)
    journal.close()
    [path] = segments(tmp_path)
    assert path.stat().st_size < 12 * len(turns[-1])
    again = Journal.open(tmp_path)
    assert again.partials == {4: turns[-1]}
    again.add_partial(4, (7, 8))  # others, which begin in another way
    again.close()
    assert Journal.open(tmp_path).partials == {4: (7, 8)}
    path.write_bytes(path.read_bytes().replace(b"1060", b"1061", 1))  # a line in the middle fails its checksum
    segments(tmp_path)[1].unlink()
    assert Journal.open(tmp_path).partials == {}


def test_partials_of_a_row_that_another_copy_of_the_folder_finished_are_left_out(tmp_path: Path) -> None:
    filled(tmp_path / "here", [3])
    filled(tmp_path / "there", [4])
    journal = Journal.open(tmp_path / "there")
    journal.save_partials({3: (1, 2)})
    journal.close()
    shutil.copytree(tmp_path / "there", tmp_path / "here", dirs_exist_ok=True)
    journal = Journal.open(tmp_path / "here")
    assert ([*journal.done], journal.partials) == ([3, 4], {})
    journal.close()


def test_the_counts_of_a_running_journal_are_read_without_touching_it(tmp_path: Path) -> None:
    assert Journal.read(tmp_path / "journal").counts == Counts() and not (tmp_path / "journal").exists()
    journal = Journal.open(tmp_path)
    journal.append(entry(0))
    journal.append(entry(1, "error"))
    journal.commit()
    (segment,) = tmp_path.glob("*.seg")
    with segment.open("ab") as file:
        file.write(b"half a li")
    before = segment.read_bytes()
    assert Journal.read(tmp_path).counts == Counts(results=1, errors=1)
    assert segment.read_bytes() == before
    journal.close()


def test_commits_come_by_themselves_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(journal_module.time, "monotonic", lambda: now_s)
    journal = Journal.open(tmp_path)
    journal.append(entry(0))
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    journal.append(entry(1))
    assert not synced
    now_s = 0.6
    journal.append(entry(2))
    assert len(synced) == 1
    monkeypatch.undo()
    journal.close()
