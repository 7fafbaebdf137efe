"""The parts of an API server that belong to one model: links, tokenizer and template, adapters, limits."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import UNSET

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.common.workers import WorkerPool, most_of_client
from weft.config.about import about
from weft.config.families.generation import sampling_defaults
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.policy import make_policies
from weft.control.links.links import Links
from weft.control.links.owner import Owner
from weft.front.first_request import example_image, takes_images
from weft.front.http.answers import ModelCard
from weft.front.lifecycle import Lifecycle, places
from weft.front.monitoring.metrics import Metrics
from weft.front.requests.adapters import Adapters, OpenRequest
from weft.front.requests.reading import Reader, check_model
from weft.front.requests.setup import GrammarCheck, Setup, TextSetup
from weft.front.requests.text_threads import TextThreads
from weft.front.requests.weight_updates import WeightUpdates
from weft.front.siblings import Siblings
from weft.media.decode import can_decode
from weft.text.model import TextModel
from weft.text.scoring import Tasks
from weft.text.submit import ModelLimits, SeedMint
from weft.tracing.writer import SpanWriter

log = get_logger(__name__)

READ_PROCESSES = 2
READ_SECONDS = 120.0
"""Maximum seconds for one large body."""


def card_of_model(config: EngineConfig, name: str, times: Mapping[str, int]) -> ModelCard:
    """Return the card of a model for /v1/models. A name that is only accepted is shown as the first served
    name. ``times``: see ``changed_at``."""
    shown = name if name in config.served_names else config.served_names[0]
    known = about(config.model_path)
    sees = takes_images(config)
    return ModelCard(
        id=shown,
        created=times[config.model_path],
        max_model_len=config.kv.max_model_len,
        input_modalities=("text", "image") if sees else ("text",),
        implementation=config.spec.implementation,
        about=known.does or UNSET,
        example=known.question if known.does else UNSET,
        examples=known.examples or UNSET,
        example_image=example_image(config, known) if known.image and sees else UNSET,
    )


class ServedModel:
    """One model, from the connection to its engines to their end. Used from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner,
        *,
        joining: bool = False,
        spans: SpanWriter | None = None,
        server: Lifecycle | None = None,
    ) -> None:
        """Take the engines of ``owner`` without connecting. ``section``: settings of the server, with the
        text settings of the model. ``joining``, ``spans``: see ``Links``. ``server``: admission of the whole
        server, for one of several models."""
        self.config, self.section, self.owner = config, section, owner
        self.accepted = (*config.served_names, *config.accepted_names)
        self.links = Links(
            owner,
            Patience(
                engine=section.engine_timeout,
                recovery=section.recovery_timeout,
                role=config.transfer.role_timeout,
                transfer=config.transfer.transfer_timeout,
            ),
            policies=make_policies(section.routing_policy, config.model.seed),
            local_prefill=config.transfer.prefill_fallback == "local",
            link_timeout=config.parallel.rank_timeout,
            joining=joining,
            spans=spans,
        )
        self.adapters = Adapters(config, self.links)
        self.weights = WeightUpdates(config, self.links)
        self.metrics = Metrics(config.served_names[0], self.links, spans)
        each = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self.lifecycle = Lifecycle(lambda: each * places(self.links.instances, self.links.elastic), server)
        self.seeds = SeedMint(config.model.seed)
        self.limits: ModelLimits | None = None
        """Limits of the engines; None before the end of ``start``."""
        self.workers: WorkerPool | None = None
        self.grammars: GrammarCheck | None = None
        self._reader: Reader | None = None

    async def start(
        self, threads: TextThreads, running: Mapping[str, OpenRequest], siblings: Siblings | None = None
    ) -> None:
        """Connect to the engine processes, and load tokenizer and template meanwhile. Raises ConfigError for
        unusable files, or the WeftError of an engine that does not start."""
        config, section = self.config, self.section
        files = TextSetup.of(config, section)
        text = await threads.run(files.load)
        if text.chat.problem is not None:
            log.warning(
                "%s; chat requests are rejected: start with --chat-template and another template",
                text.chat.problem,
            )
        if files.images is not None and not can_decode():
            log.warning("image inputs are rejected: Pillow is not installed; install weft[vision]")
        defaults = await threads.run(sampling_defaults, Path(config.model_path), section.generation_config)
        if defaults:
            shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
            log.info(
                "default sampling parameters of generation_config.json: %s; --generation-config none ignores "
                "the file",
                shown,
            )
        welcome = await self.links.start()
        await self.adapters.start(self.metrics, running, siblings)
        if siblings is not None:
            await self.weights.share(siblings)
        # --tokenizer may name a folder without the model's own end tokens.
        ends = tuple(sorted({*text.end_ids, *config.spec.eos_ids}))
        self.limits = ModelLimits(
            vocab_size=welcome.vocab_size,
            max_model_len=welcome.max_model_len,
            end_ids=ends,
            max_logprobs=config.runner.max_logprobs,
            routes=config.spec.routes,
            defaults=defaults,
        )
        setup = Setup(
            text=files,
            names=self.accepted,
            limits=self.limits,
            max_response_bytes=section.max_response_bytes,
            keep_attribution=section.keep_attribution_lines,
            grammar_timeout=config.grammar.grammar_compile_timeout,
            media=config.media,
            tasks=Tasks.of(config.spec, section.pooling),
        )
        command = (sys.executable, "-m", "weft.front.requests.read_worker")
        each = most_of_client(READ_PROCESSES) if len(section.api_key) > 1 else 0
        self.workers = WorkerPool(command, msgspec.msgpack.encode(setup), READ_PROCESSES, READ_SECONDS, each)
        self.grammars = GrammarCheck(setup)
        self._reader = setup.reader(text)

    async def close(self, shutdown: bool = True) -> None:
        """Stop the worker processes and the links; every open request fails. ``shutdown``: also order the
        engine processes to end. Call once."""
        self.adapters.close()
        self.weights.close()
        await self.links.close(shutdown)
        if self.workers is not None:
            await self.workers.close()
        if self.grammars is not None:
            self.grammars.close()

    @property
    def reader(self) -> Reader:
        """The reader of request bodies. Raises Unavailable before the end of ``start``."""
        if self._reader is None:
            raise Unavailable("the server is still starting")
        return self._reader

    @property
    def text(self) -> TextModel:
        return self.reader.text

    @functools.cached_property
    def reasoning_end(self) -> tuple[int, ...]:
        """Token ids of the end-of-reasoning marker."""
        text = self.text.output.reasoning_end
        return tuple(self.text.tokenizer.encode(text, add_special_tokens=False, parse_special=True))

    @property
    def cache_block(self) -> int:
        """Tokens in a block of the engines' prefix cache; 0 without prefix caching, or if unknown."""
        welcome = self.links.welcome
        caches = self.config.kv.enable_prefix_caching
        return welcome.block_size if caches and welcome is not None else 0

    def serves(self, name: str) -> bool:
        """Return True for a name of the model or of one of its adapters."""
        return name in self.accepted or name in self.adapters.names

    def check_model(self, name: str) -> None:
        """Raise NotFound unless the model serves ``name``."""
        check_model(name, (*self.accepted, *self.adapters.names))

    def card(self, name: str, times: Mapping[str, int]) -> ModelCard:
        """Return the card of the model for /v1/models: see ``card_of_model``."""
        return card_of_model(self.config, name, times)
