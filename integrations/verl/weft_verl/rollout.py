"""The trainer's end: new weights from the trainer's ranks to the server of their replica."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

from weft_verl.replica import actor_name
from weft_verl.server import Server


class WeftRollout(BaseRollout):
    """One on each rank of the trainer. The first rank of a replica talks to the server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        if device_mesh is None:
            self.replica_rank, self.leads = replica_rank, int(os.environ.get("RANK", "0")) == 0
        else:  # the first dimension counts replicas
            first, *others = device_mesh.get_coordinate()
            self.replica_rank, self.leads = first, not any(others)
        self._server: Server | None = None
        self._updates = 0

    async def server(self) -> Server:
        """Return the server of the replica."""
        if self._server is None:
            actor = ray.get_actor(actor_name(self.replica_rank))
            self._server = Server(*await actor.get_server_address.remote())
        return self._server

    async def resume(self, tags: list[str]) -> None:
        """Wake "weights" or "kv_cache"."""
        if self.leads and self.config.free_cache_engine:
            await (await self.server()).wake_up(tags)

    async def release(self) -> None:
        """Give the memory of the KV cache back. The weights stay: the next update needs their memory."""
        if self.leads and self.config.free_cache_engine:
            await (await self.server()).sleep(1)

    async def update_weights(
        self, weights: Iterable[tuple[str, Any]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Send all weights through shared memory. Every rank iterates, because gathering is collective.

        Raises NotImplementedError for other forms than named tensors.
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"weft_verl takes named tensors, not {wire_format}")
        pairs = [
            (name, tensor.detach().to("cpu", copy=True))
            async for name, tensor in ensure_async_iterator(weights)
            if self.leads  # other ranks only take part in the gathers
        ]
        if self.leads:
            self._updates += 1
            await (await self.server()).update(pairs, str(kwargs.get("global_steps", self._updates)))
