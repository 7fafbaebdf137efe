"""A replica of verl: one Weft server in the care of one Ray actor, on the node of the first worker."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from weft_verl.server import Process, Server, arguments


class WeftActor:
    """The methods that verl calls on the servers of a replica."""

    def __init__(self, config: Any, model_config: Any, rollout_mode: Any) -> None:
        self._config, self._model_config, self._mode = config, model_config, rollout_mode
        self._process = Process()
        self._server: Server | None = None
        self._steps: int | None = None
        self._rejecting = False

    @property
    def server(self) -> Server:
        if self._server is None:
            raise RuntimeError("launch_server comes first")
        return self._server

    async def launch_server(self) -> None:
        """Start ``weft serve``, and return when the server is ready."""
        key = secrets.token_hex(16)
        path = getattr(self._model_config, "local_path", None) or self._model_config.path
        url = await self._process.start(arguments(path, self._config), key)
        self._server = Server(url, key)

    async def get_server_address(self) -> tuple[str, str]:
        """Return the URL and the admin key."""
        return self.server.url, self.server.admin_key

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Return one output. Raises NotImplementedError for images, videos and audio."""
        if image_data or video_data or audio_data:
            raise NotImplementedError("weft_verl passes token ids only")
        extra = {"global_steps": self._steps}
        if self._rejecting:
            return TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields=extra)
        room = self._config.prompt_length + self._config.response_length - len(prompt_ids)
        made = await self.server.generate(
            list(prompt_ids), sampling_params, max(1, min(self._config.response_length, room))
        )
        return TokenOutput(
            token_ids=made.token_ids,
            log_probs=made.log_probs,
            stop_reason=made.stop_reason,
            extra_fields=extra,
        )

    async def set_global_steps(self, global_steps: int) -> None:
        self._steps = global_steps

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejecting = reject_request
        await self.server.pause()

    async def resume_generation(self) -> None:
        self._rejecting = False
        await self.server.resume()

    async def clear_kv_cache(self) -> None:
        await self.server.clear()

    async def release_kv_cache(self) -> None:
        if self._config.free_cache_engine:
            await self.server.sleep(1)

    async def resume_kv_cache(self) -> None:
        if self._config.free_cache_engine:
            await self.server.wake_up()

    async def sleep(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self.server.sleep(1)

    async def wake_up(self) -> None:
        if self._config.free_cache_engine and self._mode != RolloutMode.STANDALONE:
            await self.server.wake_up()

    async def start_profile(self, **kwargs: Any) -> None:
        """Not supported."""

    async def stop_profile(self) -> None:
        """Not supported."""


class WeftReplica(RolloutReplica):
    """One server."""

    def rollout_worker_use_gpu(self) -> bool:
        """The server takes the device, not the worker."""
        return False

    async def launch_servers(self) -> None:
        """Start the server beside the first worker. Raises NotImplementedError for more than one node."""
        if self.nnodes > 1:
            raise NotImplementedError("weft_verl runs a replica on one node")
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        actor = ray.remote(WeftActor).options(
            name=actor_name(self.replica_rank, self.name_suffix),
            scheduling_strategy=near,
            max_concurrency=self.max_concurrency,
        )
        self.servers = [actor.remote(self.config, self.model_config, self.rollout_mode)]
        await asyncio.gather(*[one.launch_server.remote() for one in self.servers])
        url, _ = await self.servers[0].get_server_address.remote()
        self._server_handle = self.servers[0]
        self._server_address = url.partition("://")[2]


def actor_name(replica_rank: int, suffix: str = "") -> str:
    """Return the name of the actor of a replica, by which the trainer's ranks find the server."""
    return f"weft_server_{replica_rank}{suffix}"
