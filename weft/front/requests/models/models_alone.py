"""The models of an API server that runs alone (``weft front``): a model is loaded as long as engines of the
model are in the directory (``weft.control.directory.directory_hub``).
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

from weft.common.errors import ConfigError, Unavailable
from weft.control import models as m
from weft.control.fleet.vacancies import vacant
from weft.control.links.owner import Owner
from weft.control.model_fronts import ModelRecord
from weft.front.requests.models.several_models import Prove, Slot
from weft.front.requests.models.shared_models import LOOK_S, SharedModels
from weft.front.requests.served_model import ServedModel
from weft.front.siblings import Siblings

if TYPE_CHECKING:
    from weft.front.requests.context import Front

OTHERS_S = 10.0
"""Maximum seconds that the start waits for further models, once one model serves."""


class ModelsAlone(SharedModels):
    """The models of an API server that runs alone. Used from one event loop.

    A request for a model without an engine that takes requests waits, like a request for a model that loads.
    """

    def admits(self, name: str) -> bool:
        """Return True if a request for the model may begin now: an engine takes requests."""
        model = self._slots[name].model
        return super().admits(name) and model is not None and _takes(model)

    def shown(self, client: int) -> list[str]:
        """See ``SeveralModels.shown``. A model is shown from its first engine on."""
        entries = self.entries
        return [
            name
            for name in super().shown(client)
            if self.loads[name] or entries[name].state is not m.ModelState.COLD
        ]

    def progressing(self, window: float) -> bool:
        """See ``SeveralModels.progressing``. One model without engines must not take requests away from the
        others."""
        fleets = ((one.links, one.links.fleet.table) for one in self.loaded)
        return any(links.progressing(window) or vacant(table) for links, table in fleets)

    async def start(self, prove: Prove) -> None:
        """Connect to the engines of all models. Return when one model serves, and every other model with
        engines serves, has failed, or has had ``OTHERS_S`` seconds. Raises ConfigError for unusable files of
        a model."""
        self._prove = prove
        self._hub.join()
        self._follow_record()
        self._ticking = asyncio.create_task(self._tick())
        loop, until = asyncio.get_running_loop(), math.inf
        while not self.loaded or (self._connecting() and loop.time() < until):
            if self.loaded:
                until = min(until, loop.time() + OTHERS_S)
            await asyncio.sleep(LOOK_S)
            for slot in self._slots.values():
                if isinstance(slot.error, ConfigError):
                    raise slot.error
        self._front.pausing.take()

    def _connecting(self) -> bool:
        """Return True while the first connection to the engines of a model is made."""
        loading = m.ModelState.LOADING.value
        return any(self._records[s.name].state == loading and s.error is None for s in self._slots.values())

    def _follow(self, slot: Slot, record: ModelRecord) -> None:
        """See ``SharedModels._follow``. Requests that wait for an engine of a lost model fail."""
        if record.state == m.ModelState.DRAINING.value and slot.model is not None:
            slot.model.links.fail_all(Unavailable(record.failure))
        super()._follow(slot, record)

    async def _connected(
        self, slot: Slot, owner: Owner, siblings: Siblings | None = None, joining: bool = False
    ) -> tuple[ServedModel, Front]:
        """See ``SeveralModels._connected``. A missing engine must not delay the others."""
        return await super()._connected(slot, owner, siblings, joining=True)


def _takes(model: ServedModel) -> bool:
    """Return True if an engine of the model takes requests. A missing role is no reason to wait here: the
    fleet has the limits of the wait for a role."""
    return model.links.fleet.table.lacking.any == math.inf
