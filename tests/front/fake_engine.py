"""Act as an engine with a script instead of a model: a real ROUTER process that speaks the real messages.

Run as ``python fake_engine.py ENDPOINT [FILE]``. With FILE the engine loads until the file exists.

The seed of a request chooses the behaviour. Without a scripted seed a request gets its own prompt back,
repeated, one token every few milliseconds, until ``max_tokens``. EngineStats report the engine's view to
tests: ``running`` has the live sequences, ``preemptions`` the received Finish messages.

FAKE_LENGTH is the context length, FAKE_TICK the seconds per token. With FAKE_MEDIA the engine appends
received images to the file, one line of JSON per sequence. With FAKE_ROLE the engine prefills or decodes: no
cache is moved, because none exists, but both roles send their messages.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import time

import msgspec
import numpy as np
import zmq

from weft.common.errors import EngineDead, ErrorInfo, InvalidRequest, Overloaded, RowError
from weft.types import messages as m
from weft.types.adapters import AdapterChanged, LoadAdapter
from weft.types.media_item import MediaItem
from weft.types.messages import decode_parts
from weft.types.tier_flush import FlushTier

HANG = 101
"""No event at all: queued for ever."""
HANG_AFTER = 102
"""Three tokens, then nothing."""
REJECT = 103
FAIL = 104
"""Three tokens, then an error."""
DIE = 105
"""The process ends after three tokens."""
GARBAGE = 106
"""Sends frames that are not messages before every token."""
FLOOD = 107
"""All tokens at once, one event each."""
FAILED = 108
"""Last words, then the process ends."""
STUCK = 109
"""Three tokens, then heartbeats say: busy, same step."""
EARLY_STOP = 110
"""Ends with a stop id after two tokens."""
HONEST = 111
"""Ends at the first of the request's stop ids."""
DIE_ONCE = 112
"""The process ends after three tokens, unless another engine generated the tokens."""
SLOW = 113
"""A second before the first token, and another one before the fourth."""
FAIL_AT_ONCE = 114
"""Three tokens and an error in one message."""

TICK = float(os.environ.get("FAKE_TICK", "0.002"))
LANDS = 0.03
"""Seconds until the decode engine continues a prefilled sequence."""


class Sequence:
    def __init__(self, front: bytes, submit: m.Submit) -> None:
        self.front = front
        self.submit = submit
        self.prompt = [int(i) for i in m.ids_from_bytes(submit.prompt_ids)]
        self.ready = time.monotonic() + 1.0
        self.transfer = submit.transfer
        self.lands = time.monotonic() + LANDS
        self.given = self.sent = len(submit.emitted_ids) // 4

    def step(self) -> list[m.TokenEvent]:
        seed = self.submit.seed
        if self.transfer is not None and not self.transfer.sends and time.monotonic() < self.lands:
            return []
        if seed == HANG or (seed in (HANG_AFTER, STUCK) and self.sent == 3):
            return []
        if seed == SLOW and self.sent in (0, 3):
            if time.monotonic() < self.ready:
                return []
            self.ready = time.monotonic() + 1.0
        if seed == REJECT:
            return [self._end("error", Overloaded("the queue is full").info())]
        if seed == FAIL and self.sent == 3:
            return [self._end("error", RowError("the logits are not finite").info())]
        if (seed == DIE and self.sent >= 3) or (seed == DIE_ONCE and self.sent == 3 and not self.given):
            os._exit(9)
        if seed == EARLY_STOP and self.sent == 2:
            return [self._end("stop")]
        if seed == FAIL_AT_ONCE:
            error = RowError("the logits are not finite").info()
            return [*(self._token() for _ in range(3)), self._end("error", error)]
        if seed == FLOOD:
            return [self._token() for _ in range(self.submit.params.max_tokens)]
        return [self._token()]

    def _end(self, finish: str, error: ErrorInfo | None = None) -> m.TokenEvent:
        return m.TokenEvent(
            sequence=self.submit.sequence, attempt=self.submit.attempt, finish=finish, error=error
        )

    def _token(self) -> m.TokenEvent:
        params = self.submit.params
        token = self.prompt[self.sent % len(self.prompt)]
        position = -1 if self.transfer is None else self.sent
        self.sent += 1
        stops = self.submit.seed == HONEST and token in params.stop_ids
        ends = "stop" if stops else "length" if self.sent >= params.max_tokens else None
        if self.transfer is not None and self.transfer.sends:
            ends = ends or "moved"
        prompt_logprobs = None
        if (
            params.prompt_logprobs >= 0
            and self.sent == 1
            and self.submit.choice == 0
            and len(self.prompt) > 1
        ):
            prompt_logprobs = columns(self.prompt[1:], 1 + params.prompt_logprobs)
        return m.TokenEvent(
            sequence=self.submit.sequence,
            attempt=self.submit.attempt,
            token_ids=(token,),
            logprobs=columns([token], 1 + params.logprobs) if params.logprobs >= 0 else None,
            prompt_logprobs=prompt_logprobs,
            num_cached=min(2, len(self.prompt) - 1),
            finish=ends,
            position=position,
            stop_id=token if stops else None,
        )


def columns(tokens: list[int], width: int) -> m.LogprobColumns:
    """Token t's alternatives are t, t + 1, ...; the first is -0.5, each next one less by 1."""
    ids = np.asarray(tokens, "<i4")[:, None] + np.arange(-1, width - 1, dtype="<i4")[None, :]
    ids[:, 0] = tokens
    values = np.broadcast_to(-0.5 - np.maximum(np.arange(width) - 1, 0).astype("<f4"), ids.shape)
    return m.LogprobColumns(
        width=width,
        ids=ids.astype("<i4").tobytes(),
        values=values.astype("<f4").tobytes(),
        rank=np.ones(len(tokens), "<i4").tobytes(),
    )


