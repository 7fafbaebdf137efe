"""The table of streams is free of races, every needed wait is necessary, and rehearsed engines match the
table."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.rehearsal.order import HOST, Free, Record, Use, Wait, races
from tests.rehearsal.rig import rehearse, short
from tests.rehearsal.streams import CAPTURE, COLLECTIVES, COMPUTE, EVENTS, MOVES, Shape, moves, trace

FORMS = ("whole", "micro-batches", "host", "captured")


@pytest.mark.parametrize(("form", "depth"), itertools.product(FORMS, (1, 2, 3)))
def test_the_table_has_no_race(form: str, depth: int) -> None:
    assert races(trace(7, Shape(form=form, depth=depth))) == []


def test_moves_have_no_race() -> None:
    assert races(moves(3)) == []


@pytest.mark.parametrize("event", EVENTS)
def test_each_wait_is_needed_or_says_why_it_is_not(event: str) -> None:
    shapes = [Shape(form=form, depth=depth) for form in FORMS for depth in (1, 2)]
    found = [line for shape in shapes for line in races(trace(7, shape, without=event))]
    found += races(moves(3, without=event))
    assert bool(found) == EVENTS[event].needed


def test_a_buffer_for_one_step_less_than_are_in_flight_races() -> None:
    """Two steps in flight share one staging buffer, without a wait for the copy."""
    steps = trace(4, Shape(depth=2), without="staged")
    merged = {"columns 1": "columns 0", "columns 1 on the device": "columns 0 on the device"}

    def rename(names: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(merged.get(name, name) for name in names)

    steps = [
        Use(e.actor, e.label, rename(e.reads), rename(e.writes)) if isinstance(e, Use) else e for e in steps
    ]
    assert any("stage on host writes columns 0" in line for line in races(steps))


def test_memory_goes_to_the_next_user_of_its_stream() -> None:
    made = [Use(COLLECTIVES, "sum", writes=("sum",)), Record(COLLECTIVES, "e"), Wait(COMPUTE, "e")]
    made += [Use(COMPUTE, "layer", reads=("sum",))]
    assert races([*made, Free("sum", COLLECTIVES)])
    assert not races([*made, Free("sum", COLLECTIVES, frozenset({COMPUTE}))])


def test_an_event_is_what_was_launched_when_it_was_recorded() -> None:
    early = [Record(COMPUTE, "e"), Use(COMPUTE, "copy", writes=("host",)), Wait(HOST, "e")]
    assert races([*early, Use(HOST, "read", reads=("host",))])
    assert races([Wait(HOST, "nobody's")])


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"ranked": True, "tensor_parallel_size": 2, "overlap": "all"}),
    ("llama", {"ranked": True, "tensor_parallel_size": 2, "collectives": "gloo"}),
]


def outside(edge: tuple[str, Any, str, Any]) -> tuple[str, Any, str, Any]:
    """Return the edge with the capturing stream renamed to the compute stream."""
    after, recorded, before, waited = edge
    if waited[0] != "weft/parallel/launcher.py":
        return edge
    return (
        COMPUTE if after == CAPTURE else after,
        recorded,
        COMPUTE if before == CAPTURE else before,
        waited,
    )


def test_rehearsed_engines_keep_to_the_table(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of rehearsed engines are exactly the waits of the table."""
    edges = set()
    for name, settings in RUNS:
        with monkeypatch.context() as patch:
            edges |= set(map(outside, rehearse(patch, folder_of(name), short(), **settings)[0].edges))
    known = {
        (e.after, e.recorded, e.before, e.waited): name for name, e in EVENTS.items() if name not in MOVES
    }
    assert not edges - known.keys(), "the table lacks these"
    assert not {known[edge] for edge in known.keys() - edges}, "no engine did these"
