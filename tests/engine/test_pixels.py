"""Images move by name, not as bytes, between an API server, engines and ranks on one host (real
processes)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tests.engine.pair_rig import unified
from tests.engine.test_images import asked, config_of
from tests.support.seen import SeeingModels
from weft.cli.verify.verify_run import generate
from weft.common.errors import PixelsLost
from weft.common.shared_bytes import SharedBytes, SharedName, write_shared
from weft.control.links import link
from weft.engine.core import EngineCore
from weft.engine.server import engine_server
from weft.engine.server.engine_server import PixelInbox
from weft.engine.server.replicas import Replicas
from weft.types import frames as f
from weft.types import messages as m
from weft.types.messages import encode_parts

NAME = "qwen3-vl"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("pixels"))


class Shown:
    """Shared images of an API server. Call ``close`` at the end."""

    def __init__(self) -> None:
        self._made: list[SharedBytes] = []

    def submit(self, one: m.Submit) -> m.Submit:
        media = []
        for item in one.media:
            made = SharedBytes(len(item.pixels))
            self._made.append(made)
            write_shared(made.name, item.pixels)
            media.append(msgspec.structs.replace(item, pixels=made.seal(), shared=made.name))
        return msgspec.structs.replace(one, media=tuple(media))

    def close(self) -> None:
        for made in self._made:
            made.close()


@pytest.fixture
def shown() -> Iterator[Shown]:
    made = Shown()
    yield made
    made.close()


def over_wire(one: m.Submit) -> m.Submit:
    """Return the message as an engine on this host receives it."""
    (frame,) = encode_parts(one, by_name=True)
    message = m.decode_to_engine(frame)
    assert isinstance(message, m.Submit)
    return message


def descriptors() -> list[str]:
    """Return the descriptors of this process that are shared bytes."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [one for one in found if "weft-bytes" in one]


@pytest.mark.requirement("D6")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reach", [True, False])
def test_an_engine_finds_what_its_front_shows(
    reach: bool, models: SeeingModels, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of two ranks. An engine that cannot open the memory gets bytes, with the same tokens."""
    folder = models.folder(NAME)
    submits = asked(models, NAME, n=2)
    sent: list[int] = []

    def encoded(message: m.ToEngine, by_name: bool = False) -> tuple[bytes, ...]:
        frames = encode_parts(message, by_name)
        if isinstance(message, m.Submit):
            sent.append(sum(map(len, frames[1:])))
        return frames

    monkeypatch.setattr(link, "encode_parts", encoded)
    if not reach:
        monkeypatch.setattr(link, "reaches", lambda name: False)
    engine = Replicas([config_of(folder, tensor_parallel_size=2)])
    try:
        found = generate(engine, [shown.submit(one) for one in submits])
    finally:
        engine.close()
    assert found == unified(config_of(folder), submits)
    bytes_of = [sum(len(item.pixels) for item in one.media) for one in submits]
    assert max(bytes_of) > 0
    assert sorted(sent) == sorted([0] * len(submits) if reach else bytes_of)


class Steps:
    """Records the largest frame of encoding steps, and whether any frame had pixels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named: list[bool] = []
        whole = f.encode

        def encode(frame: Any) -> bytes:
            if isinstance(frame, f.StepFrame):
                ops = [op for op in frame.plan.ops if type(op).__name__ == "Encode"]
                self.named += [op.shared is not None and not op.pixels for op in ops]
            return whole(frame)

        monkeypatch.setattr(f, "encode", encode)


def run(core: EngineCore, submits: list[m.Submit]) -> dict[int, list[int]]:
    made: dict[int, list[int]] = {one.sequence: [] for one in submits}
    events = [event for one in submits for event in core.submit(one)]
    while True:
        for event in events:
            assert event.error is None, event.error
            made[event.sequence] += event.token_ids
        if not core.has_work():
            return made
        events = [*core.poll(), *core.step()]


@pytest.mark.requirement("D6")
@pytest.mark.timeout(300)
def test_ranks_open_what_their_engine_has(
    models: SeeingModels, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server may have closed the image meanwhile. The last use closes the engine's descriptors."""
    folder = models.folder(NAME)
    submits = asked(models, NAME)
    steps = Steps(monkeypatch)
    core = EngineCore(config_of(folder, tensor_parallel_size=2), progress=False)
    inbox = PixelInbox(shows=True)
    try:
        taken = [inbox.take(over_wire(shown.submit(one))) for one in submits]
        assert all(item.shared is not None for one in taken for item in one.media)
        shown.close()
        found = run(core, taken)
        assert found == unified(config_of(folder), submits)
        assert steps.named
        assert all(steps.named)
        taken.clear()
        run(core, [msgspec.structs.replace(submits[0], sequence=99, media=(), prompt_ids=bytes(20))])
        assert len(descriptors()) == 1  # the probe
    finally:
        core.close()
        inbox.close()
    assert not descriptors()


@pytest.mark.requirement("D6")
@pytest.mark.timeout(300)
def test_a_rank_that_cannot_open_it_is_sent_bytes(
    models: SeeingModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch ends once. The group then continues with bytes and the same tokens."""
    folder = models.folder(NAME)
    submits = asked(models, NAME)
    steps = Steps(monkeypatch)
    nowhere = SharedName(pid=os.getpid(), fd=1 << 20, size=1, mark=bytes(16))
    core = EngineCore(config_of(folder, tensor_parallel_size=2), progress=False)
    try:
        media = [
            tuple(msgspec.structs.replace(item, shared=nowhere) for item in one.media) for one in submits
        ]
        told = [msgspec.structs.replace(one, media=its) for one, its in zip(submits, media, strict=True)]
        assert run(core, told) == unified(config_of(folder), submits)
        assert steps.named[0]
        assert not steps.named[-1]
        assert core.runner.membership.epoch >= 1
    finally:
        core.close()


FRONT = """
import os, sys, msgspec
from weft.common.shared_bytes import SharedBytes
made = SharedBytes(1000)
made.seal()
os.write(1, msgspec.msgpack.encode(made.name))
os.close(1)
sys.stdin.read()
"""


@pytest.mark.requirement("D6")
def test_a_front_that_is_killed(models: SeeingModels) -> None:
    """Images that the engine has opened stay. Other images return their sequence, and nothing else
    happens."""
    process = subprocess.Popen([sys.executable, "-c", FRONT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        name = msgspec.msgpack.decode(process.stdout.read(), type=SharedName)
        one = asked(models, NAME)[0]
        media = tuple(msgspec.structs.replace(item, pixels=b"", shared=name) for item in one.media)
        one = msgspec.structs.replace(one, media=media)
        inbox = PixelInbox(shows=False)
        taken = inbox.take(one)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert all(bytes(item.pixels) == bytes(1000) for item in taken.media)
    with pytest.raises(PixelsLost):
        inbox.take(one)
    inbox.close()


def test_an_engine_keeps_no_more_descriptors_than_it_may(
    models: SeeingModels, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks get the other images as bytes."""
    monkeypatch.setattr(engine_server, "most_descriptors", lambda: 1)
    one = max(asked(models, NAME), key=lambda its: len(its.media))
    assert len(one.media) > 1
    inbox = PixelInbox(shows=True)
    taken = inbox.take(shown.submit(one))
    assert [item.shared is not None for item in taken.media] == [True] + [False] * (len(one.media) - 1)
    assert [bytes(item.pixels) for item in taken.media] == [item.pixels for item in one.media]
    inbox.close()
