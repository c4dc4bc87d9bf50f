"""Shards divide the rows of an input: each row belongs to exactly one."""

from __future__ import annotations

import pytest

from batchgen.core.shard import WHOLE, Shard
from batchgen.run.invocation import RunOptions


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_every_row_belongs_to_one_shard(count: int) -> None:
    shards = [Shard(number, count) for number in range(1, count + 1)]
    rows = [[index for index in range(20) if shard.owns(index)] for shard in shards]
    assert sorted(index for owned in rows for index in owned) == list(range(20))
    assert rows == [list(shard.rows(20)) for shard in shards]


def test_a_whole_input_is_one_shard() -> None:
    assert [WHOLE.owns(index) for index in (-1, 0, 5)] == [False, True, True]
    assert str(Shard(2, 8)) == "2/8"


@pytest.mark.parametrize(("number", "count"), [(0, 1), (3, 2), (-1, 4)])
def test_a_shard_outside_its_count_is_refused(number: int, count: int) -> None:
    with pytest.raises(ValueError, match="1 <= i <= n"):
        Shard(number, count)


def test_options_take_a_shard_as_a_pair() -> None:
    assert RunOptions(shard=(2, 3)).shard == Shard(2, 3)  # type: ignore[arg-type]  # as scripts have always written it
