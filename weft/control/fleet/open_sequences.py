"""The open sequences of all clients: the wait for an instance, the limits of the wait, and attempts at
instances. No clock, no socket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from weft.common.counted_log import CountedLog
from weft.common.errors import Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.fleet.fleet_events import Opened
from weft.control.fleet.instance_table import InstanceTable, Patience
from weft.control.fleet.instances import Instance
from weft.control.fleet.ledger import LedgerEntry, is_refusal
from weft.control.fleet.pairs import Route, serve, ticketed
from weft.control.fleet.server_pause import ServerPause
from weft.control.fleet.vacancies import vacant
from weft.types import messages as m

log = get_logger(__name__)


MOST_REFUSALS = 8
"""Times that one instance may refuse or return a sequence before the next token."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0


def wait_after(evictions: int) -> float:
    """Return the seconds to wait after ``evictions`` refusals and returns since the last token.

    The first return costs no wait. Each further return doubles the wait, up to ``LONGEST_WAIT_S``.
    """
    return 0.0 if evictions < 2 else min(FIRST_WAIT_S * 2.0 ** (evictions - 2), LONGEST_WAIT_S)


class Parked:
    """The parked sequences. Some sequences wait until a given time."""

    def __init__(self) -> None:
        self._all: dict[int, None] = {}
        self._waits: dict[int, float] = {}
        """Sequence -> earliest time at which an instance may get the sequence."""

    def add(self, sequence: int, until: float = -math.inf) -> None:
        """Park ``sequence``, at least until the time ``until``."""
        self._all[sequence] = None
        if until > -math.inf:
            self._waits[sequence] = until

    def discard(self, sequence: int) -> None:
        """End the wait of a sequence. Idempotent."""
        self._all.pop(sequence, None)
        self._waits.pop(sequence, None)

    def ready(self, now: float) -> list[int]:
        """Return the sequences ready for an instance now, in order."""
        if self._waits:
            self._waits = {one: until for one, until in self._waits.items() if until > now}
        return [one for one in self._all if one not in self._waits]

    def deadline(self) -> float:
        """Return the time at which ``ready`` grows if nothing happens before; inf for never."""
        return min(self._waits.values(), default=math.inf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._all


LATE = "the engine failed and did not come back in time; try again later"
UNFIT = "the available groups do not fit together; see the server's log"
NO_ROLE = "no group of the role "
"""First words of the error for missing roles."""


class _Limit:
    """A time limit for one kind of lack. ``passed`` is True once the lack has lasted for the limit."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.passed = False

    def deadline(self, since: float) -> float:
        """Return the time at which the limit passes; inf if already passed."""
        return math.inf if self.passed else since + self._seconds

    def look(self, since: float, now: float) -> None:
        """Update ``passed``. ``since`` is the start time of the lack; inf if nothing is lacking."""
        self.passed = since < math.inf and (self.passed or now >= since + self._seconds)


class Lateness:
    """Decides whether requests have waited too long for an instance, for a missing role, or for image
    encoding.

    While an instance is expected to come back, requests wait for ``Patience.recovery``. The time counts from
    the end of the last process able to serve: a process that drains for a planned restart is present. New
    requests wait for ``Patience.role`` if no instance will come, and before decode instances also prefill.
    For a role that was scaled to zero, each request waits for ``Patience.recovery`` from its own start.
    """

    def __init__(self, table: InstanceTable, patience: Patience) -> None:
        """``table``: read only. ``patience``: the limits, in seconds."""
        self._table = table
        self._any = _Limit(patience.recovery)
        self._role = _Limit(patience.role)
        self._role_again = _Limit(max(patience.role, patience.recovery))
        self._images = _Limit(patience.role)
        self._images_again = _Limit(max(patience.role, patience.recovery))
        self._lacked = False
        """True if anything was missing at the last ``look``."""
        self._recovery, self._now = patience.recovery, -math.inf
        self.vacant = False
        """True if all missing roles were scaled to zero, at the last ``look``."""
        self._since: dict[int, float] = {}
        """Vacant: sequence without a place -> start of its wait."""

    def deadline(self) -> float:
        """Return the time at which ``look`` or ``late`` will next change something; inf for never."""
        own = min(self._since.values(), default=math.inf) + self._recovery
        return min(own, *(limit.deadline(since) for limit, since in self._limits()))

    def look(self, now: float) -> None:
        """Update all limits.

        Call after each change of instances, and at ``deadline``. Logs the first time that no pair has come in
        time.
        """
        lacks = any(since < math.inf for _, since in self._limits())
        if not lacks and not self._lacked:  # the usual case
            return
        self._lacked, self._now = lacks, now
        self.vacant = lacks and vacant(self._table)
        if not self.vacant:
            self._since.clear()
        before = self._role.passed
        for limit, since in self._limits():
            limit.look(since, now)
        if self._role.passed and not before:
            self._log_missing_pair()

    def _log_missing_pair(self) -> None:
        """Log what happens to requests without a pair of a prefill and a decode instance."""
        if not self._table.local:
            then = "requests wait for a pair" if self._table.awaited else "requests are rejected"
        elif self._table.blind:
            then = "decode engines also prefill prompts without images; prompts with images wait"
        else:
            then = "decode engines also prefill"
        log.warning("no pair of a prefill engine and a decode engine is available: %s", then)

    def _limits(self) -> tuple[tuple[_Limit, float], ...]:
        """Return (limit, time since when the limit runs; inf if nothing is lacking) for each limit."""
        lacking, gone = self._table.lacking, self._table.gone
        return (
            (self._any, gone.any),
            (self._role, lacking.pair),
            (self._role_again, gone.pair),
            (self._images, lacking.images),
            (self._images_again, gone.images),
        )

    @property
    def local(self) -> bool:
        """True if decode instances also compute prompts, because no prefill instance came in time."""
        return self._role.passed and self._table.local

    def why(self, begun: bool, images: bool = False) -> Unavailable | None:
        """Return the error to end the wait of a sequence without an instance; None if the sequence should
        wait.

        With ``begun`` the sequence was at an instance before; with ``images`` the sequence has images.
        """
        if self.vacant:
            return None
        if self._any.passed:
            return Unavailable(LATE)
        # A sequence once at an instance, or an expected instance, justifies the longer limits (`_again`).
        waits = begun or self._table.awaited
        if not self._table.local and (self._role_again if waits else self._role).passed:
            return self._lacks(images=False)
        if images and (self._images_again if waits else self._images).passed:
            return self._lacks(images=True)
        return None

    def overstayed(self, parked: Iterable[int]) -> set[int]:
        """Return the ``parked`` sequences that have waited too long for a role that was scaled to zero. Call
        after ``look``."""
        if not self.vacant:
            return set()
        self._since = {one: self._since.get(one, self._now) for one in parked}
        return {one for one, since in self._since.items() if self._now >= since + self._recovery}

    def _lacks(self, images: bool) -> Unavailable:
        roles = self._table.missing(images)
        if not roles:
            return Unavailable(UNFIT)
        return Unavailable(f"{NO_ROLE}{' or '.join(roles)} takes requests; try again later")


class OpenSequences:
    """All open sequences. A sequence is parked, paused, or at instances (``LedgerEntry.places``)."""

    def __init__(self) -> None:
        self.entries: dict[int, LedgerEntry] = {}
        self.requests: dict[int, dict[int, None]] = {}
        """Request -> open sequences (an ordered set). The sequences share a prompt, and prompt blocks at one
        instance."""
        self._refusals = CountedLog(log)
        self.parked = Parked()
        """Sequences waiting for an instance, in order."""
        self.paused: dict[int, None] = {}
        """Sequences not read by the client."""
        self.pause_of_server = ServerPause(self.entries)
        self.bereft: set[int] = set()
        """Parked or paused sequences after the loss of an instance."""

    def open(self, event: Opened) -> None:
        """Add the sequences of a new request as parked."""
        for submit in event.submits:
            hashes = event.hashes.get(submit.request)
            self.entries[submit.sequence] = LedgerEntry(submit, hashes, event.pinned)
            self.requests.setdefault(submit.request, {})[submit.sequence] = None
            self.parked.add(submit.sequence)
            self.pause_of_server.opened(submit.sequence, event.begun)

    def forget(self, sequence: int) -> None:
        """Remove an ended sequence from all fields. Raises KeyError for an unknown sequence."""
        entry = self.entries.pop(sequence)
        parallel_samples = self.requests[entry.submit.request]
        del parallel_samples[sequence]
        if not parallel_samples:
            del self.requests[entry.submit.request]
        self.parked.discard(sequence)
        self.paused.pop(sequence, None)
        self.bereft.discard(sequence)

    def unpaused(self, sequences: Iterable[int]) -> list[int]:
        """Return the open and unpaused members of ``sequences``."""
        return [one for one in sequences if one in self.entries and one not in self.paused]

    @property
    def kept(self) -> int:
        """Number of begun sequences at no instance. Each continues later from its tokens."""
        return sum(self.entries[one].attempt >= 0 for one in [*self.paused, *self.parked])

    def pause(self, sequence: int) -> None:
        """Mark a sequence as paused. The caller has removed the sequence from all instances."""
        self.parked.discard(sequence)
        self.paused[sequence] = None
        self.pause_of_server.opened(sequence, begun=False)

    def resume(self, sequences: Iterable[int]) -> None:
        """Park again all paused members of ``sequences``."""
        for sequence in sequences:
            if sequence in self.paused:
                del self.paused[sequence]
                self.parked.add(sequence)

    def placed(self, sequence: int) -> bool:
        """End the wait of a sequence: no longer parked or bereft.

        Return True if the sequence continues after the loss of an instance.
        """
        self.parked.discard(sequence)
        bereft = sequence in self.bereft
        self.bereft.discard(sequence)
        return bereft

    def near(self, request: int) -> set[str]:
        """Return the names of the instances with sequences of ``request``."""
        return {name for each in self.requests[request] for name in self.entries[each].places}

    def late(self, lateness: Lateness) -> list[tuple[int, WeftError]]:
        """Return the parked sequences after too long a wait, each with the error.

        Removes nothing; the error is logged.
        """
        found: list[tuple[int, WeftError]] = []
        overstayed = lateness.overstayed(self.parked)
        for sequence in self.parked:
            entry = self.entries[sequence]
            error = lateness.why(begun=entry.attempt >= 0, images=bool(entry.submit.media))
            error = Unavailable(LATE) if sequence in overstayed else error
            if error is not None:
                self._refusals.warn("a request fails: %s", error.message)
                found.append((sequence, error))
        return found


@dataclass(slots=True)
class Began:
    """The attempts begun by one call: messages to send, in order, and counts."""

    submits: list[tuple[Instance, m.Submit]] = field(default_factory=list)
    paired: int = 0
    """Sequences sent to two instances."""
    local: int = 0
    """Sequences sent to a decode instance alone, for lack of a prefill instance."""
    encodes: Counter[str] = field(default_factory=Counter)
    """Images sent to encode instances. Key "first" for the first attempt of a sequence, else "again"."""


def begin(route: Route, group: Sequence[LedgerEntry], transfer: float) -> Began:
    """Begin the next attempt of each sequence in ``group`` at the instances of ``route``.

    The sequences share a prompt.

    ``transfer`` is the maximum number of seconds for one transfer. Changes the loads of the instances and, in
    the ledger entries, attempt, pair, places and encoders. The caller sends ``Began.submits``.
    """
    compute, decode, encoders = route
    began = Began()
    for number, entry in enumerate(group):
        submit = entry.next_attempt()
        sequence = submit.sequence
        tokens = (len(submit.prompt_ids) + len(submit.emitted_ids)) // 4
        # Only the first sequence adds the prompt to the load: the others share the computed blocks.
        compute.begin(sequence, 0 if number else tokens)
        if decode is not None:
            decode.begin(sequence, 0)
            entry.pair = (compute.name, decode.name)
            began.paired += 1
        elif compute.role == "decode" and entry.pinned is None:
            began.local += 1
        for instance, its in ticketed(route, submit, transfer, first=not number):
            if instance in encoders:
                instance.begin(sequence, sum(item.count for item in its.media))
                entry.encoders[instance.name] = None
                began.encodes["again" if entry.attempt else "first"] += len(its.media)
            entry.places[instance.name] = entry.attempt
            began.submits.append((instance, its))
    return began


def may_retry(
    table: InstanceTable, local: bool, instance: Instance, entry: LedgerEntry, event: m.TokenEvent
) -> bool:
    """Return True if ``event`` refuses the sequence for lack of room and another attempt may succeed.

    Another attempt needs another instance that has not refused the sequence. A refusal by an encode instance
    needs no other instance: the sequence waits for room. With ``local``, decode instances also compute
    prompts. Refusals of pinned sequences are final.
    """
    if entry.pinned is not None or not is_refusal(event):
        return False
    # the compute instance has accepted the prompt, so the sequence can wait for an encoder
    if instance.name in entry.encoders:
        return True
    takers = table.takers(leaving=entry.submit.sequence)
    others = [i for i in takers if i is not instance and i.name not in entry.refused]
    return serve(others, local)
