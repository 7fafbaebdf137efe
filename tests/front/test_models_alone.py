"""The models of an API server that runs alone: its start, and models without engines. No process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft.common.errors import ConfigError, ReportedError
from weft.config.sections.front_section import FrontSection
from weft.control import models as m
from weft.control.directory.directory_hub import DirectoryHub
from weft.front.lifecycle import Lifecycle, Phase
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.front.requests.models import models_alone
from weft.front.requests.models.models_alone import ModelsAlone
from weft.front.requests.models.named_model import KeyModels
from weft.front.requests.models.several_models import ModelPlan, ModelSet

PATIENCE = 0.3


class Owned:
    """The engines of one model. A name is an engine that the owner awaits."""

    shared = True

    def __init__(self, *engines: str) -> None:
        self.engines = set(engines)

    def present(self, kept: int = 0) -> dict[str, None]:
        return dict.fromkeys(self.engines)


class Served:
    """A connected model."""

    def __init__(self, owner: Owned) -> None:
        self.lacking = SimpleNamespace(any=math.inf, pair=math.inf)
        self.failed: list[str] = []
        self.links = SimpleNamespace(
            alive=True,
            fleet=SimpleNamespace(table=SimpleNamespace(lacking=self.lacking)),
            fail_all=lambda error: self.failed.append(error.message),
        )
        self.owner, self.weights = owner, SimpleNamespace(number=0)
        self.metrics = SimpleNamespace(latencies=lambda: [[0.0] * len(one) for one in LATENCY_BOUNDS])
        self.adapters = SimpleNamespace(names=())

    async def close(self, shutdown: bool) -> None:
        assert not shutdown, "the engines live on"


class Models(ModelsAlone):
    """Connects without engines, to the models in ``reachable``."""

    def __init__(self, **owners: Owned) -> None:
        plans = []
        for name in owners:
            config: Any = SimpleNamespace(
                accepted_names=(), served_names=(name,), scheduler=SimpleNamespace(max_queued_requests=4)
            )
            plans.append(ModelPlan(config, (), FrontSection(), m.ModelFacts(name, 0), None, measured=False))
        front = SimpleNamespace(threads=None, running={}, pausing=SimpleNamespace(take=lambda: None))
        self.reachable = {name: asyncio.Event() for name in owners}
        self.wrong: dict[str, Exception] = {}
        hub = DirectoryHub(owners, PATIENCE)  # type: ignore[arg-type]
        models = ModelSet(tuple(plans), None, KeyModels(), hub)
        super().__init__(models, FrontSection(), front, None, None, True)

    async def _connected(self, slot: Any, owner: Any, *_: Any) -> Any:
        await self.reachable[slot.name].wait()
        if slot.name in self.wrong:
            raise self.wrong[slot.name]
        return Served(owner), SimpleNamespace(lifecycle=Lifecycle(lambda: 4, self.lifecycle))

    def connect(self, *names: str) -> None:
        for name in names:
            self.reachable[name].set()

    def states(self) -> dict[str, str]:
        return {one.name: one.state for one in self.listed()}

    async def request(self, model: str) -> None:
        """Begin and end a request."""
        with contextlib.ExitStack() as held:
            await self.enter([json.dumps({"model": model}).encode()], 0, held)


async def prove(front: Any) -> None: ...


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(deadline(10)):
        while not ready():
            await asyncio.sleep(0.01)


def run(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(play(), deadline(30)))  # type: ignore[arg-type]


def test_the_start_waits_for_models_with_engines_and_for_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        models = Models(a=Owned("x"), b=Owned(), c=Owned("y"), d=Owned("z"))
        starts = asyncio.create_task(models.start(prove))
        models.connect("a", "c")
        await until(lambda: models.states()["c"] == "loaded")
        assert not starts.done(), "d has an engine, too"
        monkeypatch.setattr(models_alone, "OTHERS_S", 0.0)
        starts.cancel()
        again = Models(a=Owned("x"), d=Owned("z"))
        again.connect("a")
        await again.start(prove)  # a broken model keeps no API server from starting
        assert again.states() == {"a": "loaded", "d": "loading"}
        assert models.shown(0) == ["a", "c", "d"], "b never had an engine"
        await models.close()
        await again.close()

    run(play)


def test_unusable_files_of_a_model_end_the_start() -> None:
    async def play() -> None:
        models = Models(a=Owned("x"), b=Owned("y"))
        models.wrong["b"] = ConfigError("no chat template")
        models.connect("a", "b")
        with pytest.raises(ConfigError, match="no chat template"):
            await models.start(prove)
        await models.close()

    run(play)


def test_requests_that_miss_a_role_begin_and_wait_in_the_fleet() -> None:
    """The fleet has the limits of a missing role, and names the role."""

    async def play() -> None:
        models = Models(a=Owned("prefill"))
        models.connect("a")
        await models.start(prove)
        models.lifecycle.move(Phase.READY)
        served: Any = models.loaded[0]
        served.links.alive, served.lacking.pair = False, 1.0
        async with asyncio.timeout(deadline(1)):
            await models.request("a")
        await models.close()

    run(play)


def test_requests_wait_for_the_next_engine_and_then_get_the_name_of_the_model() -> None:
    async def play() -> None:
        a, b = Owned("x"), Owned()
        models = Models(a=a, b=b)
        models.connect("a", "b")
        await models.start(prove)
        models.lifecycle.move(Phase.READY)
        await models.request("a")
        with pytest.raises(ReportedError, match="no engine serves the model b now"):
            await models.request("b")

        served: Any = models.loaded[0]
        served.lacking.any = 1.0
        waiting = asyncio.create_task(models.request("a"))
        await until(lambda: models.listed()[0].waiting == 1)
        served.lacking.any = math.inf
        await waiting

        served.lacking.any = 1.0
        a.engines.clear()
        with pytest.raises(ReportedError, match="no engine serves the model a now"):
            await models.request("a")
        await until(lambda: models.states()["a"] == "unloaded")
        assert served.failed, "begun requests end, too"
        assert models.shown(0) == ["a"], "the model had an engine"

        a.engines.add("new")
        await until(lambda: models.states()["a"] == "loaded")
        await models.request("a")
        assert models.listed()[0].running == 0
        await models.close()

    run(play)
