"""The models of a directory of engines, for one API server without a supervisor.

    engines of a model are there ─► LoadAsked ─► SharedTable ─► ModelsRecord ─► the API server connects
    no engine for ``patience`` seconds ─► LoadSeen(lost) ──╯                 ╰► requests get 503

Others start and end the engines. So no API server decides which models are loaded, and several API servers
need no agreement: each has a table of its own, and the directory brings all tables to the same state. A model
without engines for less than ``patience`` seconds stays loaded: requests wait, and continue at the next
engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from weft.common.clock import Clock, SystemClock
from weft.common.errors import InvalidRequest, Unavailable, WeftError
from weft.common.log import get_logger
from weft.control import models as m
from weft.control.directory.directory_owner import DirectoryOwner
from weft.control.directory.record import DirectoryReader, EngineRecord
from weft.control.links.link import Address
from weft.control.links.owner import Owner
from weft.control.model_fronts import (
    Drop,
    Joined,
    LoadSeen,
    ModelRecord,
    ModelsRecord,
    Reported,
    SharedTable,
    Use,
)

log = get_logger(__name__)

AGAIN_S = 5.0
"""Seconds from a failed connection to the engines of a model until the next attempt."""
_PINNED = "the engines run alone (`weft engine`), and a model is loaded while an engine has the model"


class ByModel:
    """The records of a directory, by model. An engine of a model that is not served is logged once.

    All models share one read of the directory: the next read follows when a model comes for the second time.
    """

    def __init__(self, directory: DirectoryReader, models: Iterable[str]) -> None:
        """``models``: names of the served models."""
        self._directory, self._models = directory, frozenset(models)
        self._found: Mapping[str, EngineRecord] = {}
        self._had = set(self._models)
        """Models that have had ``_found``."""
        self._strange: set[tuple[str, int]] = set()

    def of(self, model: str) -> DirectoryReader:
        """Return the directory of the engines of one model."""
        return _OfModel(self, model)

    def read(self, model: str) -> dict[str, EngineRecord]:
        """Return the records of the model by name. Raise OSError."""
        if model in self._had:
            self._found, self._had = self._directory.read(), set()
            self._log_unserved(self._found)
        self._had.add(model)
        return {name: record for name, record in self._found.items() if record.model == model}

    def _log_unserved(self, found: Mapping[str, EngineRecord]) -> None:
        """Log the engines of models that are not served, each once."""
        for record in found.values():
            if record.model not in self._models and (record.name, record.incarnation) not in self._strange:
                self._strange.add((record.name, record.incarnation))
                log.error(
                    "engine %s is not used: it serves %s, and this API server serves %s",
                    *(record.name, record.model, ", ".join(sorted(self._models))),
                )
        self._strange = {one for one in self._strange if one[0] in found}

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``."""
        self._directory.ask_drain(record)


class _OfModel:
    """Implementation of ``DirectoryReader`` for one model."""

    def __init__(self, directory: ByModel, model: str) -> None:
        self._directory, self._model = directory, model

    def read(self) -> Mapping[str, EngineRecord]:
        """See ``DirectoryReader``."""
        return self._directory.read(self._model)

    def ask_drain(self, record: EngineRecord) -> None:
        """See ``DirectoryReader``."""
        self._directory.ask_drain(record)


