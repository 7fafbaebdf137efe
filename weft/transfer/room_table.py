"""What both sides of rooms have in common: how a room fails, is fenced, and is remembered. Pure.

    new ──► bound ──► active ──► done            RoomLanded, once
      ╰──────┴─────────┴──► failing ──► fenced   RoomFailed at once, RoomFreed when it is fenced

A room that fails stops this group's ranks and tells the other side at once. Its memory is given back when
everybody who could touch it has said that he does not, or cannot: this group's ranks (``RankStopped``, or
their process has ended), and the peer, where it has a part in that (``Fenced``, its death, or its access
revoked). No clock gives memory back. A message is repeated until something answers it, so it may be lost,
and whatever answers twice changes nothing, so it may be repeated.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.common.errors import DeadlineExceeded, ErrorInfo, PeerEnded, Unavailable
from weft.transfer import events as ev
from weft.transfer.outcomes import Outcomes
from weft.transfer.tombstones import Tombstones
from weft.types import rooms as r
from weft.types.rooms import Outcome, Peer, RoomKey, State

FenceBy = Literal["copy", "connection", "rekey"]
"""What ends a transport's writes: receivers copy themselves; closed connections; revoked registrations."""


_TOMBSTONE_BYTES = 512
"""Of one beside its message."""


class Patience(NamedTuple):
    """After how many seconds a room repeats, gives up or forgets."""

    retry: float = 1.0
    """Between repetitions of a message."""
    bind: float = 60.0
    """From an offer, or from when a receiver that has no room yet asks for another one, until it is bound."""
    fence: float = 10.0
    """Until a peer that does not answer a fence is to be revoked."""
    stop: float = 5.0
    """Until ranks that have not said that they stopped are told again: a frame may have been lost."""
    longest: float = 60.0
    """Between repetitions of a stop, a fence or a revocation, each of which waits twice as long as the one
    before."""
    remember: float = 900.0
    """How long an ended room is known: longer than ``weft.types.rooms.MOST_SECONDS``."""


class Room:
    """One room on one side."""

    def __init__(self, key: RoomKey, peer: Peer, seconds: float, ranks: int) -> None:
        self.key, self.peer, self.seconds = key, peer, seconds
        self.deadline: float | None = None
        """None before the first offer: how long the sender's queue is says nothing of the room."""
        self.state = State.new
        self.was_bound = False
        self.outcomes = Outcomes(ranks)
        self.running = set(range(ranks))
        """Ranks of this group that have not stopped."""
        self.stop_at = 0.0
        """When those are told again to stop, if the room fails by then."""
        self.stop_after = 0.0
        """Seconds until the repetition after that."""
        self.peer_stopped = False
        """Whether the peer touches nothing of the room any more. Set by ``peer_is_quiet`` alone."""
        self.revoke_at: float | None = None
        self.revoke_after = 0.0
        """Seconds until the revocation after that."""
        self.say: r.RoomMessage | None = None
        """What is repeated until it is answered."""
        self.say_at = 0.0
        self.answer: r.RoomMessage | None = None
        """Of a room that fails: to what still comes."""
        self.peer_asked = False
        """Whether the peer waits to hear that this side has stopped."""
        self.bind_by: float | None = None
        self.offer: r.Admitted | None = None
        self.num_cached = 0
        """Of a sender: positions of its own prefix hit."""
        self.bound: r.Bound | None = None
        self.metadata: r.Metadata | None = None

    def begin(self, now: float) -> None:
        """Notes that the room was offered: its time counts from now. Idempotent."""
        if self.deadline is None:
            self.deadline = now + self.seconds

    def peer_is_quiet(self) -> None:
        """The peer has said, or it is proven, that it touches nothing of the room: it is not revoked."""
        self.peer_stopped, self.revoke_at = True, None

    def move(self, state: State) -> None:
        """Raises AssertionError for a move that there is not."""
        assert state > self.state, f"{self.state.name} -> {state.name}"
        assert not self.state.ended, f"{self.state.name} -> {state.name}"
        self.state = state
        self.was_bound |= state in (State.bound, State.active)


