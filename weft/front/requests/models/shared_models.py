"""The models of one of several API servers. The supervisor owns the engines and decides which models are
loaded (``weft.control.model_fronts``).

    record of the supervisor ─► connect, close, wake or refuse the requests that wait
    requests begin and end   ─► counts for the supervisor, ``REPORT_S`` later

The last record decides whether a request begins, without a message to the supervisor. An API server reports
the version of a record after acting on the record. From then on no request begins at a model that drains in
the record.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from weft.common.errors import ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.sections.front_section import FrontSection
from weft.control import models as m
from weft.control.links.owner import Owner
from weft.control.model_fronts import ModelRecord, ModelsRecord, Use
from weft.front.monitoring import several_pages
from weft.front.requests.models.several_models import (
    ModelSet,
    ModelStatus,
    Prove,
    SeveralModels,
    Slot,
    cost_of,
    ended,
    settle,
)
from weft.front.siblings import Siblings
from weft.tracing.writer import SpanWriter

log = get_logger(__name__)

LOOK_S = 0.05
"""Seconds between two reads of the record."""
REPORT_S = 0.02
"""Seconds from a change of the counts to the report."""
BETWEEN_S = 0.1
"""Minimum seconds between two reports. For each report the supervisor checks all processes."""
RETRY_S = 1.0
"""Seconds until the next attempt to connect to the engines of a loaded model."""
JOIN_S = 20.0
"""Maximum seconds until the record names this API server as a member."""


class ModelHub(Protocol):
    """The owner of the engines, in another process."""

    member: str
    """Name of this API server in the record."""

    @property
    def behind(self) -> bool:
        """True while messages wait, because the owner does not read."""

    def record(self) -> ModelsRecord | None:
        """Return the present record; None before the first."""

    def owner(self, model: str, load: int, keeps: Callable[[int], None]) -> Owner:
        """Return the owner of the engines of a load. ``keeps``: see ``RegistryOwner``."""

    def join(self) -> None:
        """Ask to be a member."""

    def used(self, seen: int, uses: dict[str, Use]) -> None:
        """Report the last seen version, and the use of the models whose use has changed."""

    def ready(self, model: str, load: int, cost: int = 0, error: WeftError | None = None) -> None:
        """Report the outcome of a load: see ``LoadSeen``."""

    async def ask(self, model: str, what: Any, seconds: float = 0.0) -> None:
        """Send the command of an operator: see ``ModelAsked``. Return when the next record shows the command.
        Raises WeftError."""


class RecordedModel:
    """State of one model in the last record. Implements ``several_models.ModelState``."""

    def __init__(self, record: ModelRecord) -> None:
        self.state = m.ModelState(record.state)
        self.cost, self.pinned = record.cost, record.pinned
        self.open, self.waiting, self.expires = record.running, record.waiting, record.expires
        self.failure = record.failure


class SharedModels(SeveralModels):
    """The models of an API server that shares the engines with others. Used from one event loop. Implements
    ``several_models.ModelStates`` over the last record."""

    shared = True

    def __init__(
        self,
        models: ModelSet,
        section: FrontSection,
        front: Any,
        spans: SpanWriter | None,
        siblings: Siblings | None,
        joining: bool,
    ) -> None:
        """``siblings``: the other API servers. ``joining``: True if the others serve already. The rest: see
        ``SeveralModels``."""
        assert models.hub is not None
        self._hub, self._siblings, self._joining = models.hub, siblings, joining
        self.entries: Mapping[str, RecordedModel] = {}
        self._records: dict[str, ModelRecord] = {}
        self._record: ModelsRecord | None = None
        self._member = False
        self._uses = {plan.facts.name: Use() for plan in models.plans}
        self._changed: set[str] = set()
        """Models whose use has changed since the last report."""
        self._reporting: asyncio.TimerHandle | None = None
        self._reported = 0
        """Version of the last report."""
        self._due = 0.0
        """Earliest time of the next report."""
        self._loads: dict[str, int] = dict.fromkeys(self._uses, 0)
        """Name -> load that this API server connects to, or is connected to; 0 without."""
        self._drained: set[str] = set()
        """Models that drain in the last record."""
        self._refused: dict[str, int] = {}
        self._unloads: dict[str, int] = {}
        """Number of unloads by operators in the last record."""
        super().__init__(models, section, front, spans)
        self._take(self._hub.record())

    def _states(self, models: ModelSet) -> SharedModels:
        """Return the states of the last record: the owner of the engines decides."""
        return self

    def _register(self) -> None:
        """Register nothing: all API servers see the same states, so the page shows the states once."""
        self.metrics.engines.register(several_pages.ModelsCollector(self))

    # -- states

    def admits(self, name: str) -> bool:
        """Return True if a request for the model may begin now."""
        record, slot = self._records.get(name), self._slots[name]
        if record is None or not self._member or slot.front is None:
            return False
        return record.state == m.ModelState.UP.value and record.load == self._loads[name]

    def wait(self, name: str) -> float:
        """Return the predicted seconds until the model admits requests."""
        record = self._records.get(name)
        return 1.0 if record is None else record.wait

    def _waiting(self, slot: Slot) -> int:
        return self._uses[slot.name].waiting

    # -- life

    async def start(self, prove: Prove) -> None:
        """Connect to the models of the start, and become a member. Raises the error of the first model that
        does not load. An API server that joins a running server waits for the loaded models alone, and raises
        no such error."""
        self._prove = prove
        self._follow_record()
        self._ticking = asyncio.create_task(self._tick())
        first = [slot for slot in self._slots.values() if self._awaited(slot)]
        await asyncio.gather(*(slot.settled.wait() for slot in first))
        if not self._joining:
            for slot in first:
                # A model that another API server has unloaded meanwhile is no error.
                if slot.front is None and slot.error is not None:
                    raise slot.error
        self._hub.join()
        try:
            async with asyncio.timeout(JOIN_S):
                while not self._member:
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise Unavailable("the supervisor does not answer") from None

    def _awaited(self, slot: Slot) -> bool:
        """Return True for a model that the start waits for."""
        if not self._joining:
            return slot.plan.facts.starts
        record = self._records.get(slot.name)
        return record is not None and record.state == m.ModelState.UP.value

    async def close(self, shutdown: bool = True) -> None:
        """Close all models; every open request fails. The engines live on. Call once."""
        if self._reporting is not None:
            self._reporting.cancel()
        await super().close(shutdown=False)

    async def _tick(self) -> None:
        """Act on the record regularly, until a cancellation."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._follow_record_safely()

    def _follow_record_safely(self) -> None:
        try:
            self._follow_record()
        except Exception:
            log.exception("unexpected error in the states of the models; the API server continues")

    # -- the record

    def _follow_record(self) -> None:
        """Act on the present record, and report the version."""
        record = self._hub.record()
        if record is None or self._closing:
            return
        self._take(record)
        for slot in self._slots.values():
            self._follow(slot, self._records[slot.name])
        if record.version != self._reported:
            self._report_soon()

    def _take(self, record: ModelsRecord | None) -> None:
        if record is None or record is self._record:
            return
        self._record = record
        self._records = {one.name: one for one in record.models}
        self.entries = {one.name: RecordedModel(one) for one in record.models}
        self.loads = {one.name: one.loads for one in record.models}
        self._member = self._hub.member in record.members

    def _follow(self, slot: Slot, record: ModelRecord) -> None:
        """Bring one model into the state of its record."""
        if record.refused != self._refused.get(slot.name, 0):
            self._refused[slot.name] = record.refused
            if record.refusal is not None:
                slot.error = slot.error or ReportedError(record.refusal)
                settle(slot, ReportedError(record.refusal))
        state = m.ModelState(record.state)
        if record.unloads != self._unloads.setdefault(slot.name, record.unloads):
            self._unloads[slot.name] = record.unloads
            slot.give_up()
        present = 0 if state is m.ModelState.COLD or record.ending else record.load
        if self._loads[slot.name] not in (0, present):
            self._leave(slot)
        usable = state in (m.ModelState.LOADING, m.ModelState.UP)
        if present and usable and not self._loads[slot.name] and ended(slot.task):
            self._loads[slot.name] = present
            slot.task = asyncio.create_task(self._connect(slot, present))
        if state is not m.ModelState.DRAINING:
            self._drained.discard(slot.name)
        elif slot.name not in self._drained:
            self._drained.add(slot.name)
            if self._uses[slot.name].lines:
                self.stop_lines(slot.name)
        if slot.waiters and self.admits(slot.name):
            settle(slot, None)
        if record.load and state is m.ModelState.COLD:  # the load has ended
            if record.failure:
                slot.error = slot.error or Unavailable(record.failure)
            slot.settled.set()

    def _leave(self, slot: Slot) -> None:
        """Leave the load that ends. A later look connects to the next load."""
        self._loads[slot.name] = 0
        self._keeps(slot.name, 0)
        if ended(slot.task):
            slot.task = asyncio.create_task(self._close_model(slot))
        elif slot.task is not None:
            slot.task.cancel()

    async def _connect(self, slot: Slot, load: int) -> None:
        """Connect to the engines of a load, until a success. Report the outcome."""
        model = None
        try:
            while model is None:
                owner = self._hub.owner(slot.name, load, lambda kept: self._keeps(slot.name, kept))
                joining = self._records[slot.name].state == m.ModelState.UP.value
                try:
                    model, front = await self._connected(slot, owner, self._siblings, joining)
                except Exception as error:
                    if not isinstance(error, (WeftError, OSError)):
                        log.exception("unexpected error at the model %s", slot.name)
                    slot.error = error if isinstance(error, WeftError) else Unavailable(str(error))
                    log.error("no connection to the model %s: %s", slot.name, slot.error.message)
                    self._hub.ready(slot.name, load, error=slot.error)
                    slot.settled.set()
                    await asyncio.sleep(RETRY_S)
        except asyncio.CancelledError:
            return  # the load has ended
        slot.model, slot.front, slot.error = model, front, None
        welcome = model.links.welcome if slot.plan.measured else None
        self._hub.ready(slot.name, load, 0 if welcome is None else cost_of(slot.plan, welcome.num_blocks))
        slot.settled.set()
        if self.admits(slot.name):
            settle(slot, None)

    # -- counts

    def _on(self, event: m.Event) -> None:
        """Count a request."""
        assert not isinstance(event, m.Tick)
        use = self._uses[event.name]
        match event:
            case m.Wanted():
                use.waiting += 1
                use.requests += 1
            case m.GaveUp():
                use.waiting -= 1
            case m.Opened(_, waited, line):
                use.waiting -= waited
                use.open += 1
                use.lines += line
                if not line:
                    use.requests, use.begun, use.keep = use.requests + 1, use.begun + 1, None
            case m.Kept(_, seconds):
                use.keep = seconds
            case m.Closed(_, line):
                use.open -= 1
                use.lines -= line
            case m.BatchWants(_, wants):
                use.batch = wants
        self._changed.add(event.name)
        self._report_soon()

    def _keeps(self, name: str, kept: int) -> None:
        if self._uses[name].kept != kept:
            self._uses[name].kept = kept
            self._changed.add(name)
            self._report_soon()

    def _report_soon(self) -> None:
        if self._reporting is None and self._member and not self._closing:
            loop = asyncio.get_running_loop()
            self._reporting = loop.call_at(max(loop.time() + REPORT_S, self._due), self._report)

    def _report(self) -> None:
        """Report the version that this API server has acted on, with the counts of the same moment."""
        self._reporting = None
        assert self._record is not None
        if self._hub.behind:  # the owner does not read: a later report replaces this report
            self._reporting = asyncio.get_running_loop().call_later(LOOK_S, self._report)
            return
        self._reported, self._due = self._record.version, asyncio.get_running_loop().time() + BETWEEN_S
        self._hub.used(self._reported, {name: copy.copy(self._uses[name]) for name in self._changed})
        self._changed.clear()

    def batch_wants(self, models: Collection[str]) -> None:
        """Note the models that lines of batches need: see ``SeveralModels.batch_wants``."""
        for name, use in self._uses.items():
            if use.batch != (name in models):
                self._on(m.BatchWants(name, name in models))

    # -- operators

    def listed(self, client: int | None = None) -> list[ModelStatus]:
        """See ``SeveralModels.listed``. A command through another API server shows at once."""
        self._follow_record_safely()
        return super().listed(client)

    async def load(self, name: str) -> ModelStatus:
        """See ``SeveralModels.load``."""
        slot = self._known(name)
        if not self.admits(slot.name):
            await self._ask(slot, "load")
            if await self._up(slot):
                self._on(m.GaveUp(slot.name))
        return self.status(slot.name)

    async def unload(self, name: str) -> ModelStatus:
        """See ``SeveralModels.unload``."""
        return await self._ask(self._known(name), "unload")

    async def pin(self, name: str, pinned: bool) -> ModelStatus:
        """See ``SeveralModels.pin``."""
        return await self._ask(self._known(name), "pin" if pinned else "unpin")

    async def keep(self, name: str, seconds: float) -> ModelStatus:
        """See ``SeveralModels.keep``."""
        return await self._ask(self._known(name), "keep", seconds)

    async def _ask(self, slot: Slot, what: str, seconds: float = 0.0) -> ModelStatus:
        """Send a command, and return the state after the command. Raises WeftError."""
        if self._reporting is not None:  # counts from before the command must arrive before the command
            self._reporting.cancel()
            self._report()
        await self._hub.ask(slot.name, what, seconds)
        # Act on the new record now: later requests must see no refusal from before the command.
        self._follow_record()
        return self.status(slot.name)
