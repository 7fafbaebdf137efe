"""The engine's side of the messages, over a real scheduler, without a socket."""

from __future__ import annotations

import msgspec
import pytest

from testing.cluster.check import TokenModel
from testing.cluster.head import Engine
from weft.common.clock import VirtualClock
from weft.config.sections.all import SchedulerSection
from weft.control.fleet.head_protocol import HeadProtocol
from weft.sim.engine import kv_config
from weft.types import messages as m
from weft.types.measures import Measures
from weft.types.sampling import TokenParams


def head() -> HeadProtocol:
    section = SchedulerSection(max_num_seqs=2, max_num_batched_tokens=16, max_queued_requests=2)
    kv = kv_config(section, 24, block_size=4)
    return HeadProtocol(Engine(kv, section, TokenModel({}, {}), VirtualClock()), 7)


def hello(front: str) -> m.Hello:
    return m.Hello(versions=(m.OLDEST, m.VERSION), front=front)


def submit(sequence: int, attempt: int = 0) -> m.Submit:
    params = TokenParams(max_tokens=4)
    ids = m.ids_to_bytes([1, 2])
    return m.Submit(
        sequence=sequence, request=sequence, seed=1, prompt_ids=ids, params=params, attempt=attempt
    )


def test_a_front_that_connects_again_takes_its_sequences_over() -> None:
    """The former connection broke, and the engine has not noticed yet."""
    one = head()
    one.on(b"old", hello("front"))
    assert one.on(b"old", submit(1)) == []
    assert one.on(b"old", submit(2)) == []
    one.on(b"new", hello("front"))
    assert one.on(b"new", submit(1, attempt=1)) == []
    event = m.TokenEvent(sequence=1, token_ids=(5,))
    told = m.TokenEvent(sequence=1, token_ids=(5,), attempt=1)
    assert one.events([event]) == [(b"new", m.Tokens(step=-1, events=(told,)))]
    assert one.events([m.TokenEvent(sequence=2, token_ids=(5,))]) == []  # left with the connection
    one.forget(b"old")
    assert one.on(b"new", m.Finish(sequence=1)) != []


def test_another_front_with_the_same_id_is_refused_and_disturbs_nobody() -> None:
    one = head()
    for name in ("one", "other"):
        one.on(name.encode(), hello(name))
    one.on(b"one", submit(1))
    ((front, answer),) = one.on(b"other", submit(1, attempt=3))
    assert front == b"other"
    assert isinstance(answer, m.Tokens)
    assert [event.finish for event in answer.events] == ["error"]
    ((front, _),) = one.events([m.TokenEvent(sequence=1, token_ids=(5,))])
    assert front == b"one"


def test_a_submit_that_comes_twice_is_dropped_and_a_later_attempt_ends_the_earlier_one() -> None:
    one = head()
    one.on(b"front", hello("front"))
    assert one.on(b"front", submit(1)) == []
    assert one.on(b"front", submit(1)) == []
    assert one.bad_frames == 1
    assert one.on(b"front", submit(1, attempt=2)) == []
    assert one.on(b"front", submit(1, attempt=1)) == []
    ((_, answer),) = one.events([m.TokenEvent(sequence=1, token_ids=(5,))])
    assert isinstance(answer, m.Tokens)
    assert [event.attempt for event in answer.events] == [2]


def test_the_end_of_a_front_ends_its_own_sequences_alone() -> None:
    one = head()
    for name in ("one", "other"):
        one.on(name.encode(), hello(name))
    one.on(b"one", submit(1))
    one.on(b"other", submit(2))
    one.on(b"one", m.Goodbye())
    assert not one.stopped
    told = one.events([m.TokenEvent(sequence=s, token_ids=(5,)) for s in (1, 2)])
    assert [front for front, _ in told] == [b"other"]


