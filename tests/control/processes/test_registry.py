"""The registry as a file, and the API servers' view of engines through it."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path

import pytest

from tests.support.slowness import deadline
from weft.common.errors import DeadlineExceeded, EngineDead, Unavailable, WeftError
from weft.control.links.link import Address
from weft.control.links.owner import Scaled
from weft.control.processes import channel
from weft.control.processes.process_registry import (
    NAME,
    ProcessRecord,
    ProcessRegistry,
    RegistryOwner,
    RegistryReader,
    write,
)
from weft.engine.server.engine_processes import group_folder


def engine(incarnation: int, state: str = "running", endpoint: str | None = "ipc:///x") -> ProcessRecord:
    error = EngineDead("it died").info() if state == "retired" else None
    return ProcessRecord(
        role="head", name="0", incarnation=incarnation, state=state, endpoint=endpoint, pid=1, error=error
    )


def test_it_is_replaced_as_a_whole_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    reader = RegistryReader(tmp_path)
    assert reader.read() == ProcessRegistry()
    first = ProcessRegistry(
        (engine(1), ProcessRecord(role="front", name="0", incarnation=3, state="running"))
    )
    write(tmp_path, first)
    assert stat.S_IMODE((tmp_path / NAME).stat().st_mode) == 0o600
    assert reader.read() == first
    assert reader.read() is reader.read()
    assert [record.incarnation for record in first.of("front")] == [3]
    write(tmp_path, ProcessRegistry((engine(2),)))
    assert reader.read().of("head") == [engine(2)]
    (tmp_path / NAME).unlink()  # the server ends
    assert reader.read().of("head") == [engine(2)]


def test_the_registry_as_seen_by_an_api_server(tmp_path: Path) -> None:
    lost: list[tuple[str, int]] = []
    owner = RegistryOwner(
        RegistryReader(tmp_path),
        lambda name, incarnation, _: lost.append((name, incarnation)),
        channel.LoadLink(channel.SupervisorLink(channel.channel()[1], serving=False)),
    )
    write(tmp_path, ProcessRegistry((engine(1, endpoint=None),)))
    address = owner.present()["0"]
    assert isinstance(address, Address)
    assert callable(address.endpoint)
    assert address.endpoint() is None
    write(tmp_path, ProcessRegistry((engine(1),)))
    assert address.endpoint() == "ipc:///x"
    owner.replace("0", 1, EngineDead("gone"))
    assert lost == [("0", 1)]
    write(tmp_path, ProcessRegistry((engine(2, "draining"),)))
    address = owner.present()["0"]
    assert isinstance(address, Address)
    assert (address.incarnation, address.draining) == (2, True)
    write(tmp_path, ProcessRegistry((engine(2, "retired"),)))
    error = owner.present()["0"]
    assert isinstance(error, WeftError)
    assert error.message == "it died"


def test_two_groups_in_one_folder_share_no_name(tmp_path: Path) -> None:
    folders = [group_folder(tmp_path) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in folders)


def test_a_front_and_its_supervisor_hear_each_other() -> None:
    ours, theirs = channel.channel()
    delivered: list[str] = []

    async def front() -> None:
        link = channel.SupervisorLink(theirs, serving=False)
        link.attach(lambda: delivered.append("drain"), lambda: delivered.append("stop"))
        link.ready()
        channel.LoadLink(link).report("0", 7, EngineDead("gone"))
        channel.tell(ours, "drain")
        channel.tell(ours, "stop")
        async with asyncio.timeout(deadline(30)):
            while delivered != ["drain", "stop"]:
                await asyncio.sleep(0.01)
        heard = channel.receive(ours)
        lost = channel.EngineLost("0", 7, EngineDead("gone").info())
        assert heard == [channel.FrontAlive(), channel.FrontReady(), lost]
        ours.close()
        async with asyncio.timeout(deadline(30)):
            while delivered != ["drain", "stop", "stop"]:  # the supervisor is gone
                await asyncio.sleep(0.01)

    asyncio.run(front())
    theirs.close()


def test_a_front_that_is_gone_is_seen() -> None:
    ours, theirs = channel.channel()
    assert channel.receive(ours) == []
    theirs.close()
    assert channel.receive(ours) is None
    channel.tell(ours, "drain")
    ours.close()


def test_a_command_waits_for_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """The API server returns the supervisor's changes, its refusal, or the lack of an answer."""
    ours, theirs = channel.channel()

    async def asked(count: int) -> list[int]:
        numbers: list[int] = []
        while len(numbers) < count:
            heard = channel.receive(ours) or ()
            numbers += [message.request for message in heard if isinstance(message, channel.Command)]
            await asyncio.sleep(0.01)
        return numbers

    async def front() -> None:
        link = channel.SupervisorLink(theirs, serving=False)
        link.attach(lambda: None, lambda: None)
        commands = channel.LoadLink(link)
        first, second = (asyncio.ensure_future(commands.scale("decode", count)) for count in (3, 4))
        async with asyncio.timeout(deadline(30)):
            numbers = await asked(2)
            # Verdicts may come in any order.
            refusal = Unavailable("no free GPU").info()
            channel.answer(ours, channel.Verdict(numbers[1], error=refusal))
            channel.answer(ours, channel.Verdict(99))
            channel.answer(ours, channel.Verdict(numbers[0], Scaled(("decode2",), returning=("decode1",))))
            assert await first == Scaled(("decode2",), (), ("decode1",))
            with pytest.raises(WeftError, match="no free GPU") as caught:
                await second
            assert caught.value.info() == refusal
            monkeypatch.setattr(channel, "VERDICT_S", 0.05)
            with pytest.raises(DeadlineExceeded, match="weft status"):
                await commands.restart("decode0", "")
            monkeypatch.setattr(channel, "VERDICT_S", 60.0)
            last = asyncio.ensure_future(commands.remove("decode0"))
            await asyncio.sleep(0)
            ours.close()
            with pytest.raises(WeftError, match="shutting down"):
                await last

    asyncio.run(front())
    theirs.close()
