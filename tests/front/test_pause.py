"""Sequences of unread streams leave their engines and later continue with the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.slowness import deadline
from weft.common import env
from weft.common.errors import Unavailable, WeftError
from weft.control.fleet.instance_table import Patience
from weft.control.links.flow import Flow
from weft.control.links.link import Address
from weft.control.links.links import Links
from weft.control.processes.engine_owner import EngineOwner
from weft.types import messages as m
from weft.types.sampling import TokenParams

HERE = Path(__file__).parent
PROMPT = [10, 20, 30]


class Rig:
    """An API server's links to scripted engine processes."""

    def __init__(self, folder: Path, count: int, restarts: int) -> None:
        self._folder = folder
        self.gate = folder / "gate"
        """While the file exists, a started engine does not begin."""
        self.processes: list[subprocess.Popen[bytes]] = []
        owner = EngineOwner([str(number) for number in range(count)], self, restarts)
        owner.start()
        self.links = Links(owner, Patience(engine=10.0))

    def start(self, name: str, incarnation: int) -> Address:
        endpoint = f"ipc://{self._folder}/head{len(self.processes)}"
        variables = env.child_environment(PYTHONPATH=str(HERE.parent.parent))
        command = [sys.executable, str(HERE / "fake_engine.py"), endpoint]
        if self.gate.exists():
            waits = 'while [ -e "$0" ]; do sleep 0.01; done; exec "$@"'
            command = ["sh", "-c", waits, str(self.gate), *command]
        self.processes.append(subprocess.Popen(command, env=variables))
        return Address(endpoint, self.processes[-1], None, incarnation)

    def kill(self, name: str, incarnation: int) -> None:
        """Do nothing: every lost process here has ended already."""

    def submit(self, *sequences: int, max_tokens: int = 300, seed: int = 1) -> Flow:
        params = TokenParams(max_tokens=max_tokens, prompt_logprobs=1, logprobs=2)
        made = [
            m.Submit(
                sequence=sequence,
                request=9000 + sequences[0],
                choice=choice,
                seed=seed,
                prompt_ids=m.ids_to_bytes(PROMPT),
                params=params,
            )
            for choice, sequence in enumerate(sequences)
        ]
        return self.links.submit(made)

    async def running(self) -> int:
        """Return the live sequences of all engines, from heartbeats sent after the call."""
        steps = [one.stats.steps for one in self.links.instances]
        async with asyncio.timeout(deadline(20)):
            while any(
                one.alive and one.stats.steps <= before + 30
                for one, before in zip(self.links.instances, steps, strict=True)
            ):
                await asyncio.sleep(0.01)
        return sum(one.stats.running for one in self.links.instances if one.alive)


@contextlib.asynccontextmanager
async def rig(folder: Path, count: int = 1, restarts: int = 0) -> AsyncIterator[Rig]:
    made = Rig(folder, count, restarts)
    try:
        await made.links.start()
        yield made
    finally:
        await made.links.close()
        for process in made.processes:
            process.kill()
            process.wait()