class WithRole(Engine):
    """An engine of a decode group."""

    def welcome(self, incarnation: int) -> m.Welcome:
        made = super().welcome(incarnation)
        return msgspec.structs.replace(made, role="decode", fingerprint="abc", rooms="ipc://there")

    def stats(self) -> m.HeadStats:
        stats = msgspec.structs.replace(super().stats(), transfers=m.TransferStats(done=3))
        constrained = {
            "constrained_steps": 5,
            "mask_seconds": 0.5,
            "grammars_compiled": 2,
            "grammar_errors": 1,
            "images_encoded": 3,
            "image_hits": 2,
            "embedding_bytes": 64,
            "encode_seconds": 0.25,
            "queue_times": Measures(counts=(1,), total=1.0),
            "prefill_times": Measures(counts=(1,), total=1.0),
        }
        return msgspec.structs.replace(stats, **constrained)


@pytest.mark.parametrize("newest", [1, 2, 3, 4, 5, 8, 9])
def test_a_front_is_told_what_its_version_knows(newest: int) -> None:
    """Unknown fields are left out: an older API server would refuse such a message."""
    section = SchedulerSection(max_num_seqs=2, max_num_batched_tokens=16, max_queued_requests=2)
    config = kv_config(section, 24, block_size=4)
    one = HeadProtocol(WithRole(config, section, TokenModel({}, {}), VirtualClock()), 7)
    (_, welcome), (_, first) = one.on(b"front", m.Hello(versions=(1, newest), front="front"))
    assert one.on(b"front", submit(1)) == []
    events = [m.TokenEvent(sequence=1, token_ids=(5,), position=0)]
    ((_, tokens),) = one.events(events)
    ((_, later),) = one.heartbeats()
    assert isinstance(welcome, m.Welcome)
    assert isinstance(tokens, m.Tokens)
    told = b"".join(map(m.encode, (welcome, tokens, first, later)))
    new = newest >= 3
    assert welcome.role == ("decode" if new else "unified")
    assert (welcome.fingerprint, welcome.rooms) == (("abc", "ipc://there") if new else ("", ""))
    assert tokens.events[0].position == (0 if new else -1)
    for heartbeat in (first, later):
        assert isinstance(heartbeat, m.Heartbeat)
        assert (heartbeat.stats.transfers is not None) is new
    for field in (b"position", b"transfers", b"role", b"fingerprint", b"rooms"):
        assert (field in told) is new, field
    for field in (b"constrained_steps", b"mask_seconds", b"grammars_compiled", b"grammar_errors"):
        assert (field in told) is (newest >= 4), field
    for field in (b"images_encoded", b"image_hits", b"embedding_bytes", b"encode_seconds"):
        assert (field in told) is (newest >= 5), field
    for field in (b"queue_times", b"prefill_times"):
        assert (field in told) is (newest >= 9), field


class Encoding(Engine):
    """An engine with the role encode."""

    def welcome(self, incarnation: int) -> m.Welcome:
        told = super().welcome(incarnation)
        return msgspec.structs.replace(
            told, role=self.role, tower=True, embeddings="ipc://here", tower_fingerprint="tower"
        )

    role: m.Role = "encode"

    def stats(self) -> m.HeadStats:
        moved = m.TransferStats(rooms=2)
        return msgspec.structs.replace(super().stats(), embedding_transfers=moved, embedding_host_bytes=5)


@pytest.mark.parametrize("version", [5, 6])
@pytest.mark.parametrize("role", ["encode", "unified"])
def test_what_fronts_of_an_older_release_hear_of_images(role: m.Role, version: int) -> None:
    section = SchedulerSection(max_num_seqs=2, max_num_batched_tokens=16, max_queued_requests=2)
    engine = Encoding(kv_config(section, 24, block_size=4), section, TokenModel({}, {}), VirtualClock())
    engine.role = role
    one = HeadProtocol(engine, 7)
    told = [message for _, message in one.on(b"front", m.Hello(versions=(1, version), front="front"))]
    if role == "encode" and version < 6:
        (failed,) = told
        assert isinstance(failed, m.HeadFailed)
        assert "version 5" in failed.error.message
        return
    welcome, heartbeat = told
    assert isinstance(welcome, m.Welcome)
    assert isinstance(heartbeat, m.Heartbeat)
    new = version == 6
    assert (welcome.tower, bool(welcome.embeddings), bool(welcome.tower_fingerprint)) == (new, new, new)
    assert (heartbeat.stats.embedding_transfers is not None, heartbeat.stats.embedding_host_bytes) == (
        new,
        5 * new,
    )
