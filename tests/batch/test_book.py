"""The book of batches: every line is recorded at most once, and every batch ends exactly once."""

from __future__ import annotations

import random

from weft.batch.book import (
    MOST_ATTEMPTS,
    Answered,
    BatchBook,
    CancelBatch,
    Capacity,
    Drained,
    Finalize,
    Interrupted,
    OpenBatch,
    Record,
    Recorded,
    StartLine,
    Stop,
    Tick,
)


def test_lines_run_in_order_within_the_room() -> None:
    book = BatchBook()
    assert book.on(OpenBatch(batch="a", lines=(3, 1, 2)), 0.0) == []
    assert book.on(Capacity(2), 0.0) == [StartLine("a", 3), StartLine("a", 1)]
    assert book.on(Answered("a", 3, 200), 0.0) == [Record("a", 3, True)]
    assert book.on(Capacity(5), 0.0) == [StartLine("a", 2)]
    assert book.on(Answered("a", 1, 400), 0.0) == [Record("a", 1, False)]
    assert book.on(Answered("a", 2, 200), 0.0) == [Record("a", 2, True)]
    assert book.on(Recorded("a", 1), 0.0) == book.on(Recorded("a", 2), 0.0) == []
    assert book.on(Recorded("a", 3), 0.0) == [Finalize("a", "completed")]
    assert book.on(Recorded("a", 3), 0.0) == []


def test_batches_share_the_room() -> None:
    book = BatchBook()
    book.on(OpenBatch(batch="a", lines=(0, 1, 2, 3)), 0.0)
    assert book.on(Capacity(2), 0.0) == [StartLine("a", 0), StartLine("a", 1)]
    book.on(OpenBatch(batch="b", lines=(0, 1, 2, 3)), 0.0)
    assert book.on(Capacity(3), 0.0) == [StartLine("b", 0), StartLine("b", 1), StartLine("a", 2)]


def test_lines_of_a_model_that_is_not_loaded_wait() -> None:
    book = BatchBook()
    models = {0: "a", 1: "b", 2: "a", 3: "b"}
    book.on(OpenBatch(batch="x", lines=(0, 2, 1, 3), models=models), 0.0)
    book.on(OpenBatch(batch="y", lines=(0,), models={0: "b"}), 0.0)
    assert book.ready_models(0.0) == ["a", "b"]
    assert book.on(Capacity(3, "b"), 0.0) == [StartLine("x", 1), StartLine("y", 0), StartLine("x", 3)]
    assert book.on(Capacity(1, "a"), 0.0) == [StartLine("x", 0)]
    assert book.unfinished() == {"a": 2, "b": 3}
    # The model b drains: its lines stop, and run again when there is room.
    assert book.on(Drained("b"), 1.0) == [Stop("x", 1), Stop("x", 3), Stop("y", 0)]
    book.on(Interrupted("x", 1), 1.0)
    book.on(Interrupted("y", 0), 1.0)
    assert book.on(Answered("x", 3, 200), 1.0) == [Record("x", 3, True)], "the answer came first"
    book.on(Recorded("x", 3), 1.0)
    assert book.ready_models(1.0) == ["a"]
    assert book.on(Capacity(9, "b"), 9.0) == [StartLine("x", 1), StartLine("y", 0)]
    assert book.unfinished() == {"a": 2, "b": 2}
    for batch, line in (("x", 0), ("x", 1), ("y", 0)):
        book.on(Answered(batch, line, 200), 9.0)
        book.on(Recorded(batch, line), 9.0)
    assert book.unfinished() == {"a": 1}
    assert book.open == ["x"]


def test_failures_of_the_server_have_a_limit_and_lack_of_room_has_none() -> None:
    book = BatchBook()
    book.on(OpenBatch(batch="a", lines=(0,)), 0.0)
    now = 0.0
    for status in [429, 503, 429, *[500] * (MOST_ATTEMPTS - 1)]:
        assert book.on(Capacity(1), now) == [StartLine("a", 0)]
        assert book.on(Answered("a", 0, status), now) == []
        assert book.on(Capacity(1), now) == []  # a pause
        assert book.ready_models(now) == []
        now += 60.0
        assert book.ready_models(now) == [""]
    assert book.on(Capacity(1), now) == [StartLine("a", 0)]
    assert book.on(Answered("a", 0, 500), now) == [Record("a", 0, False)]


