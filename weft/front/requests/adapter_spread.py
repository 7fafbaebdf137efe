"""Distribution of LoRA adapters from one API server to all engine processes.

    wanted contents ──send_missing──► LoadAdapter, one at a time per process ──► Instance.adapters: the answer
                             └──────► DropAdapter for each content that is no longer wanted

``send_missing`` compares and sends, so calls may be repeated at any time. A process that joins or starts
again has a new link, and gets everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from weft.common.errors import ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control.fleet.instances import Instance
from weft.control.links.links import Links
from weft.types.adapters import DropAdapter, LoadAdapter

log = get_logger(__name__)

POLL_S = 0.05
"""Seconds between two comparisons with the engine processes."""
LOAD_S = 120.0
"""Maximum seconds until every engine process has answered."""


@dataclass(slots=True)
class _Process:
    """One engine process, as seen by ``Spread``."""

    sent: dict[str, LoadAdapter] = field(default_factory=dict)
    """Digest -> message as sent last."""
    complete: Mapping[str, LoadAdapter] | None = None
    """The ``wanted`` object of the last call, if everything in the object was sent. Skips the comparison."""
    logged: set[str] = field(default_factory=set)
    """Digests of refused contents in the log."""


def wanted_of(messages: Iterable[LoadAdapter]) -> dict[str, LoadAdapter]:
    """Return digest -> message. Names of one content share one message: the folder of the first name, and
    pinned if any name is pinned."""
    found: dict[str, LoadAdapter] = {}
    for message in messages:
        first = found.setdefault(message.digest, message)
        if message.pinned and not first.pinned:
            found[message.digest] = msgspec.structs.replace(first, pinned=True)
    return found


class Spread:
    """Sends adapters to engine processes. Used from the event loop."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._processes: dict[tuple[str, int], _Process] = {}
        """(instance, number of the link) -> process."""

    def takers(self) -> list[Instance]:
        """Return the live engine processes that take adapters."""
        return [
            one
            for one in self._links.instances
            if one.alive and one.welcome is not None and one.welcome.max_loras
        ]

    def missing(self, digest: str) -> int:
        """Return the number of live engine processes that have not loaded the adapter."""
        return sum(not one.has_adapter(digest) for one in self.takers())

    def send_missing(self, wanted: Mapping[str, LoadAdapter]) -> None:
        """Send what each process lacks. ``wanted``: by digest; pass the same object while nothing changes."""
        known = self._processes
        self._processes = {}
        for instance in self.takers():
            key = (instance.name, instance.link)
            process = self._processes[key] = known.get(key) or _Process()
            if process.complete is not wanted:
                self._send(instance, process, wanted)
            self._log_refusals(instance, process)

    def _send(self, instance: Instance, process: _Process, wanted: Mapping[str, LoadAdapter]) -> None:
        """Send the next messages to one process."""
        for digest in [digest for digest in process.sent if digest not in wanted]:
            del process.sent[digest]
            process.logged.discard(digest)
            instance.adapters.pop(digest, None)
            self._links.tell(instance.name, DropAdapter(digest=digest))
        for digest, message in wanted.items():
            last = process.sent.get(digest)
            if last is not None and last.pinned == message.pinned:
                continue
            # The engine reads the files between two steps. Several reads in a row could last longer than
            # --engine-timeout, and the engine would count as dead.
            if instance.loading:
                return
            process.sent[digest] = message
            instance.loading.add(digest)
            self._links.tell(instance.name, message)
        process.complete = wanted

    def _log_refusals(self, instance: Instance, process: _Process) -> None:
        """Log each adapter that the process does not take, once."""
        for digest, error in instance.adapters.items():
            if error is None or digest in process.logged or digest not in process.sent:
                continue
            process.logged.add(digest)
            log.warning(
                "group %s has not loaded the LoRA adapter %r and gets no requests for the adapter: %s. "
                "Correct the folder %s on the hosts of the group, then load the adapter again, or start the "
                "group again",
                *(instance.name, process.sent[digest].name, error.message, process.sent[digest].folder),
            )

    def retry(self, digest: str) -> None:
        """Send an adapter again to each process. A process that has the adapter still takes requests."""
        for instance in self.takers():
            if instance.adapters.get(digest) is not None:
                del instance.adapters[digest]
            process = self._processes.get((instance.name, instance.link))
            if process is not None:
                process.sent.pop(digest, None)
                process.logged.discard(digest)
                process.complete = None

    def trust(self, digest: str) -> None:
        """Send requests for an adapter that another API server has loaded on all processes, before the
        processes answer this API server."""
        for instance in self.takers():
            instance.adapters.setdefault(digest, None)

    async def answered(self, digest: str) -> WeftError | None:
        """Wait until every live process has answered for an adapter. Return the first error, or None.

        Another task must call ``send_missing``.
        """
        try:
            async with asyncio.timeout(LOAD_S):
                while any(digest not in one.adapters or digest in one.loading for one in self.takers()):
                    await asyncio.sleep(POLL_S / 5)
        except TimeoutError:
            return Unavailable("an engine did not load the LoRA adapter in time; try again later")
        errors = [error for one in self.takers() if (error := one.adapters[digest]) is not None]
        return ReportedError(errors[0]) if errors else None
