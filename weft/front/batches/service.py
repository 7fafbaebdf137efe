"""Batches of one API server: the store in a thread, the lease, and the runner beside online traffic."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import msgspec
from starlette.types import ASGIApp

from weft.batch.book import BatchBook, CancelBatch, EndReason, OpenBatch
from weft.batch.database import BatchDatabase, LeaseLost
from weft.batch.files import BatchFiles
from weft.batch.lines import BatchAnswer, Checks, body_of, sequences_of
from weft.batch.runner import BatchRunner, LineBroken, LineLost, LineOutput, LineRequest
from weft.batch.store import DAY, BatchRow, BatchStore
from weft.common.errors import InvalidRequest, NotFound, TooLarge, Unavailable, WeftError
from weft.common.folder import expanded
from weft.common.log import get_logger
from weft.config.flags import parse_size
from weft.front.batches.batch_metrics import BatchCounts
from weft.front.batches.inner import ask
from weft.front.http.answers import error_response, to_json
from weft.front.lifecycle import Phase
from weft.front.requests.context import Front
from weft.types.priority import BATCH_PRIORITY

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

POLL_S = 1.0
"""Seconds between two reads of the store for new, cancelled and ended batches."""
RENEW_S = 3.0
"""Seconds between two renewals of the lease."""
PURGE_S = 600.0
RETRY_S = 30.0
"""Seconds until the next attempt of a batch after an error."""
LONGEST_PAUSE = 60.0
"""Longest pause of all batches after errors of the disk."""
MOST_FRAME = 16 << 10
"""Maximum bytes of a line besides its body."""
MOST_KV = 0.8
"""Used fraction of a KV cache pool from which no line is started."""
QUIET_S = 30.0
"""Seconds without an online request after which batches may use all slots."""
MOST_STARTS = 64
"""Maximum number of lines started at once: the load of the engines is known only after a heartbeat."""


class BatchService:
    """Files and batches of one API server. Used from the server's event loop."""

    def __init__(self, front: Front, folder: str) -> None:
        """Open ``folder``. Raises ConfigError for an unusable folder."""
        section = front.section
        self._front = front
        self._base = BatchDatabase(expanded(folder))
        self.retention = section.batch_retention * DAY
        self.max_bytes = parse_size(section.batch_max_bytes) or 0
        self.files = BatchFiles(self._base, time.time, self.retention)
        self.store = BatchStore(self._base, self.files, time.time)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-batch")
        self._shares: dict[str, int] = {}
        """Batch -> id as a client request."""
        self._online = -QUIET_S
        """Time of the last open online request."""
        self._runner: BatchRunner | None = None
        self._app: ASGIApp | None = None
        self._task: asyncio.Task[None] | None = None
        self._ended = False
        self._known: set[str] = set()
        """Batches that the runner has."""
        self._later: dict[str, float] = {}
        """Batch with an error -> time of the next attempt."""
        self.counts = BatchCounts(front.metrics)
        if front.several is not None:
            front.several.stop_lines = self._stop_lines

    def start(self, app: ASGIApp) -> None:
        """Begin to run batches once the server is ready. ``app``: the routes, without the access checks."""
        self._app = app
        self._task = asyncio.create_task(self._live())

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the store for a request of a client. Raises Unavailable for a full disk, for a
        locked database, and for a server that stops."""
        if self._ended:
            raise Unavailable("the server is shutting down")
        try:
            return await self._call(function, *args, **kwargs)
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            log.warning("the folder of --batch-dir cannot be used (%s)", reason)
            raise Unavailable(f"the folder of files and batches cannot be used now: {reason}") from None

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the store in the store's thread and return the result."""
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, lambda: function(*args, **kwargs)
        )

    def owner(self, key: int) -> str:
        """Return the owner of files for an API key. The same key has the same owner after a restart, whatever
        its number."""
        return self._front.access.salt_of(key, "batches")

    def _key(self, owner: str) -> int | None:
        """Return the number of an owner's API key; None for a key that the server no longer has."""
        keys = max(len(self._front.section.api_key), 1)
        return next((number for number in range(keys) if self.owner(number) == owner), None)

    # -- the life of the holder

    @property
    def _serves(self) -> bool:
        return self._front.lifecycle.phase is Phase.READY

    async def _live(self) -> None:
        """Take the lease when the lease is free, and run all batches while holding the lease. Ends with the
        server."""
        pause = POLL_S
        try:
            while self._front.lifecycle.phase in (Phase.STARTING, Phase.READY):
                if self._serves and await self._take():
                    # Lines that ran before an error run again: a full disk must not repeat them all day.
                    pause = POLL_S if await self._lead() else min(2 * pause, LONGEST_PAUSE)
                until = time.monotonic() + pause
                while time.monotonic() < until and (self._serves or pause == POLL_S):
                    await asyncio.sleep(POLL_S)
        finally:
            self._ended = True
            self.counts.clear()
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        """End the store's thread, the lease and the database. Call neither from the store's thread nor from
        the event loop: a long call of the store would block the loop."""
        with contextlib.suppress(Exception):
            self._thread.shutdown(wait=True)
            self._base.release_lease(self.store.holder)
            self._base.close()

    async def _take(self) -> bool:
        try:
            return await self._call(self._base.take_lease, self.store.holder, time.time())
        except Exception as error:  # a full or locked disk: another attempt follows
            log.warning("the batch folder cannot be written (%s)", type(error).__name__)
            return False

    async def _lead(self) -> bool:
        """Run batches until the lease is lost or the server stops. Return False after an error of the disk;
        running lines then run again."""
        runner = self._runner = BatchRunner(BatchBook(), self, self._send, self._room)
        self._known.clear()
        # A separate task renews the lease: a long comparison of outputs must not lose the lease.
        tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._poll(runner))]
        try:
            await runner.run(lambda: any(task.done() for task in tasks) or not self._serves)
            for task in tasks:
                if task.done():
                    task.result()
            return True
        except LeaseLost:
            log.info("another API server runs the batches now")
            return True
        except Exception:
            log.exception("batches stop after an error of the disk; another attempt follows")
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for share in self._shares.values():
                self._front.ids.release(share)
            self._shares.clear()
            self._runner = None
            self._want(())

    async def _renew(self) -> None:
        """Renew the lease until a cancellation. Raises LeaseLost."""
        while True:
            await asyncio.sleep(RENEW_S)
            if not await self._take():
                raise LeaseLost

    async def _poll(self, runner: BatchRunner) -> None:
        """Give new and cancelled batches to the runner, and delete expired files and batches."""
        purged = 0.0
        while True:
            now = time.monotonic()
            if now - purged >= PURGE_S:
                await self._call(self.store.purge, self.retention)
                purged = now
            for row in await self._call(self.store.active):
                if row.status == "cancelling" and row.id in self._known:
                    runner.feed(CancelBatch(row.id))
                elif row.id not in self._known and self._later.get(row.id, now) <= now:
                    await self._try_open(runner, row)
            self._want(runner.book.unfinished())
            self.counts.show(await self._call(self.store.counts), await self._call(self.store.oldest))
            await asyncio.sleep(POLL_S)

    async def _try_open(self, runner: BatchRunner, row: BatchRow) -> None:
        """Open a batch. An error, such as a damaged disk block, delays this batch alone."""
        try:
            if await self._open(runner, row):
                self._known.add(row.id)
                self._later.pop(row.id, None)
        except LeaseLost:
            raise
        except Exception:
            self._delay(row.id)

    def _delay(self, batch: str) -> None:
        """Log an error of a batch, and let ``_poll`` open the batch again later."""
        log.exception("batch %s: an error; another attempt follows in %.0f s", batch, RETRY_S)
        self._later[batch] = time.monotonic() + RETRY_S
        self._known.discard(batch)

    async def _open(self, runner: BatchRunner, row: BatchRow) -> bool:
        """Validate or continue a batch. Return False for a batch that cannot run yet, or has ended."""
        key = self._key(row.owner)
        left = row.expires - time.time()
        if key is None and left > 0 and row.status != "cancelling":
            return False
        if row.status == "validating" and left > 0:
            await self._validate(row)
        elif row.status != "validating":
            damaged, steps = 0, self.store.repair(row.id)
            while (found := await self._call(next, steps, None)) is not None:
                damaged += found
            if damaged:
                log.warning("batch %s: %d damaged outputs are made again", row.id, damaged)
        current = await self._call(self.store.get, row.id)
        if current is None or current.status not in ("validating", "in_progress", "finalizing", "cancelling"):
            return False
        if current.status == "validating" and left > 0:
            return False
        pending = await self._call(self.store.pending, row.id)
        models: dict[int, str] = {}
        if (several := self._front.several) is not None:
            named = await self._call(self.store.models, row.id)
            models = {line: several.first_name(name) for line, name in named.items()}
        ends = current.ends is not None or current.status == "cancelling"
        if left <= 0 and not ends:
            await self.finalize(row.id, "expired")
            return False
        self._shares[row.id] = self._front.ids.mint()
        deadline = time.monotonic() + max(left, 0.0)
        lines = () if ends else pending
        runner.feed(OpenBatch(batch=row.id, lines=lines, models=models, deadline=deadline))
        return True

    async def _validate(self, row: BatchRow) -> None:
        front = self._front
        # A copy: the check runs in the store's thread, and adapters come and go.
        if front.several is None:
            names = frozenset((*front.model.accepted, *front.adapters.names))
        else:
            names = front.several.names_for(self._key(row.owner) or 0)
        _, waiting = await self._call(self.store.load, row.owner)
        room = max(front.section.batch_max_lines - waiting, 0)
        most = front.section.max_request_bytes + MOST_FRAME
        checks = Checks(row.endpoint, names.__contains__, most_line=most)
        await self._call(self.store.validate, row.id, checks, room)

    # -- capacity beside online requests

    def _want(self, models: Collection[str]) -> None:
        """Report the models that lines need to a server of several models."""
        if self._front.several is not None:
            self._front.several.batch_wants(models)

    def _stop_lines(self, model: str) -> None:
        """Stop the lines of a model that drains."""
        if self._runner is not None:
            self._runner.stop_lines(model)

    def _fronts(self) -> list[Front]:
        """Return the front of each loaded model."""
        return [self._front] if self._front.several is None else self._front.several.fronts

    def _front_of(self, model: str) -> Front | None:
        """Return the front of the model of a line; None while the model admits no requests."""
        return self._front if self._front.several is None else self._front.several.admitting(model)

    def _room(self, model: str, mine: int) -> int:
        """Return the number of lines of a model that may start: only while every online sequence of the
        model has a slot, and the KV caches have room. ``mine``: sequences of the model's running lines."""
        if not self._serves:
            return 0
        if self._front.several is not None and not model:
            return max(MOST_STARTS - mine, 0)  # the route answers that there is no such model any more
        front = self._front_of(model)
        if front is None:
            return 0
        engines = [
            one for one in front.links.instances if one.alive and one.role not in ("prefill", "encode")
        ]
        if any(one.stats.waiting or one.stats.kv_usage >= MOST_KV for one in engines):
            return 0
        slots = front.config.scheduler.max_num_seqs * len(engines)
        others = _online(front) + sum(one.elsewhere for one in engines)
        now = time.monotonic()
        # All models share the cores, so a request for any model counts.
        if others or any(_online(one) + _elsewhere(one) for one in self._fronts() if one is not front):
            self._online = now
        most = room_of(slots, others, now - self._online, front.section.batch_online_share)
        return max(min(most - mine, MOST_STARTS), 0)

    # -- the line store of the runner

    async def _send(self, request: LineRequest) -> BatchAnswer:
        key = self._key(request.owner)
        if key is None or self._app is None:
            raise LineLost
        return await ask(self._app, request.url, request.body, key, self._shares[request.batch])

    async def request(self, batch: str, line: int) -> LineRequest:
        try:
            return await self._call(self._request, batch, line)
        except FileNotFoundError:
            raise _broken(InvalidRequest("the input file was deleted", code="input_file_missing")) from None
        except (msgspec.DecodeError, ValueError, RecursionError) as wrong:
            raise _broken(
                InvalidRequest(f"the line cannot be read: {wrong}", code="invalid_json_line")
            ) from None
        except (OSError, sqlite3.Error) as failure:
            log.warning("batch %s: line %d cannot be read (%s)", batch, line + 1, type(failure).__name__)
            raise LineLost from None

    def _request(self, batch: str, line: int) -> LineRequest:
        row = self.store.get(batch)
        if row is None:
            raise LineLost
        if self.files.load(row.owner)[1] > self.max_bytes:
            raise _broken(
                TooLarge(
                    "the files of this key and the outputs of its batches have more than --batch-max-bytes; "
                    "delete files"
                )
            )
        made = self.store.line(batch, line)
        body = body_of(made, row.seed)
        return LineRequest(batch, line, made.url, body, sequences_of(made), row.owner)

    async def record(self, outputs: list[LineOutput]) -> None:
        await self._call(self.store.record, outputs)
        self.counts.add("completed", sum(output.good for output in outputs))
        self.counts.add("failed", sum(not output.good for output in outputs))

    async def finalize(self, batch: str, reason: EndReason) -> None:
        try:
            row = await self._call(self.store.get, batch)
            await self._call(self.store.finalize, batch, reason)
            ended = await self._call(self.store.get, batch)
        except LeaseLost:
            raise
        except Exception:
            self._delay(batch)
        else:
            if row is not None and ended is not None:
                self.counts.add(ended.status, ended.failed - row.failed)
        share = self._shares.pop(batch, None)
        if share is not None:
            self._front.ids.release(share)