def shown(item: MediaItem) -> dict[str, object]:
    return {
        "key": item.key.hex(),
        "start": item.start,
        "count": item.count,
        "grid": item.grid,
        "bytes": len(item.pixels),
        "pixels": hashlib.sha256(item.pixels).hexdigest(),
    }


class FakeEngine:
    def __init__(self, endpoint: str, loaded: str | None = None) -> None:
        while loaded is not None and not os.path.exists(loaded):
            time.sleep(0.02)
        self.socket = zmq.Context().socket(zmq.ROUTER)
        self.socket.sndhwm = 0  # by default zmq drops messages that a slow API server has not taken yet
        self.socket.bind(endpoint)
        self.live: dict[int, Sequence] = {}
        self.endpoint, self.role = endpoint, os.environ.get("FAKE_ROLE", "unified")
        self.incarnation = secrets.randbits(63)
        self.moved = 0
        self.fronts: set[bytes] = set()
        self.finishes = self.resets = 0
        self.steps = 0
        self.stuck = False
        self.stop = False
        self.heartbeat_sent = 0.0

    def run(self) -> None:
        while not self.stop:
            while self.socket.poll(0 if self.live else 20):
                front, body, *attached = self.socket.recv_multipart()
                self.take(front, decode_parts(body, attached))
            self.step()
            if time.monotonic() - self.heartbeat_sent > 0.05:
                self.heartbeat_sent = time.monotonic()
                for front in self.fronts:
                    self.send(front, self.heartbeat())
            if self.live:
                time.sleep(TICK)

    def take(self, front: bytes, message: m.ToEngine) -> None:
        if isinstance(message, m.Hello):
            self.fronts.add(front)
            welcome = m.Welcome(
                versions=(m.OLDEST, m.VERSION),
                vocab_size=300,
                max_model_len=int(os.environ.get("FAKE_LENGTH", "512")),
                max_num_seqs=8,
                num_blocks=(64,),
                incarnation=self.incarnation,
            )
            if self.role != "unified":
                more = {
                    "role": self.role,
                    "fingerprint": "fake",
                    "transfer_address": self.endpoint + "-rooms",
                }
                welcome = msgspec.structs.replace(welcome, **more)
            places = int(os.environ.get("FAKE_LORAS", "0"))
            self.send(front, msgspec.structs.replace(welcome, max_loras=places))
        elif isinstance(message, m.ToAdapters):
            self.send(front, self.adapter(message))
        elif isinstance(message, m.Submit):
            self.live[message.sequence] = Sequence(front, message)
            if (log := os.environ.get("FAKE_ADAPTERS")) is not None:
                with open(log, "a", encoding="utf-8") as file:
                    file.write(f"{message.adapter}\n")
            if (log := os.environ.get("FAKE_MEDIA")) is not None and message.media:
                with open(log, "ab") as file:
                    file.write(msgspec.json.encode(list(map(shown, message.media))) + b"\n")
        elif isinstance(message, m.Finish):
            self.finishes += 1
            if (ended := self.live.pop(message.sequence, None)) is not None:
                end = ended._end("abort")
                self.send(front, m.Tokens(step=self.steps, events=(end,)))
        elif isinstance(message, FlushTier):
            self.resets += 1
        elif isinstance(message, m.Shutdown):
            self.stop = True

    def adapter(self, message: m.ToAdapters) -> AdapterChanged:
        """Load an adapter, unless the name has "bad" inside. A name with "slow" inside takes a while."""
        if isinstance(message, LoadAdapter) and "slow" in message.name:
            time.sleep(0.3)
        if isinstance(message, LoadAdapter) and "bad" in message.name:
            error = InvalidRequest("module model.x does not fit the model").info()
            return AdapterChanged(digest=message.digest, loaded=False, error=error)
        return AdapterChanged(digest=message.digest, loaded=isinstance(message, LoadAdapter))

    def step(self) -> None:
        if self.stuck:
            return  # send no more tokens; heartbeats continue
        self.steps += 1
        for number, sequence in list(self.live.items()):
            seed = sequence.submit.seed
            if seed == GARBAGE:
                for frames in (
                    [b"\x80\x04garbage"],
                    [b""],
                    [b"a", b"b"],
                    [msgspec.msgpack.encode({"type": "Nope"})],
                ):
                    self.socket.send_multipart([sequence.front, *frames])
            if seed == FAILED and sequence.sent == 3:
                self.send(sequence.front, m.EngineFailed(error=EngineDead("the engine failed").info()))
                time.sleep(0.2)
                os._exit(3)
            self.stuck |= seed == STUCK and sequence.sent == 3
            events = sequence.step()
            if events:
                self.send(sequence.front, m.Tokens(step=self.steps, events=tuple(events)))
                self.moved += events[-1].finish == "moved"
                if events[-1].finish is not None:
                    del self.live[number]

    def heartbeat(self) -> m.Heartbeat:
        stats = m.EngineStats(
            steps=self.steps, running=len(self.live), preemptions=self.finishes, free_blocks=(64,)
        )
        if self.role != "unified":
            stats = msgspec.structs.replace(stats, transfers=m.TransferStats(done=self.moved))
        stats = msgspec.structs.replace(stats, prefix_resets=self.resets, forgotten_blocks=3 * self.resets)
        return m.Heartbeat(idle=not self.live, stats=stats)

    def send(self, front: bytes, message: m.ToFront) -> None:
        self.socket.send_multipart([front, m.encode(message)])


if __name__ == "__main__":
    FakeEngine(*sys.argv[1:]).run()
