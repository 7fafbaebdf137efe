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
from weft.control.fleet import events as e
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.instances import InstanceState
from weft.control.fleet.policy import RoutingPolicy, make_policies
from weft.types import messages as m
from weft.types.media import MediaItem
from weft.types.rooms import RoomKey, RoomTicket
from weft.types.sampling import TokenParams

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
    landed: bool = False
    prompt_told: int = 0

    @property
    def tickets(self) -> list[RoomTicket]:
        """Return the transfer parameters of the cache and of the images."""
        each = [self.submit.room, *(item.room for item in self.submit.media)]
        return [one for one in each if one is not None]


@dataclass
class Room:
    """A transfer. ``done``: everything was computed; the transfer is then received, or fails."""

    state: Literal["open", "done", "landed", "failed"] = "open"


@dataclass
class Head:
    """One engine process."""

    name: str
    role: m.Role
    link: int
    alive: bool = True
    work: dict[int, Work] = field(default_factory=dict)
    inbox: deque[m.ToHead] = field(default_factory=deque)
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
        self.heads: dict[str, Head] = {}
        self.links: dict[int, Head] = {}
        self.rooms: dict[RoomKey, Room] = {}
        self.embeddings: defaultdict[RoomKey, set[str]] = defaultdict(set)
        """Transfer of an image -> engines that know the transfer."""
        self.streams: dict[int, Stream] = {}
        self.kills = rng.choice((0, 1, 2, 4))
        self.drains = rng.choice((0, 0, 1))
        self.gives_back = rng.choice((0.0, 0.0, 0.03, 0.1))
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
                head = self.links[action.link]
                assert head is self.heads[action.instance]
                if isinstance(action.message, m.Submit):
                    self.placed.setdefault(action.message.sequence, {})[action.link] = action.message.attempt
                elif isinstance(action.message, m.Finish):
                    self.placed[action.message.sequence].pop(action.link, None)
                if head.alive:
                    head.inbox.append(action.message)
            elif isinstance(action, e.Deliver):
                for told in action.events:
                    self.told(told)
            elif isinstance(action, e.Replace):
                self.count("replaced")
        for sequence, stream in self.streams.items():
            if stream.finish is not None or stream.closed or stream.paused:
                assert not self.placed.get(sequence), f"sequence {sequence} was not ended everywhere"

    def start(self, name: str) -> None:
        link = len(self.links)
        head = Head(name, self.roles[name], link)
        self.heads[name] = self.links[link] = head
        self.feed(e.Expected(name, link))
        self.feed(e.Linked(name, link))
        head.inbox.clear()
        paired = head.role in ("prefill", "decode")
        computes = head.role in ("prefill", "unified")
        encodes = "encode" in self.roles.values()
        welcome = m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=100,
            max_model_len=100,
            max_num_seqs=8,
            num_blocks=(9,),
            incarnation=1000 + link,
            role=head.role,
            fingerprint="model" if paired else "",
            rooms=f"ipc://{name}/{link}" if paired else "",
            tower=head.role == "encode" or (computes and self.towers),
            embeddings=f"ipc://{name}/{link}" if encodes and head.role != "decode" else "",
            tower_fingerprint="tower" if encodes else "",
        )
        self.feed(e.Received(name, link, welcome))

    def told(self, event: m.TokenEvent) -> None:
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

    def hears(self, head: Head) -> None:
        message = head.inbox.popleft()
        if isinstance(message, m.Finish):
            work = head.work.pop(message.sequence, None)
            if work is not None:
                self.cancel(work)
                self.answer(head, work, finish="abort")
        elif isinstance(message, m.Submit):
            if (before := head.work.pop(message.sequence, None)) is not None:
                assert before.submit.attempt < message.attempt, "an attempt twice"
                self.cancel(before)
            work = Work(message, len(message.emitted_ids) // 4)
            if message.room is not None:
                other = self.peer(message.room)
                assert other.role != head.role
                assert message.room.sends == (head.role == "prefill")
                assert self.links[message.room.key.incarnation - 1000].role == "prefill"
                self.rooms.setdefault(message.room.key, Room())
            self.sees(head, message)
            if self.rng.random() < self.gives_back / 2:
                self.cancel(work)
                self.answer(head, work, finish="error", error=Overloaded("full").info())
                self.count("refused")
            else:
                head.work[message.sequence] = work

    def sees(self, head: Head, submit: m.Submit) -> None:
        """Check that the engine gets exactly the required images."""
        for item in submit.media:
            if item.room is None:
                assert bool(item.pixels) <= (head.role != "decode" or submit.room is None)
                continue
            assert item.room.sends == (head.role == "encode") == bool(item.pixels)
            encoder = self.links[item.room.key.incarnation - 1000]
            assert encoder.role == "encode"
            assert encoder is (head if item.room.sends else self.peer(item.room))
            assert head.name not in self.embeddings[item.room.key], "a room twice"
            self.embeddings[item.room.key].add(head.name)
            assert len(self.embeddings[item.room.key]) <= 2
            self.rooms.setdefault(item.room.key, Room())
        assert head.role != "encode" or (submit.media and not submit.prompt_ids)

    def peer(self, ticket: RoomTicket) -> Head:
        name, link = ticket.peer.name.removeprefix("ipc://").split("/")
        head = self.links[int(link)]
        assert (head.name, 1000 + head.link) == (name, ticket.peer.incarnation)
        return head

    def cancel(self, work: Work) -> None:
        for ticket in work.tickets:
            if (room := self.rooms.get(ticket.key)) is not None and room.state != "landed":
                room.state = "failed"

    def answer(self, head: Head, work: Work, *tokens: int, **fields: object) -> None:
        position = work.known if work.submit.room is not None else -1
        head.outbox.append(
            m.TokenEvent(
                sequence=work.submit.sequence,
                attempt=work.submit.attempt,
                token_ids=tokens,
                position=position if tokens else -1,
                **fields,  # type: ignore[arg-type]
            )
        )
        work.known += len(tokens)

    def works(self, head: Head) -> None:
        sequence = self.rng.choice(list(head.work))
        work = head.work[sequence]
        room = self.rooms[work.submit.room.key] if work.submit.room is not None else None
        # A blocked sequence does nothing. Afterwards the engine may return the sequence at any time.
        if self.images(head, work):
            return
        if room is not None and not work.landed and self.lost_room(head, work, work.submit.room):
            return
        if self.rng.random() < self.gives_back:
            del head.work[sequence]
            self.cancel(work)
            self.answer(head, work, finish="evicted")
            self.count(f"evicted by {head.role}")
        elif room is None or work.landed:
            self.decodes(head, work, self.rng.choice((1, 1, 2, 3)))
        elif head.role == "prefill":
            self.prefills(head, work, room)
        elif room.state == "done":
            work.landed = True
            room.state = "landed"
            self.decodes(head, work, 1)

    def images(self, head: Head, work: Work) -> bool:
        """Return True if missing images block the sequence."""
        tickets = [item.room for item in work.submit.media if item.room is not None]
        for ticket in tickets:
            if self.rooms[ticket.key].state != "landed" and self.lost_room(head, work, ticket):
                return True
        states = {self.rooms[ticket.key].state for ticket in tickets}
        if head.role != "encode":
            for ticket in tickets:
                room = self.rooms[ticket.key]
                if room.state == "done":
                    room.state = "landed"
                    return True
            return bool(states - {"landed"})
        if self.rng.random() < self.gives_back:
            del head.work[work.submit.sequence]
            self.cancel(work)
            self.answer(head, work, finish="evicted")
            self.count("evicted by encode")
        elif "open" in states:
            next(self.rooms[one.key] for one in tickets if self.rooms[one.key].state == "open").state = "done"
        elif states == {"landed"}:
            del head.work[work.submit.sequence]
            self.answer(head, work, finish="moved")
            self.count("encoded")
        return True

    def lost_room(self, head: Head, work: Work, ticket: RoomTicket | None) -> bool:
        """Return True if the transfer has failed, which each end notices at some time."""
        assert ticket is not None
        room = self.rooms[ticket.key]
        gone = not self.peer(ticket).alive and room.state != "done"
        if room.state == "done" and self.rng.random() < self.gives_back:
            room.state = "failed"
        if room.state != "failed" and not gone:
            return False
        self.cancel(work)
        del head.work[work.submit.sequence]
        gone = not self.peer(ticket).alive
        error = PeerEnded("the other end was lost").info() if gone else None
        self.answer(head, work, finish="evicted", error=error)
        self.count("rooms failed, the peer has ended" if gone else "rooms failed")
        return True

    def tells_prompt(self, head: Head, work: Work) -> bool:
        """Return True if another piece of prompt logprobs was reported."""
        submit = work.submit
        if submit.params.prompt_logprobs < 0 or submit.choice or work.known or work.prompt_told == PROMPT - 1:
            return False
        count = self.rng.randint(1, PROMPT - 1 - work.prompt_told)
        self.answer(head, work, prompt_logprobs=columns(work.prompt_told, count))
        work.prompt_told += count
        return True

    def prefills(self, head: Head, work: Work, room: Room) -> None:
        if self.tells_prompt(head, work):
            return
        sequence = work.submit.sequence
        del head.work[sequence]
        last = work.known + 1 == work.submit.params.max_tokens
        room.state = "failed" if last else "done"
        self.answer(head, work, token_of(sequence, work.known), finish="length" if last else "moved")
        self.count("ended at prefill" if last else "moved")

    def decodes(self, head: Head, work: Work, count: int) -> None:
        if work.submit.room is None and self.tells_prompt(head, work):
            return
        sequence, most = work.submit.sequence, work.submit.params.max_tokens
        count = min(count, most - work.known)
        tokens = [token_of(sequence, work.known + number) for number in range(count)]
        last = work.known + count == most
        if last:
            del head.work[sequence]
        self.answer(head, work, *tokens, finish="length" if last else None)

    def speaks(self, head: Head) -> None:
        """Deliver some of the engine's messages."""
        count = self.rng.randint(1, len(head.outbox))
        events = tuple(head.outbox.popleft() for _ in range(count))
        for event in events:
            if event.finish is not None and self.placed[event.sequence].get(head.link) == event.attempt:
                del self.placed[event.sequence][head.link]
        self.feed(e.Received(head.name, head.link, m.Tokens(step=0, events=events)))

    # -- what happens

    def step(self) -> None:
        rng = self.rng
        head = rng.choice(list(self.heads.values()))
        dice = rng.random()
        if dice < 0.08 and len(self.streams) < 24:
            self.opens()
        elif dice < 0.14 and self.streams:
            self.client()
        elif dice < 0.16 and self.kills and head.alive:
            self.kills -= 1
            self.kill(head)
        elif dice < 0.21:
            self.now += rng.choice((0.1, 1.0))
            self.feed(e.Tick())
        elif dice < 0.22:
            self.drain(head)
        elif dice < 0.25:
            self.revive(rng.choice(list(self.heads.values())))
        else:
            self.moves(head)

    def moves(self, head: Head) -> bool:
        """Let one thing happen at an engine or its link. Return False if nothing can happen."""
        able = [
            act
            for act, there in ((self.hears, head.inbox), (self.works, head.work), (self.speaks, head.outbox))
            if there and head.alive
        ]
        if able:
            self.rng.choice(able)(head)
        return bool(able)

    def kill(self, head: Head) -> None:
        how = self.rng.randrange(3)
        if how == 0:
            while head.outbox:
                self.speaks(head)
        else:  # others notice before its messages arrive; how == 2: and before the API server does
            head.alive = how == 1
            for _ in range(20):
                self.moves(self.rng.choice([one for one in self.heads.values() if one is not head]))
        head.alive = False
        head.outbox.clear()
        for places in self.placed.values():
            places.pop(head.link, None)
        self.count(f"killed {head.role}")
        self.feed(e.Lost(head.name, head.link, EngineDead("killed")))

    def revive(self, head: Head) -> None:
        if self.fleet.table.instances[head.name].state is InstanceState.DOWN:
            self.start(head.name)

    def drain(self, head: Head) -> None:
        """Drain an engine, if another engine has the same role."""
        roles = list(self.roles.values())
        if self.drains and roles.count(head.role) > 1:
            self.drains -= 1
            self.count("drained")
            self.feed(e.Draining(head.name))

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
            self.streams[first + choice] = Stream(length, wants)
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
            stream.paused = True
            self.count("paused")
            self.feed(e.Paused((sequence,)))

    def run(self) -> None:
        for _ in range(self.rng.choice((200, 600))):
            self.step()
        self.gives_back = 0.0
        for head in list(self.heads.values()):
            self.revive(head)
        for sequence, stream in self.streams.items():
            if stream.paused:
                stream.paused = False
                self.feed(e.Resumed((sequence,)))
        for _ in range(20000):
            self.now += 0.01
            self.feed(e.Tick())
            moved = [self.moves(head) for head in self.heads.values()]
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
        for head in self.heads.values():
            assert not head.work, f"{head.name} was not told of an end"
