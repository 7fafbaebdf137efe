"""Two generators in turns."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from weft.common.errors import EngineDead
from weft.overlap.interleave import interleave
from weft.parallel.comm import Pending


class Named(Pending):
    """A collective that reports when its result is taken."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        log.append(f"launch {name}")

    def result(self):  # type: ignore[no-untyped-def]
        self.log.append(f"take {self.name}")


def micro_batch(
    name: str, points: int, log: list[str], fails: int | None = None
) -> Generator[Pending, None, str]:
    try:
        for point in range(points):
            if fails == point:
                raise ValueError(f"{name} at {point}")
            pending = Named(f"{name}{point}", log)
            yield pending
            pending.result()
        if fails == points:
            raise ValueError(f"{name} at {points}")
        return name
    finally:
        log.append(f"end {name}")


def test_strict_alternation() -> None:
    log: list[str] = []
    turns: list[int] = []
    assert interleave(micro_batch("a", 2, log), micro_batch("b", 2, log), turns.append) == ("a", "b")
    assert turns == [0, 1, 0, 1, 0, 1]
    assert log == [
        "launch a0",
        "launch b0",
        "take a0",
        "launch a1",
        "take b0",
        "launch b1",
        "take a1",
        "end a",
        "take b1",
        "end b",
    ]


def test_without_communication_one_runs_after_the_other() -> None:
    log: list[str] = []
    assert interleave(micro_batch("a", 0, log), micro_batch("b", 0, log)) == ("a", "b")
    assert log == ["end a", "end b"]


@pytest.mark.requirement("C5")
@pytest.mark.parametrize("who", ["a", "b"])
@pytest.mark.parametrize("point", [0, 1, 2, 3])
def test_a_failure_passes_through_and_ends_both(who: str, point: int) -> None:
    log: list[str] = []
    micro_batches = [micro_batch(name, 3, log, point if name == who else None) for name in ("a", "b")]
    with pytest.raises(ValueError, match=f"{who} at {point}"):
        interleave(*micro_batches)
    started = [name for name in ("a", "b") if f"end {name}" in log]
    assert started == (["a"] if (who, point) == ("a", 0) else ["a", "b"])
    for one in micro_batches:
        with pytest.raises(StopIteration):
            next(one)


@pytest.mark.requirement("C5")
@pytest.mark.parametrize(("first", "second"), [(2, 3), (3, 2), (0, 1), (1, 0)])
def test_micro_batches_that_communicate_unequally_are_refused(first: int, second: int) -> None:
    log: list[str] = []
    with pytest.raises(EngineDead, match="equally often"):
        interleave(micro_batch("a", first, log), micro_batch("b", second, log))
    assert sorted(entry for entry in log if entry.startswith("end")) == ["end a", "end b"]
