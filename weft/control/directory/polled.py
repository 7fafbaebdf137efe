"""The directory as the HTTP ports of the groups: each group answers /records, and API servers ask each group.

For hosts without a shared file system. An engine needs no place to publish.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec

from weft.common.counted_log import CountedLog
from weft.common.log import get_logger
from weft.control.directory.record import EngineRecord

log = get_logger(__name__)

POLL_S = 1.0
"""Seconds between two questions to a group."""
ANSWER_S = 2.0
"""Maximum seconds for an answer. A group that does not answer delays no other."""
ASKED_AT_ONCE = 16
MOST_BYTES = 1 << 20
"""Maximum size of an answer."""
_records = msgspec.json.Decoder(list[EngineRecord])


class PolledDirectory:
    """Implementation of ``Directory`` for readers: asks the groups at some URLs.

    A thread asks; readers get the last answers and never wait. A group that does not answer keeps its last
    records, whose leases then end.
    """

    def __init__(self, urls: Callable[[], Iterable[str]], key: str = "", poll: float = POLL_S) -> None:
        """``urls``: returns the present URLs of groups, ``http://HOST:PORT``; may raise OSError. ``key``:
        admin key of the groups, for orders to drain."""
        self._urls, self._key, self._poll = urls, key, poll
        self._found: dict[str, list[EngineRecord]] = {}
        """URL -> records of the group."""
        self._failed: OSError | None = None
        self._trouble = CountedLog(log)
        self._client = httpx.Client(timeout=ANSWER_S)
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="weft-directory")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weft-directory", daemon=True)
        self._thread.start()

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``Directory``. Of two groups with one engine name the later process counts."""
        if self._failed is not None:
            raise self._failed
        return {record.name: record for records in list(self._found.values()) for record in records}

    def publish(self, record: EngineRecord) -> None:
        """Raise OSError: engines publish at their own HTTP port."""
        raise OSError("engines publish at their HTTP port")

    withdraw = publish

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``Directory``. Does not wait for the answer, which only the log shows."""
        for url, records in list(self._found.items()):
            if any((one.name, one.incarnation) == (record.name, record.incarnation) for one in records):
                self._pool.submit(self._drain, url)

    def asked_to_drain(self, record: EngineRecord) -> bool:
        """Return False: a group hears orders at its own port."""
        return False

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._over.set()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _run(self) -> None:
        """Ask all groups again and again. The body of a thread."""
        while not self._over.is_set():
            began = time.monotonic()
            try:
                urls = dict.fromkeys(self._urls())
                self._failed = None
            except OSError as error:
                self._failed = error
                urls = dict.fromkeys(self._found)
            answers = self._pool.map(self._ask, urls)
            fresh = dict(zip(urls, answers, strict=True))
            # A group that does not answer keeps its records; a group that is not listed any more has none.
            self._found = {
                url: self._found.get(url, []) if records is None else records
                for url, records in fresh.items()
            }
            self._over.wait(max(0.0, began + self._poll - time.monotonic()))

    def _ask(self, url: str) -> list[EngineRecord] | None:
        """Return the records of the group at ``url``; None without an answer."""
        try:
            with self._client.stream("GET", f"{url}/records") as answer:
                data = b""
                for piece in answer.iter_bytes():
                    data += piece
                    if len(data) > MOST_BYTES:
                        raise ValueError("the answer is too large")
                if answer.status_code != 200:
                    raise ValueError(f"status {answer.status_code}")
            return _records.decode(data)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, msgspec.MsgspecError) as error:
            self._trouble.say("the group at %s does not answer (%s)", url, error)
            return None

    def _drain(self, url: str) -> None:
        with contextlib.suppress(httpx.HTTPError):
            answer = self._client.post(f"{url}/drain", headers={"Authorization": f"Bearer {self._key}"})
            if answer.status_code != 200:
                log.error("the group at %s does not drain: %s", url, answer.text[:200])


class PortDirectory:
    """Implementation of ``Directory`` for one group: keeps the records for the group's own HTTP port."""

    def __init__(self) -> None:
        self._records: dict[str, EngineRecord] = {}

    def publish(self, record: EngineRecord) -> None:
        """See ``Directory``."""
        self._records[record.name] = record

    def withdraw(self, record: EngineRecord) -> None:
        """See ``Directory``."""
        self._records.pop(record.name, None)

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``Directory``."""
        return dict(self._records)

    def ask_drain(self, record: EngineRecord) -> None:
        """Do nothing: the HTTP port hears orders."""

    def asked_to_drain(self, record: EngineRecord) -> bool:
        """Return False: the HTTP port hears orders."""
        return False