def test_a_cancelled_batch_ends_behind_its_running_lines() -> None:
    book = BatchBook()
    book.on(OpenBatch(batch="a", lines=(0, 1, 2)), 0.0)
    book.on(Capacity(2), 0.0)
    assert book.on(CancelBatch("a"), 1.0) == [Stop("a", 0), Stop("a", 1)]
    assert book.on(CancelBatch("a"), 1.0) == []
    assert book.on(Answered("a", 0, 200), 1.0) == [Record("a", 0, True)]  # the answer came first
    assert book.on(Interrupted("a", 1), 1.0) == []
    assert book.on(Capacity(5), 100.0) == []
    assert book.on(Recorded("a", 0), 1.0) == [Finalize("a", "cancelled")]


def test_a_batch_expires_at_its_deadline() -> None:
    book = BatchBook()
    book.on(OpenBatch(batch="a", lines=(0, 1), deadline=10.0), 0.0)
    book.on(Capacity(1), 0.0)
    assert book.on(Tick(), 9.9) == []
    assert book.on(Tick(), 10.0) == [Stop("a", 0)]
    assert book.on(Interrupted("a", 0), 10.1) == [Finalize("a", "expired")]


def test_a_batch_without_pending_lines_ends_at_once() -> None:
    assert BatchBook().on(OpenBatch(batch="a", lines=()), 0.0) == [Finalize("a", "completed")]


def test_random_events_record_every_line_once() -> None:
    for seed in range(60):
        _run_randomly(seed)


def _run_randomly(seed: int) -> None:
    rng = random.Random(seed)
    book, now = BatchBook(), 0.0
    sizes = {f"b{n}": rng.randrange(12) for n in range(4)}
    running: list[tuple[str, int]] = []
    writing: list[tuple[str, int]] = []
    recorded: list[tuple[str, int]] = []
    ends: dict[str, str] = {}
    cancelled: set[str] = set()

    def carry_out(actions: list[object]) -> None:
        for action in actions:
            if isinstance(action, StartLine):
                assert (action.batch, action.line) not in running + writing + recorded
                running.append((action.batch, action.line))
            elif isinstance(action, Record):
                running.remove((action.batch, action.line))
                writing.append((action.batch, action.line))
            elif isinstance(action, Finalize):
                assert action.batch not in ends
                assert action.batch not in {batch for batch, _ in running + writing}
                ends[action.batch] = action.reason

    for name, size in sizes.items():
        carry_out(book.on(OpenBatch(batch=name, lines=tuple(range(size)), deadline=1e6), now))
    while len(ends) < len(sizes):
        now += rng.random()
        event = rng.choice(["room", "answer", "lost", "written", "cancel", "tick"])
        if event == "room":
            carry_out(book.on(Capacity(rng.randrange(4)), now))
        elif event == "answer" and running:
            carry_out(book.on(Answered(*rng.choice(running), rng.choice([200, 200, 400, 429, 500])), now))
            running = [key for key in running if key[1] in book._batches[key[0]].running_lines]
        elif event == "lost" and running:
            key = running.pop(rng.randrange(len(running)))
            carry_out(book.on(Interrupted(*key), now))
        elif event == "written" and writing:
            key = writing.pop(rng.randrange(len(writing)))
            recorded.append(key)
            carry_out(book.on(Recorded(*key), now))
        elif event == "cancel" and rng.random() < 0.01:
            name = rng.choice(list(sizes))
            cancelled |= {name} - ends.keys()
            carry_out(book.on(CancelBatch(name), now))
    assert len(set(recorded)) == len(recorded)
    for name, size in sizes.items():
        assert ends[name] == ("cancelled" if name in cancelled else "completed")
        if name not in cancelled:
            assert {line for batch, line in recorded if batch == name} == set(range(size))
