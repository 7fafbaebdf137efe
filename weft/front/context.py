"""The front's parts, as the handlers see them."""

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
    InvalidRequest,
    Overloaded,
    ReportedError,
    Unavailable,
    WeftError,
)
from weft.common.log import get_logger
from weft.common.workers import WorkerPool, most_of_client
from weft.config.about import about
from weft.config.front_section import FrontSection
from weft.config.resolved import EngineConfig
from weft.front.access import REQUEST_ID, AccessControl, key_of
from weft.front.answers import ModelCard
from weft.front.body import Bodies
from weft.front.first_request import takes_images
from weft.front.lifecycle import Lifecycle
from weft.front.metrics import Metrics
from weft.front.monitoring.request_log import RequestFacts
from weft.front.monitoring.throughput import report
from weft.front.monitoring.vllm_metrics import as_vllm
from weft.front.proofs import Compiling, Unproved, digest_of
from weft.front.rate_limit import RateLimits
from weft.front.read_worker import Known, ReadAnswer, decode_answer, payload_of, read_with
from weft.front.reading import Job, Reader, check_model, takes_too_long
from weft.front.request_trace import RequestTrace
from weft.front.retry_after import RetryAfter
from weft.front.setup import GrammarCheck, Setup, TextSetup
from weft.front.siblings import Siblings
from weft.grammar.service import Compile
from weft.links.links import Links
from weft.links.owner import Owner
from weft.media.decode import can_decode
from weft.media.headers import ImageHeader
from weft.media.memory import Lease
from weft.media.pictures import Wanted, headers_of
from weft.media.service import MediaService
from weft.routing.instance_table import Patience
from weft.routing.policy import make_policies
from weft.text.model import TextModel
from weft.text.parsing.parser import OutputParser, OutputSpec
from weft.text.submit import IdMint, ModelLimits, SeedMint
from weft.tracing.writer import open_writer
from weft.types.grammar import Grammar
from weft.types.messages import HeadStats

if TYPE_CHECKING:
    from weft.front.generation import Generation

log = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

TEXT_THREADS = 2
TEXT_QUEUE = 1024
"""Pieces of text work that may wait for a thread; beyond it new requests get 429."""
SMALL_BODY = 64 << 10
"""Bytes of a body that is read in a thread. A larger one could hold Python's lock for long while it is
parsed: it is read in a process of its own."""
READ_PROCESSES = 2
READ_SECONDS = 120.0
"""For one large body."""
MAX_READS = 16
"""Times that a small body is read. A request asks for fewer grammars."""
TRIM_AFTER = 3.0
"""Seconds after a large body in which its memory is given back."""


