"""Compare decode while caches arrive with decode without arrivals, in one engine and one run.

    python -m bench.receiving [--model FOLDER] [--rates 2,8,24] [--length 1024] [--rounds 3] [--name NAME]

A decode engine with its real loop and ranks is pinned to one core. On another core a script plays an API
server and a prefill engine: at a constant rate it submits prompts, offers transfers and pushes caches that
nobody computed. ``--streams`` sequences decode all the time; only their tokens count. An arrived prompt
decodes for one more step, so that its transfer is complete.

The engine counts everything between heartbeats: tokens and steps between the same two heartbeats belong
together. The engine never sleeps while streams run. On a core of its own, tokens per second equal tokens per
second of CPU time; on a shared machine only the latter has a meaning.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from bench import record
from bench.sending import CHUNK, config_of, random_model
from weft.common.clock import SystemClock
from weft.config.resolved import EngineConfig
from weft.disagg.protocol.group_layout import blocks_of
from weft.engine.disagg.group_rooms import GroupRooms
from weft.engine.disagg.rank_rooms import open_rooms
from weft.engine.disagg.room_channel import ZmqRooms
from weft.engine.disagg.rooms import HeadRooms
from weft.engine.server.engine_server import run_head
from weft.engine.server.listener import Listener
from weft.runner.exports import Exports
from weft.types import messages as m
from weft.types import plan as p
from weft.types import rooms as r
from weft.types.sampling import TokenParams

DEADLINE = 120.0
ROOM_S = 60.0
MOST_OPEN = 64
"""Maximum number of open transfers. Further arrivals are dropped and counted as missed."""


def decode(config: EngineConfig, endpoint: str, core: int) -> None:
    """Run the decode engine, as the body of a process."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    run_head(config, Listener(endpoint))


