"""The models of a server of several models: executes the decisions of ``weft.control.models``.

    request ─► enter ─► name in the body ─► loaded: the model's front
                                        ╰─► not loaded: waits; ModelTable ─► Load, Unload

Each load makes a new ``ServedModel`` over new engine processes. So below this module a server of several
models is several servers of one model, and no sequence ever moves between models.

For other modules: ``listed`` has the state of each model. ``load``, ``unload``, ``pin`` and ``keep`` change
the state.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from weft.common.clock import SystemClock
from weft.common.errors import ConfigError, InvalidRequest, Overloaded, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection
from weft.config.sizing.model_cost import model_cost
from weft.control import models as m
from weft.control.links.owner import Owner
from weft.front.http.answers import ModelCard
from weft.front.lifecycle import Lifecycle
from weft.front.monitoring import several_pages
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.front.monitoring.load_history import EngineState
from weft.front.monitoring.metrics import Metrics
from weft.front.protocol.ollama_request import LATEST
from weft.front.protocol.parse import unknown_model
from weft.front.requests.models.named_model import KeyModels, NamedModel, named_in
from weft.front.requests.served_model import ServedModel, card_of_model
from weft.front.requests.weight_updates import UpdatesState
from weft.front.siblings import Siblings
from weft.store.shared_files import SharedFiles
from weft.tracing.writer import SpanWriter

if TYPE_CHECKING:
    from weft.front.requests.context import Front
    from weft.front.requests.models.shared_models import ModelHub

log = get_logger(__name__)

TICK_S = 0.5
"""Seconds between two reports of the time to the table of models."""

Prove = Callable[["Front"], Awaitable[None]]
"""Generates a first token with every engine of a model. Raises WeftError."""


class ModelProcesses(Protocol):
    """Starts and ends the engine processes of one model."""

    def start(self) -> Owner:
        """Start all processes, and return their owner, without a wait for readiness. Raises OSError."""

    def close(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the processes, which have an order to end, and kill the rest. Blocks.
        Idempotent."""


class ModelPlan(NamedTuple):
    """One model of a server of several models."""

    config: EngineConfig
    """Settings for API servers. ``served_names[0]`` is the name of the model."""
    groups: tuple[EngineConfig, ...]
    section: FrontSection
    """Settings of the server, with the text settings of the model."""
    facts: m.ModelFacts
    processes: ModelProcesses | None
    """None if another process owns the engines."""
    measured: bool = True
    """True: the engines' report replaces the memory in ``facts``."""


class ModelSet(NamedTuple):
    """All models of a server."""

    plans: tuple[ModelPlan, ...]
    budget: int | None
    """Maximum bytes of all loaded models."""
    keys: KeyModels
    hub: ModelHub | None = None
    """The owner of the engines, which several API servers share; None for engines that end with this API
    server."""

    @property
    def shared(self) -> bool:
        return self.hub is not None


