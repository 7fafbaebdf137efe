"""A fleet among simulated engines: slow, dead, out of space, ahead of each other.

Messages of one link stay in order; messages of two links come in any order. All random choices come from one
seed. The tokens that readers receive are compared with the expected output of every sequence.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from weft.common.errors import EngineDead, Overloaded, PeerEnded
from weft.control.fleet import fleet_events as e
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.instances import InstanceState
from weft.control.fleet.policy import RoutingPolicy, make_policies
from weft.types import messages as m
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams
from weft.types.transfer import TransferKey, TransferParameters

PROMPT = 5
PATIENCE = Patience(engine=1e6, recovery=1e5, listen=1e6, load=1e6, role=3.0)
EXPECTED_ERRORS = ("engine_dead", "overloaded", "unavailable")


def token_of(sequence: int, position: int) -> int:
    return (sequence * 131 + position * 17) % 97


def columns(first: int, count: int) -> m.LogprobColumns:
    values = np.arange(first, first + count, dtype="<i4")
    return m.LogprobColumns(
        width=1, ids=values.tobytes(), values=values.astype("<f4").tobytes(), rank=values.tobytes()
    )


@dataclass
class Work:
    """A sequence at an engine."""

    submit: m.Submit
    known: int
    """Number of output tokens."""
    received: bool = False
    prompt_delivered: int = 0

    @property
    def parameter_lists(self) -> list[TransferParameters]:
        """Return the transfer parameters of the cache and of the images."""
        each = [self.submit.transfer, *(item.transfer for item in self.submit.media)]
        return [one for one in each if one is not None]


@dataclass
class Transfer:
    """A transfer. ``done``: everything was computed; the transfer is then received, or fails."""

    state: Literal["open", "done", "received", "failed"] = "open"


@dataclass
class Engine:
    """One engine process."""

    name: str
    role: m.Role
    link: int
    alive: bool = True
    work: dict[int, Work] = field(default_factory=dict)
    inbox: deque[m.ToEngine] = field(default_factory=deque)
    outbox: deque[m.TokenEvent] = field(default_factory=deque)


@dataclass
class Stream:
    """The events that a reader received."""

    length: int
    wants_prompt: bool
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    finish: str | None = None
    closed: bool = False
    paused: bool = False
    waits: bool = False
    """True for a sequence that must wait for the end of the server's pause."""


