"""The front's parts, as the handlers see them."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from weft.common.errors import NotFound, Overloaded, Unavailable
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection
from weft.front.heads import Heads, Place, Respawn
from weft.front.lifecycle import Lifecycle
from weft.front.metrics import Metrics
from weft.front.protocol import printable
from weft.front.responses import ModelCard
from weft.text.model import TextModel
from weft.text.submit import IdMint, ModelLimits, SeedMint

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
TEXT_QUEUE = 1024
"""Requests that may wait for a text thread; beyond it they get 429."""


class Front:
    """Everything that lives as long as the process. Used from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        places: Sequence[Place],
        respawn: Respawn | None = None,
    ) -> None:
        self.config = config
        self.section = section
        self.names = config.served_names
        self.created = int(time.time())
        self.client = Heads(
            places,
            section.engine_timeout,
            respawn=respawn,
            link_timeout=config.parallel.rank_timeout,
            patience=section.recovery_timeout,
            together=config.parallel.enable_expert_parallel,
        )
        self.metrics = Metrics(self.names[0], self.client)
        each = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self.lifecycle = Lifecycle(each * len(places))
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="weft-text")
        self._pooled = 0
        self._text: TextModel | None = None
        self.ids = IdMint()
        self.seeds = SeedMint(config.model.seed)

    async def start(self) -> None:
        """Loads tokenizer and template while the head loads its model. Raises ConfigError or WeftError."""
        loop = asyncio.get_running_loop()
        load = functools.partial(TextModel.load, self.config.tokenizer_path, self.section.chat_template)
        text = await loop.run_in_executor(self._pool, load)
        if text.chat.problem is not None:
            log.warning(
                "%s; chat completions are refused until --chat-template names another one", text.chat.problem
            )
        welcome = await self.client.start()
        # --tokenizer may name a folder that does not know the model's own ends.
        ends = tuple(sorted({*text.end_ids, *self.config.spec.eos_ids}))
        self.limits = ModelLimits(
            vocab_size=welcome.vocab_size, max_model_len=welcome.max_model_len, end_ids=ends
        )
        self._text = text

    async def close(self) -> None:
        """Ends the link; every request that is still open fails."""
        await self.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def text(self) -> TextModel:
        if self._text is None:
            raise Unavailable("the server is still starting")
        return self._text

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs text work off the event loop. Raises Overloaded when too much of it waits."""
        if self._pooled >= TEXT_QUEUE:
            raise Overloaded("too many requests wait to be read; try again later")
        self._pooled += 1
        try:
            work = functools.partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pooled -= 1

    def check_model(self, name: str) -> None:
        """Raises NotFound unless ``name`` is served."""
        if name not in self.names:
            shown = printable(name, 64)
            raise NotFound(f"the model {shown} does not exist here", param="model", code="model_not_found")

    def card(self, name: str) -> ModelCard:
        """A served model, as /v1/models shows it."""
        return ModelCard(id=name, created=self.created, max_model_len=self.config.kv.max_model_len)