class ModelState(Protocol):
    """State of one model, as ``SeveralModels`` reads the state."""

    @property
    def state(self) -> m.ModelState: ...
    @property
    def cost(self) -> int: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def open(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def expires(self) -> float | None: ...
    @property
    def failure(self) -> str: ...


class ModelStates(Protocol):
    """States of all models: ``weft.control.models.ModelTable``, or the last record of the owner."""

    @property
    def entries(self) -> Mapping[str, ModelState]: ...

    def admits(self, name: str) -> bool: ...

    def wait(self, name: str) -> float: ...


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one model, for operators."""

    name: str
    aliases: tuple[str, ...]
    state: str
    """unloaded, loading, loaded or draining."""
    size: int
    """Bytes of memory while the model is loaded."""
    pinned: bool
    running: int
    """Requests that have begun."""
    waiting: int
    """Requests that wait for the model."""
    expires_in: float | None = None
    """Seconds until the unload if no request comes; null for never, and for a model in use."""
    failure: str = ""
    """Reason of the last failure; "" after a load that succeeded."""


class NotLoaded(Unavailable):
    """The model was not loaded in time."""

    def __init__(self, message: str, wait: float) -> None:
        """``wait``: predicted seconds until the model is loaded."""
        super().__init__(message)
        self.wait = wait


class Slot:
    """One model, with the present load."""

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan
        self.name = plan.facts.name
        self.model: ServedModel | None = None
        self.front: Front | None = None
        self.waiters: list[asyncio.Future[None]] = []
        """One per waiting request. Done when the model admits requests, or with the reason of a refusal."""
        self.task: asyncio.Task[None] | None = None
        """Loads or unloads the model now."""
        self.watch: asyncio.Task[None] | None = None
        """Waits for the death of the engines."""
        self.error: WeftError | None = None
        """Error of the last load, as raised."""
        self.updates: UpdatesState | None = None
        """Updates of the weights during earlier loads; None for the weights of the files."""
        self.files = SharedFiles()
        """Files of ``updates`` in shared memory, until the next load has read them."""
        self.forgets = False
        """True if an operator unloads the model, with its updates."""
        self.settled = asyncio.Event()
        """Set once the load of the start has succeeded or failed."""

    def give_up(self) -> None:
        """Give up the updates of the weights: the next load has the weights of the files."""
        changed = self.updates if self.model is None else self.model.weights.number
        if changed:
            log.warning("the next load of the model %s has the weights of its files", self.name)
        # A load under way may have read the updates already.
        self.updates, self.forgets = None, self.model is not None or not ended(self.task)
        self.files.keep(())

    def keep(self, updates: UpdatesState | None) -> None:
        """Keep ``updates`` for the next load; None for the weights of the files."""
        files = () if updates is None else [file for one in updates.history for file in one.files]
        self.files.hold(files)
        self.files.keep(files)
        self.updates, self.forgets = updates, False

    @property
    def most_waiting(self) -> int:
        return self.plan.config.scheduler.max_queued_requests


class SeveralModels:
    """The models of one API server. Used from one event loop."""

    shared = False

    def __init__(
        self,
        models: ModelSet,
        section: FrontSection,
        front: Front,
        spans: SpanWriter | None,
    ) -> None:
        """``front``: objects of the process, without a model."""
        self._front, self._section, self._spans = front, section, spans
        self._keys = models.keys
        self._clock = SystemClock()
        self._slots = {plan.facts.name: Slot(plan) for plan in models.plans}
        self._names = {
            name: slot
            for slot in self._slots.values()
            for name in (*slot.plan.config.accepted_names, *slot.plan.config.served_names)
        }
        self.table = self._states(models)
        self.lifecycle = Lifecycle(lambda: sum(one.lifecycle.capacity for one in self.loaded))
        self.metrics = Metrics("", several_pages.NO_LINKS, spans)
        """Metrics of the process. Each model has its own."""
        self._register()
        self._past = [[0.0] * len(bounds) for bounds in LATENCY_BOUNDS]
        """Latencies of earlier loads."""
        self.stop_lines: Callable[[str], None] = lambda model: None
        """Stops the lines of batches that run at a model; set by the owner of the batches."""
        self._prove: Prove | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._closing = False
        self.loads = dict.fromkeys(self._slots, 0)
        """Name -> number of loads that succeeded."""
        self.died = asyncio.Event()
        """Never set: a model whose engines are lost is loaded again on demand."""

    def _states(self, models: ModelSet) -> ModelStates:
        """Make the table that decides which models are loaded."""
        self._table = m.ModelTable([plan.facts for plan in models.plans], models.budget)
        return self._table

    def _register(self) -> None:
        """Add the metrics of ``several_pages.MODELS``."""
        self.metrics.registry.register(several_pages.ModelsCollector(self))

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, prove: Prove) -> None:
        """Load the models with ``load: start``, all at once. Return when all are loaded. Raises the error of
        the first model that does not load."""
        self._prove = prove
        self._ticking = asyncio.create_task(self._tick())
        self._carry_out(self._table.start(self._clock.now()))
        first = [slot for slot in self._slots.values() if slot.plan.facts.starts]
        await asyncio.gather(*(slot.settled.wait() for slot in first))
        for slot in first:
            if not self.table.admits(slot.name):
                raise slot.error or Unavailable(f"the model {slot.name} could not be loaded")

    async def close(self, shutdown: bool = True) -> None:
        """End all loads and close all models; every open request fails. Call once."""
        self._closing = True
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        watches = [slot.watch for slot in self._slots.values() if slot.watch is not None]
        for task in [*tasks, *watches, *([] if self._ticking is None else [self._ticking])]:
            task.cancel()
        await asyncio.gather(*tasks, *watches, return_exceptions=True)
        await asyncio.gather(*(model.close(shutdown) for model in self.loaded))
        for slot in self._slots.values():
            slot.files.keep(())

    def drain(self) -> None:
        """Report to the owners of the engines that the server drains. Requests that wait for a model fail:
        none of these requests has begun."""
        for slot in self._slots.values():
            settle(slot, Unavailable("the server is shutting down"))
        for model in self.loaded:
            model.owner.drain()

    def fail_all(self, error: WeftError) -> None:
        """Fail every open request with ``error``."""
        for model in self.loaded:
            model.links.fail_all(error)

    # -- requests -----------------------------------------------------------------------------------

    async def enter(
        self, body: list[bytes], client: int, held: contextlib.ExitStack, line: bool = False
    ) -> Front:
        """See ``Front.enter``."""
        asked = await named_in(body, self._front.threads)
        slot = self._find(asked, client)
        if line and not self.table.admits(slot.name):
            # A line does not load its model: `batch_wants` does. The line runs again later.
            raise Unavailable(f"the model {slot.name} is not loaded")
        waited = await self._up(slot)
        # No await from here on: the table counts the request before anything else can happen.
        front = slot.front
        assert front is not None
        # A line does not decide how long a model stays, so its ``keep_alive`` has no effect.
        held.enter_context(self._place(slot, front, waited, None if line else asked.keep, line))
        return front

    def _find(self, asked: NamedModel, client: int) -> Slot:
        """Return the slot of the model that a request names. Raises NotFound and InvalidRequest."""
        allowed = [slot for slot in self._slots.values() if self._keys.allow(client, slot.name)]
        if asked.model is None:
            if len(allowed) == 1:
                return allowed[0]
            names = ", ".join(slot.name for slot in allowed)
            raise InvalidRequest(f"model is required: this server has the models {names}", param="model")
        slot = self._slot(asked.model)
        if slot is None or slot not in allowed:
            raise unknown_model(asked.model)
        return slot

    def _slot(self, name: str) -> Slot | None:
        """Return the slot of a name, also with Ollama's tag ``:latest`` behind the name; None if unknown."""
        for one in dict.fromkeys((name, name.removesuffix(LATEST))):
            if (slot := self._names.get(one) or self._with_adapter(one)) is not None:
                return slot
        return None

    def _with_adapter(self, name: str) -> Slot | None:
        """Return the loaded model that has the adapter ``name``."""
        for slot in self._slots.values():
            if slot.model is not None and name in slot.model.adapters.names:
                return slot
        return None

    async def _up(self, slot: Slot) -> bool:
        """Wait until the model admits requests. Return True if the request waited: then the table still
        counts the request as waiting. Raises WeftError."""
        if self.table.admits(slot.name):
            return False
        if self._waiting(slot) >= slot.most_waiting:
            raise Overloaded(f"too many requests wait for the model {slot.name}; try again later")
        waiter = self._wait(slot)
        self._on(m.Wanted(slot.name))
        try:
            async with asyncio.timeout(min(self._section.model_timeout, self._section.request_timeout)):
                await waiter
                while not self.table.admits(slot.name):  # drained again before this task ran
                    waiter = self._wait(slot)
                    await waiter
        except BaseException as error:
            if waiter in slot.waiters:
                slot.waiters.remove(waiter)
            wait = self.table.wait(slot.name)
            self._on(m.GaveUp(slot.name))
            if isinstance(error, TimeoutError):
                what = f"the model {slot.name} was not loaded within --model-timeout; try again later"
                raise NotLoaded(what, wait) from None
            raise
        return True

    def _waiting(self, slot: Slot) -> int:
        """Return the number of requests of this API server that wait for a model."""
        return self._table.entries[slot.name].waiting

    def _wait(self, slot: Slot) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        slot.waiters.append(waiter)
        return waiter

    @contextlib.contextmanager
    def _place(
        self, slot: Slot, front: Front, waited: bool, keep: float | None, line: bool
    ) -> Iterator[None]:
        """Count a request until its end. Raises Overloaded if the model has no place."""
        self._on(m.Opened(slot.name, waited, line))
        if keep is not None:
            self._on(m.Kept(slot.name, keep))
        try:
            with front.lifecycle.request():
                yield
        finally:
            self._on(m.Closed(slot.name, line))

    # -- batches ------------------------------------------------------------------------------------

    def batch_wants(self, models: Collection[str]) -> None:
        """Note the models that lines of batches need. The table loads the models when no request needs the
        memory. ``models``: first names."""
        for name, entry in self._table.entries.items():
            if entry.batch != (name in models):
                self._on(m.BatchWants(name, name in models))

    def first_name(self, name: str) -> str:
        """Return the first name of the model that a line names; "" for an unknown name."""
        slot = self._slot(name)
        return "" if slot is None else slot.name

    def names_for(self, client: int) -> frozenset[str]:
        """Return all names of models and adapters that an API key may name."""
        names = [name for name, slot in self._names.items() if self._keys.allow(client, slot.name)]
        adapters = [
            name
            for slot in self._slots.values()
            if slot.model is not None and self._keys.allow(client, slot.name)
            for name in slot.model.adapters.names
        ]
        return frozenset([*names, *(name + LATEST for name in names), *adapters])

    def admitting(self, name: str) -> Front | None:
        """Return the front of a model that admits requests now; None for another model."""
        return self._slots[name].front if self.table.admits(name) else None

    # -- operators ----------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all models, in order."""
        return tuple(self._slots)

    @property
    def paths(self) -> list[str]:
        """Folders of all models, in order."""
        return [slot.plan.config.model_path for slot in self._slots.values()]

    @property
    def loaded(self) -> list[ServedModel]:
        """Models with engines that serve, in order."""
        return [slot.model for slot in self._slots.values() if slot.model is not None]

    @property
    def fronts(self) -> list[Front]:
        """The front of each loaded model."""
        return [slot.front for slot in self._slots.values() if slot.front is not None]

    def listed(self, client: int | None = None) -> list[ModelStatus]:
        """Return the state of all models, in order. ``client``: only the models for this API key."""
        now = self._clock.now()
        made = []
        for name, entry in self.table.entries.items():
            if client is not None and not self._keys.allow(client, name):
                continue
            config = self._slots[name].plan.config
            expires = entry.expires
            made.append(
                ModelStatus(
                    name=name,
                    aliases=(*config.served_names[1:], *config.accepted_names),
                    state=entry.state.value,
                    size=entry.cost,
                    pinned=entry.pinned,
                    running=entry.open,
                    waiting=entry.waiting,
                    expires_in=None if expires is None else max(expires - now, 0.0),
                    failure=entry.failure,
                )
            )
        return made

    def shown(self, client: int) -> list[str]:
        """Return the names for /v1/models, in order. ``client``: number of the API key."""
        return [one.name for one in self.listed(client)]

    def progressing(self, window: float) -> bool:
        """Return True if engines with progress in the last ``window`` seconds can serve requests."""
        return all(one.links.progressing(window) for one in self.loaded)

    def status(self, name: str) -> ModelStatus:
        """Return the state of one model. Raises NotFound for an unknown name."""
        found = self._known(name).name
        return next(one for one in self.listed() if one.name == found)

    def card(self, name: str, times: Mapping[str, int]) -> ModelCard:
        """Return the card of a model for /v1/models. ``times``: see ``changed_at``. Raises NotFound for an
        unknown name."""
        slot = self._known(name)
        config = slot.plan.config
        card = card_of_model(config, name, times)
        card.status = self.table.entries[slot.name].state.value
        return card

    def plan_of(self, name: str, client: int) -> ModelPlan:
        """Return the settings of a model for an API key. Raises NotFound for an unknown name."""
        return self._find(NamedModel(name), client).plan

    def loaded_as(self, name: str) -> ServedModel | None:
        """Return the loaded model with this first name; None while the model is not loaded."""
        return self._slots[name].model

    def named(self, name: str, client: int) -> Front | None:
        """Return the front of the loaded model with the name, or with a LoRA adapter of the name; None for a
        model that is not loaded. Raises NotFound."""
        slot = self._find(NamedModel(name), client)
        return slot.front if name not in self._names else None

    def front_of(self, name: str) -> Front:
        """Return the front of a loaded model; "" for the only loaded model. Raises NotFound, InvalidRequest,
        and Unavailable for a model that is not loaded."""
        fronts = self.fronts
        if not name:
            if len(fronts) == 1:
                return fronts[0]
            raise InvalidRequest(
                f"this server has several models: name one of {', '.join(self.names)} in model", param="model"
            )
        slot = self._known(name)
        if slot.front is None:
            raise Unavailable(f"the model {slot.name} is not loaded")
        return slot.front

    async def load(self, name: str) -> ModelStatus:
        """Load a model, and return the state when the model is loaded. Raises WeftError."""
        slot = self._known(name)
        if not self.table.admits(slot.name):
            self._on(m.LoadAsked(slot.name))
            if await self._up(slot):
                self._on(m.GaveUp(slot.name))
        return self.status(slot.name)

    async def unload(self, name: str) -> ModelStatus:
        """Unload a model when its running requests have ended. Return the present state. Raises NotFound."""
        slot = self._known(name)
        slot.give_up()
        self._on(m.UnloadAsked(slot.name))
        return self.status(slot.name)

    async def pin(self, name: str, pinned: bool) -> ModelStatus:
        """Pin or unpin a model. Return the present state. Raises NotFound."""
        slot = self._known(name)
        self._on(m.PinAsked(slot.name, pinned))
        return self.status(slot.name)

    async def updated(self, name: str) -> None:
        """Pin a loaded model with new weights: a later load would have to read all updates again. ``name``:
        as for ``front_of``."""
        await self.pin(self.front_of(name).names[0], True)

    async def keep(self, name: str, seconds: float) -> ModelStatus:
        """Set the seconds without a request until the unload. Return the present state. Raises NotFound."""
        slot = self._known(name)
        self._on(m.Kept(slot.name, seconds))
        return self.status(slot.name)

    def _known(self, name: str) -> Slot:
        slot = self._names.get(name)
        if slot is None:
            raise unknown_model(name)
        return slot

    # -- the table ----------------------------------------------------------------------------------

    def _on(self, event: m.Event) -> None:
        """Pass an event to the table, and carry out the actions."""
        self._carry_out(self._table.on(event, self._clock.now()))

    def _carry_out(self, actions: Sequence[m.Action]) -> None:
        """Begin each action, and wake the requests of models that admit requests."""
        for action in actions:
            slot = self._slots[action.name]
            if isinstance(action, m.Refuse):
                slot.error = slot.error or action.error
                settle(slot, action.error)
            elif isinstance(action, m.StopLines):
                self.stop_lines(action.name)
            elif not self._closing:
                work = self._load(slot) if isinstance(action, m.Load) else self._unload(slot)
                slot.task = asyncio.create_task(work)
        for slot in self._slots.values():
            if slot.waiters and self.table.admits(slot.name):
                settle(slot, None)
            entry = self._table.entries[slot.name]
            if not entry.asked and entry.state is not m.ModelState.LOADING:
                slot.settled.set()

    async def _load(self, slot: Slot) -> None:
        """Load a model. The table gets Loaded or Failed."""
        log.info("loading the model %s", slot.name)
        try:
            model, front = await self._loaded(slot)
        except Exception as error:
            # An unexpected error must not leave the model in the state loading for ever.
            if not isinstance(error, (WeftError, OSError)):
                log.exception("unexpected error in the load of the model %s", slot.name)
            slot.error = error if isinstance(error, WeftError) else Unavailable(str(error))
            await self._end(slot, 0.0)
            log.error("the model %s could not be loaded: %s", slot.name, slot.error.message)
            self._on(m.Failed(slot.name, _failure(slot.name, slot.error)))
            return
        slot.model, slot.front, slot.error = model, front, None
        slot.watch = asyncio.create_task(self._watch(slot, model))
        self.loads[slot.name] += 1
        welcome = model.links.welcome if slot.plan.measured else None
        cost = 0 if welcome is None else cost_of(slot.plan, welcome.num_blocks)
        log.info("the model %s is loaded", slot.name)
        self._on(m.Loaded(slot.name, cost))

    async def _loaded(self, slot: Slot) -> tuple[ServedModel, Front]:
        """Start the processes of a model, and wait for a first token. Raises WeftError and OSError."""
        assert slot.plan.processes is not None, "this API server owns the engines"
        return await self._connected(slot, slot.plan.processes.start())

    async def _connected(
        self, slot: Slot, owner: Owner, siblings: Siblings | None = None, joining: bool = False
    ) -> tuple[ServedModel, Front]:
        """Connect to the engines of ``owner``, and wait for a first token. Raises WeftError. ``siblings``,
        ``joining``: see ``ServedModel``."""
        plan, slot.forgets = slot.plan, False
        model = ServedModel(
            plan.config, plan.section, owner, joining=joining, spans=self._spans, server=self.lifecycle
        )
        self._front.pausing.meet(model)
        try:
            await model.start(self._front.threads, self._front.running, siblings)
            if slot.updates is not None:
                await model.weights.bring_back(slot.updates)
            front = self._front.of(model)
            assert self._prove is not None
            await self._prove(front)
            self._front.pausing.joined(model)  # the pause may have changed meanwhile
        except BaseException:
            # The load may end meanwhile, which cancels this task. Then the close goes on.
            await asyncio.shield(model.close(shutdown=not owner.shared))
            raise
        slot.files.keep(())  # the model needs the files from now on
        return model, front

    async def _watch(self, slot: Slot, model: ServedModel) -> None:
        """Report the death of all engines of a model."""
        await model.links.died.wait()
        assert model.links.failure is not None
        log.error("the engines of the model %s have failed: %s", slot.name, model.links.failure.message)
        self._on(m.Failed(slot.name, _failure(slot.name, model.links.failure)))

    async def _unload(self, slot: Slot) -> None:
        """Close a model, and end its processes. The table gets Gone."""
        await self._close_model(slot)
        await self._end(slot, m.END_S)
        log.info("the model %s is unloaded", slot.name)
        self._on(m.Gone(slot.name))

    async def _close_model(self, slot: Slot) -> None:
        """Close the connections of a model. The model serves no request from the call on."""
        model, slot.model, slot.front = slot.model, None, None
        if slot.watch is not None:
            slot.watch.cancel()
        if model is None:
            return
        # After a failure of the engines the next load brings the same weights, not those of the files.
        changed = model.weights.number > 0 and not slot.forgets
        slot.keep(model.weights.state if changed else None)
        for past, now in zip(self._past, model.metrics.latencies(), strict=True):
            past[:] = map(sum, zip(past, now, strict=True))
        try:
            await model.close(shutdown=not model.owner.shared)
        except Exception:
            log.exception("unexpected error in the unload of the model %s", slot.name)

    async def _end(self, slot: Slot, seconds: float) -> None:
        """End the processes of a model: see ``ModelProcesses.close``."""
        if slot.plan.processes is not None:
            await asyncio.to_thread(slot.plan.processes.close, seconds)

    async def _tick(self) -> None:
        """Report the time to the table until a cancellation."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._on(m.Tick())
            except Exception:
                log.exception("unexpected error in the table of models; the table continues")

    # -- metrics ------------------------------------------------------------------------------------

    def engine_states(self) -> list[EngineState]:
        """Return the state of every engine process, under the name MODEL/ENGINE."""
        return [
            EngineState(f"{model.config.served_names[0]}/{one.name}", one.role or "", one.alive, one.stats)
            for model in self.loaded
            for one in model.links.instances
        ]

    def latencies(self) -> tuple[list[float], list[float]]:
        """Return the sums of ``Metrics.latencies`` over all models since the start."""
        found = [self._past, *(model.metrics.latencies() for model in self.loaded)]
        first, other = (
            functools.reduce(lambda a, b: [x + y for x, y in zip(a, b, strict=True)], same)
            for same in zip(*found, strict=True)
        )
        return list(first), list(other)

    def page(self) -> bytes:
        """Return the metrics of the server and of all loaded models, in Prometheus text format."""
        return several_pages.page(self.metrics, [model.metrics for model in self.loaded])

    def own(self) -> bytes:
        """Return the part of ``page`` that this API server counts: see ``Metrics.own``."""
        return several_pages.own(self.metrics, [model.metrics for model in self.loaded])

    def render_all(self, pages: Mapping[str, bytes]) -> bytes:
        """Return the page of several API servers: see ``Metrics.render_all``."""
        return several_pages.render_all(self.metrics, [model.metrics for model in self.loaded], pages)


def settle(slot: Slot, error: WeftError | None) -> None:
    """Wake all requests that wait for a model; with ``error`` all fail."""
    waiters, slot.waiters = slot.waiters, []
    for waiter in waiters:
        if waiter.done():  # the request has given up
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)


def ended(task: asyncio.Task[None] | None) -> bool:
    """Return True if no task runs."""
    return task is None or task.done()


def cost_of(plan: ModelPlan, num_blocks: Sequence[int]) -> int:
    """Return the bytes of a loaded model; 0 if the weight files were deleted after the load."""
    try:
        return model_cost(plan.groups, num_blocks)
    except OSError:
        return 0


def _failure(name: str, error: WeftError) -> Unavailable:
    """Return the error for requests for a model that did not load, or died."""
    what = "is not configured correctly" if isinstance(error, ConfigError) else "cannot be used now"
    return Unavailable(f"the model {name} {what}: {error.message}")
