"""A link sends images by name to an engine that can open this process's memory, otherwise as bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from tests.support.slowness import deadline
from weft.common.errors import PixelsLost
from weft.common.shared_bytes import UNREACHABLE, SharedBytes
from weft.control.fleet import fleet_events as e
from weft.control.links.channel import READ_AT_ONCE
from weft.control.links.link import Address, Link
from weft.types import messages as m
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams


class Lives:
    def poll(self) -> int | None:
        return None


async def sent(engine: zmq.asyncio.Socket, link: Link, one: m.Submit) -> list[bytes]:
    """The frames behind the message."""
    link.send(one)
    return list((await engine.recv_multipart())[2:])


async def talk(folder: Path) -> None:
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(f"ipc://{folder}/head")
    heard: asyncio.Queue[e.Event] = asyncio.Queue()
    link = Link("one", 1, Address(f"ipc://{folder}/head", Lives()), context, 30.0, heard.put_nowait)
    probe, image = SharedBytes(0), SharedBytes(48)
    probe.seal()
    item = MediaItem(key=bytes(16), start=0, count=1, grid=(1, 2, 2), pixels=image.seal(), shared=image.name)
    one = m.Submit(
        sequence=1, request=1, seed=1, prompt_ids=bytes(4), params=TokenParams(max_tokens=1), media=(item,)
    )

    async def tell(message: m.ToFront) -> None:
        await engine.send_multipart([front, m.encode(message)])
        while not isinstance(await heard.get(), e.Received):
            pass

    try:
        link.send(m.Hello(versions=(m.OLDEST, m.VERSION), front="f"))
        front, _ = await engine.recv_multipart()
        assert await sent(engine, link, one) == [bytes(48)]  # nothing is known of the engine
        welcome = m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=9,
            max_model_len=9,
            max_num_seqs=1,
            num_blocks=(1,),
            incarnation=1,
        )
        await tell(welcome)
        assert await sent(engine, link, one) == [bytes(48)]  # an older engine
        elsewhere = msgspec.structs.replace(probe.name, pid=1 << 30)
        await tell(msgspec.structs.replace(welcome, probe=elsewhere))
        assert await sent(engine, link, one) == [bytes(48)]  # another host
        await tell(msgspec.structs.replace(welcome, probe=probe.name))
        assert await sent(engine, link, one) == []
        for code, frames in ((PixelsLost.code, []), (UNREACHABLE, [bytes(48)])):
            error = PixelsLost("gone", code=code).info()
            event = m.TokenEvent(sequence=1, finish="evicted", error=error)
            await tell(m.Tokens(step=-1, events=(event,)))
            assert await sent(engine, link, one) == frames
    finally:
        await link.close(flush=False)
        engine.close()
        context.term()
        probe.close()
        image.close()


@pytest.mark.requirement("D6")
def test_images_are_named_where_the_engine_can_open_them(tmp_path: Path) -> None:
    asyncio.run(asyncio.wait_for(talk(tmp_path), deadline(30)))


async def storm(folder: Path) -> None:
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(f"ipc://{folder}/head")
    heard: list[int] = []

    def report(event: e.Event) -> None:
        if isinstance(event, e.Received) and isinstance(event.message, m.Tokens):
            heard.append(event.message.step)
            link.send(m.Finish(sequence=event.message.step))

    link = Link("one", 1, Address(f"ipc://{folder}/head", Lives()), context, 30.0, report)
    try:
        link.send(m.Hello(versions=(m.OLDEST, m.VERSION), front="f"))
        front, _ = await engine.recv_multipart()
        for step in range(4 * READ_AT_ONCE):
            await engine.send_multipart([front, m.encode(m.Tokens(step=step, events=()))])
        answers = [m.decode_to_engine((await engine.recv_multipart())[1]) for _ in range(4 * READ_AT_ONCE)]
        assert answers == [m.Finish(sequence=step) for step in heard]
        assert len(heard) == 4 * READ_AT_ONCE
    finally:
        await link.close(flush=False)
        engine.close()
        context.term()


def test_many_messages_at_once_are_all_received_and_answered(tmp_path: Path) -> None:
    """zmq signals once for many messages, and a send may use the signal up."""
    asyncio.run(asyncio.wait_for(storm(tmp_path), deadline(30)))
