"""Objects of one API server process, as used by the request handlers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import msgspec
from msgspec import UNSET
from starlette.types import Scope

from weft.common.allocator import trim_heap
from weft.common.errors import (
    DeadlineExceeded,
    ErrorInfo,
    Overloaded,
    ReportedError,
    Unavailable,
    WeftError,
)
from weft.common.log import get_logger
from weft.common.workers import WorkerPool, most_of_client
from weft.config.about import about
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.policy import make_policies
from weft.control.links.links import Links
from weft.control.links.owner import Owner
from weft.front.first_request import example_image, takes_images
from weft.front.http.access import REQUEST_ID, AccessControl, key_of
from weft.front.http.answers import ModelCard
from weft.front.http.body import Bodies
from weft.front.http.rate_limit import RateLimits
from weft.front.lifecycle import Lifecycle, RetryAfter, places
from weft.front.monitoring import load_history
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.front.monitoring.metrics import Metrics
from weft.front.monitoring.request_log import RequestFacts
from weft.front.monitoring.request_trace import RequestTrace
from weft.front.monitoring.throughput import report
from weft.front.monitoring.vllm_metrics import as_vllm
from weft.front.requests.adapters import Adapters
from weft.front.requests.proofs import Told, Unproved, digest_of
from weft.front.requests.read_worker import Known, ReadAnswer, decode_answer, payload_of, read_with
from weft.front.requests.reading import Job, Reader, check_model, takes_too_long
from weft.front.requests.setup import GrammarCheck, Setup, TextSetup
from weft.front.siblings import Siblings
from weft.grammar.guard.compile_jobs import Compile
from weft.media.decode import can_decode
from weft.media.media_memory import MediaLease
from weft.media.pictures import Wanted, headers_of
from weft.media.service import MediaService
from weft.media.video_header import Header
from weft.text.model import TextModel
from weft.text.parsing.parser import OutputParser, OutputSpec
from weft.text.scoring import Tasks
from weft.text.submit import IdMint, ModelLimits, SeedMint
from weft.tracing.writer import open_writer
from weft.types.messages import EngineStats

if TYPE_CHECKING:
    from weft.front.requests.generation import Generation

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
TEXT_QUEUE = 1024
"""Maximum number of text work items waiting for a thread. Beyond the maximum, new requests get 429."""
SMALL_BODY = 64 << 10
"""Maximum bytes of a body read in a thread. Parsing a larger body could hold Python's lock for long, so
larger bodies are read in a separate process."""
READ_PROCESSES = 2
READ_SECONDS = 120.0
"""Maximum seconds for one large body."""
MAX_READS = 16
"""Maximum number of attempts to read a body. One request needs fewer grammars."""
TRIM_AFTER = 3.0
"""Seconds between a large body and the trim of the heap."""


def _rate_limits(section: FrontSection) -> RateLimits | None:
    """Return the share of one API server in the rate limits, rounded up; None without limits."""
    limits = (section.rate_limit_requests, section.rate_limit_tokens)
    return RateLimits(*(-(-limit // section.fronts) for limit in limits)) if any(limits) else None


class Front:
    """All objects with the lifetime of the process. Used from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner,
        siblings: Siblings | None = None,
        joining: bool = False,
    ) -> None:
        """``siblings``: other API servers; None for a single API server. ``joining``: True if the others
        serve already."""
        self.config, self.section = config, section
        self.names = config.served_names
        self._accepted = (*config.served_names, *config.accepted_names)
        self.created = int(time.time())
        self._siblings = siblings
        name = "front" if siblings is None else f"front {siblings.name}"
        self._spans = open_writer(config.runner.trace_requests, name, config.runner.otlp_traces_endpoint)
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
            spans=self._spans,
        )
        self.adapters = Adapters(config, self.links)
        self.metrics = Metrics(self.names[0], self.links, self._spans)
        each = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self.lifecycle = Lifecycle(lambda: each * places(self.links.instances, self.links.elastic))
        self.bodies = Bodies(section.max_request_bytes)
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="weft-text")
        self._pooled = 0
        self._reader: Reader | None = None
        self._trimming: asyncio.TimerHandle | None = None
        self._workers: WorkerPool | None = None
        self._grammars: GrammarCheck | None = None
        self._reports: asyncio.Task[None] | None = None
        self._history = load_history.LoadHistory()
        self._sampling: asyncio.Task[None] | None = None
        self._keys_share = len(section.api_key) > 1
        self.media = MediaService(config.media, apart=self._keys_share)
        self.access = AccessControl(
            section.api_key,
            section.admin_key,
            section.allowed_origins,
            _rate_limits(section),
            time.monotonic,
            open_metrics=section.open_metrics,
        )
        self.retry_after = RetryAfter()
        self.running: dict[str, Generation] = {}
        """Requests in the engine, by answer id."""
        self.drain: Callable[[], None] = lambda: None  # drains and ends the server; set by the owner
        self.ids = IdMint()
        self.seeds = SeedMint(config.model.seed)

    async def start(self) -> None:
        """Connect to the engine processes, load tokenizer and template meanwhile, and start the background
        tasks. Until the return, ``read`` and ``text`` raise Unavailable. Raises ConfigError for unusable
        files, or the WeftError of an engine that does not start."""
        if self._siblings is not None:
            await self._siblings.start(self.metrics.own, self._abort_here, self._own_history)
        loop = asyncio.get_running_loop()
        files = TextSetup.of(self.config, self.section)
        text = await loop.run_in_executor(self._pool, files.load)
        if text.chat.problem is not None:
            log.warning(
                "%s; chat requests are rejected: start with --chat-template and another template",
                text.chat.problem,
            )
        if files.images is not None and not can_decode():
            log.warning("image inputs are rejected: Pillow is not installed; install weft[vision]")
        welcome = await self.links.start()
        await self.adapters.start(self.metrics, self.running, self._siblings)
        # --tokenizer may name a folder without the model's own end tokens.
        ends = tuple(sorted({*text.end_ids, *self.config.spec.eos_ids}))
        self.limits = ModelLimits(
            vocab_size=welcome.vocab_size, max_model_len=welcome.max_model_len, end_ids=ends
        )
        setup = Setup(
            text=files,
            names=self._accepted,
            limits=self.limits,
            max_response_bytes=self.section.max_response_bytes,
            keep_attribution=self.section.keep_attribution_lines,
            grammar_timeout=self.config.grammar.grammar_compile_timeout,
            media=self.config.media,
            tasks=Tasks.of(self.config.spec, self.section.pooling),
        )
        command = (sys.executable, "-m", "weft.front.requests.read_worker")
        each = most_of_client(READ_PROCESSES) if self._keys_share else 0
        greeting = msgspec.msgpack.encode(setup)
        self._workers = WorkerPool(command, greeting, READ_PROCESSES, READ_SECONDS, each)
        self._grammars = GrammarCheck(setup)
        # Each API server sees the load of all engines, so only one logs the load.
        if self._siblings is None or self._siblings.name == "0":
            self._reports = asyncio.create_task(report(self._engine_stats))
        keep = load_history.keep(self._history, self._engine_states, self.metrics.latencies)
        self._sampling = asyncio.create_task(keep)
        self._reader = setup.reader(text)

    def _engine_stats(self) -> list[tuple[str, EngineStats]]:
        return [(instance.name, instance.stats) for instance in self.links.instances]

    def _engine_states(self) -> list[load_history.EngineState]:
        instances = self.links.instances
        return [load_history.EngineState(one.name, one.role or "", one.alive, one.stats) for one in instances]

    def _own_history(self, second: int) -> bytes:
        return load_history.encode(self._history.since(second))

    async def close(self, shutdown: bool = True) -> None:
        """Stop the background tasks, the worker processes and the links; every open request fails.
        ``shutdown``: also end the engine processes. Call once."""
        if self._reports is not None:
            self._reports.cancel()
        if self._sampling is not None:
            self._sampling.cancel()
        if self._siblings is not None:
            await self._siblings.close()
        self.adapters.close()
        await self.links.close(shutdown)
        if self._trimming is not None:
            self._trimming.cancel()
        if self._workers is not None:
            await self._workers.close()
        if self._grammars is not None:
            self._grammars.close()
        await self.media.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def trace(self, body_type: str, header: str | None) -> RequestTrace | None:
        """Return a trace span for a request arriving now. ``header``: the ``traceparent`` header. None
        without tracing."""
        return None if self._spans is None else RequestTrace(self._spans, body_type, header)

    def facts(self, body_type: str, scope: Scope) -> RequestFacts | None:
        """Return the facts for the log line of a request arriving now. None if requests are not logged."""
        if not self.section.log_requests:
            return None
        client = key_of(scope) if self.section.api_key else None
        return RequestFacts(request_id=scope.get(REQUEST_ID, ""), client=client, body_type=body_type)

    async def metrics_page(self) -> bytes:
        """Return the metrics of the whole server, in Prometheus text format, without API servers that do not
        answer in time. With ``--vllm-metrics`` the page also has vLLM's names."""
        if self._siblings is None:
            page = self.metrics.render()
        else:
            others = await self._siblings.pages()
            page = self.metrics.render_all({self._siblings.name: self.metrics.own(), **others})
        if not self.section.vllm_metrics:
            return page
        return page + as_vllm(page, self.config, self.links.instances)

    async def load_since(self, second: int) -> load_history.LoadAnswer:
        """Return the load of the whole server: one point for each second after ``second`` of the monotonic
        clock, and the present load of each engine process."""
        first = second - load_history.WINDOW
        rings = [self._history.since(first)]
        if self._siblings is not None:
            others = await self._siblings.histories(first)
            rings += [load_history.decode(data, LATENCY_BOUNDS) for data in others]
        return load_history.LoadAnswer(
            now=round(time.monotonic(), 3),
            points=load_history.points(load_history.merged(rings), second, LATENCY_BOUNDS),
            engines=self._history.engines,
        )

    async def abort(self, rid: str) -> bool:
        """Abort the request with this answer id in any API server. Return True if the request was found."""
        return self._abort_here(rid) or (self._siblings is not None and await self._siblings.abort(rid))

    def _abort_here(self, rid: str) -> bool:
        """Abort the request with this answer id in this process. Return True if the request was found."""
        generation = self.running.get(rid)
        if generation is not None:
            generation.abort()
        return generation is not None

    @property
    def text(self) -> TextModel:
        return self._ready_reader().text

    @property
    def cache_block(self) -> int:
        """Tokens in a block of the engines' prefix cache; 0 without prefix caching, or if unknown."""
        welcome = self.links.welcome
        caches = self.config.kv.enable_prefix_caching
        return welcome.block_size if caches and welcome is not None else 0

    @functools.cached_property
    def reasoning_end(self) -> tuple[int, ...]:
        """Token ids of the end-of-reasoning marker."""
        text = self.text.output.reasoning_end
        return tuple(self.text.tokenizer.encode(text, add_special_tokens=False, parse_special=True))

    def parser(self, spec: OutputSpec) -> OutputParser:
        """Return a parser for one output, configured by ``spec``."""
        return self.text.output.parser(spec)

    def _ready_reader(self) -> Reader:
        if self._reader is None:
            raise Unavailable("the server is still starting")
        return self._reader

    async def read(
        self,
        body_type: str,
        body: list[bytes],
        then: Callable[[Job], T],
        lease: MediaLease | None = None,
        client: int = 0,
    ) -> T:
        """Read a request's body, given in pieces, off the event loop. Return the result of ``then``, called
        with the job in a thread.

        ``body_type``: a key of ``BODY_READERS``. ``lease``: memory lease for the images; without a lease,
        ``then`` gets the job with undecoded ``pictures``. ``client``: number of the request's API key. May
        fetch image files and compile grammars, and waits for both. Raises the WeftError of an invalid
        request or of ``then``, Unavailable before the end of ``start``, and Overloaded if too much text work
        is waiting.
        """

        def use(answer: ReadAnswer) -> T | Job:
            """Return the result of ``then``, or the job itself if images are still to be decoded."""
            assert answer.job is not None
            # Without images to decode, `then` runs in the same thread.
            return answer.job if answer.job.pictures and lease is not None else then(answer.job)

        found, files = await self._read(body_type, body, use, lease, client)
        if not isinstance(found, Job) or lease is None or not found.pictures:
            return cast(T, found)
        media = await self.media.decode(found.pictures, files, lease, client)
        lease.give(sum(map(len, files.values())))
        return await self.in_thread(then, msgspec.structs.replace(found, pictures=(), media=media))

    async def made(self, body_type: str, body: list[bytes], client: int) -> bytes:
        """Read a body for an answer without the engine, and return the answer's JSON. ``body_type``: one of
        ``MADE``. Raises the errors of ``read``."""
        return (await self._read(body_type, body, lambda answer: answer.made, None, client))[0]

    async def _read(
        self,
        body_type: str,
        body: list[bytes],
        use: Callable[[ReadAnswer], T],
        lease: MediaLease | None,
        client: int = 0,
    ) -> tuple[T, dict[str, memoryview]]:
        """Read a body, and repeat the read with each missing input until all inputs are known. Return
        (result of ``use``, called in a thread with the read answer; fetched image files by URL). The files
        count against ``lease``, or without one against a lease that ends with this call. Raises the errors
        of ``read``."""
        reader = self._ready_reader()
        files: dict[str, memoryview] = {}
        headers: dict[str, Header] = {}
        verdicts: dict[str, ErrorInfo | None] = {}

        def take(data: bytes | bytearray | None) -> T | tuple[Wanted, ...] | Unproved:
            """Read the body in this thread, or decode the worker's answer ``data``. Return the missing
            input, or the result of ``use``. Raises WeftError."""
            if data is None:
                told = Told(verdicts, self._grammars)
                knowing = reader.knowing(headers, client, told, self.adapters.names)
                answer = read_with(knowing, body_type, b"".join(body))
            else:
                answer = _decoded(data)
            return answer.wanted or answer.unproved or use(answer)

        with self.media.memory.lease(client) as own:
            # Each round resolves one missing input: the verdict on a grammar, or all image files.
            while len(verdicts) < MAX_READS:
                known = Known(files=headers, verdicts=verdicts, names=self.adapters.names)
                data = await self._read_large(body_type, body, known, client)
                found = await self.in_thread(take, data)
                if isinstance(found, Unproved):
                    verdicts[digest_of(found.grammar)] = await self._verdict(found, client)
                elif isinstance(found, tuple):
                    files |= await self.media.fetch(found, lease or own, client)
                    headers |= await self.in_thread(headers_of, found, files)
                    headers |= await self.media.videos.headers(found, files, client)
                else:
                    return found, files
        raise Overloaded("compiling the request's grammars takes too long; try again later")

    async def _verdict(self, unproved: Unproved, client: int) -> ErrorInfo | None:
        """Compile a grammar and wait for the result on the event loop. Return the compile error, or None.
        Raises InvalidRequest for a compile time-out: a looser grammar may take as long.

        A thread must not wait for a grammar: threads are few, and a client can request a slow grammar.
        """
        assert self._grammars is not None
        task = await self.in_thread(self._grammars.submit, unproved.grammar, client)
        await _ended(task)
        try:
            task.result()
        except DeadlineExceeded:
            raise takes_too_long(unproved.param) from None
        except WeftError as error:
            return error.info()
        return None

    async def _read_large(
        self, body_type: str, body: list[bytes], known: Known, client: int
    ) -> bytes | bytearray | None:
        """Return the encoded ReadAnswer of a worker process; None for a small body. Raises Overloaded if
        ``TEXT_QUEUE`` work items wait already."""
        if self._pooled >= TEXT_QUEUE:
            raise Overloaded("too many request bodies wait to be parsed; try again later")
        size = sum(map(len, body))
        if size <= SMALL_BODY:
            return None
        assert self._workers is not None
        # A large body leaves a large free heap behind.
        self._trim_later()
        return await self._workers.call(*payload_of(body_type, body, known), client=client, cost=size)

    def _trim_later(self) -> None:
        """Schedule a heap trim in ``TRIM_AFTER`` seconds; else the allocator keeps large bodies' memory."""
        loop = asyncio.get_running_loop()
        if self._trimming is None or self._trimming.when() < loop.time():
            self._trimming = loop.call_later(TRIM_AFTER, loop.run_in_executor, self._pool, trim_heap)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a text thread and return the result, or raise its exception."""
        self._pooled += 1
        try:
            work = functools.partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pooled -= 1

    def check_model(self, name: str) -> None:
        """Raise NotFound unless ``name`` is served."""
        check_model(name, (*self._accepted, *self.adapters.names))

    def card(self, name: str) -> ModelCard:
        """Return the card of a served model for /v1/models. A name that is only accepted is shown as the
        first served name."""
        shown = name if name in self.names else self.names[0]
        known = about(self.config.model_path)
        sees = takes_images(self.config)
        return ModelCard(
            id=shown,
            created=self.created,
            max_model_len=self.config.kv.max_model_len,
            input_modalities=("text", "image") if sees else ("text",),
            implementation=self.config.spec.implementation,
            about=known.does or UNSET,
            example=known.question if known.does else UNSET,
            examples=known.examples or UNSET,
            example_image=example_image(self.config, known) if known.image and sees else UNSET,
        )


async def _ended(task: Compile) -> None:
    """Wait until ``task`` has ended or its deadline has passed. Return nothing and raise nothing:
    ``task.result`` has the outcome."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def ring() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no coroutine waits
            loop.call_soon_threadsafe(event.set)

    task.when_ended(ring)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(task.left):
            await event.wait()


def _decoded(data: bytes | bytearray) -> ReadAnswer:
    """Return the answer of a read worker. Raises ReportedError for an answer with an error."""
    answer = decode_answer(data)
    if answer.error is not None:
        raise ReportedError(answer.error)
    return answer
