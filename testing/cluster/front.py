"""A simulated API server: the product's ``Fleet``, a shell that carries out actions, and the clients.

Every action of the fleet is compared with the state of the cluster.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from testing.cluster.check import Stream, output, require, token_key
from testing.cluster.clients import Client
from testing.cluster.excuses import PATIENCE, check_books, check_wait, explain, goes_on, there
from testing.cluster.network import Link
from weft.common.errors import EndedElsewhere, EngineDead, PeerEnded, RanksLost, WeftError
from weft.control.fleet import fleet_events as e
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instances import InstanceState
from weft.types import messages as m

if TYPE_CHECKING:
    from testing.cluster.cluster import Cluster
    from testing.cluster.engine_process import EngineProcess

MOST_SILENCE = 1.2
"""Seconds of silence up to which no API server may give an instance up."""


class FrontProcess:
    """The process of a simulated API server, with a fleet. Each connection to a process has a link number."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        instances: dict[str, str],
        joining: bool = False,
    ) -> None:
        """Create the process. ``version``: of its messages. For ``joining`` see ``Fleet``."""
        self.cluster = cluster
        self.name = name
        self.alive = True
        self.closing = False
        self.stalled_until = 0.0
        self.fleet = Fleet(
            instances, PATIENCE, front=name, joining=joining, local_prefill=cluster.transfers.local_prefill
        )
        self.links: dict[int, Link] = {}
        self.streams: dict[int, Stream] = {}
        self.clients: dict[int, Client] = {}
        """First sequence of a request -> client."""
        self.asked: dict[int, Client] = {}
        """Client number -> client, for requests under way."""
        self.requests: dict[int, list[int]] = {}
        """First sequence of a request -> all sequences of the request."""
        self.replaced: set[int] = set()
        """Links for which the fleet has requested a replacement."""
        self.retired_instances: set[str] = set()
        self.left_instances: set[str] = set()
        self.lapsed: set[str] = set()
        """Instances whose lease has ended here, while their engines live."""
        self.registry_at = 0.0
        """Arrival time of the latest event of the registry."""
        self._ticks_at = float("inf")
        self.there_at = [0.0, 0.0, 0.0]
        """Last times with live instances able to (produce tokens, serve a request, serve one with images).

        Stalls of the API server do not count.
        """
        self._were_there = (False, False, False)
        """The same three abilities at the last event."""

    # -- the shell

    def feed(self, event: e.Event) -> None:
        """Give the fleet an event, carry out the actions, and check the state.

        Ignored once the process has ended. Raise Violation.
        """
        if not self.alive:
            return
        cluster = self.cluster
        self.there_at = [
            cluster.now if was else since for was, since in zip(self._were_there, self.there_at, strict=True)
        ]
        actions = self.fleet.on(event, cluster.now)
        if not actions and isinstance(event, e.Received) and isinstance(event.message, m.Heartbeat):
            return  # deadlines only moved later, which ``_tick`` will see
        for action in actions:
            self._carry_out(action)
        tokens = isinstance(event, e.Received) and isinstance(event.message, m.Tokens)
        if not goes_on(event, actions):  # an end may reveal the loss of another instance
            self._were_there = there(self)
            check_books(self)
        if self.clients:
            self._after()
        if self.alive and not tokens:  # tokens move no deadline forward
            self._schedule_tick()

    def _carry_out(self, action: e.Action) -> None:
        """Carry out one action of the fleet. Raise Violation if the action is not allowed now."""
        cluster = self.cluster
        if isinstance(action, e.Send):
            link = self.links[action.link]
            require(not link.unlinked, f"{self.name}: {type(action.message).__name__} over a link given up")
            self._track(link, action.message)
            cluster.network.to_engine_process(link, action.message)
        elif isinstance(action, e.Deliver):
            for token_event in action.events:
                self._deliver(token_event)
        elif isinstance(action, e.Unlink):
            self._unlink(action)
        elif isinstance(action, e.Replace):
            require(action.instance not in self.retired_instances, f"{self.name}: a retired one replaced")
            number = self.fleet.table.instances[action.instance].link
            require(number not in self.replaced, f"{self.name}: link {number} was replaced twice")
            self.replaced.add(number)
            engine_process = self.links[number].engine_process
            cluster.note(self.name, "..", engine_process.name, f"replace it: {action.error.message}")
            cluster.at(
                cluster.now + cluster.rng.random() * 0.05,
                None,
                cluster.supervisor.replace,
                self,
                engine_process,
            )
        elif isinstance(action, e.Forget):
            self._forget(action.instance)
        elif isinstance(action, e.Failed):
            cluster.note(self.name, "..", "", f"failed: {action.error.message}")
            cluster.front_failed(self)
        else:
            cluster.note(self.name, "..", "", "all instances have answered")

    def _track(self, link: Link, message: m.ToEngine) -> None:
        """Record at the stream where a sequence is after an outgoing ``message``.

        Raise Violation if sending is not allowed.
        """
        if isinstance(message, m.Submit):
            stream = self.streams[message.sequence]
            require(stream.open, f"{self.name}: sequence {message.sequence} was sent after its end")
            require(not stream.paused, f"{self.name}: sequence {message.sequence} was sent, and nobody reads")
            again = f"{self.name}: sequence {message.sequence} was sent again, and had ended where it was"
            require(not stream.ended_elsewhere, again)
            leaves = link.engine_process.instance in self.left_instances
            require(not leaves, f"{self.name}: sequence {message.sequence} was sent to one that has left")
            self._lands(stream)
            stream.links.add(link.number)
            if stream.times_given_back and link.engine_process.instance not in stream.given_back:
                self.cluster.count("retried elsewhere")
        elif isinstance(message, m.Finish):
            self.streams[message.sequence].links.discard(link.number)
            self._lands(self.streams[message.sequence])

    def _lands(self, stream: Stream) -> None:
        """Note the removal of a sequence from its instances."""
        if self.cluster.now >= stream.lands_by:  # the cache was not received in time
            stream.losses += 1
            self.cluster.count("lost when it had moved")
        stream.left()

    def _unlink(self, action: e.Unlink) -> None:
        """Give a link up: count the losses of its sequences and disconnect.

        Raise Violation if nothing had happened to the engine, or if the link was given up before.
        """
        if action.link not in self.links:  # the instance never had a process
            return
        cluster = self.cluster
        link = self.links[action.link]
        require(not link.unlinked, f"{self.name}: link {link.number} was given up twice")
        excused = link.excused or link.engine_process.excused or link.silence > MOST_SILENCE
        require(excused, f"{self.name} gave {link.engine_process.name} up, and nothing had happened to it")
        link.unlinked = True
        cluster.note(self.name, "..", link.engine_process.name, f"link {link.number} given up")
        self._sender_ends(link)
        for stream in self.streams.values():
            if self._was_handed_off(stream, link):
                continue
            if stream.open and link.number in stream.links:
                stream.links.discard(link.number)
                if self._stays(stream, link):
                    cluster.count("went on without its sender")
                else:
                    stream.losses += 1
                    stream.moved_over, stream.lands_by = 0, math.inf  # the attempt is over: no second loss
                    stream.ended_elsewhere = False  # the report of the end may be lost, too
                    cluster.count("lost with an instance")
        if link.up:
            cluster.disconnect(link)

    def _was_handed_off(self, stream: Stream, link: Link) -> bool:
        """Return True if the engine of ``link`` handed the sequence off, and no later token came."""
        return stream.open and link.number == stream.moved_over and not stream.received

    def _sender_ends(self, link: Link) -> None:
        """Set the deadline of sequences that the engine of ``link`` handed off before it was lost or left."""
        for stream in self.streams.values():
            if self._was_handed_off(stream, link):
                stream.lands_by = min(stream.lands_by, self.cluster.now + PATIENCE.transfer)

    def _forget(self, instance: str) -> None:
        """Close the links of an instance that has left. Raise Violation if a sequence is still there."""
        for link in self.links.values():
            if link.engine_process.instance != instance or link.unlinked:
                continue
            there = [one.sequence for one in self.streams.values() if one.open and link.number in one.links]
            require(not there, f"{self.name} forgot {instance}, and sequences {there} are there")
            link.unlinked = True
            self._sender_ends(link)
            self.cluster.note(self.name, "..", link.engine_process.name, f"link {link.number}: forgotten")
            if link.up:
                self.cluster.disconnect(link)

    def _stays(self, stream: Stream, lost: Link) -> bool:
        """Return True if the sequence may stay where it is after the loss of one of its instances.

        A decode instance continues if the lost prefill instance had reported everything. A compute instance
        continues if the lost encode instance had sent all images.
        """
        entry = self.fleet.entries.get(stream.sequence)
        roles = self.cluster.transfers.roles
        role = roles[lost.engine_process.instance]
        if entry is None or role not in ("prefill", "encode") or entry.losses > stream.losses:
            return False
        if role == "encode":
            require(stream.computed, f"{self.name}: sequence {stream.sequence} goes on without its images")
            return True
        left = [self.links[number].engine_process.instance for number in stream.links]
        require(
            set(entry.places) == set(left)
            and [roles[name] for name in left if roles[name] != "encode"] == ["decode"],
            f"{self.name}: sequence {stream.sequence} is at {list(entry.places)}, and was sent to {left}",
        )
        return True

    def _deliver(self, event: m.TokenEvent) -> None:
        """Check an event against its stream. A failed stream needs an excuse. Raise Violation."""
        stream = self.streams.get(event.sequence)
        require(stream is not None, f"{self.name}: an event of sequence {event.sequence}, which nobody asked")
        assert stream is not None
        if self.cluster.logs:
            self.cluster.note(self.name, "=>", "client", event)
        stream.take(event)
        if event.finish is not None:
            stream.links.clear()
        if event.finish == "error":
            assert event.error is not None
            explain(self, stream, event.error.code, event.error.message)

    # -- time

    def _schedule_tick(self) -> None:
        deadline = self.fleet.next_deadline()
        if deadline < self._ticks_at:
            self._ticks_at = deadline
            self.cluster.at(max(deadline, self.cluster.now), self, self._tick, deadline)

    def _tick(self, planned: float) -> None:
        """Feed ``Tick`` at the fleet's deadline; an outdated plan is ignored.

        Raise Violation if the tick changes nothing.
        """
        if planned != self._ticks_at:
            return
        self._ticks_at = float("inf")
        now = self.cluster.now
        if self.fleet.next_deadline() > now:
            self._schedule_tick()
            return
        self.feed(e.Tick())
        if self.alive:
            later = self.fleet.next_deadline() > now
            require(later, f"{self.name}: a tick at the fleet's deadline changed nothing")

    def woke(self, seconds: float) -> None:
        """Note that the API server stood still for ``seconds``."""
        self.there_at = [since + seconds for since in self.there_at]
        for stream in self.streams.values():
            stream.lands_by += seconds
        self.cluster.note(self.name, "..", "", f"stood still for {seconds:.3f} s")
        self.feed(e.Stalled(seconds))

    # -- messages and the registry

    def receive(self, link: Link, message: m.ToFront) -> None:
        """Receive a message of an engine: record it for the streams and feed the fleet.

        Messages over a link given up are counted and passed on, too.
        """
        if link.unlinked:
            self.cluster.count("messages of a link given up")
        if self.cluster.logs:
            note = message if isinstance(message, m.Tokens | m.EngineFailed) else type(message).__name__
            self.cluster.note(link.engine_process.name, "->", self.name, note)
        # Record what the message means for the streams before the fleet reacts.
        if isinstance(message, m.Tokens):
            for event in message.events:
                self._track_back(link, event)
        self.feed(e.Received(link.engine_process.instance, link.number, message))
        if isinstance(message, m.Welcome):
            instance = self.fleet.table.instances.get(link.engine_process.instance)
            half_open = instance is not None and instance.state is InstanceState.HALF_OPEN
            self.cluster.count("half-open instances", half_open)

    def _track_back(self, link: Link, event: m.TokenEvent) -> None:
        """Record at the stream which sequences end, move or fail at the link's engine.

        Events of other attempts are ignored.
        """
        stream = self.streams.get(event.sequence)
        if stream is None or link.number not in stream.links:
            return
        entry = self.fleet.entries.get(event.sequence)
        if entry is None or entry.attempt != event.attempt:
            return
        refused = event.error is not None and event.error.blame == "capacity"
        why = "" if event.error is None else event.error.code
        encodes = link.engine_process.instance in entry.encoders
        ended = why == PeerEnded.code and entry.peer(link.engine_process.instance) is not None
        stream.computed = stream.computed or bool(event.token_ids)
        if why == EndedElsewhere.code:
            stream.links.discard(link.number)
            stream.ended_elsewhere = True
            self.cluster.count("ends that the other instance reported first")
            return
        if encodes and event.finish and (event.finish == "moved" or entry.computed):
            stream.links.discard(link.number)
            return
        if event.finish == "evicted" and (ended or why == RanksLost.code):
            stream.losses += 1
            self.cluster.count("lost as a peer saw")
        elif refused or event.finish == "evicted":
            stream.given_back.add(link.engine_process.instance)
            stream.times_given_back += 1
        stream.received = stream.received or (
            entry.receives(link.engine_process.instance) and bool(event.token_ids)
        )
        # A decode instance may finish before the prefill instance has reported everything. The fleet holds
        # the final event until then, so the sequence stays at its links.
        held = entry.sender not in (None, link.engine_process.instance) and event.finish in ("stop", "length")
        if event.finish is not None and not held:
            stream.links.discard(link.number)
        if event.finish == "moved":
            stream.moved_over = link.number
        elif event.finish is not None and not held:
            stream.left()
        elif stream.received:
            stream.lands_by = math.inf

    def linked(self, link: Link) -> None:
        """Handle a connection: the first one over this link, or a reconnection."""
        for stream in self.streams.values():  # the engine has ended the sequences of the former connection
            if link.number in stream.links:
                stream.links.discard(link.number)
                stream.ended_elsewhere = False  # the report of the end may be lost with the connection
        self.feed(e.Linked(link.engine_process.instance, link.number))

    def lost(self, link: Link, why: str) -> None:
        """Notice a broken connection or the end of a process."""
        self.cluster.note(self.name, "..", link.engine_process.name, f"link {link.number}: {why}")
        self.feed(e.Lost(link.engine_process.instance, link.number, EngineDead(why)))

    def started(self, engine_process: EngineProcess) -> None:
        """Learn from the registry of a newly started process: make and connect a link. A process whose lease
        has ended is found later."""
        found = any(one.engine_process is engine_process and not one.unlinked for one in self.links.values())
        if found or engine_process.instance in self.lapsed:
            return
        self.retired_instances.discard(engine_process.instance)
        link = self.cluster.new_link(self, engine_process)
        self.links[link.number] = link
        self.cluster.note(self.name, "..", engine_process.name, f"expected over link {link.number}")
        self.feed(e.Expected(engine_process.instance, link.number))
        self.feed(e.Located(engine_process.instance, link.number))
        self.cluster.connect(link)

    def ended(self, engine_process: EngineProcess) -> None:
        """Learn from the registry of the end of a process."""
        for link in list(self.links.values()):
            if link.engine_process is engine_process:
                self.lost(link, "its process ended")

    def retired(self, instance: str, error: WeftError) -> None:
        """Learn from the registry of the retirement of an instance."""
        if instance in self.lapsed:
            return
        for other in sorted(self.lapsed):  # a server with an unknown engine is never at its end
            self.renew(other)
        self.retired_instances.add(instance)
        self.feed(e.Retired(instance, error))

    def joined(self, instance: str) -> None:
        """Learn from the registry of a new member."""
        self.left_instances.discard(instance)
        self.feed(e.Joined(instance))

    def left(self, instance: str) -> None:
        """Learn from the registry of an instance that leaves the server."""
        if instance in self.cluster.supervisor.removed:
            self.lapsed.discard(instance)
        self.left_instances.add(instance)
        self.feed(e.Left(instance))

    def lapse(self, instance: str) -> None:
        """Find that the lease of an instance has ended."""
        if instance not in self.left_instances:
            self.lapsed.add(instance)
            self.left(instance)

    def renew(self, instance: str) -> None:
        """Find the record of an instance again. The present process may be another one, and a link to the
        process may be gone."""
        if instance not in self.lapsed:
            return
        self.lapsed.discard(instance)
        supervisor = self.cluster.supervisor
        if instance in supervisor.removed:
            return
        self.joined(instance)
        engine_process = supervisor.engine_processes[instance]
        self.started(engine_process)
        if instance in supervisor.retired:
            self.retired(instance, EngineDead("it died too often"))
        elif engine_process.replaced:
            self.ended(engine_process)

    def draining(self, instance: str) -> None:
        """Learn from the registry of an instance about to drain."""
        self.feed(e.Draining(instance))

    def close(self) -> None:
        """End the API server in order, without the instances."""
        self.closing = True
        self.feed(e.Closing(shutdown=False))

    # -- clients

    def open(self, client: Client, first: int) -> None:
        """Open the request of ``client``, or count a refusal.

        The request's sequences are ``first``, ``first`` + 1, ... Raise Violation for an unfounded refusal.
        """
        del self.asked[client.number]
        refusal = self.fleet.refusal()
        if refusal is not None:
            self.cluster.count("refused before it began")
            check_wait(self, refusal.message, f"{self.name} refused a request ({refusal.message})")
            self.cluster.client_ended(client, self, "refused")
            return
        prompt = m.ids_to_bytes(client.prompt)
        pinned = self.cluster.pin() if client.pinned else None
        submits = []
        for choice in range(client.choices):
            submits.append(self._submit(client, first, choice, prompt))
            self._stream(client, submits[-1], pinned)
        self.clients[first] = client
        self.requests[first] = [submit.sequence for submit in submits]
        self.feed(e.Opened(tuple(submits), pinned=pinned))

    def _submit(self, client: Client, first: int, choice: int, prompt: bytes) -> m.Submit:
        """Return the Submit of one choice.

        ``first``: sequence of choice 0. ``prompt``: int32 ids as bytes.
        """
        return m.Submit(
            sequence=first + choice,
            request=first,
            choice=choice,
            seed=client.seed,
            prompt_ids=prompt,
            params=client.params,
            media=client.media,
        )

    def _stream(self, client: Client, submit: m.Submit, pinned: str | None) -> None:
        """Record the expected output of one sequence in ``streams``."""
        key = token_key(submit.prompt_ids, submit.seed, submit.choice)
        length = self.cluster.kv.max_model_len
        tokens, finish = output(key, len(client.prompt), client.params, length)
        self.streams[submit.sequence] = Stream(
            sequence=submit.sequence,
            prompt=client.prompt,
            tokens=tokens,
            finish=finish,
            key=key,
            wants_prompt=client.params.prompt_logprobs >= 0 and submit.choice == 0,
            pinned=pinned,
            images=bool(client.media),
        )

    def _after(self) -> None:
        """Let clients and the text side react to new output: end choices at their text stops, and report
        ended requests.
        """
        for first, client in list(self.clients.items()):
            streams = [self.streams[sequence] for sequence in self.requests[first]]
            stops = client.text_stops
            # The text side ends a choice after a given number of tokens.
            ended = tuple(
                s.sequence for c, s in enumerate(streams) if s.open and s.count >= stops.get(c, 1 << 30)
            )
            if ended and first in self.clients:
                self.cluster.count("ended by the text side", len(ended))
                self.end_streams(ended)
            elif first in self.clients and not any(stream.open for stream in streams):
                failed = any(stream.end == "error" for stream in streams)
                del self.clients[first]
                self.cluster.client_ended(client, self, "failed" if failed else "done")

    def end_streams(self, sequences: tuple[int, ...]) -> None:
        """Close sequences on behalf of the reader."""
        for sequence in sequences:
            self.streams[sequence].closed = True
        self.feed(e.Closed(sequences))

    def pause(self, first: int, paused: bool) -> None:
        """Let the client of a request stop reading, or read again. Ended requests are ignored."""
        if first not in self.clients:
            return
        streams = [self.streams[sequence] for sequence in self.requests[first]]
        sequences = tuple(stream.sequence for stream in streams if stream.open)
        for sequence in sequences:
            self.streams[sequence].paused = paused
            # the end is late then, so the sequence is computed again
            self.streams[sequence].ended_elsewhere = False
        self.cluster.note("client", "..", self.name, f"{'pauses' if paused else 'resumes'} {sequences}")
        self.cluster.count("paused" if paused else "resumed")
        self.feed(e.Paused(sequences) if paused else e.Resumed(sequences))

    def abandon(self, first: int) -> None:
        """Let the client of a request leave, and end its streams. Ended requests are ignored."""
        client = self.clients.pop(first, None)
        if client is None:
            return
        self.cluster.note("client", "..", self.name, f"leaves {self.requests[first]}")
        self.cluster.count("abandoned")
        self.cluster.client_ended(client, self, "left")
        self.end_streams(tuple(s for s in self.requests[first] if self.streams[s].open))
