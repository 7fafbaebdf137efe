"""The load: sends planned requests at the due time or when a place is free, and waits for all ends."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from weft.bench.client import ServerTarget, send
from weft.bench.records import RequestRecord
from weft.bench.schedule import Planned
from weft.common.progress import progress_bar


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a run. Times in seconds."""

    concurrency: int | None
    """Maximum requests at once; None for no limit (only with arrival times)."""
    requests: int | None
    """Number of requests to send; None to send until ``duration``."""
    duration: float | None
    """Nothing is sent after this time; requests already sent may end."""
    request_timeout: float = 600.0
    run_timeout: float | None = None
    """The whole run ends after this time, including requests under way."""


@dataclass(slots=True)
class LoadRun:
    """Result of a run. ``records`` has a record for each sent request, in sending order."""

    records: list[RequestRecord] = field(default_factory=list)
    interrupted: bool = False
    """True if the user interrupted the run."""
    timed_out: bool = False
    seconds: float = 0.0
    client_cpu: float = 0.0
    """CPU seconds of this process. Near ``seconds``, the load generator itself is the limit."""


async def run_load(
    client: httpx.AsyncClient,
    target: ServerTarget,
    plan: Iterator[Planned],
    limits: Limits,
    *,
    key: str,
    title: str = "requests",
    progress: bool = True,
) -> LoadRun:
    """Send ``plan`` within ``limits``, and return the records, also of failed and unfinished requests.

    ``key`` seeds the random prompts; prompts of different keys share no prefix. Ctrl-C, and the end of
    ``run_timeout``, end the run at once; the records so far are returned.
    """
    run = LoadRun()
    total = limits.requests
    bar = progress_bar(total=total, title=title, unit="req", shown=progress)
    began, cpu = time.monotonic(), _cpu_seconds()
    driver = asyncio.create_task(_Driver(client, target, limits, run, key, bar).drive(plan, began))
    with bar, _interrupting(driver, run):
        done, _ = await asyncio.wait([driver], timeout=limits.run_timeout)
        if not done:
            run.timed_out = True
            driver.cancel()
            await asyncio.wait([driver])
    run.seconds, run.client_cpu = time.monotonic() - began, _cpu_seconds() - cpu
    if not driver.cancelled():
        driver.result()
    return run


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _interrupting(driver: asyncio.Task[None], run: LoadRun) -> Iterator[None]:
    """Within the block, the first Ctrl-C cancels ``driver`` and marks ``run`` as interrupted.

    A second Ctrl-C has the usual effect. Outside the main thread the block has no effect.
    """
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        run.interrupted = True
        loop.remove_signal_handler(signal.SIGINT)
        driver.cancel()

    try:
        loop.add_signal_handler(signal.SIGINT, interrupt)
    except (RuntimeError, ValueError):  # not the main thread: the owner of the main thread interrupts
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Driver:
    def __init__(
        self,
        client: httpx.AsyncClient,
        target: ServerTarget,
        limits: Limits,
        run: LoadRun,
        key: str,
        bar: Any,
    ) -> None:
        self._client, self._target, self._limits, self._run = client, target, limits, run
        self._key, self._bar = key, bar
        self._places = asyncio.Semaphore(limits.concurrency) if limits.concurrency is not None else None
        self._failed = 0

    async def drive(self, plan: Iterator[Planned], began: float) -> None:
        """Send the plan, and return when all sent requests have ended.

        Appends a record per request to the run. Cancellation leaves unfinished records.
        """
        stop = None if self._limits.duration is None else began + self._limits.duration
        async with asyncio.TaskGroup() as group:
            for number, planned in enumerate(itertools.islice(plan, self._limits.requests)):
                due = None if planned.at is None else began + planned.at
                # built before the due time, so building delays nothing
                body = self._target.body(planned, f"{self._key} {number}")
                if not await self._may_send(due, stop):
                    return
                record = RequestRecord(
                    number=number,
                    planned=due,
                    sent=time.monotonic(),
                    prompt_tokens=planned.input_len,
                    asked_tokens=planned.output_len,
                )
                self._run.records.append(record)
                group.create_task(self._one(body, record))

    async def _may_send(self, due: float | None, stop: float | None) -> bool:
        """Wait for the due time and for a free place.

        Return False if the time to send is over; a place may be taken then.
        """
        if due is not None:
            if stop is not None and due >= stop:
                return False
            await asyncio.sleep(max(due - time.monotonic(), 0))
        if self._places is not None:
            try:
                # The wait for a place must not outlast the sending time.
                async with asyncio.timeout(None if stop is None else max(stop - time.monotonic(), 0)):
                    await self._places.acquire()
            except TimeoutError:
                return False
        return stop is None or time.monotonic() < stop

    async def _one(self, body: bytes, record: RequestRecord) -> None:
        """Send one request, free the place, and advance the bar. Failures are in ``record``."""
        try:
            await send(self._client, self._target, body, record, self._limits.request_timeout)
        finally:
            if self._places is not None:
                self._places.release()
        self._failed += record.outcome != "ok"
        if self._failed:
            self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update(1)