class DirectoryHub:
    """Implementation of ``weft.front.requests.models.shared_models.ModelHub`` over one owner per model. Used
    from one event loop."""

    member = "alone"
    behind = False

    def __init__(
        self, owners: Mapping[str, DirectoryOwner], patience: float, clock: Clock | None = None
    ) -> None:
        """``owners``: model -> owner of the engines of the model. ``patience``: seconds without an engine
        until a model counts as unloaded."""
        self._owners, self._patience = owners, patience
        self._clock = clock or SystemClock()
        self._table = SharedTable([m.ModelFacts(name, 0, pinned=True) for name in owners])
        self._since: dict[str, float] = {}
        """Model without engines -> time from which the model has had none."""
        self._planned = set(owners)
        """Models whose lack of engines is no fault: no engine has joined yet, or all have drained."""
        self._again: dict[str, float] = {}
        """Model -> earliest time of the next connection, after a failure."""
        self._unloads = dict.fromkeys(owners, 0)
        """Model -> number of unloads that operators have asked for here."""
        self._record: ModelsRecord | None = None

    def record(self) -> ModelsRecord:
        """Return the state that follows from the present engines. The object changes with the state alone."""
        self._look()
        made = self._table.record()
        models = tuple(
            msgspec.structs.replace(one, failure=self._fault(one), unloads=self._unloads[one.name])
            for one in made.models
        )
        made = ModelsRecord(made.version, made.members, models)
        if self._record is None or made != self._record:
            self._record = made
        return self._record

    def _fault(self, one: ModelRecord) -> str:
        """Return the failure of a model for /health; "" if the engines are missing in order."""
        in_order = one.name in self._planned and one.state == m.ModelState.COLD.value
        return "" if in_order else one.failure

    def owner(self, model: str, load: int, keeps: Callable[[int], None]) -> Owner:
        """Return the owner of the engines of a model."""
        return self._owners[model]

    def join(self) -> None:
        """Make this API server the only member of the table."""
        self._on(Joined(self.member))

    def used(self, seen: int, uses: dict[str, Use]) -> None:
        """Take the use of models whose use has changed. Requests for models without engines are refused."""
        self._on(Reported(self.member, seen, uses))

    def ready(self, model: str, load: int, cost: int = 0, error: WeftError | None = None) -> None:
        """Take a connection that works, or does not: see ``LoadSeen``."""
        if error is not None:
            self._again[model] = self._clock.now() + AGAIN_S
        self._on(LoadSeen(model, load, cost, error))

    async def ask(self, model: str, what: Any, seconds: float = 0.0) -> None:
        """Take the command of an operator: an unload drains all engines of the model. A pin or a time changes
        nothing, because only operators end engines. Raise Unavailable for the load of a model without
        engines, and InvalidRequest for an unpin."""
        if what == "load" and not self._there(model):
            raise _none(model)
        if what == "unload":
            await self._owners[model].remove_all()
            self._unloads[model] += 1
        if what == "unpin":
            raise InvalidRequest(_PINNED)

    def _look(self) -> None:
        """Compare the table with the engines of the directory."""
        now = self._clock.now()
        for name in self._owners:
            entry = self._table.entries[name]
            if self._there(name):
                self._since.pop(name, None)
                if entry.state is m.ModelState.COLD and now >= self._again.get(name, now):
                    self._on(m.LoadAsked(name))
                continue
            since = self._since.setdefault(name, now)
            load = self._table.loads[name]
            if entry.state is m.ModelState.LOADING:
                self._on(LoadSeen(name, load, error=_none(name)))
            elif entry.state is m.ModelState.UP and now >= since + self._patience:
                log.warning("the model %s has had no engine for %g seconds", name, self._patience)
                self._on(LoadSeen(name, load, error=_none(name), lost=True))

    def _there(self, name: str) -> bool:
        """Return True if the model has an engine that stays, or that the owner awaits."""
        found = self._owners[name].present().values()
        leaving = [one.leaving for one in found if isinstance(one, Address)]
        stays = not all(leaving) or any(one is None for one in found)
        if stays:
            self._planned.discard(name)
        elif leaving:
            self._planned.add(name)
        return stays

    def _on(self, event: Any) -> None:
        """Feed the table, and carry out the actions: no process is started or ended here."""
        events = deque([event])
        while events:
            for action in self._table.on(events.popleft(), self._clock.now()):
                match action:
                    case m.Load(name) if not self._there(name):
                        events.append(m.Failed(name, _none(name)))
                    case m.Unload(name):
                        events.append(m.Gone(name))
                    case Drop(name, error):
                        events.append(m.Failed(name, error))


def _none(name: str) -> Unavailable:
    return Unavailable(f"no engine serves the model {name} now; try again later")
