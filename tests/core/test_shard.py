"""Shards divide the rows of an input: each row belongs to exactly one."""

from __future__ import annotations

import pytest

from batchgen.core.records import WHOLE, Shard


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_row_belongs_to_one_shard(count: int) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    rows = [[index for index in range(20) if shard.owns(index)] for shard in shards]
    assert sorted(index for owned in rows for index in owned) == list(range(20))
    assert rows == [list(shard.rows(20)) for shard in shards]


def test_a_whole_input_is_one_shard() -> None:
    assert [WHOLE.owns(index) for index in (-1, 0, 5)] == [False, True, True]
    assert str(Shard(2, 8)) == "2/8"
