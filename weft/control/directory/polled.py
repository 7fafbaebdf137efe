"""The directory as the HTTP ports of the groups: each group answers /records, and API servers ask each group.

For hosts without a shared file system. An engine needs no place to publish.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import httpx
import msgspec

from weft.common.counted_log import CountedLog
from weft.common.log import get_logger
from weft.control.directory.record import LEASE_S, EngineRecord

log = get_logger(__name__)

POLL_S = 1.0
"""Seconds between two questions to a group."""
ANSWER_S = 2.0
"""Maximum seconds for an answer. A group that does not answer delays no other."""
ASKED_AT_ONCE = 16
SILENCE_S = 5.0
"""Seconds without any answer after which this host counts as cut off."""
MOST_BYTES = 1 << 20
"""Maximum size of an answer."""
_records = msgspec.json.Decoder(list[EngineRecord])


class _Answer(NamedTuple):
    at: float
    records: list[EngineRecord]


class PolledDirectory:
    """Implementation of ``DirectoryReader``: asks the groups at some URLs.

    Threads ask; readers get the last answers and never wait. A group that does not answer keeps its last
    records, whose leases then end, and delays no other group.
    """

    def __init__(self, urls: Callable[[], Iterable[str]], key: str = "", poll: float = POLL_S) -> None:
        """``urls``: returns the present URLs of groups, ``http://HOST:PORT``; may raise OSError. ``key``:
        admin key of the groups, for orders to drain."""
        self._urls, self._key, self._poll = urls, key, poll
        self._found: dict[str, _Answer] = {}
        """URL -> last answer of the group."""
        self._listed: set[str] = set()
        self._asking: set[str] = set()
        """URLs whose answer is awaited."""
        self._answered = time.monotonic()
        """Time of the last answer of any group."""
        self._failed: OSError | None = None
        self._trouble = CountedLog(log)
        # Groups are reached directly: a proxy of the environment must not see keys.
        self._client = httpx.Client(timeout=ANSWER_S, trust_env=False)
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="weft-directory")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-directory", daemon=True)
        self._thread.start()

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``DirectoryReader``. Of two groups with one engine name the later process counts, unless its
        group has not answered within a lease.

        Raise OSError if no group answers: then the trouble is on this side.
        """
        failed = self._failed
        if failed is not None:
            raise failed
        now = time.monotonic()
        if self._listed and now - self._answered > SILENCE_S:
            raise OSError(f"no group has answered for {SILENCE_S:g} seconds")
        found = [(answer, record) for answer in self._found.copy().values() for record in answer.records]
        # The last record of a name wins.
        found.sort(key=lambda one: (now - one[0].at < LEASE_S, one[1].incarnation, one[0].at))
        named: dict[str, EngineRecord] = {}
        for _, record in found:
            if (other := named.get(record.name)) is not None and other.model != record.model:
                what = "two engines are called %s, of the models %s and %s: give one group another name"
                self._trouble.warn(what, record.name, other.model, record.model)
            named[record.name] = record
        return named

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``. Waits for the group's answer. Raise OSError if the group refuses."""
        for url, answer in self._found.copy().items():
            if any(
                (one.name, one.incarnation) == (record.name, record.incarnation) for one in answer.records
            ):
                self._drain(url)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._over.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _run(self) -> None:
        """Ask all groups again and again. The body of a thread."""
        while not self._over.is_set():
            try:
                self._listed = set(self._urls())
                self._failed = None
            except OSError as error:
                self._failed = error
            for url in self._found.keys() - self._listed:
                self._found.pop(url, None)
            for url in self._listed - self._asking:
                self._asking.add(url)
                self._pool.submit(self._ask, url)
            self._over.wait(self._poll)

    def _ask(self, url: str) -> None:
        """Store the records of the group at ``url``. A group without an answer is logged."""
        try:
            records = self._records_of(url)
            self._answered = time.monotonic()
            if url in self._listed:
                self._found[url] = _Answer(self._answered, records)
        except Exception as error:  # of the network, or in what a stranger at the URL answers
            self._trouble.warn("the group at %s does not answer (%s)", url, error)
        finally:
            self._asking.discard(url)

    def _records_of(self, url: str) -> list[EngineRecord]:
        until = time.monotonic() + ANSWER_S
        with self._client.stream("GET", f"{url}/records") as answer:
            data = b""
            for piece in answer.iter_bytes():
                data += piece
                if len(data) > MOST_BYTES or time.monotonic() > until:
                    raise ValueError("the answer is too large, or takes too long")
            if answer.status_code != 200:
                raise ValueError(f"status {answer.status_code}")
        here = httpx.URL(url).host in ("127.0.0.1", "::1", "localhost")
        # A group of another host must not name a socket of this host, which would be used without keys.
        return [one for one in _records.decode(data) if here or one.endpoint.startswith("tcp:")]

    def _drain(self, url: str) -> None:
        if not self._key:
            raise OSError("this API server has no admin key for the group: set WEFT_ADMIN_KEY")
        try:
            answer = self._client.post(f"{url}/drain", headers={"Authorization": f"Bearer {self._key}"})
        except httpx.HTTPError as error:
            raise OSError(f"{url} does not answer: {type(error).__name__}") from error
        if answer.status_code != 200:
            raise OSError(f"{url} refuses: {answer.text[:200]}")


class PortDirectory:
    """Implementation of ``DirectoryWriter`` for a group whose HTTP port shows the records and hears orders:
    there is no other place."""

    def publish(self, record: EngineRecord) -> None:
        """Do nothing."""

    def withdraw(self, record: EngineRecord) -> None:
        """Do nothing."""

    def read(self) -> Mapping[str, EngineRecord]:
        """Return nothing: other groups are unknown."""
        return {}

    def asked_to_drain(self, record: EngineRecord) -> bool:
        """Return False."""
        return False
