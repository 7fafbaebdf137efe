"""Objects of one API server process, as used by the request handlers."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import msgspec
from starlette.types import Scope

from weft.common.errors import DeadlineExceeded, ErrorInfo, Overloaded, ReportedError, WeftError
from weft.config.resolved import EngineConfig
from weft.config.sections.front_section import FrontSection
from weft.control.links.owner import Owner
from weft.front.http.access import REQUEST_ID, AccessControl, key_of
from weft.front.http.answers import ModelCard
from weft.front.http.body import Bodies
from weft.front.http.rate_limit import RateLimits
from weft.front.lifecycle import RetryAfter
from weft.front.monitoring import load_history
from weft.front.monitoring.front_tables import LATENCY_BOUNDS
from weft.front.monitoring.request_log import RequestFacts
from weft.front.monitoring.request_trace import RequestTrace
from weft.front.monitoring.throughput import report
from weft.front.monitoring.vllm_metrics import as_vllm
from weft.front.requests.models.models_alone import ModelsAlone
from weft.front.requests.models.several_models import ModelSet, SeveralModels
from weft.front.requests.models.shared_models import SharedModels
from weft.front.requests.pausing import Pausing
from weft.front.requests.proofs import KnownVerdicts, Unproved, digest_of
from weft.front.requests.read_worker import Known, ReadAnswer, decode_answer, payload_of, read_with
from weft.front.requests.reading import Job, takes_too_long
from weft.front.requests.served_model import ServedModel
from weft.front.requests.text_threads import TextThreads
from weft.front.siblings import Siblings
from weft.grammar.guard.compile_jobs import Compile
from weft.media.media_memory import MediaLease
from weft.media.pictures import FileToFetch, headers_of
from weft.media.service import MediaService
from weft.media.video_header import Header
from weft.text.model import TextModel
from weft.text.parsing.parser import OutputParser, OutputSpec
from weft.text.submit import IdMint
from weft.tracing.writer import open_writer
from weft.types.messages import EngineStats

if TYPE_CHECKING:
    from weft.front.requests.generation import Generation

P = ParamSpec("P")
T = TypeVar("T")

TEXT_QUEUE = 1024
"""Maximum number of text work items waiting for a thread. Beyond the maximum, new requests get 429."""
SMALL_BODY = 64 << 10
"""Maximum bytes of a body read in a thread. Parsing a larger body could hold Python's lock for long, so
larger bodies are read in a separate process."""
MAX_READS = 16
"""Maximum number of attempts to read a body. One request needs fewer grammars."""


def _rate_limits(section: FrontSection) -> RateLimits | None:
    """Return the rate limits of one API server: the limits divided by ``fronts``, rounded up. None without
    limits."""
    limits = (section.rate_limit_requests, section.rate_limit_tokens)
    return RateLimits(*(-(-limit // section.fronts) for limit in limits)) if any(limits) else None


class Front:
    """All objects with the lifetime of the process, and the parts of one model. Used from one event loop.

    A server of several models has one ``Front`` without a model, and a copy with a model for each loaded
    model. ``enter`` returns the copy for a request. The copies share all objects of the process.
    """

    def __init__(
        self,
        config: EngineConfig,
        section: FrontSection,
        owner: Owner | ModelSet,
        siblings: Siblings | None = None,
        joining: bool = False,
    ) -> None:
        """``config``: of the model; of several models, the first. ``owner``: of the engines, or all models
        of a server of several models. ``siblings``: other API servers; None for a single API server.
        ``joining``: True if the others serve already."""
        self.section = section
        self._siblings = self.siblings = siblings
        name = "front" if siblings is None else f"front {siblings.name}"
        self._spans = open_writer(config.runner.trace_requests, name, config.runner.otlp_traces_endpoint)
        self.bodies = Bodies(section.max_request_bytes)
        self.threads = TextThreads()
        self._reports: asyncio.Task[None] | None = None
        self._history = load_history.LoadHistory()
        self._sampling: asyncio.Task[None] | None = None
        self.media = MediaService(config.media, per_client=len(section.api_key) > 1)
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
        self.pausing = Pausing(self, siblings)
        self.several: SeveralModels | None = None
        """The models of a server of several models; None for a server of one model."""
        if isinstance(owner, ModelSet):
            self.config = config
            if owner.hub is None:
                several = SeveralModels(owner, section, self, self._spans)
            else:
                made = ModelsAlone if siblings is None else SharedModels
                several = made(owner, section, self, self._spans, siblings, joining)
            self.several = several
            self.metrics, self.lifecycle = several.metrics, several.lifecycle
        else:
            self._bind(ServedModel(config, section, owner, joining=joining, spans=self._spans))

    def _bind(self, model: ServedModel) -> None:
        """Use the parts of ``model`` from now on."""
        self.model = model
        self.config, self.section, self.names = model.config, model.section, model.config.served_names
        self.links, self.adapters, self.metrics = model.links, model.adapters, model.metrics
        self.lifecycle, self.seeds = model.lifecycle, model.seeds

    def of(self, model: ServedModel) -> Front:
        """Return a copy with the parts of ``model``, which shares everything else."""
        made = copy.copy(self)
        made._bind(model)
        self.pausing.joined(model)
        return made

    async def start(self) -> None:
        """Connect to the engine processes, load tokenizer and template meanwhile, and start the background
        tasks. Until the return, ``read`` and ``text`` raise Unavailable. Raises ConfigError for unusable
        files, or the WeftError of an engine that does not start. Several models: start only the tasks; see
        ``SeveralModels.start``."""
        if self._siblings is not None:
            own = self.metrics.own if self.several is None else self.several.own
            await self._siblings.start(own, self._abort_here, self._own_history)
            await self.pausing.join()
        if self.several is None:
            self.pausing.meet(self.model)
            await self.model.start(self.threads, self.running, self._siblings)
            self.pausing.take()
        # Each API server sees the load of all engines, so only one logs the load.
        if self._siblings is None or self._siblings.name == "0":
            self._reports = asyncio.create_task(report(self._engine_stats))
        source = self.metrics if self.several is None else self.several
        keep = load_history.keep(self._history, self._engine_states, source.latencies)
        self._sampling = asyncio.create_task(keep)

    @property
    def failure(self) -> WeftError | None:
        """The reason why no engine is left; None for a server of several models."""
        return None if self.several is not None else self.links.failure

    def _engine_stats(self) -> list[tuple[str, EngineStats]]:
        return [(one.name, one.stats) for one in self._engine_states()]

    def _engine_states(self) -> list[load_history.EngineState]:
        if self.several is not None:
            return self.several.engine_states()
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
        self.pausing.close()
        if self._siblings is not None:
            await self._siblings.close()
        await (self.model if self.several is None else self.several).close(shutdown)
        await self.media.close()
        self.threads.close()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    async def enter(
        self, body: list[bytes], client: int, held: contextlib.ExitStack, line: bool = False
    ) -> Front:
        """Hold a place for a request until ``held`` closes. Return the front of the model that ``body``
        names; a server of one model does not look. ``client``: number of the API key. ``line``: True for a
        line of a batch. A request waits for a model that is not loaded; a line fails with Unavailable, and
        runs again later. Raises WeftError."""
        if self.several is not None:
            return await self.several.enter(body, client, held, line)
        held.enter_context(self.lifecycle.request())
        return self

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
            page = self.metrics.render() if self.several is None else self.several.page()
        else:
            others = await self._siblings.pages()
            source = self.metrics if self.several is None else self.several
            page = source.render_all({self._siblings.name: source.own(), **others})
        if not self.section.vllm_metrics:  # servers of several models refuse the flag
            return page
        return page + as_vllm(page, self.config, self.links.instances, self.links.asleep)

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
        return self.model.text

    @property
    def cache_block(self) -> int:
        """Tokens in a block of the engines' prefix cache; 0 without prefix caching, or if unknown."""
        return self.model.cache_block

    @property
    def reasoning_end(self) -> tuple[int, ...]:
        """Token ids of the end-of-reasoning marker."""
        return self.model.reasoning_end

    def parser(self, spec: OutputSpec) -> OutputParser:
        """Return a parser for one output, configured by ``spec``."""
        return self.text.output.parser(spec)

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
        reader, grammars = self.model.reader, self.model.grammars
        files: dict[str, memoryview] = {}
        headers: dict[str, Header] = {}
        verdicts: dict[str, ErrorInfo | None] = {}

        def take(data: bytes | bytearray | None) -> T | tuple[FileToFetch, ...] | Unproved:
            """Read the body in this thread, or decode the worker's answer ``data``. Return the missing
            input, or the result of ``use``. Raises WeftError."""
            if data is None:
                known_verdicts = KnownVerdicts(verdicts, grammars)
                knowing = reader.knowing(headers, client, known_verdicts, self.adapters.names)
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
        assert self.model.grammars is not None
        task = await self.in_thread(self.model.grammars.submit, unproved.grammar, client)
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
        if self.threads.busy >= TEXT_QUEUE:
            raise Overloaded("too many request bodies wait to be parsed; try again later")
        size = sum(map(len, body))
        if size <= SMALL_BODY:
            return None
        workers = self.model.workers
        assert workers is not None
        # A large body leaves a large free heap behind.
        self.threads.trim_later()
        return await workers.call(*payload_of(body_type, body, known), client=client, cost=size)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in a text thread and return the result, or raise its exception."""
        return await self.threads.run(function, *args, **kwargs)

    def check_model(self, name: str) -> None:
        """Raise NotFound unless ``name`` is served."""
        self.model.check_model(name)

    def card(self, name: str, times: Mapping[str, int]) -> ModelCard:
        """Return the card of a served model for /v1/models. A name that is only accepted is shown as the
        first served name. ``times``: see ``changed_at``."""
        return self.model.card(name, times)


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
