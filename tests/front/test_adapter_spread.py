"""Adapters on the way to engine processes: names of one content, one load at a time, late refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import pytest

from weft.common.errors import InvalidRequest
from weft.control.fleet.instances import Instance, InstanceState
from weft.front.requests.adapter_spread import Spread, wanted_of
from weft.types import messages as m
from weft.types.adapters import AdapterChanged, DropAdapter, LoadAdapter

REFUSED = InvalidRequest("other content").info()


def message(name: str, digest: str, folder: str = "", pinned: bool = False) -> LoadAdapter:
    return LoadAdapter(name=name, digest=digest, folder=folder or f"/{name}", pinned=pinned)


class Wire:
    """Live instances, and the messages to each of them."""

    def __init__(self, *names: str) -> None:
        self.instances: list[Instance] = []
        self.sent: list[tuple[str, LoadAdapter | DropAdapter]] = []
        for name in names:
            self.join(name)

    def join(self, name: str) -> Instance:
        made = Instance(name)
        made.start(link=len(self.instances), deadline=math.inf)
        made.state = InstanceState.UP
        made.welcome = WELCOME
        self.instances.append(made)
        return made

    def tell(self, name: str, message: LoadAdapter | DropAdapter) -> None:
        self.sent.append((name, message))

    def answer(self, refused: Sequence[str] = ()) -> int:
        """Answer all messages, and return their number. ``refused``: instances that refuse all adapters."""
        sent, self.sent = self.sent, []
        for name, message in sent:
            one = next(one for one in self.instances if one.name == name)
            loads = isinstance(message, LoadAdapter)
            error = REFUSED if loads and name in refused else None
            one.adapter_changed(
                AdapterChanged(digest=message.digest, loaded=loads and error is None, error=error)
            )
        return len(sent)


WELCOME = m.Welcome(
    versions=(1, 1),
    vocab_size=8,
    max_model_len=8,
    max_num_seqs=1,
    num_blocks=(1,),
    incarnation=1,
    max_loras=2,
)


def spread(wire: Wire) -> Spread:
    return Spread(wire)  # type: ignore[arg-type]


def test_two_names_of_one_content_are_sent_once() -> None:
    wire = Wire("one")
    book = spread(wire)
    messages = [message("a", "x"), message("b", "x", pinned=True)]
    for _ in range(5):
        book.send_missing(wanted_of(messages))
        assert wire.instances[0].has_adapter("x") or wire.sent
        wire.answer()
    assert wire.answer() == 0
    assert wanted_of(messages)["x"] == message("a", "x", pinned=True)
    # The other name goes: the content is no longer pinned, and requests go on meanwhile.
    book.send_missing(wanted_of(messages[:1]))
    assert wire.sent == [("one", messages[0])]
    assert wire.instances[0].has_adapter("x")
    book.send_missing(wanted_of([]))
    assert wire.sent[-1] == ("one", DropAdapter(digest="x"))
    assert not wire.instances[0].has_adapter("x")


def test_a_process_gets_one_adapter_at_a_time() -> None:
    wire = Wire("one", "two")
    book = spread(wire)
    wanted = wanted_of(message(str(number), str(number)) for number in range(4))
    rounds = 0
    while not all(one.has_adapter(digest) for one in wire.instances for digest in wanted):
        book.send_missing(wanted)
        assert len(wire.sent) == 2
        book.send_missing(wanted)
        assert wire.answer() == 2
        rounds += 1
    assert rounds == 4
    book.send_missing(wanted)
    assert not wire.sent


def test_a_late_group_that_refuses_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    wire = Wire("one")
    book = spread(wire)
    wanted = wanted_of([message("a", "x", "/folder")])
    book.send_missing(wanted)
    wire.answer()
    assert book.missing("x") == 0
    wire.join("late")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            book.send_missing(wanted)
            wire.answer(refused=["late"])
    assert book.missing("x") == 1
    (record,) = caplog.records
    for part in ("late", "'a'", "other content", "/folder", "load the adapter again"):
        assert part in record.getMessage()
    # A load of the same content asks the group again.
    book.retry("x")
    book.send_missing(wanted)
    assert [name for name, _ in wire.sent] == ["one", "late"]
    assert wire.instances[0].has_adapter("x")
    wire.answer()
    assert book.missing("x") == 0


def test_a_process_that_starts_again_gets_everything() -> None:
    wire = Wire("one")
    book = spread(wire)
    wanted = wanted_of([message("a", "x")])
    book.send_missing(wanted)
    wire.answer()
    wire.instances[0].start(link=9, deadline=math.inf)
    wire.instances[0].state, wire.instances[0].welcome = InstanceState.UP, WELCOME
    book.send_missing(wanted)
    assert len(wire.sent) == 1