class Read:
    """Collect the events of a flow."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.tokens: dict[int, list[int]] = {sequence: [] for sequence in flow.open}
        self.prompt_positions = 0
        self.cached = 0
        self.ends: dict[int, str] = {}

    async def some(self) -> None:
        for event in await asyncio.wait_for(self.flow.next(), deadline(20)):
            self.tokens[event.sequence] += event.token_ids
            if event.logprobs is not None:
                assert len(event.logprobs.rank) == 4 * len(event.token_ids)
            self.prompt_positions += (
                0 if event.prompt_logprobs is None else len(event.prompt_logprobs.rank) // 4
            )
            self.cached = max(self.cached, event.num_cached)
            if event.finish is not None:
                assert event.error is None, event.error
                assert event.sequence not in self.ends
                self.ends[event.sequence] = event.finish

    async def until(self, count: int) -> None:
        while min(map(len, self.tokens.values())) < count:
            await self.some()

    async def all(self) -> None:
        while len(self.ends) < len(self.tokens):
            await self.some()

    def check(self, max_tokens: int = 300) -> None:
        """Assert that every token and end arrived exactly once."""
        whole = (PROMPT * max_tokens)[:max_tokens]
        assert self.tokens == dict.fromkeys(self.tokens, whole)
        assert self.ends == dict.fromkeys(self.tokens, "length")
        assert self.prompt_positions == len(PROMPT) - 1


def run(folder: Path, test: Any, **fields: Any) -> None:
    async def within() -> None:
        async with asyncio.timeout(deadline(60)), rig(folder, **fields) as made:
            await test(made)

    asyncio.run(within())


@pytest.mark.requirement("F29")
def test_a_paused_flow_leaves_its_head_and_goes_on(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        flow = rig.submit(1, 2)
        read = Read(flow)
        await read.until(5)
        cached = read.cached
        for _ in range(3):
            rig.links.pause(flow)
            rig.links.pause(flow)
            assert await rig.running() == 0
            rig.links.resume(flow)
            rig.links.resume(flow)
            await read.until(min(map(len, read.tokens.values())) + 3)
        await read.all()
        read.check()
        assert (read.cached, cached) == (2, 2)
        assert (rig.links.pauses, rig.links.failovers, rig.links.open_sequences) == (3, 0, 0)
        assert await rig.running() == 0

    run(tmp_path, test)


def test_what_was_on_its_way_when_a_flow_was_paused_is_not_counted_twice(tmp_path: Path) -> None:
    """A resumed flow may get tokens from before the pause; each token counts once."""

    async def test(rig: Rig) -> None:
        flow = rig.submit(1, 2)
        read = Read(flow)
        while not read.ends:
            rig.links.pause(flow)
            rig.links.resume(flow)
            await read.until(min(map(len, read.tokens.values())) + 1)
        await read.all()
        read.check()

    run(tmp_path, test)


@pytest.mark.slow
def test_many_pauses_are_no_losses_and_heads_may_die_meanwhile(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        flow = rig.submit(1, 2)
        read = Read(flow)
        for number in range(8):
            await read.until(2 * number + 2)
            rig.links.pause(flow)
            if number == 2:  # all engines: the flow waits for an engine that returns
                rig.gate.touch()
                for process in rig.processes:
                    process.kill()
                while rig.links.alive:
                    await asyncio.sleep(0.01)
            if number == 5:  # one of two
                while not rig.links.whole:
                    await asyncio.sleep(0.01)
                rig.processes[-1].kill()
                while rig.links.whole:
                    await asyncio.sleep(0.01)
            rig.links.resume(flow)
            rig.gate.unlink(missing_ok=True)
        await read.all()
        read.check()
        assert rig.links.failovers == 0

    run(tmp_path, test, count=2, restarts=3)


@pytest.mark.slow
def test_a_flow_that_waits_for_a_head_can_be_paused(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        flow = rig.submit(1)
        read = Read(flow)
        await read.until(3)
        rig.processes[0].kill()
        while rig.links.alive:
            await asyncio.sleep(0.01)
        rig.links.pause(flow)
        while not rig.links.alive:
            await asyncio.sleep(0.01)
        assert await rig.running() == 0
        rig.links.resume(flow)
        await read.all()
        read.check()

    run(tmp_path, test, restarts=1)


def test_a_paused_flow_ends_with_the_last_head(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        flow = rig.submit(1)
        await Read(flow).until(3)
        rig.links.pause(flow)
        rig.processes[0].kill()
        await rig.links.died.wait()
        rig.links.resume(flow)
        (end,) = await flow.next()
        assert end.finish == "error"
        assert end.error is not None
        assert end.error.code == "engine_dead"
        rig.links.release(flow)
        assert rig.links.open_sequences == 0

    run(tmp_path, test)


def test_a_paused_flow_can_be_released_and_failed(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        left, failed = rig.submit(1, 2), rig.submit(3)
        for flow in (left, failed):
            await Read(flow).until(3)
            rig.links.pause(flow)
        rig.links.release(left)
        assert rig.links.open_sequences == 1
        rig.links.resume(left)
        rig.links.fail_all(Unavailable("the server stops"))
        rig.links.resume(failed)
        with pytest.raises(WeftError, match="stops"):
            await failed.next()
        assert await rig.running() == 0
        rig.links.release(failed)
        assert rig.links.open_sequences == 0

    run(tmp_path, test)


# -- whole servers ----------------------------------------------------------------------------------


def begin(server: Any, **fields: Any) -> socket.socket:
    """Start a stream without a reading client. Return the socket."""
    body = json.dumps({"model": server.model, "stream": True, **fields}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(deadline(60))
    raw.connect(("127.0.0.1", httpx.URL(server.url).port))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += b"Content-Type: application/json\r\n"
    raw.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    return raw


def read_stream(raw: socket.socket) -> list[dict[str, Any]]:
    """Return all chunks of a stream."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # from now on the client reads larger pieces
    with raw:
        data = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    assert data.count(b"data: [DONE]") == 1
    return [json.loads(line) for line in re.findall(rb"^data: ({.*})\r?$", data, re.M)]


def joined(chunks: list[dict[str, Any]], index: int) -> tuple[str, list[str], list[float], str]:
    """Text, tokens and logprobs, and the end of one choice of a stream."""
    mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    logprobs = [c["logprobs"] for c in mine if c["logprobs"]]
    return (
        "".join(c["text"] for c in mine),
        [token for one in logprobs for token in one["tokens"]],
        [value for one in logprobs for value in one["token_logprobs"]],
        *(c["finish_reason"] for c in mine if c["finish_reason"]),
    )


