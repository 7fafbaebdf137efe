"""Measure the cost of the API server per token: many streams from engines that replay a script.

python -m bench.front_overhead --streams 1000 --interval-ms 200 --tokens 50 --rounds 3 --json FILE
python -m bench.front_overhead --together --flags "--data-parallel-size 32"
python -m bench.front_overhead --against ../other-checkout      # rounds of both, in turn

Streams start in sequence, evenly over one interval and at least ``--spacing-ms`` apart. Token k of a stream
is due at start + (k + 1) intervals. The latency of a token is its delay at the client after the due time,
counted from the sending of the request. The latency includes the message to the engine, the engine's delay,
the API server and the client. With ``--together``, the tokens of all streams are due at multiples of the
interval, as from one step.

CPU time of each process comes from /proc, so the load generator's time is not in the API server's.
``front_us_a_token`` is over all work while the streams ran, reading the requests included.
``stream_us_a_token`` is over the time in which all streams were open and no request began or ended; nan if
the server was too slow for such a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools
import msgspec
import uvloop

from bench import record
from weft.bench.process import ServerProcess, role_of
from weft.bench.process_memory import tree

TEXT = "x"
TICKS = os.sysconf("SC_CLK_TCK")


class Delta(msgspec.Struct):
    """Fields of an event that the client reads."""

    content: str | None = None


class Choice(msgspec.Struct):
    """See ``Delta``."""

    delta: Delta


class Chunk(msgspec.Struct):
    """See ``Delta``."""

    choices: list[Choice] = []
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(Chunk).decode


@dataclass
class Stream(asyncio.Protocol):
    """Receive one streamed chat completion."""

    body: bytes
    done: asyncio.Future[None]
    sent: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each token came."""
    events: int = 0
    rest: bytes = b""
    tokens: int = 0
    """Tokens so far."""

    def connection_made(self, transport: Any) -> None:
        """Sends the request."""
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.sent = time.monotonic()
        transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        """Parse the received bytes."""
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        """Handle the events of the body."""
        *lines, self.rest = (self.rest + body).split(b"\n")
        now = time.monotonic()
        for line in lines:
            if line.startswith(b"data: {"):
                chunk = _decode(line[6:])
                if chunk.error is not None:
                    self._end(RuntimeError(str(chunk.error)))
                text = "".join(one.delta.content or "" for one in chunk.choices)
                self.events += bool(text)
                self.arrivals += [now] * len(text)
                self.tokens += len(text)

    def on_message_complete(self) -> None:
        """End the stream."""
        status = self.parser.get_status_code()
        self._end(None if status == 200 else RuntimeError(f"status {status}: {self.rest!r}"))

    def connection_lost(self, exc: Exception | None) -> None:
        """End the stream with an error unless the answer is complete."""
        self._end(exc or RuntimeError("the connection broke"))

    def _end(self, error: Exception | None) -> None:
        if not self.done.done():
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)
        self.transport.close()


