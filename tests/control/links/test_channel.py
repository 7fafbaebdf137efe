"""A zmq socket on the event loop: signals that a send uses up, and reads that are due."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import zmq

from tests.support.slowness import deadline
from weft.control.links.channel import READ_AT_ONCE, READ_S, Channel

COMMAND_S = 0.02
"""zmq handles no commands in a send sooner after the last call."""


@contextlib.contextmanager
def pair() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes]]:
    """Yield a DEALER, its ROUTER and the DEALER's identity. Each direction has room for two messages."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    try:
        for socket in (router, dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(1e3 * deadline(10)))
        router.set_hwm(1)
        dealer.set(zmq.SNDHWM, 1)
        router.bind("inproc://engine")
        dealer.connect("inproc://engine")
        dealer.send(b"hello")
        identity, _ = router.recv_multipart()
        yield dealer, router, identity
    finally:
        dealer.close()
        router.close()
        context.term()


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(), deadline(5))

    asyncio.run(within())


def fill(dealer: zmq.Socket[bytes]) -> int:
    """Send until the queue is full. Return the number of messages."""
    for count in range(100):
        try:
            dealer.send(b"fill", zmq.NOBLOCK)
        except zmq.Again:
            return count
    raise AssertionError("the queue has no limit")


def test_a_full_queue_hides_no_received_message() -> None:
    """The engine may read nothing for seconds in a long step, and still send tokens."""

    async def work() -> None:
        with pair() as (dealer, router, identity):
            heard: list[list[bytes]] = []
            channel = Channel(dealer, heard.append)
            await asyncio.sleep(0.01)
            full = fill(dealer)
            time.sleep(COMMAND_S)

            async def send() -> None:
                # The token comes within a turn of the event loop. The send finds the queue full, and uses up
                # the signal for the token.
                router.send_multipart([identity, b"token"])
                await channel.send((b"last",))

            sending = asyncio.create_task(send())
            while not heard:
                await asyncio.sleep(0.01)
            assert heard == [[b"token"]]
            assert not sending.done()
            for _ in range(full):
                router.recv_multipart()
            await sending
            assert router.recv_multipart()[1] == b"last"
            channel.close()

    run(work)


class Endless:
    """A socket with a message whenever somebody reads, and with room for all sent messages."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.fileno = socket.fileno
        self.reads = 0

    def recv_multipart(self, flags: int) -> list[bytes]:
        self.reads += 1
        return [b"token"]

    def send_multipart(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_many_sends_cause_one_read() -> None:
    """With a read per send, other tasks of the event loop would wait behind thousands of messages."""

    async def work() -> None:
        with pair() as (dealer, _, _):
            endless = Endless(dealer)
            channel = Channel(endless, lambda frames: None)  # type: ignore[arg-type]
            for _ in range(100):
                await channel.send((b"x",))
            assert endless.reads == 0
            await asyncio.sleep(0)
            assert endless.reads == READ_AT_ONCE
            channel.close()

    run(work)


def test_slow_work_gives_other_tasks_turns_and_shows_that_messages_wait() -> None:
    """Otherwise 64 messages with tokens of 1,000 streams would hold the event loop for seconds."""

    async def work() -> None:
        with pair() as (dealer, router, identity):
            seen: list[bool] = []

            def take(frames: list[bytes]) -> None:
                seen.append(channel.behind)
                time.sleep(1.5 * READ_S)

            channel = Channel(dealer, take)
            for _ in range(2):
                router.send_multipart([identity, b"token"])
            await asyncio.sleep(0)
            assert seen == [False]
            while channel.behind or len(seen) < 2:
                await asyncio.sleep(0)
            assert seen == [False, True]
            router.send_multipart([identity, b"token"])
            while len(seen) < 3:
                await asyncio.sleep(0.001)
            assert seen[2:] == [False]
            channel.close()

    run(work)