@pytest.mark.requirement("F29")
@pytest.mark.slow
def test_clients_that_never_read_keep_no_slots(start_weft: Any) -> None:
    """As many unread clients as slots do not block another client, and later get complete answers."""
    server = start_weft("--max-num-seqs", "4")
    fields = {
        "prompt": "Tom has 12 apples and buys 7 more.",
        "max_tokens": 1000,
        "ignore_eos": True,
        "temperature": 1.0,
        "logprobs": 20,
        "n": 2,
        "stream_options": {"include_usage": True},
    }
    with server.stream("/v1/completions", seed=1, **fields) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    alone = [json.loads(line) for line in lines]
    stalled = [begin(server, seed=seed, **fields) for seed in (1, 2)]
    server.wait(lambda: server.metric("streams_paused_total") >= 2, 60)
    server.wait(lambda: server.metric("num_requests_running") == 0, 10)
    assert server.metric("front_sequences") == 4
    assert server.complete("Ann", max_tokens=5).status_code == 200
    chunks = read_stream(stalled[0])
    for index in (0, 1):
        text, tokens, logprobs, finish = joined(chunks, index)
        expected = joined(alone, index)
        assert (text, tokens, finish) == (expected[0], expected[1], expected[3])
        assert logprobs == pytest.approx(expected[2], abs=1e-3)
        assert len(tokens) == 1000
    assert chunks[-1]["usage"]["completion_tokens"] == alone[-1]["usage"]["completion_tokens"] == 2000
    assert chunks[-1]["usage"]["prompt_tokens"] == alone[-1]["usage"]["prompt_tokens"]
    stalled[1].close()
    server.wait(lambda: server.metric("front_sequences") == 0, 10)


LONG = {"prompt": "x", "max_tokens": 490, "logprobs": 20, "n": 4}


SHORT_GRACE = {"weft.front.front_server.GRACE": 0.5}
"""Seconds until the server closes connections of clients that do not read."""


@pytest.mark.slow
def test_a_server_with_a_paused_stream_stops_in_time(start_fake: Any) -> None:
    server = start_fake(drain_timeout=0.5, constants=SHORT_GRACE)
    with begin(server, **LONG):
        server.wait(lambda: server.metric("streams_paused_total") == 1, 20)
        assert server.stop(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_paused_stream_is_finished_while_the_server_drains(start_fake: Any) -> None:
    server = start_fake(drain_timeout=60)
    raw = begin(server, **LONG)
    server.wait(lambda: server.metric("streams_paused_total") == 1, 20)
    server.process.terminate()
    server.wait(lambda: server.http.get("/ready").status_code == 503)
    chunks = read_stream(raw)
    assert {len(joined(chunks, index)[1]) for index in range(4)} == {490}
    assert server.process.wait(deadline(20)) == 0


@pytest.mark.slow
@pytest.mark.requirement("F29")
def test_a_client_that_reads_nothing_is_cut_off(start_fake: Any) -> None:
    unread = deadline(1.0)
    server = start_fake(constants={"weft.front.connection.UNREAD_SECONDS": unread})
    with begin(server, **LONG), begin(server, **LONG) as reads:
        server.wait(lambda: server.metric("streams_paused_total") >= 2, 20)
        data, end = b"", time.monotonic() + 3 * unread
        while time.monotonic() < end and (more := reads.recv(1 << 16)):
            data += more
            time.sleep(0.01)
        server.wait(lambda: server.metric("front_sequences") <= 4, 20)
        data += b"".join(iter(lambda: reads.recv(1 << 16), b""))
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        server.wait(lambda: server.metric("front_sequences") == 0, 20)


@pytest.mark.slow
def test_a_paused_stream_ends_at_its_deadline(start_fake: Any) -> None:
    server = start_fake(
        request_timeout=deadline(2.0), constants={"weft.front.requests.serving.SEND_GRACE": 0.5}
    )
    with begin(server, **LONG):
        server.wait(lambda: server.metric("streams_paused_total") == 1, 20)
        assert server.metric("front_sequences") == 4
        server.wait(lambda: server.metric("front_sequences") == 0, 10)
        server.wait(lambda: server.metric("request_failure_total") == 1, 10)


def crowd(server: Any, count: int) -> None:
    """Assert that ``count`` unread clients use bounded memory, and other clients are served."""

    def memory() -> int:
        lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))

    fields = {"prompt": "x", "max_tokens": 490, "logprobs": 20, "n": 2}
    for raw in [begin(server, **fields) for _ in range(8)]:
        read_stream(raw)
    before = memory()
    stalled = [begin(server, **fields) for _ in range(count)]
    server.wait(lambda: server.metric("num_requests_running") == 0, 60)  # done, or paused
    assert (memory() - before) / count < 1024, "KiB a client, of answers with 40 thousand logprobs"
    assert server.chat(max_tokens=11).status_code == 200
    texts = [c["text"] for chunk in read_stream(stalled[-1]) for c in chunk["choices"]]
    assert "".join(texts) == "x" * 980, "who reads after all gets everything"
    for raw in stalled:
        raw.close()
    server.wait(lambda: server.metric("front_sequences") == 0, 30)
    server.wait(lambda: memory() - before < 64 << 10, 30)


@pytest.mark.requirement("F29")
@pytest.mark.slow
def test_fifty_clients_that_never_read(start_fake: Any) -> None:
    crowd(start_fake(max_queued_requests=4000), 50)


@pytest.mark.requirement("F29")
@pytest.mark.grid
def test_a_thousand_clients_that_never_read(start_fake: Any) -> None:
    crowd(start_fake(max_queued_requests=4000), 1000)
