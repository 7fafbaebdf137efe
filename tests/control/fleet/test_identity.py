"""An address of a record may lead to another engine: both sides find out, and nothing is lost."""

from __future__ import annotations

import logging

import pytest

from tests.control.fleet.driver import Driver
from tests.releases.record import TinyEngine
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.control.fleet.instances import InstanceState
from weft.types import messages as m
from weft.types.handshake import EngineIdentity, no_common_version_text
from weft.types.sampling import TokenParams

WANTED = EngineIdentity(name="a", model="m", start=17)
OTHERS = [
    EngineIdentity(name="b", model="m", start=17),
    EngineIdentity(name="a", model="n", start=17),
    EngineIdentity(name="a", model="m", start=18),
]


def expecting(*names: str) -> Driver:
    """Return a fleet that has connected to the address of ``a``, where the engine ``WANTED`` should be."""
    one = Driver(*names, joining=True).up(*names[1:])
    one.links += 1
    one.link["a"] = one.links
    one.on(e.Expected("a", one.links, identity=WANTED))
    one.on(e.Linked("a", one.links))
    return one


def welcome(one: Driver, engine: EngineIdentity | None) -> m.Welcome:
    """Return the answer of an engine at the address of ``a``."""
    answer = one.welcome("a")
    return m.Welcome(
        versions=answer.versions,
        vocab_size=100,
        max_model_len=100,
        max_num_seqs=8,
        num_blocks=(9,),
        incarnation=99,
        engine=engine,
    )


def test_the_api_server_names_the_engine_that_it_wants() -> None:
    one = expecting("a", "b")
    (hello,) = one.sent()
    assert isinstance(hello, m.Hello)
    assert hello.engine == WANTED


@pytest.mark.parametrize("found", OTHERS)
def test_another_engine_at_the_address_gets_no_requests_and_the_wanted_one_is_missing(
    found: EngineIdentity, caplog: pytest.LogCaptureFixture
) -> None:
    one = expecting("a", "b")
    with caplog.at_level(logging.ERROR):
        one.say("a", welcome(one, found))
    assert one.fleet.table.instances["a"].state is InstanceState.DOWN
    assert not one.fleet.table.whole
    assert one.of(e.Unlink) == [e.Unlink("a", one.link["a"])]
    (replace,) = one.of(e.Replace)
    assert replace.error.message == f"another engine answers at the address: {found} instead of {WANTED}"
    assert one.open(1) == "b"


@pytest.mark.parametrize("found", [WANTED, None, EngineIdentity(name="a", model="m", start=0)])
def test_the_wanted_engine_or_one_that_cannot_tell_is_used(found: EngineIdentity | None) -> None:
    one = expecting("a")
    one.say("a", welcome(one, found))
    assert one.fleet.table.instances["a"].state is InstanceState.UP


@pytest.mark.parametrize("own", OTHERS)
def test_an_engine_refuses_whoever_wants_another_and_keeps_what_it_has(own: EngineIdentity) -> None:
    """The API server has a second connection to this engine, under the engine's own name."""
    engine = TinyEngine()
    protocol = EngineProtocol(engine, 7, None, own)
    hello = m.Hello(versions=(m.OLDEST, m.VERSION), front="front", engine=own)
    (_, answer), _ = protocol.on(b"right", hello)
    assert isinstance(answer, m.Welcome)
    params = TokenParams(max_tokens=3)
    submit = m.Submit(sequence=1, request=1, seed=1, prompt_ids=bytes(4), params=params)
    assert protocol.on(b"right", submit) == []
    stale = m.Hello(versions=(m.OLDEST, m.VERSION), front="front", engine=WANTED)
    ((connection, failed),) = protocol.on(b"stale", stale)
    assert connection == b"stale"
    assert isinstance(failed, m.EngineFailed)
    assert failed.error.message == f"another engine answers at the address: {own} instead of {WANTED}"
    assert [connection for connection, _ in protocol.events(engine.step())] == [b"right"]
    assert [connection for connection, _ in protocol.heartbeats()] == [b"right"]


def test_the_refusal_of_the_engine_is_a_loss() -> None:
    one = expecting("a", "b")
    protocol = EngineProtocol(TinyEngine(), 7, None, OTHERS[0])
    (hello,) = one.sent()
    ((_, failed),) = protocol.on(b"front", hello)
    one.say("a", failed)
    (replace,) = one.of(e.Replace)
    assert "another engine answers at the address" in replace.error.message
    assert one.fleet.table.instances["a"].state is InstanceState.DOWN


def test_a_refused_version_names_the_upgrade() -> None:
    newer = no_common_version_text((3, 4), (1, 2), "API server")
    assert newer.startswith("the engine speaks versions 3 to 4 of the messages, this API server (Weft ")
    assert newer.endswith("versions 1 to 2: upgrade the API server")
    assert no_common_version_text((1, 1), (2, 3), "API server").endswith(
        "versions 2 to 3: upgrade the engine"
    )
    assert no_common_version_text((1, 1), (2, 3), "engine").startswith(
        "the API server speaks versions 2 to 3"
    )
    assert no_common_version_text((1, 1), (2, 3), "engine").endswith("versions 1 to 1: upgrade the engine")


def test_a_process_that_starts_gets_the_latest_pause() -> None:
    """The Hello may be older than the pause. Without another one, this API server stays behind there."""
    one = expecting("a", "b")
    one.on(e.PauseShared("1 x keep - - -"))
    sent = [(action.instance, action.message.pause) for action in one.of(e.Send)]  # type: ignore[union-attr]
    assert sent == [("a", "1 x keep - - -"), ("b", None)]
    one.on(e.Linked("a", one.links))
    assert [hello.pause for hello in one.sent()] == ["1 x keep - - -"]  # type: ignore[union-attr]