class Front:
    """All objects that exist as long as the process. Used from one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner,
        siblings: Siblings | None = None,
        joining: bool = False,
    ) -> None:
        """``siblings``: the other fronts of the server, if there may be any; ``joining``: they serve."""
        self.config = config
        self.section = section
        self.names = config.served_names
        self._accepted = (*config.served_names, *config.accepted_names)
        self.created = int(time.time())
        name = "front" if siblings is None else f"front {siblings.name}"
        self._spans = open_writer(config.runner.trace_requests, name)
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
        self.metrics = Metrics(self.names[0], self.links)
        self._siblings = siblings
        each = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests
        self.lifecycle = Lifecycle(each * len(self.links.instances))
        self.bodies = Bodies(section.max_request_bytes)
        self._pool = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="weft-text")
        self._pooled = 0
        self._reader: Reader | None = None
        self._trimming: asyncio.TimerHandle | None = None
        self._workers: WorkerPool | None = None
        self._grammars: GrammarCheck | None = None
        self._reports: asyncio.Task[None] | None = None
        self._keys_share = len(section.api_key) > 1
        self.media = MediaService(config.media, apart=self._keys_share)
        limits = (section.rate_limit_requests, section.rate_limit_tokens)
        each_front = [-(-limit // section.fronts) for limit in limits]
        self.access = AccessControl(
            section.api_key,
            section.admin_key,
            section.allowed_origins,
            RateLimits(*each_front) if any(limits) else None,
            time.monotonic,
            open_metrics=section.open_metrics,
        )
        self.retry_after = RetryAfter()
        self.running: dict[str, Generation] = {}
        """Requests that the engine works on, by the ids of their answers."""
        self.drain: Callable[[], None] = lambda: None
        """Drains and ends the server. Set by who runs it."""
        self.ids = IdMint()
        self.seeds = SeedMint(config.model.seed)

    async def start(self) -> None:
        """Loads tokenizer and template while the head loads its model. Raises ConfigError or WeftError."""
        if self._siblings is not None:
            await self._siblings.start(self.metrics.own, self._abort_here)
        loop = asyncio.get_running_loop()
        files = TextSetup.of(self.config, self.section)
        text = await loop.run_in_executor(self._pool, files.load)
        if text.chat.problem is not None:
            log.warning(
                "%s; chat completions are refused until --chat-template names another one", text.chat.problem
            )
        if files.images is not None and not can_decode():
            log.warning("images are refused: this model sees, but Pillow is not installed (weft[vision])")
        welcome = await self.links.start()
        # --tokenizer may name a folder that does not know the model's own ends.
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
        )
        command = (sys.executable, "-m", "weft.front.read_worker")
        each = most_of_client(READ_PROCESSES) if self._keys_share else 0
        greeting = msgspec.msgpack.encode(setup)
        self._workers = WorkerPool(command, greeting, READ_PROCESSES, READ_SECONDS, each)
        self._grammars = GrammarCheck(setup)
        # Each front sees the load of all engines: one of them logs it.
        if self._siblings is None or self._siblings.name == "0":
            self._reports = asyncio.create_task(report(self._engine_stats))
        self._reader = setup.reader(text, self._grammars, waits=False)

    def _engine_stats(self) -> list[tuple[str, HeadStats]]:
        return [(instance.name, instance.stats) for instance in self.links.instances]

    async def close(self, shutdown: bool = True) -> None:
        """Ends the links; every request that is still open fails. ``shutdown``: the heads end, too."""
        if self._reports is not None:
            self._reports.cancel()
        if self._siblings is not None:
            await self._siblings.close()
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
            self._spans.close()

    def trace(self, kind: str, header: str | None) -> RequestTrace | None:
        """A span for a request that came now with this ``traceparent``; None where none is traced."""
        return None if self._spans is None else RequestTrace(self._spans, kind, header)

    def facts(self, kind: str, scope: Scope) -> RequestFacts | None:
        """Facts of a request that came now, for its log line; None where requests are not logged."""
        if not self.section.log_requests:
            return None
        client = key_of(scope) if self.section.api_key else None
        return RequestFacts(request_id=scope.get(REQUEST_ID, ""), client=client, kind=kind)

    async def metrics_page(self) -> bytes:
        """The metrics of the whole server, as Prometheus reads them."""
        if self._siblings is None:
            page = self.metrics.render()
        else:
            others = await self._siblings.pages()
            page = self.metrics.render_all({self._siblings.name: self.metrics.own(), **others})
        if not self.section.vllm_metrics:
            return page
        return page + as_vllm(page, self.config, self._engine_stats())

    async def abort(self, rid: str) -> bool:
        """Ends the request whose answer has exactly this id, whichever front has it; whether there is one."""
        return self._abort_here(rid) or (self._siblings is not None and await self._siblings.abort(rid))

    def _abort_here(self, rid: str) -> bool:
        generation = self.running.get(rid)
        if generation is not None:
            generation.abort()
        return generation is not None

    @property
    def text(self) -> TextModel:
        return self._ready_reader().text

    @property
    def cache_block(self) -> int:
        """Tokens of a block of the heads' prefix cache; 0 where nothing is cached, or they do not say."""
        welcome = self.links.welcome
        caches = self.config.kv.enable_prefix_caching
        return welcome.block_size if caches and welcome is not None else 0

    @functools.cached_property
    def thought_end(self) -> tuple[int, ...]:
        """Ids of what ends a thought."""
        text = self.text.output.thought_end
        return tuple(self.text.tokenizer.encode(text, add_special_tokens=False, parse_special=True))

    def parser(self, spec: OutputSpec) -> OutputParser:
        """A parser for one output that is read as ``spec`` says."""
        return self.text.output.parser(spec)

    def _ready_reader(self) -> Reader:
        if self._reader is None:
            raise Unavailable("the server is still starting")
        return self._reader

    async def read(
        self,
        kind: str,
        body: list[bytes],
        then: Callable[[Job], T],
        lease: Lease | None = None,
        client: int = 0,
    ) -> T:
        """Reads a request's body, in pieces, off the event loop, and calls ``then`` with it in a thread.

        ``kind`` is one of ``KINDS``. ``lease``: of the memory of its images; without one they are not
        decoded. ``client``: number of the API key that the request came with. Raises the WeftError of a
        request that can't be read, and Overloaded when too much text work waits.
        """

        def use(answer: ReadAnswer) -> T | Job:
            assert answer.job is not None
            return answer.job if answer.job.pictures and lease is not None else then(answer.job)

        found, files = await self._read(kind, body, use, lease, client)
        if not isinstance(found, Job) or lease is None or not found.pictures:
            return cast(T, found)
        media = await self.media.decode(found.pictures, files, lease, client)
        lease.give(sum(map(len, files.values())))
        return await self.in_thread(then, msgspec.structs.replace(found, pictures=(), media=media))

    async def _read_again(self, read: Callable[[], T]) -> T:
        """What ``read`` returns, in a thread. No thread waits for a grammar: there are few of them, and a
        client can ask for what takes long. ``read`` is called again when there is one.
        """
        for _ in range(MAX_READS):
            try:
                return await self.in_thread(read)
            except Compiling as under_way:
                await _ended(under_way.task)
                try:
                    under_way.task.result()
                except InvalidRequest:
                    pass  # kept by the service: reading again finds it, and may ask for a looser grammar
                except DeadlineExceeded:  # not kept: reading again would begin anew
                    raise takes_too_long(under_way.param) from None
        raise Overloaded("grammars wait too long to be compiled; try again later")

    async def made(self, kind: str, body: list[bytes], client: int) -> bytes:
        """Reads a body that needs no engine; ``kind`` is one of ``MADE``. The answer's JSON."""
        return (await self._read(kind, body, lambda answer: answer.made, None, client))[0]

    async def _read(
        self,
        kind: str,
        body: list[bytes],
        use: Callable[[ReadAnswer], T],
        lease: Lease | None,
        client: int = 0,
    ) -> tuple[T, dict[str, memoryview]]:
        """(what ``use`` makes of the request, in a thread; files of its images that were fetched)."""
        reader = self._ready_reader()
        files: dict[str, memoryview] = {}
        headers: dict[str, ImageHeader] = {}
        verdicts: dict[str, ErrorInfo | None] = {}

        def take(data: bytes | bytearray | None) -> T | tuple[Wanted, ...] | Unproved:
            if data is None:
                answer = read_with(reader.knowing(headers, client), kind, b"".join(body))
            else:
                answer = _decoded(data)
            return answer.wanted or answer.unproved or use(answer)

        with self.media.memory.lease(client) as own:
            while len(verdicts) < MAX_READS:
                known = Known(files=headers, verdicts=verdicts)
                data = await self._read_large(kind, body, known, client)
                found = await self._read_again(functools.partial(take, data))
                if isinstance(found, Unproved):
                    verdicts[digest_of(found.grammar)] = await self._verdict(found.grammar, client)
                elif isinstance(found, tuple):
                    assert not files  # they were all asked for at once
                    files = await self.media.fetch(found, lease or own, client)
                    headers = await self.in_thread(headers_of, found, files)
                else:
                    return found, files
        raise Overloaded("grammars wait too long to be compiled; try again later")

    async def _verdict(self, grammar: Grammar, client: int) -> ErrorInfo | None:
        """Why ``grammar`` does not compile; None where it does."""
        assert self._grammars is not None
        task = await self.in_thread(self._grammars.submit, grammar, client)
        await _ended(task)
        try:
            task.result()
        except WeftError as error:
            return error.info()
        return None

    async def _read_large(
        self, kind: str, body: list[bytes], known: Known, client: int
    ) -> bytes | bytearray | None:
        """What a process read; None for a body that is small enough to be read in a thread."""
        if self._pooled >= TEXT_QUEUE:
            raise Overloaded("too many requests wait to be read; try again later")
        size = sum(map(len, body))
        if size <= SMALL_BODY:
            return None
        assert self._workers is not None
        self._trim_later()
        return await self._workers.call(*payload_of(kind, body, known), client=client, cost=size)

    def _trim_later(self) -> None:
        """Gives the memory of large bodies back when they are gone, rather than keep it for the next ones."""
        loop = asyncio.get_running_loop()
        if self._trimming is None or self._trimming.when() < loop.time():
            self._trimming = loop.call_later(TRIM_AFTER, loop.run_in_executor, self._pool, trim_heap)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs text work off the event loop, however much of it waits: each request has one at a time."""
        self._pooled += 1
        try:
            work = functools.partial(function, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pooled -= 1

    def check_model(self, name: str) -> None:
        """Raises NotFound unless ``name`` is served."""
        check_model(name, self._accepted)

    def card(self, name: str) -> ModelCard:
        """A served model, as /v1/models shows it: never by a name that is only accepted."""
        shown = name if name in self.names else self.names[0]
        known = about(self.config.model_path)
        return ModelCard(
            id=shown,
            created=self.created,
            max_model_len=self.config.kv.max_model_len,
            input_modalities=("text", "image") if takes_images(self.config) else ("text",),
            about=known.does or UNSET,
            example=known.question if known.does else UNSET,
        )


async def _ended(task: Compile) -> None:
    """Waits until ``task`` has a result, or is too late."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def ring() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(event.set)

    task.when_ended(ring)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(task.left):
            await event.wait()


def _decoded(data: bytes | bytearray) -> ReadAnswer:
    answer = decode_answer(data)
    if answer.error is not None:
        raise ReportedError(answer.error)
    return answer