def _online(front: Front) -> int:
    """Return the number of open sequences of clients."""
    return sum(one.submit.priority < BATCH_PRIORITY for one in front.links.fleet.entries.values())


def _elsewhere(front: Front) -> int:
    """Return the sequences of other API servers at the engines of a model."""
    return sum(one.elsewhere for one in front.links.instances if one.alive)


def _broken(error: WeftError) -> LineBroken:
    """Return the outcome of a line that is not sent, with an answer as from its route."""
    info = error.info()
    return LineBroken(BatchAnswer(info.http_status, "", to_json(error_response(info))))


def room_of(slots: int, others: int, quiet: float, share: float) -> int:
    """Return the number of sequences that batches may run. ``others``: open online sequences. ``quiet``:
    seconds since the last one. ``share``: part of the slots beside online requests; above 0 at least one."""
    most = slots
    if quiet < QUIET_S:
        most = max(int(slots * share), 1) if share else 0
    return min(most, slots - others)


def service_of(front: Front) -> BatchService | None:
    """Return the service of a server with --batch-dir; None without. Raises ConfigError for an unusable
    folder."""
    folder = front.section.batch_dir
    return None if folder is None else BatchService(front, folder)


def batches_of(service: BatchService | None) -> BatchService:
    """Return the service. Raises NotFound for a server without batches."""
    if service is None:
        raise NotFound(
            "this server has no files and no batches; start the server with --batch-dir FOLDER",
            code="batches_disabled",
        )
    return service
