"""An API server that shares the engines of all models follows the record of the table: no process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.common.errors import Unavailable
from weft.config.sections.front_section import FrontSection
from weft.control import models as m
from weft.control.model_fronts import Joined, LoadSeen, ModelsRecord, Reported, SharedTable, Use
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.front.requests.models import several_models
from weft.front.requests.models.named_model import KeyModels
from weft.front.requests.models.several_models import ModelPlan, ModelSet
from weft.front.requests.models.shared_models import BETWEEN_S, SharedModels
from weft.front.requests.weight_updates import UpdatesState

MEMBER, OTHER = "0/1", "1/1"
"""The API server of the test, and another member of the table."""


NEW_WEIGHTS = UpdatesState(stamp=1, number=1, labels={1: "new"}, history=())


class Hub:
    """The table of models, without the processes between. Implements ``ModelHub``."""

    member, behind = MEMBER, False

    def __init__(self) -> None:
        self.table = SharedTable([m.ModelFacts("a", 1)])
        self.actions: list[Any] = []
        self.models: SharedModels | None = None
        self.failed = 0
        """Number of reports of a load that cannot be used."""
        self.on(Joined(OTHER))

    def on(self, event: Any) -> None:
        self.actions += self.table.on(event, 0.0)

    def load(self) -> None:
        """Load the model. The other API server uses the load first."""
        self.on(m.LoadAsked("a"))
        self.on(LoadSeen("a", self.table.loads["a"]))
        assert self.table.admits("a")

    async def end(self) -> None:
        """Let the model, which drains, end."""
        self.on(Reported(OTHER, self.table.version, {}))
        await until(lambda: m.Unload("a") in self.actions)
        self.actions.clear()
        await until(lambda: self.models is not None and self.models.ending)
        self.on(m.Gone("a"))

    def record(self) -> ModelsRecord:
        return self.table.record()

    def owner(self, model: str, load: int, keeps: Callable[[int], None]) -> Any:
        return SimpleNamespace(shared=True)

    def join(self) -> None:
        self.on(Joined(MEMBER))

    def used(self, seen: int, uses: dict[str, Use]) -> None:
        assert self.models is not None
        shut = self.table.entries["a"].state is not m.ModelState.UP
        assert not (seen == self.table.version and shut and self.models.admits("a")), "not acted on"
        self.on(Reported(MEMBER, seen, uses))

    def ready(self, model: str, load: int, cost: int = 0, error: Any = None) -> None:
        self.failed += error is not None
        self.on(LoadSeen(model, load, cost, error))

    async def ask(self, model: str, what: Any, seconds: float = 0.0) -> None:
        assert what == "unload"
        self.on(m.UnloadAsked(model))


class Served:
    """A connected model with new weights."""

    def __init__(self) -> None:
        self.weights = SimpleNamespace(number=1, state=NEW_WEIGHTS)
        self.metrics = SimpleNamespace(latencies=lambda: [[0.0] * len(one) for one in LATENCY_BOUNDS])
        self.owner = SimpleNamespace(shared=True)
        self.lifecycle = SimpleNamespace(capacity=1)

    async def close(self, shutdown: bool) -> None:
        assert not shutdown, "the engines live on"


class Models(SharedModels):
    """Connects without engines, as soon as ``reachable`` is set."""

    def __init__(self, hub: Hub) -> None:
        config: Any = SimpleNamespace(
            accepted_names=(), served_names=("a",), scheduler=SimpleNamespace(max_queued_requests=4)
        )
        plan = ModelPlan(config, (), FrontSection(), m.ModelFacts("a", 1), None, measured=False)
        front = SimpleNamespace(threads=None, running={}, pausing=SimpleNamespace(meet=lambda model: None))
        self.reachable = asyncio.Event()
        hub.models = self
        super().__init__(ModelSet((plan,), None, KeyModels(), hub), FrontSection(), front, None, None, True)

    @property
    def ending(self) -> bool:
        """True after a look at a record in which the processes of the model end."""
        return self._records["a"].ending

    async def _connected(self, *_: Any) -> Any:
        await self.reachable.wait()
        return Served(), SimpleNamespace()


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(deadline(10)):
        while not ready():
            await asyncio.sleep(0.01)


def run(play: Callable[[Hub], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(play(Hub()), deadline(30)))  # type: ignore[arg-type]


async def prove(front: Any) -> None: ...


def test_a_model_that_ends_during_the_start_does_not_stop_the_start() -> None:
    async def play(hub: Hub) -> None:
        hub.load()
        models = Models(hub)
        starts = asyncio.create_task(models.start(prove))
        await asyncio.sleep(0.1)
        assert not starts.done(), "connects to a loaded model"
        hub.on(m.UnloadAsked("a"))
        await hub.end()
        await asyncio.wait_for(starts, deadline(10))
        assert hub.table.members == (OTHER, MEMBER)
        await models.close()

    run(play)


def test_new_weights_stay_after_a_loss_of_the_engines_and_end_with_an_unload() -> None:
    async def play(hub: Hub) -> None:
        hub.load()
        models = Models(hub)
        slot = models._slots["a"]
        models.reachable.set()
        await models.start(prove)
        assert models.admits("a")
        models._keeps("a", 3)
        await until(lambda: hub.table.kept("a") == 3)
        hub.on(LoadSeen("a", 1, error=Unavailable("killed"), lost=True))
        await hub.end()
        await until(lambda: slot.model is None)
        assert slot.updates == NEW_WEIGHTS
        await until(lambda: hub.table.kept("a") == 0)
        hub.load()
        await until(lambda: models.admits("a"))
        await models.unload("a")
        await hub.end()
        await until(lambda: slot.model is None)
        assert slot.updates is None
        await models.close()

    run(play)


def test_a_busy_api_server_reports_at_most_ten_times_per_second() -> None:
    async def play(hub: Hub) -> None:
        hub.load()
        models = Models(hub)
        models.reachable.set()
        await models.start(prove)
        reports: list[Use] = []
        used = hub.used

        def counted(seen: int, uses: dict[str, Use]) -> None:
            reports.append(uses["a"])
            used(seen, uses)

        await asyncio.sleep(2 * BETWEEN_S)
        hub.used = counted  # type: ignore[method-assign]
        began = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < began + 5 * BETWEEN_S:
            models._on(m.Opened("a", False, False))
            await asyncio.sleep(0.005)
        seconds = asyncio.get_running_loop().time() - began
        assert 2 <= len(reports) <= 1 + seconds / BETWEEN_S
        await until(lambda: hub.table.entries["a"].open == models._uses["a"].open)
        await models.close()

    run(play)


def test_an_unload_ends_new_weights_also_without_a_connection() -> None:
    async def play(hub: Hub) -> None:
        hub.load()
        models = Models(hub)
        slot = models._slots["a"]
        slot.updates = NEW_WEIGHTS
        starts = asyncio.create_task(models.start(prove))
        await asyncio.sleep(0.1)
        hub.on(m.UnloadAsked("a"))
        await hub.end()
        await starts
        assert slot.updates is None
        await models.close()

    run(play)


def test_a_load_that_ends_while_a_failed_connection_is_closed_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closing, may_close, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Fails:
        def __init__(self, *_: Any, **more: Any) -> None: ...

        async def start(self, *_: Any) -> None:
            raise Unavailable("no connection")

        async def close(self, shutdown: bool) -> None:
            closing.set()
            await may_close.wait()
            closed.set()

    monkeypatch.setattr(several_models, "ServedModel", Fails)

    async def play(hub: Hub) -> None:
        hub.load()
        models = Models(hub)
        monkeypatch.setattr(models, "_connected", lambda *more: SharedModels._connected(models, *more))
        starts = asyncio.create_task(models.start(prove))
        await asyncio.wait_for(closing.wait(), deadline(10))
        hub.on(m.UnloadAsked("a"))
        await hub.end()
        may_close.set()
        await asyncio.wait_for(closed.wait(), deadline(10))
        await starts
        await models.close()

    run(play)