def request(port: int, model: str, tokens: int) -> bytes:
    """Return a request as bytes on the wire."""
    messages = [{"role": "user", "content": "Go on."}]
    body = json.dumps({"model": model, "messages": messages, "stream": True, "max_tokens": tokens}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


@dataclass
class Steady:
    """The API server's work while all streams were open."""

    cpu: float = 0.0
    """CPU seconds."""
    tokens: int = 0


async def steady(args: argparse.Namespace, root: int, streams: list[Stream]) -> Steady:
    """Measure from the first token of the last stream to the third last token of the first stream."""

    def now() -> Steady:
        return Steady(cpu_seconds(root)["front"], sum(stream.tokens for stream in streams))

    while not streams[-1].tokens:
        await asyncio.sleep(0.02)
    before = now()
    while streams[0].tokens < args.tokens - 2:
        await asyncio.sleep(0.02)
    after = now()
    return Steady(after.cpu - before.cpu, after.tokens - before.tokens)


async def load(args: argparse.Namespace, port: int, model: str, root: int) -> tuple[list[Stream], Steady]:
    """Run all streams to their end and return them. ``root``: process of the server. Raise TimeoutError."""
    loop = asyncio.get_running_loop()
    body = request(port, model, args.tokens)
    spacing = max(args.spacing_ms / 1e3, args.interval_ms / 1e3 / args.streams)
    streams: list[Stream] = []
    start = time.monotonic()
    for number in range(args.streams):
        await asyncio.sleep(max(start + number * spacing - time.monotonic(), 0))
        stream = Stream(body, loop.create_future())
        await loop.create_connection(lambda made=stream: made, "127.0.0.1", port)  # type: ignore[misc]
        streams.append(stream)
    async with asyncio.timeout(60 + 4 * args.tokens * args.interval_ms / 1e3):
        found = await steady(args, root, streams)
        await asyncio.gather(*(stream.done for stream in streams))
    return streams, found


def cpu_seconds(root: int) -> dict[str, float]:
    """Return CPU seconds so far of ``front`` and ``head`` (a server with one of each) and of this process
    (``client``).
    """
    found = {"front": 0.0, "head": 0.0, "client": time.process_time()}
    for process in tree(root):
        folder = Path(f"/proc/{process.pid}")
        words = folder.joinpath("cmdline").read_bytes().split(b"\0")
        own = "front" if process.pid == root else "helper"  # helpers render templates, and end when idle
        role = role_of([word.decode("utf-8", "replace") for word in words]) or own
        fields = folder.joinpath("stat").read_bytes().rpartition(b")")[2].split()
        found[role] = found.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / TICKS
    return found


def measure(args: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    """Run one round and return its figures. Raise RuntimeError if tokens are missing."""
    assert server.pid is not None
    assert server.model is not None
    before, began = cpu_seconds(server.pid), time.monotonic()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        streams, found = runner.run(load(args, server.port, server.model, server.pid))
    seconds, after = time.monotonic() - began, cpu_seconds(server.pid)
    tokens = sum(len(stream.arrivals) for stream in streams)
    if tokens != args.streams * args.tokens:
        raise RuntimeError(f"{tokens} tokens came, not {args.streams * args.tokens}")
    interval = args.interval_ms / 1e3
    late = [
        came - begin(stream, interval, args.together) - number * interval
        for stream in streams
        for number, came in enumerate(stream.arrivals)
    ]
    cuts = statistics.quantiles(late, n=1000)
    used = {role: after[role] - before[role] for role in ("front", "head", "client")}
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
        "events": sum(stream.events for stream in streams),
        "late_p50_ms": 1e3 * statistics.median(late),
        "late_p99_ms": 1e3 * cuts[989],
        "late_max_ms": 1e3 * max(late),
        "front_us_a_token": 1e6 * used["front"] / tokens,
        "stream_us_a_token": 1e6 * found.cpu / found.tokens if found.tokens > args.streams else math.nan,
        "head_us_a_token": 1e6 * used["head"] / tokens,
        "client_us_a_token": 1e6 * used["client"] / tokens,
        "front_cores": used["front"] / seconds,
        "head_cores": used["head"] / seconds,
        "client_cores": used["client"] / seconds,
    }


def begin(stream: Stream, interval: float, together: bool) -> float:
    """Return the time at which the first token of ``stream`` was due."""
    if not together:
        return stream.sent + interval
    # Engine and client share a clock. The least late token is less than an interval late.
    first = min(came - number * interval for number, came in enumerate(stream.arrivals))
    return math.floor(first / interval) * interval


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=50, help="tokens of each stream")
    parser.add_argument(
        "--interval-ms", type=float, default=200.0, help="time between two tokens of a stream"
    )
    parser.add_argument("--spacing-ms", type=float, default=5.0, help="minimum time between two requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--together", action="store_true", help="tokens of all streams are due at the same times"
    )
    parser.add_argument("--against", type=Path, help="folder of another checkout; rounds alternate")
    parser.add_argument("--flags", default="", help="further flags of the server")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print a line per round, and write the medians with ``--json``."""
    args = parse()
    folders = {"": Path.cwd()} if args.against is None else {"before ": args.against, "after ": Path.cwd()}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {name: serve(stack, args, folder, checkout) for name, checkout in folders.items()}
        for number in range(args.rounds):
            for name, server in servers.items():
                rounds[name].append(measure(args, server))
                shown = ", ".join(f"{key} {value:.4g}" for key, value in rounds[name][-1].items())
                print(f"{name}round {number + 1}: {shown}", flush=True)
    if args.json:
        write(args, rounds)


def serve(
    stack: contextlib.ExitStack, args: argparse.Namespace, folder: Path, checkout: Path
) -> ServerProcess:
    """Start the server of ``checkout`` and wait until the server is ready. ``folder``: for script and
    tokenizer."""
    entry: dict[str, Any] = {
        "text": TEXT * args.tokens,
        "finish": "length",
        "delay_ms": args.interval_ms,
        "wait_ms": args.interval_ms,
        "repeat": True,
    }
    if args.together:
        entry["beat_ms"] = args.interval_ms
    script, tokenizer = folder / "script.jsonl", folder / "text"
    script.write_text(json.dumps(entry) + "\n")
    tokenizer.mkdir(exist_ok=True)
    write_tokenizer(tokenizer)
    command = [sys.executable, "-m", "weft", "serve", "--port", "{port}", "--scripted", str(script)]
    command += ["--tokenizer", str(tokenizer), "--max-num-seqs", str(2 * args.streams), *args.flags.split()]
    # PYTHONSAFEPATH: the current folder must not come before the checkout.
    paths = [str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    server = ServerProcess(command, prompt="a", environment=environment)
    stack.enter_context(server)
    server.wait_ready(300)
    return server


def write(args: argparse.Namespace, rounds: dict[str, list[dict[str, Any]]]) -> None:
    """Write the result as two files."""
    rows = []
    for name in next(iter(rounds.values()))[0]:
        row = {"": name}
        for which, found in rounds.items():
            row[f"{which}median"] = f"{statistics.median(r[name] for r in found):.4g}"
            row |= {f"{which}round {n + 1}": f"{r[name]:.4g}" for n, r in enumerate(found)}
        rows.append(row)
    how = "all together" if args.together else "each at its own time"
    title = f"The front's overhead: {args.streams} streams, a token each {args.interval_ms:g} ms, {how}"
    record.write(args.json, "bench.front_overhead", title, record.markdown(rows), {"rounds": rounds})


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per byte, so that one character is one token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


if __name__ == "__main__":
    main()