class Model:
    """One random schedule. ``run`` raises AssertionError if an invariant is violated."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        roles: list[m.Role] = ["prefill"] * rng.choice((1, 1, 2)) + ["decode"] * rng.choice((1, 2, 2))
        roles += ["unified"] * rng.choice((0, 0, 1))
        roles += ["encode"] * rng.choice((0, 0, 1, 2, 3))
        self.towers = rng.random() < 0.3
        """True if engines that compute prompts also encode images."""
        self.roles: dict[str, m.Role] = {f"{role}{number}": role for number, role in enumerate(roles)}
        policy: RoutingPolicy = rng.choice(("prefix", "least-load", "round-robin", "two-choices"))
        self.fleet = Fleet(
            dict.fromkeys(self.roles, ""),
            PATIENCE,
            make_policies(policy, seed),
            local_prefill=rng.random() < 0.7,
        )
        self.now = 0.0
        self.engines: dict[str, Engine] = {}
        self.links: dict[int, Engine] = {}
        self.transfers: dict[TransferKey, Transfer] = {}
        self.embeddings: defaultdict[TransferKey, set[str]] = defaultdict(set)
        """Transfer of an image -> engines that know the transfer."""
        self.streams: dict[int, Stream] = {}
        self.kills = rng.choice((0, 1, 2, 4))
        self.drains = rng.choice((0, 0, 1))
        self.gives_back = rng.choice((0.0, 0.0, 0.03, 0.1))
        self.pauses = random.Random(seed) if seed % 3 == 0 else None
        """Random pauses of the server, apart from ``rng``: the other schedules stay as they are."""
        self.held = self.whole = False
        self.placed: dict[int, dict[int, int]] = {}
        """Sequence -> link and attempt of each submission that neither ended nor was finished."""
        self.seen: dict[str, int] = {}
        """Event -> number of times."""
        for name in self.roles:
            self.start(name)

    def count(self, what: str) -> None:
        self.seen[what] = self.seen.get(what, 0) + 1

    # -- the shell

    def feed(self, event: e.Event) -> None:
        for action in self.fleet.on(event, self.now):
            if isinstance(action, e.Send):
                engine = self.links[action.link]
                assert engine is self.engines[action.instance]
                if isinstance(action.message, m.Submit):
                    self.placed.setdefault(action.message.sequence, {})[action.link] = action.message.attempt
                elif isinstance(action.message, m.Finish):
                    self.placed[action.message.sequence].pop(action.link, None)
                if engine.alive:
                    engine.inbox.append(action.message)
            elif isinstance(action, e.Deliver):
                for delivered in action.events:
                    self.delivered(delivered)
            elif isinstance(action, e.Replace):
                self.count("replaced")
        for sequence, stream in self.streams.items():
            if stream.finish is not None or stream.closed or stream.paused or stream.waits or self.whole:
                assert not self.placed.get(sequence), f"sequence {sequence} was not ended everywhere"

    def start(self, name: str) -> None:
        link = len(self.links)
        engine = Engine(name, self.roles[name], link)
        self.engines[name] = self.links[link] = engine
        self.feed(e.Expected(name, link))
        self.feed(e.Linked(name, link))
        engine.inbox.clear()
        paired = engine.role in ("prefill", "decode")
        computes = engine.role in ("prefill", "unified")
        encodes = "encode" in self.roles.values()
        welcome = m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=100,
            max_model_len=100,
            max_num_seqs=8,
            num_blocks=(9,),
            incarnation=1000 + link,
            role=engine.role,
            fingerprint="model" if paired else "",
            transfer_address=f"ipc://{name}/{link}" if paired else "",
            tower=engine.role == "encode" or (computes and self.towers),
            embeddings=f"ipc://{name}/{link}" if encodes and engine.role != "decode" else "",
            tower_fingerprint="tower" if encodes else "",
        )
        self.feed(e.Received(name, link, welcome))

    def delivered(self, event: m.TokenEvent) -> None:
        stream = self.streams[event.sequence]
        assert stream.finish is None, "after its end"
        assert not stream.closed, "its reader has left"
        if event.prompt_logprobs is not None:
            assert not stream.tokens, "prompt logprobs behind a token"
            stream.prompt += event.prompt_logprobs.arrays()[2].tolist()
        stream.tokens += event.token_ids
        wanted = [token_of(event.sequence, position) for position in range(len(stream.tokens))]
        assert stream.tokens == wanted, "other tokens"
        if event.token_ids and stream.wants_prompt:
            assert stream.prompt == list(range(PROMPT - 1)), "prompt logprobs are missing"
        stream.finish = event.finish
        if event.finish == "error":
            assert event.error is not None
            assert event.error.code in EXPECTED_ERRORS
            self.count(f"failed: {event.error.code}")
        elif event.finish is not None:
            assert event.finish == "length"
            assert len(stream.tokens) == stream.length, "it ended too early"
            self.count("done")

    # -- heads

    def hears(self, engine: Engine) -> None:
        message = engine.inbox.popleft()
        if isinstance(message, m.Finish):
            work = engine.work.pop(message.sequence, None)
            if work is not None:
                self.cancel(work)
                self.answer(engine, work, finish="abort")
        elif isinstance(message, m.Submit):
            if (before := engine.work.pop(message.sequence, None)) is not None:
                assert before.submit.attempt < message.attempt, "an attempt twice"
                self.cancel(before)
            work = Work(message, len(message.emitted_ids) // 4)
            if message.transfer is not None:
                other = self.peer(message.transfer)
                assert other.role != engine.role
                assert message.transfer.sends == (engine.role == "prefill")
                assert self.links[message.transfer.key.incarnation - 1000].role == "prefill"
                self.transfers.setdefault(message.transfer.key, Transfer())
            self.sees(engine, message)
            if self.rng.random() < self.gives_back / 2:
                self.cancel(work)
                self.answer(engine, work, finish="error", error=Overloaded("full").info())
                self.count("refused")
            else:
                engine.work[message.sequence] = work

    def sees(self, engine: Engine, submit: m.Submit) -> None:
        """Check that the engine gets exactly the required images."""
        for item in submit.media:
            if item.transfer is None:
                assert bool(item.pixels) <= (engine.role != "decode" or submit.transfer is None)
                continue
            assert item.transfer.sends == (engine.role == "encode") == bool(item.pixels)
            encoder = self.links[item.transfer.key.incarnation - 1000]
            assert encoder.role == "encode"
            assert encoder is (engine if item.transfer.sends else self.peer(item.transfer))
            assert engine.name not in self.embeddings[item.transfer.key], "a room twice"
            self.embeddings[item.transfer.key].add(engine.name)
            assert len(self.embeddings[item.transfer.key]) <= 2
            self.transfers.setdefault(item.transfer.key, Transfer())
        assert engine.role != "encode" or (submit.media and not submit.prompt_ids)

    def peer(self, parameters: TransferParameters) -> Engine:
        name, link = parameters.peer.name.removeprefix("ipc://").split("/")
        engine = self.links[int(link)]
        assert (engine.name, 1000 + engine.link) == (name, parameters.peer.incarnation)
        return engine

    def cancel(self, work: Work) -> None:
        for parameters in work.parameter_lists:
            if (transfer := self.transfers.get(parameters.key)) is not None and transfer.state != "landed":
                transfer.state = "failed"

    def answer(self, engine: Engine, work: Work, *tokens: int, **fields: object) -> None:
        position = work.known if work.submit.transfer is not None else -1
        engine.outbox.append(
            m.TokenEvent(
                sequence=work.submit.sequence,
                attempt=work.submit.attempt,
                token_ids=tokens,
                position=position if tokens else -1,
                **fields,  # type: ignore[arg-type]
            )
        )
        work.known += len(tokens)

    def works(self, engine: Engine) -> None:
        sequence = self.rng.choice(list(engine.work))
        work = engine.work[sequence]
        transfer = self.transfers[work.submit.transfer.key] if work.submit.transfer is not None else None
        # A blocked sequence does nothing. Afterwards the engine may return the sequence at any time.
        if self.images(engine, work):
            return
        if (
            transfer is not None
            and not work.received
            and self.lost_transfer(engine, work, work.submit.transfer)
        ):
            return
        if self.rng.random() < self.gives_back:
            del engine.work[sequence]
            self.cancel(work)
            self.answer(engine, work, finish="evicted")
            self.count(f"evicted by {engine.role}")
        elif transfer is None or work.received:
            self.decodes(engine, work, self.rng.choice((1, 1, 2, 3)))
        elif engine.role == "prefill":
            self.prefills(engine, work, transfer)
        elif transfer.state == "done":
            work.received = True
            transfer.state = "landed"
            self.decodes(engine, work, 1)

    def images(self, engine: Engine, work: Work) -> bool:
        """Return True if missing images block the sequence."""
        parameter_lists = [item.transfer for item in work.submit.media if item.transfer is not None]
        for parameters in parameter_lists:
            if self.transfers[parameters.key].state != "landed" and self.lost_transfer(
                engine, work, parameters
            ):
                return True
        states = {self.transfers[parameters.key].state for parameters in parameter_lists}
        if engine.role != "encode":
            for parameters in parameter_lists:
                transfer = self.transfers[parameters.key]
                if transfer.state == "done":
                    transfer.state = "landed"
                    return True
            return bool(states - {"landed"})
        if self.rng.random() < self.gives_back:
            del engine.work[work.submit.sequence]
            self.cancel(work)
            self.answer(engine, work, finish="evicted")
            self.count("evicted by encode")
        elif "open" in states:
            next(
                self.transfers[one.key] for one in parameter_lists if self.transfers[one.key].state == "open"
            ).state = "done"
        elif states == {"landed"}:
            del engine.work[work.submit.sequence]
            self.answer(engine, work, finish="moved")
            self.count("encoded")
        return True

    def lost_transfer(self, engine: Engine, work: Work, parameters: TransferParameters | None) -> bool:
        """Return True if the transfer has failed, which each end notices at some time."""
        assert parameters is not None
        transfer = self.transfers[parameters.key]
        gone = not self.peer(parameters).alive and transfer.state != "done"
        if transfer.state == "done" and self.rng.random() < self.gives_back:
            transfer.state = "failed"
        if transfer.state != "failed" and not gone:
            return False
        self.cancel(work)
        del engine.work[work.submit.sequence]
        gone = not self.peer(parameters).alive
        error = PeerEnded("the other end was lost").info() if gone else None
        self.answer(engine, work, finish="evicted", error=error)
        self.count("rooms failed, the peer has ended" if gone else "rooms failed")
        return True

    def tells_prompt(self, engine: Engine, work: Work) -> bool:
        """Return True if another piece of prompt logprobs was reported."""
        submit = work.submit
        if (
            submit.params.prompt_logprobs < 0
            or submit.choice
            or work.known
            or work.prompt_delivered == PROMPT - 1
        ):
            return False
        count = self.rng.randint(1, PROMPT - 1 - work.prompt_delivered)
        self.answer(engine, work, prompt_logprobs=columns(work.prompt_delivered, count))
        work.prompt_delivered += count
        return True

    def prefills(self, engine: Engine, work: Work, transfer: Transfer) -> None:
        if self.tells_prompt(engine, work):
            return
        sequence = work.submit.sequence
        del engine.work[sequence]
        last = work.known + 1 == work.submit.params.max_tokens
        transfer.state = "failed" if last else "done"
        self.answer(engine, work, token_of(sequence, work.known), finish="length" if last else "moved")
        self.count("ended at prefill" if last else "moved")

    def decodes(self, engine: Engine, work: Work, count: int) -> None:
        if work.submit.transfer is None and self.tells_prompt(engine, work):
            return
        sequence, most = work.submit.sequence, work.submit.params.max_tokens
        count = min(count, most - work.known)
        tokens = [token_of(sequence, work.known + number) for number in range(count)]
        last = work.known + count == most
        if last:
            del engine.work[sequence]
        self.answer(engine, work, *tokens, finish="length" if last else None)

    def speaks(self, engine: Engine) -> None:
        """Deliver some of the engine's messages."""
        count = self.rng.randint(1, len(engine.outbox))
        events = tuple(engine.outbox.popleft() for _ in range(count))
        for event in events:
            if event.finish is not None and self.placed[event.sequence].get(engine.link) == event.attempt:
                del self.placed[event.sequence][engine.link]
        self.feed(e.Received(engine.name, engine.link, m.Tokens(step=0, events=events)))

    # -- what happens

    def server_pauses(self, rng: random.Random) -> None:
        """Pause or resume the server. A pause of all sequences leaves no sequence at an engine."""
        if self.held and rng.random() < 0.5:
            self.count("server resumed")
            self.release()
            return
        running = rng.random() < 0.5
        self.held, self.whole = True, self.whole or running
        self.count("server paused" if running else "server paused for new sequences")
        for stream in self.streams.values():
            stream.waits = stream.waits or stream.paused
        self.feed(e.Held(running))

    def release(self) -> None:
        self.held = self.whole = False
        for stream in self.streams.values():
            stream.waits = False
        self.feed(e.Released())

    def step(self) -> None:
        if self.pauses is not None and self.pauses.random() < 0.02:
            self.server_pauses(self.pauses)
        rng = self.rng
        engine = rng.choice(list(self.engines.values()))
        dice = rng.random()
        if dice < 0.08 and len(self.streams) < 24:
            self.opens()
        elif dice < 0.14 and self.streams:
            self.client()
        elif dice < 0.16 and self.kills and engine.alive:
            self.kills -= 1
            self.kill(engine)
        elif dice < 0.21:
            self.now += rng.choice((0.1, 1.0))
            self.feed(e.Tick())
        elif dice < 0.22:
            self.drain(engine)
        elif dice < 0.25:
            self.revive(rng.choice(list(self.engines.values())))
        else:
            self.moves(engine)

    def moves(self, engine: Engine) -> bool:
        """Let one thing happen at an engine or its link. Return False if nothing can happen."""
        able = [
            act
            for act, there in (
                (self.hears, engine.inbox),
                (self.works, engine.work),
                (self.speaks, engine.outbox),
            )
            if there and engine.alive
        ]
        if able:
            self.rng.choice(able)(engine)
        return bool(able)

    def kill(self, engine: Engine) -> None:
        how = self.rng.randrange(3)
        if how == 0:
            while engine.outbox:
                self.speaks(engine)
        else:  # others notice before its messages arrive; how == 2: and before the API server does
            engine.alive = how == 1
            for _ in range(20):
                self.moves(self.rng.choice([one for one in self.engines.values() if one is not engine]))
        engine.alive = False
        engine.outbox.clear()
        for places in self.placed.values():
            places.pop(engine.link, None)
        self.count(f"killed {engine.role}")
        self.feed(e.Lost(engine.name, engine.link, EngineDead("killed")))

    def revive(self, engine: Engine) -> None:
        if self.fleet.table.instances[engine.name].state is InstanceState.DOWN:
            self.start(engine.name)

    def drain(self, engine: Engine) -> None:
        """Drain an engine, if another engine has the same role."""
        roles = list(self.roles.values())
        if self.drains and roles.count(engine.role) > 1:
            self.drains -= 1
            self.count("drained")
            self.feed(e.Draining(engine.name))

    def opens(self) -> None:
        if self.fleet.refusal() is not None:
            self.count("refused before it began")
            return
        first, rng = len(self.streams), self.rng
        request = 1000 + first
        length, prompt = rng.choice((1, 2, 4, 8)), rng.random() < 0.6
        submits = []
        media: tuple[MediaItem, ...] = ()
        if "encode" in self.roles.values() and rng.random() < 0.6:
            media = tuple(
                MediaItem(
                    key=rng.randrange(9).to_bytes(16, "little"),
                    start=number,
                    count=1,
                    grid=(1, 2, 2),
                    pixels=b"pixels",
                )
                for number in range(rng.choice((1, 1, 2, 4)))
            )
        for choice in range(rng.choice((1, 1, 2, 3))):
            wants = prompt and not choice
            params = TokenParams(max_tokens=length, prompt_logprobs=0 if wants else -1)
            submits.append(
                m.Submit(
                    sequence=first + choice,
                    request=request,
                    choice=choice,
                    seed=1,
                    prompt_ids=m.ids_to_bytes(list(range(PROMPT))),
                    params=params,
                    media=media,
                )
            )
            self.streams[first + choice] = Stream(length, wants, waits=self.held)
        self.feed(e.Opened(tuple(submits)))

    def client(self) -> None:
        sequence = self.rng.choice(list(self.streams))
        stream = self.streams[sequence]
        if stream.finish is not None or stream.closed:
            return
        if stream.paused:
            stream.paused = False
            self.feed(e.Resumed((sequence,)))
        elif self.rng.random() < 0.3:
            stream.closed = True
            self.count("left")
            self.feed(e.Closed((sequence,)))
        else:
            stream.paused, stream.waits = True, stream.waits or self.held
            self.count("paused")
            self.feed(e.Paused((sequence,)))

    def run(self) -> None:
        for _ in range(self.rng.choice((200, 600))):
            self.step()
        self.gives_back = 0.0
        for engine in list(self.engines.values()):
            self.revive(engine)
        for sequence, stream in self.streams.items():
            if stream.paused:
                stream.paused = False
                self.feed(e.Resumed((sequence,)))
        self.release()
        for _ in range(20000):
            self.now += 0.01
            self.feed(e.Tick())
            moved = [self.moves(engine) for engine in self.engines.values()]
            if True not in moved and self.fleet._parked.deadline() == math.inf:
                break
        self.check()

    def check(self) -> None:
        for sequence, stream in self.streams.items():
            assert stream.closed or stream.finish is not None, f"sequence {sequence} did not end"
        assert self.fleet.entries == {}
        assert self.fleet.open.requests == {}
        for name, instance in self.fleet.table.instances.items():
            assert instance.load == 0, f"load of {name}"
        for engine in self.engines.values():
            assert not engine.work, f"{engine.name} was not told of an end"
