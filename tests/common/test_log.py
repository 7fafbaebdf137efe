"""What a log line names as its process."""

from __future__ import annotations

from weft.common.log import head_name


def test_a_replica_of_several_is_named_and_a_worker_always_is() -> None:
    assert head_name(0, 1) == "head"
    assert head_name(0, 1, 1) == "rank 1"
    assert [head_name(number, 2) for number in range(2)] == ["head 0", "head 1"]
    assert head_name(1, 2, 3) == "head 1 rank 3"
