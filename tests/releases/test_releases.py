"""Engines and API servers of two releases: what the earlier release sent is recorded in ``version1.json``.

``tests/releases/record.py`` made the recording, with the code of the commit that the file names. The rule
is in docs/adr/0036-releases-that-meet.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tests.releases.record import FRONT, LINK, NAME, OUTPUT, Dialogue, TinyEngine, opening, submit
from weft.common.errors import Unavailable
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import EngineRecord
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol
from weft.front.requests.generation import Generation
from weft.types import messages as m
from weft.types import transfer
from weft.types.handshake import EngineIdentity
from weft.types.media_item import MediaItem
from weft.types.transport_counts import TransportCounts
from weft.types.versions import unknown_to

RECORDING: dict[str, Any] = json.loads((Path(__file__).parent / "version1.json").read_text())
ITEM = MediaItem(key=bytes(16), start=0, count=1, grid=(1, 2, 2))
IDENTITY = EngineIdentity(name=NAME, model="m", start=5)


def read_as_version_1(frame: bytes) -> dict[str, Any]:
    """Return the message in ``frame``. Fail if the earlier release would refuse the frame."""
    value = msgspec.msgpack.decode(frame)
    _check(value, [value["type"]], value["type"])
    return dict(value)


def _check(value: Any, kinds: list[str], where: str) -> None:
    """Fail if ``value``, of one of the structs ``kinds``, has fields that version 1 does not have, or lacks
    required fields."""
    schema = RECORDING["schema"]
    if isinstance(value, dict) and kinds:
        kind = value.get("type", kinds[0])
        assert kind in kinds, where
        known = schema[kind]["fields"]
        assert value.keys() - {"type"} <= known.keys(), where
        assert value.keys() >= set(schema[kind]["required"]), where
        for name, inner in value.items():
            _check(inner, known.get(name, []), f"{where}.{name}")
    elif isinstance(value, list) and kinds and schema[kinds[0]]["array"]:
        assert len(value) <= len(schema[kinds[0]]["fields"]), where
    elif isinstance(value, list):
        for inner in value:
            _check(inner, kinds, where)


class RecordedEngine(Dialogue):
    """Today's API server, and a recorded engine."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = [bytes.fromhex(frame) for _, frame in RECORDING["dialogue"]]
        self.due = 0
        """Number of recorded frames that have passed."""

    def _to_engine(self, frame: bytes) -> None:
        """Compare ``frame`` with the recorded frame of the API server, then play the engine's answers."""
        self.frames.append(("API server", frame.hex()))
        found, recorded = read_as_version_1(frame), msgspec.msgpack.decode(self.answers[self.due])
        for one in (found, recorded):
            one.pop("versions", None)
            one.pop("quiet", None) if not one.get("quiet") else None
        assert found == recorded
        self.due += 1
        self.answer_recorded()

    def answer_recorded(self) -> None:
        """Give the fleet all frames that the engine sent before the API server's next frame."""
        while self.due < len(self.answers) and RECORDING["dialogue"][self.due][0] == "engine":
            frame = self.answers[self.due]
            self.due += 1
            self.on(e.Received(NAME, LINK, m.decode_to_front(frame)))


def test_an_engine_of_the_earlier_release_serves_this_api_server() -> None:
    one = RecordedEngine()
    for event in (*opening(), e.Opened((submit(2),)), e.Closed((2,)), e.Closing(shutdown=False)):
        one.on(event)
    assert one.due == len(one.answers)
    first = [token for event in one.delivered if event.sequence == 1 for token in event.token_ids]
    assert first == OUTPUT
    assert [event.finish for event in one.delivered if event.sequence == 1][-1] == "length"
    instance = one.fleet.table.instances[NAME]
    assert instance.welcome is not None
    assert (instance.welcome.versions, instance.welcome.engine) == ((1, 1), None)
    assert m.common_version(instance.welcome.versions) == 1