class Script:
    """Act as the scheduler of a prefill engine for its transfers: a ``rooms.RoomScheduler``."""

    def __init__(self, config: EngineConfig, length: int) -> None:
        opened = open_rooms(config, config.kv, 0)
        assert opened is not None
        self._opened, self._length, self._config = opened, length, config
        for kind in opened.memory:
            for tensor in kind:
                tensor.fill_(0.01)  # every page is there
        self.incarnation = secrets.randbits(63)
        ranks = GroupRooms(
            opened.transfer, opened.reports, lambda: [opened.endpoint], {}, lambda rank, frame: None
        )
        self._folder = tempfile.TemporaryDirectory(prefix="weft-bench-")
        channel = ZmqRooms(f"ipc://{self._folder.name}/rooms", self.incarnation)
        self.rooms = HeadRooms(True, ranks, channel, incarnation=self.incarnation, clock=SystemClock())
        layers = 1 + max(layer for pool in config.kv.pools for layer in pool.cache.layers)
        self._exports = Exports(config.kv, layers, config.dtype, opened.transfer)
        self._layers = layers
        self._asked: list[r.RoomRequest] = []
        self.open: set[r.RoomKey] = set()
        self.ended: Counter[str] = Counter()

    def offer(self, number: int, peer: r.Peer) -> r.RoomKey:
        """Open and offer a transfer. Return the key."""
        key = r.RoomKey(number, 0, self.incarnation)
        self.rooms.open(r.RoomTicket(key, True, peer, ROOM_S))
        self._asked.append(r.OfferRoom(key=key, num_prompt=self._length, num_cached=0))
        self.open.add(key)
        self.rooms.asked(self)
        return key

    def room(self, event: r.RoomEvent, now: float) -> list[m.TokenEvent]:
        """Handle a transfer event. Bound: push everything as if all chunks were computed at once. Ended:
        forget the key.
        """
        key = event.key
        if isinstance(event, r.RoomBound):
            self._push(key)
            self._asked.append(r.FinishRoom(key=key, first=r.FirstToken(choice=0, token=5)))
        elif isinstance(event, r.RoomLanded | r.RoomFailed):
            self.open.discard(key)
            self.ended[type(event).__name__] += 1
        return []

    def room_requests(self) -> list[r.RoomRequest]:
        asked, self._asked = self._asked, []
        return asked

    def room_blocks(self, key: r.RoomKey) -> tuple[r.Blocks, ...]:
        return self._blocks(self._length)

    def _blocks(self, end: int) -> tuple[r.Blocks, ...]:
        """Return the block numbers of each pool. All transfers send the same blocks."""
        sizes = [pool.block_size for pool in self._config.kv.pools]
        return tuple(blocks_of(np.arange(1, 1 + -(-end // size))) for size in sizes)

    def _push(self, key: r.RoomKey) -> None:
        for begin in range(0, self._length, CHUNK):
            end = min(begin + CHUNK, self._length)
            op = p.Export(slot=0, key=key, start=begin, end=end, blocks=self._blocks(end))
            computed = self._exports.begin([op])
            assert computed is not None
            for layer in range(self._layers):
                computed(layer)

    def close(self) -> None:
        self.rooms.close()
        self._opened.close()
        self._folder.cleanup()


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of all living threads of a process."""
    spent = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            spent += int((task / "schedstat").read_text().split()[0]) / 1e9
    return spent


class Mark(msgspec.Struct, frozen=True):
    """Record the totals between two steps of the engine."""

    at: float
    cpu: float
    """CPU seconds of the engine process."""
    stats: m.HeadStats
    tokens: int
    """Number of tokens of the streams."""


class Load:
    """Play the API server. Streams have numbers below ``streams``; arrivals have the others."""

    def __init__(self, endpoint: str, pid: int, script: Script, args: argparse.Namespace) -> None:
        self._pid, self._script, self._args = pid, script, args
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._send(m.Hello(versions=(m.OLDEST, m.VERSION), front=secrets.token_hex(4)))
        self._poller = zmq.Poller()
        for one in (self._socket, *script.rooms.sockets):
            self._poller.register(one, zmq.POLLIN)
        self.welcome: m.Welcome | None = None
        self._tokens: Counter[int] = Counter()
        self._marks: list[Mark] = []
        self._number = 0
        self._streams = range(0)
        self.gaps: list[float] = []
        self._last: dict[int, float] = {}
        self._until(lambda: self.welcome is not None)

    def window(self, rate: float) -> dict[str, float]:
        """The streams for a while, with ``rate`` arrivals a second."""
        args = self._args
        first = self._number
        for _ in range(args.streams):
            self._submit(args.context, args.most)
        self._streams = range(first, self._number)
        self._last.clear()
        self._until(lambda: all(self._tokens[number] > 8 for number in self._streams))
        missed = self._arrivals(rate, args.settle)
        self._marks.clear()
        self.gaps.clear()
        failed = self._script.ended["RoomFailed"]
        missed = self._arrivals(rate, args.seconds)
        begin, end = self._marks[0], self._marks[-1]
        for number in self._streams:
            self._send(m.Finish(sequence=number))
        self._until(lambda: not self._script.open)
        self._turn(0.5)
        was, now = begin.stats, end.stats
        assert was.transfers is not None
        assert now.transfers is not None
        seconds, steps = end.at - begin.at, now.steps - was.steps
        gaps = sorted(self.gaps)
        return {
            "tok/s": (end.tokens - begin.tokens) / seconds,
            "tok a CPU second": (end.tokens - begin.tokens) / (end.cpu - begin.cpu),
            "CPU share": (end.cpu - begin.cpu) / seconds,
            "steps/s": steps / seconds,
            "rows of streams a step": (end.tokens - begin.tokens) / steps,
            "rows a step": (now.decode_rows - was.decode_rows) / steps,
            "gap p99 ms": 1e3 * gaps[int(0.99 * len(gaps))],
            "gap max ms": 1e3 * gaps[-1],
            "landed/s": (now.transfers.done - was.transfers.done) / seconds,
            "MB/s": (now.transfers.received_bytes - was.transfers.received_bytes) / seconds / 1e6,
            "missed or failed": missed + self._script.ended["RoomFailed"] - failed,
            "prefill rows": now.prefill_rows - was.prefill_rows,
        }

    def shut_down(self) -> None:
        """Stop the engine and close the socket."""
        self._send(m.Shutdown())
        self._socket.close(1000)
        self._context.term()

    def _arrivals(self, rate: float, seconds: float) -> int:
        """Submit arrivals at ``rate`` for ``seconds``. Return the number of dropped arrivals."""
        began, missed, made = time.monotonic(), 0, 0
        while (now := time.monotonic()) < began + seconds:
            due = began + made / rate if rate else began + seconds
            if now < due:
                self._turn(min(due, began + seconds) - now)
                continue
            made += 1
            if len(self._script.open) < MOST_OPEN:
                self._arrive()
            else:
                missed += 1
        return missed

    def _arrive(self) -> None:
        assert self.welcome is not None
        peer = r.Peer(self.welcome.rooms, self.welcome.incarnation)
        own = r.Peer(self._script.rooms.address, self._script.incarnation)
        key = r.RoomKey(self._number, 0, self._script.incarnation)
        self._submit(self._args.length, 2, r.RoomTicket(key, False, own, ROOM_S))
        self._script.offer(key.room, peer)

    def _submit(self, length: int, tokens: int, room: r.RoomTicket | None = None) -> None:
        ids = np.random.default_rng(self._number).integers(10, 1000, length)
        params = TokenParams(temperature=0.0, max_tokens=tokens)
        number = self._number
        prompt = m.ids_to_bytes(ids.tolist())
        self._send(
            m.Submit(sequence=number, request=number, seed=1, prompt_ids=prompt, params=params, room=room)
        )
        self._number += 1

    def _send(self, message: m.ToHead) -> None:
        self._socket.send(m.encode(message))

    def _until(self, done: Any) -> None:
        until = time.monotonic() + DEADLINE
        while not done():
            if time.monotonic() > until:
                raise RuntimeError("the head that decodes did not answer in time")
            self._turn(0.1)

    def _turn(self, seconds: float) -> None:
        self._poller.poll(max(1, round(1e3 * seconds)))
        self._script.rooms.take(self._script)
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(m.decode_to_front(self._socket.recv(zmq.NOBLOCK)))

    def _take(self, message: m.ToFront) -> None:
        now = time.monotonic()
        match message:
            case m.Welcome():
                self.welcome = message
            case m.Tokens(events=events):
                for event in events:
                    if event.error is not None:
                        raise RuntimeError(f"sequence {event.sequence}: {event.error}")
                    self._tokens[event.sequence] += len(event.token_ids)
                    if event.sequence in self._streams:
                        self.gaps.append(now - self._last.get(event.sequence, now))
                        self._last[event.sequence] = now
            case m.Heartbeat(stats=stats):
                tokens = sum(self._tokens[number] for number in self._streams)
                self._marks.append(Mark(now, cpu_seconds(self._pid), stats, tokens))
            case m.HeadFailed(error=error):
                raise RuntimeError(f"the head failed: {error}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder; by default qwen3-dense-s, made with random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, default=8, help="that decode all along")
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of those")
    parser.add_argument("--most", type=int, default=3000, help="tokens that a stream may make in a window")
    parser.add_argument("--rates", default="2,8,24", help="arrivals a second")
    parser.add_argument("--length", type=int, default=1024, help="prompt tokens of each")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds before each window")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", help="of the result in bench/results")
    return parser.parse_args()


def rows_of(found: dict[float, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Return one row per rate: medians, and the ratio to decode without arrivals, round by round."""
    rows: list[dict[str, Any]] = []
    for rate, windows in found.items():
        row: dict[str, Any] = {"arrivals/s": f"{rate:g}"}
        for title, name in (("of alone", "tok/s"), ("of alone, by CPU time", "tok a CPU second")):
            shares = [one[name] / alone[name] for one, alone in zip(windows, found[0.0], strict=True)]
            row[title] = f"{statistics.median(shares):.3f} ({min(shares):.3f} to {max(shares):.3f})"
        medians = {name: round(statistics.median(one[name] for one in windows), 2) for name in windows[0]}
        rows.append(row | medians)
    return rows


def main() -> None:
    args = parse()
    rates = [0.0, *(float(rate) for rate in args.rates.split(","))]
    cores = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        model = args.model or random_model(folder)
        shape = model, max(args.length, args.context + args.most), 2 * MOST_OPEN
        endpoint = f"ipc://{folder}/head"
        context = multiprocessing.get_context("spawn")
        config = config_of(*shape, "decode", args.dtype)
        process = context.Process(target=decode, args=(config, endpoint, cores[0]), daemon=True)
        process.start()
        os.sched_setaffinity(0, {cores[-1]})
        script = Script(config_of(*shape, "prefill", args.dtype), args.length)
        assert process.pid is not None
        load = Load(endpoint, process.pid, script, args)
        load.window(max(rates))  # warms up
        found: dict[float, list[dict[str, float]]] = {rate: [] for rate in rates}
        for number in range(args.rounds):
            for rate in rates if number % 2 == 0 else rates[::-1]:
                made = load.window(rate)
                found[rate].append(made)
                shown = ", ".join(f"{name} {value:.2f}" for name, value in made.items())
                print(f"round {number + 1}, {rate:g} arrivals/s: {shown}", flush=True)
        load.shut_down()
        process.join(10)
        script.close()
    os.sched_setaffinity(0, cores)
    table = record.markdown(rows_of(found))
    print(table)
    if args.name:
        path = Path(__file__).parent / "results" / f"{args.name}.json"
        what = args.model or "qwen3-dense-s"
        title = f"Decoding {args.streams} streams while prompts of {args.length} tokens arrive: {what}"
        windows = {f"{rate:g}": each for rate, each in found.items()}
        record.write(path, "bench.receiving", title, table, {"windows": windows})


if __name__ == "__main__":
    main()