class Ended(NamedTuple):
    """What is left of a room that has ended."""

    state: State
    answer: r.RoomMessage
    """To whatever still comes, but for a fence."""


class _Notice(NamedTuple):
    peer: Peer
    message: r.Fence
    due: float
    after: float
    """Seconds until the repetition after that."""
    until: float
    """When it is given up, unless this side's memory waits for the answer."""


class Rooms:
    """The rooms of one head, on one side."""

    def __init__(self, ranks: int, fence: FenceBy = "copy", patience: Patience = Patience()) -> None:
        self._ranks, self._fence, self._patience = ranks, fence, patience
        self._rooms: dict[RoomKey, Room] = {}
        self._ended: Tombstones[Ended] = Tombstones(patience.remember)
        self._notices: dict[RoomKey, _Notice] = {}
        self._gone: set[int] = set()
        """Ranks of this group whose process has ended, and none has taken its place."""
        self.strays = 0
        """Messages dropped: of peers that have no part in the room, or that cannot be right."""

    def __len__(self) -> int:
        """Rooms that have not ended."""
        return len(self._rooms)

    def state(self, key: RoomKey) -> State | None:
        """The state of a room that is known here."""
        room = self._rooms.get(key)
        if room is not None:
            return room.state
        ended = self._ended.get(key)
        return None if ended is None else ended.state

    @property
    def remembered(self) -> int:
        """Ended rooms that are not forgotten yet."""
        return len(self._ended)

    def next_due(self) -> float | None:
        """When the next ``Tick`` does something; None: never, as things stand."""
        due: list[float | None] = [notice.due for notice in self._notices.values()]
        for room in self._rooms.values():
            due.append(room.revoke_at)
            if room.state < State.failing:
                due += [room.deadline, room.bind_by, None if room.say is None else room.say_at]
            elif room.running:
                due.append(room.stop_at)
        due.append(self._ended.next_due())
        return min([at for at in due if at is not None], default=None)

    # ---- what the two sides add

    def _needs_peer(self, room: Room) -> bool:
        """Whether the peer may touch this side's memory of a room."""
        raise NotImplementedError

    def _opened(self, room: Room, now: float) -> list[ev.Action]:
        """A room is new."""
        return []

    def _progressed(self, room: Room, now: float) -> list[ev.Action]:
        """A rank reported, and none has failed."""
        return []

    def _heard_of(self, room: Room, message: r.RoomMessage, now: float) -> list[ev.Action]:
        """A message from the peer of a room that has not ended, and is no fence."""
        raise NotImplementedError

    def _heard_early(self, peer: Peer, message: r.RoomMessage, now: float) -> list[ev.Action]:
        """A message of a room that is not known."""
        return [ev.Send(peer, r.Fenced(key=message.key))]

    # ---- events of both sides

    def _common(self, event: ev.Common, now: float) -> list[ev.Action]:
        match event:
            case ev.Open():
                return self._open(event, now)
            case ev.Heard():
                return self._heard(event, now)
            case ev.RankReport():
                return self._rank_report(event, now)
            case ev.RankStopped(key, rank):
                return self._rank_stopped(key, rank, now)
            case ev.RankGone(rank):
                return self._rank_gone(rank, now)
            case ev.RankBack(rank):
                self._gone.discard(rank)
                return []
            case ev.PeerLost(peer):
                return self._peer_lost(peer, now)
            case ev.Revoked(key):
                return self._peer_stopped(key, now)
            case ev.Cancel(key, error):
                room = self._rooms.get(key)
                return [] if room is None else self._fail(room, error, now)
            case ev.Tick():
                return self._tick(now)

    def _heard(self, event: ev.Heard, now: float) -> list[ev.Action]:
        key, message = event.message.key, event.message
        room = self._rooms.get(key)
        if room is not None and room.peer != event.peer:
            self.strays += 1
            return []
        if isinstance(message, r.Fence):
            return self._fenced_by_peer(event.peer, message, now)
        if isinstance(message, r.Fenced):
            return self._peer_stopped(key, now)
        if room is not None:
            return self._heard_of(room, message, now)
        ended = self._ended.get(key)
        if ended is not None:
            return [ev.Send(event.peer, ended.answer)]
        return self._heard_early(event.peer, message, now)

    def _open(self, event: ev.Open, now: float) -> list[ev.Action]:
        if event.key in self._rooms:
            return []
        if (ended := self._ended.get(event.key)) is not None:
            if ended.state is not State.fenced:
                return []
            answer = ended.answer
            error = answer.error if isinstance(answer, r.Fence | r.Refused) else _gone()
            return [ev.Tell(r.RoomFailed(event.key, error)), ev.Tell(r.RoomFreed(event.key))]
        room = self._rooms[event.key] = Room(event.key, event.peer, event.seconds, self._ranks)
        return self._opened(room, now)

    def _tick(self, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for room in list(self._rooms.values()):
            if room.revoke_at is not None and room.revoke_at <= now:
                room.revoke_after = min(2 * room.revoke_after, self._patience.longest)
                room.revoke_at = now + room.revoke_after
                actions.append(ev.Revoke(room.key, room.peer))
            if room.state >= State.failing:
                actions += self._stop_again(room, now)
                continue
            if room.deadline is not None and room.deadline <= now:
                error = DeadlineExceeded("a transfer between groups took too long")
                actions += self._fail(room, error.info(), now)
            elif room.bind_by is not None and room.bind_by <= now:
                actions += self._fail(room, Unavailable("a transfer was not taken in time").info(), now)
            elif room.say is not None and room.say_at <= now:
                actions += self._say(room, room.say, now)
        self._ended.expire(now)
        return actions + self._remind(now)

    def _stop_again(self, room: Room, now: float) -> list[ev.Action]:
        """Of a room that fails: ranks that have not said that they stopped may not have heard, or not been
        heard."""
        if not room.running or room.stop_at > now:
            return []
        room.stop_after = min(2 * room.stop_after, self._patience.longest)
        room.stop_at = now + room.stop_after
        return [ev.Stop(room.key)]

    def _remind(self, now: float) -> list[ev.Action]:
        """Fences that nobody has answered. Those that memory waits for are repeated for ever."""
        actions: list[ev.Action] = []
        for key, notice in list(self._notices.items()):
            room = self._rooms.get(key)
            if notice.until <= now and (room is None or not self._needs_peer(room)):
                del self._notices[key]
            elif notice.due <= now:
                after = min(2 * notice.after, max(self._patience.longest, self._patience.retry))
                self._notices[key] = notice._replace(due=now + after, after=after)
                actions.append(ev.Send(notice.peer, notice.message))
        return actions

    def _rank_report(self, event: ev.RankReport, now: float) -> list[ev.Action]:
        room = self._rooms.get(event.key)
        if room is None or room.state not in (State.bound, State.active):
            return []
        if room.outcomes.take(event.rank, event.outcome, event.error) is Outcome.failed:
            return self._fail(room, room.outcomes.error or _gone(), now)
        if room.state is State.bound:
            room.move(State.active)
        return self._progressed(room, now)

    def _rank_stopped(self, key: RoomKey, rank: int, now: float) -> list[ev.Action]:
        room = self._rooms.get(key)
        if room is None or room.state is not State.failing or rank not in room.running:
            return []
        room.running.discard(rank)
        return self._settle(room, now)

    def _all_there(self, room: Room, now: float) -> list[ev.Action]:
        """Fails a room that has just been bound when a rank is gone: nobody would move its part."""
        lost = Unavailable("a process that would have a part in the transfer was lost")
        return self._fail(room, lost.info(), now) if self._gone else []

    def _rank_gone(self, rank: int, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        self._gone.add(rank)
        for room in list(self._rooms.values()):
            if room.was_bound and room.state is not State.failing:
                lost = Unavailable("a process that had a part in the transfer was lost")
                actions += self._fail(room, lost.info(), now)
            if room.key in self._rooms:
                actions += self._rank_stopped(room.key, rank, now)
        return actions

    def _peer_lost(self, peer: Peer, now: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for key in [key for key, notice in self._notices.items() if notice.peer == peer]:
            del self._notices[key]
        for room in [room for room in self._rooms.values() if room.peer == peer]:
            room.peer_is_quiet()
            actions += self._fail(room, PeerEnded("the other end of the transfer was lost").info(), now)
        return actions

    def _peer_stopped(self, key: RoomKey, now: float) -> list[ev.Action]:
        """``Fenced`` came, or its access was revoked."""
        self._notices.pop(key, None)
        room = self._rooms.get(key)
        if room is None:
            return []
        room.peer_is_quiet()
        return self._fail(room, Unavailable("the other end of the transfer has ended it").info(), now)

    def _fenced_by_peer(self, peer: Peer, fence: r.Fence, now: float) -> list[ev.Action]:
        room = self._rooms.get(fence.key)
        if room is not None:
            room.peer_asked = True
            return self._fail(room, fence.error, now)
        # What comes later of a room that is not known here finds that it has ended.
        size = len(r.encode(fence)) + _TOMBSTONE_BYTES
        self._ended.add_of(peer, fence.key, Ended(State.fenced, fence), size, now)
        return [ev.Send(peer, r.Fenced(key=fence.key))]

    # ---- how a room ends

    def _fail(
        self, room: Room, error: ErrorInfo, now: float, answer: r.RoomMessage | None = None
    ) -> list[ev.Action]:
        """The room fails, unless it does already; its memory is given back when it is fenced.

        ``answer``: to what still comes, if not a fence.
        """
        actions: list[ev.Action] = []
        if room.state < State.failing:
            fence = r.Fence(key=room.key, error=error)
            room.say, room.answer = None, answer or fence
            actions.append(ev.Tell(r.RoomFailed(room.key, error)))
            actions.append(ev.Stop(room.key))
            room.running -= self._gone
            if not room.was_bound:  # ranks know at most what they have computed of it
                room.running.clear()
            room.stop_after = self._patience.stop
            room.stop_at = now + room.stop_after
            room.move(State.failing)
            if not room.peer_stopped:
                actions.append(ev.Send(room.peer, fence))
                due, until = now + self._patience.retry, now + self._patience.remember
                self._notices[room.key] = _Notice(room.peer, fence, due, self._patience.retry, until)
                if self._needs_peer(room):
                    room.revoke_after = self._patience.fence
                    room.revoke_at = now + room.revoke_after
        return actions + self._settle(room, now)

    def _reject(self, event: ev.Open, error: ErrorInfo, now: float) -> list[ev.Action]:
        """A room that cannot begin here; its other end, which may wait for it, is told."""
        fence = r.Fence(key=event.key, error=error)
        retry = self._patience.retry
        until = now + self._patience.remember
        self._notices[event.key] = _Notice(event.peer, fence, now + retry, retry, until)
        told = ev.Tell(r.RoomFailed(event.key, error)), ev.Tell(r.RoomFreed(event.key))
        return [*told, ev.Send(event.peer, fence)]

    def _settle(self, room: Room, now: float) -> list[ev.Action]:
        """Goes on with a failing room as far as what is known allows."""
        actions: list[ev.Action] = []
        if room.running:
            return actions
        if room.peer_asked:
            room.peer_asked = False
            actions.append(ev.Send(room.peer, r.Fenced(key=room.key)))
        if room.peer_stopped or not self._needs_peer(room):
            room.move(State.fenced)
            assert room.answer is not None
            self._end(room, room.answer, now)
            actions.append(ev.Tell(r.RoomFreed(room.key)))
        return actions

    def _end(self, room: Room, answer: r.RoomMessage, now: float) -> None:
        """The room is over. ``answer``: to what still comes."""
        del self._rooms[room.key]
        self._ended.add(room.key, Ended(room.state, answer), now)

    def _say(self, room: Room, message: r.RoomMessage, now: float) -> list[ev.Action]:
        """Sends ``message``, and again until it is answered."""
        room.say, room.say_at = message, now + self._patience.retry
        return [ev.Send(room.peer, message)]


def _gone() -> ErrorInfo:
    return Unavailable("the transfer has ended").info()