def test_an_api_server_of_the_earlier_release_uses_this_engine() -> None:
    """The engine's frames have the same bytes as before, except for the versions of the Welcome."""
    engine = TinyEngine()
    protocol = EngineProtocol(engine, 7, None, IDENTITY)
    sent: list[bytes] = []
    for sender, frame in RECORDING["dialogue"]:
        if sender == "API server":
            outgoing = protocol.on(FRONT, m.decode_to_engine(bytes.fromhex(frame)))
            sent += [m.encode(message) for _, message in outgoing]
            continue
        recorded = bytes.fromhex(frame)
        if not sent:  # a step, or a heartbeat
            step = msgspec.msgpack.decode(recorded).get("step", -1)
            outgoing = protocol.events(engine.step(), step) if step >= 0 else protocol.heartbeats()
            sent += [m.encode(message) for _, message in outgoing]
        found, due = read_as_version_1(sent.pop(0)), msgspec.msgpack.decode(recorded)
        if found["type"] == "Welcome":
            assert (found.pop("versions"), due.pop("versions")) == ([1, m.VERSION], [1, 1])
        assert found == due
    assert not sent


def test_a_newer_api_server_learns_the_identity_of_the_engine() -> None:
    protocol = EngineProtocol(TinyEngine(), 7, None, IDENTITY)
    for newest, identity in ((1, None), (2, IDENTITY), (9, IDENTITY)):
        (_, welcome), _ = protocol.on(FRONT, m.Hello(versions=(1, newest), front="front"))
        assert isinstance(welcome, m.Welcome)
        assert welcome.engine == identity


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_payers_go_to_engines_that_know_them(newest: int) -> None:
    one = RecordedEngine()
    welcome = msgspec.structs.replace(TinyEngine().welcome(7), versions=(1, newest))
    for event in opening():
        one.on(event)
    instance = one.fleet.table.instances[NAME]
    instance.welcome = welcome
    one._to_engine = lambda frame: one.frames.append(("API server", frame.hex()))  # type: ignore[method-assign]
    one.on(e.Opened((msgspec.structs.replace(submit(2), payer="key"),)))
    sent = [
        msgspec.msgpack.decode(bytes.fromhex(frame)) for sender, frame in one.frames if sender != "engine"
    ]
    assert sent[-1]["type"] == "Submit"
    assert sent[-1].get("payer", "") == ("key" if newest > 2 else "")


@pytest.mark.parametrize(
    ("feature", "since", "fields"),
    [
        ("videos of this model", m.LAG_SINCE, {"media": (ITEM, msgspec.structs.replace(ITEM, lag=0))}),
        ("routed experts", m.ROUTES_SINCE, {"routes": 0}),
        ("", 1, {"media": (ITEM, ITEM), "payer": "key"}),
    ],
)
def test_features_that_an_earlier_engine_does_not_know(
    feature: str, since: int, fields: dict[str, Any]
) -> None:
    """An engine of an earlier release would drop the message, and the request would reach its deadline."""
    asked = msgspec.structs.replace(submit(2), **fields)
    for newest in range(1, m.VERSION + 1):
        welcome = msgspec.structs.replace(TinyEngine().welcome(7), versions=(1, newest))
        assert unknown_to(welcome, [submit(1), asked]) == ("" if newest >= since else feature)
    if feature:
        with pytest.raises(AssertionError):
            read_as_version_1(m.encode(asked))


def test_an_earlier_engine_counts_no_averaged_frames() -> None:
    item = msgspec.structs.replace(ITEM, grid=(4, 2, 2))
    for newest in (m.LAG_SINCE - 1, m.LAG_SINCE):
        welcome = msgspec.structs.replace(TinyEngine().welcome(7), versions=(1, newest))
        found = unknown_to(welcome, [msgspec.structs.replace(submit(2), media=(ITEM, item))])
        assert found == ("" if newest >= m.LAG_SINCE else "videos of this model")


def test_a_request_waits_for_the_upgrade_of_all_groups() -> None:
    later, earlier = (
        msgspec.structs.replace(TinyEngine().welcome(7), versions=(1, newest))
        for newest in (m.VERSION, m.LAG_SINCE - 1)
    )
    generation = object.__new__(Generation)
    image, video = (msgspec.structs.replace(submit(2), media=(ITEM,)), submit(3))
    video = msgspec.structs.replace(video, media=(ITEM, msgspec.structs.replace(ITEM, lag=1)))
    instances = [SimpleNamespace(welcome=later), SimpleNamespace(welcome=None)]
    generation.front = cast(Any, SimpleNamespace(links=SimpleNamespace(instances=instances)))
    generation._check_versions([image, video])
    instances.append(SimpleNamespace(welcome=earlier))
    generation._check_versions([image])
    with pytest.raises(Unavailable, match="knows no videos of this model"):
        generation._check_versions([image, video])


