"""Updates of weights between two loads of a model: which end of a load gives the updates up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.common.errors import EngineDead
from weft.control import models as m
from weft.control.model_fronts import ModelRecord, SharedTable
from weft.front.requests.models.several_models import Slot
from weft.front.requests.models.shared_models import SharedModels
from weft.front.requests.weight_updates import UpdatesState
from weft.store import shared_files
from weft.store.shared_files import SharedFiles, new_token, shared_name
from weft.types.weights import WeightsUpdate


def slot_of(name: str = "a") -> Slot:
    plan: Any = SimpleNamespace(facts=m.ModelFacts(name, 1))
    return Slot(plan)


def state_of(*files: str) -> UpdatesState:
    update = WeightsUpdate(version=1, files=files)
    return UpdatesState(stamp=1, number=1, labels={1: "new"}, history=(update,))


class Fronts:
    """One API server's part, over the records of a table."""

    def __init__(self) -> None:
        self.table = SharedTable([m.ModelFacts("a", 1)])
        self.slot = slot_of()
        self.models: Any = SimpleNamespace(
            _refused={}, _unloads={}, _loads={"a": 0}, _drained=set(), admits=lambda name: False
        )
        self.models._uses = {"a": SimpleNamespace(lines=0)}
        self.now = 0.0

    def on(self, *events: Any) -> ModelRecord:
        """Return the record after ``events``, which the API server has followed."""
        for event in events:
            self.now += 1.0
            self.table.on(event, self.now)
        (record,) = self.table.record().models
        self.models._loads["a"] = 0 if record.state == "unloaded" or record.ending else record.load
        SharedModels._follow(self.models, self.slot, record)
        return record


@pytest.fixture
def fronts() -> Fronts:
    made = Fronts()
    made.on(m.LoadAsked("a"), m.Loaded("a"))
    served: Any = SimpleNamespace(weights=SimpleNamespace(number=1))
    made.slot.model = served
    return made


def test_a_failure_of_the_engines_gives_nothing_up(fronts: Fronts) -> None:
    assert fronts.on(m.Failed("a", EngineDead("lost"))).ending
    assert not fronts.slot.forgets


def test_an_unload_by_an_operator_gives_the_updates_up(fronts: Fronts) -> None:
    fronts.on(m.UnloadAsked("a"))
    assert fronts.slot.forgets


def test_an_unload_of_a_model_that_does_not_load_gives_the_updates_up(fronts: Fronts) -> None:
    """Otherwise, updates whose files are gone would let every later load fail."""
    fronts.on(m.Failed("a", EngineDead("lost")), m.Gone("a"))
    fronts.slot.model = None
    fronts.slot.keep(state_of("/gone"))
    fronts.on(m.UnloadAsked("a"))
    assert (fronts.slot.updates, fronts.slot.forgets) == (None, False)


def test_files_in_shared_memory_outlive_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "SHARED", tmp_path)
    file = tmp_path / shared_name(0, new_token())
    file.write_bytes(b"x")
    load, slot = SharedFiles(), slot_of()
    load.hold([str(file)])
    slot.keep(state_of(str(file)))
    load.keep(())  # the end of the load
    assert file.exists()
    slot.give_up()
    assert not file.exists()