def test_an_image_has_the_fields_of_the_earlier_release() -> None:
    read_as_version_1(m.encode(msgspec.structs.replace(submit(2), media=(ITEM,))))


@pytest.mark.parametrize("frame", [*RECORDING["to_engine"], *RECORDING["to_front"], RECORDING["failed"]])
def test_every_message_of_the_earlier_release_is_read_and_written_as_before(frame: str) -> None:
    data = bytes.fromhex(frame)
    to_engine = frame in RECORDING["to_engine"]
    message = m.decode_to_engine(data) if to_engine else m.decode_to_front(data)
    # Values, not bytes: a struct with an unset field has a longer head.
    assert msgspec.msgpack.decode(m.encode(message)) == msgspec.msgpack.decode(data)
    read_as_version_1(data)


@pytest.mark.parametrize("frame", RECORDING["transfers"])
def test_engines_of_two_releases_exchange_caches(frame: str) -> None:
    """The fingerprint of an engine has the version of these messages, so their bytes must not change."""
    assert transfer.VERSION == 1
    assert transfer.encode(transfer.decode(bytes.fromhex(frame))) == bytes.fromhex(frame)


def test_records_of_both_releases_are_read_by_both(tmp_path: Path) -> None:
    folder = FolderDirectory(tmp_path)
    (tmp_path / f"{NAME}.engine.json").write_text(RECORDING["record"])
    record = folder.read()[NAME]
    assert (record.incarnation, record.messages) == (7, 1)
    later = msgspec.structs.replace(record, messages=m.VERSION)
    earlier = json.loads(RECORDING["record"])
    assert json.loads(msgspec.json.encode(later)) == {**earlier, "messages": m.VERSION}
    assert not EngineRecord.__struct_config__.forbid_unknown_fields


def test_a_hello_of_a_later_release_is_refused_by_name_whatever_fields_it_has() -> None:
    protocol = EngineProtocol(TinyEngine(), 7)
    later = {"type": "Hello", "versions": [m.VERSION + 1, m.VERSION + 4], "front": "f", "colour": "blue"}
    hello = m.decode_to_engine(msgspec.msgpack.encode(later))
    ((_, failed),) = protocol.on(FRONT, hello)
    assert isinstance(failed, m.EngineFailed)
    assert f"the API server speaks versions {m.VERSION + 1} to {m.VERSION + 4}" in failed.error.message
    assert failed.error.message.endswith(f"versions {m.OLDEST} to {m.VERSION}: upgrade the engine")


def test_a_welcome_of_a_later_release_is_read() -> None:
    welcome = TinyEngine().welcome(7)
    later = {**msgspec.msgpack.decode(m.encode(welcome)), "colour": "blue", "versions": [1, 9]}
    found = m.decode_to_front(msgspec.msgpack.encode(later))
    assert found == msgspec.structs.replace(welcome, versions=(1, 9))
    with pytest.raises(msgspec.ValidationError, match="colour"):
        m.decode_to_front(
            msgspec.msgpack.encode({"type": "Heartbeat", "idle": True, "stats": {}, "colour": 1})
        )


@pytest.mark.parametrize("newest", [1, 2])
def test_counts_by_transport_go_to_api_servers_that_know_them(newest: int) -> None:
    engine = TinyEngine()
    moves = m.TransferStats(done=2, sent=TransportCounts((("shm", 2),)))
    engine.stats = lambda: m.EngineStats(transfers=moves)  # type: ignore[method-assign]
    protocol = EngineProtocol(engine, 7, None, IDENTITY)
    *_, (_, first) = protocol.on(FRONT, m.Hello(versions=(1, newest), front="front"))
    (_, later) = protocol.heartbeats()[-1]
    for heartbeat in (first, later):
        assert isinstance(heartbeat, m.Heartbeat)
        found = msgspec.msgpack.decode(m.encode(heartbeat))["stats"]["transfers"]
        assert found["done"] == 2
        assert ("sent" in found) == (newest > 1)
