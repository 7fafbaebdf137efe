"""``AsyncLLM``: streams outputs of concurrent requests on an event loop.

The engine runs in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from weft.api.engine_thread import EngineThread, Sink
from weft.api.llm import load_text, request_maker
from weft.api.request import Request, client_error, spread_params
from weft.api.request_outputs import RequestOutput
from weft.api.settings import read_settings
from weft.common.errors import EngineDead, ErrorInfo, InvalidRequest, Overloaded, WeftError
from weft.config.resolve import resolve
from weft.engine.server.replicas import start_engine
from weft.types.grammar import Grammar
from weft.types.messages import EngineStats, TokenEvent
from weft.types.sampling import SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """A model and its engine, for event loops. All settings of ``LLM`` are valid.

    The constructor blocks until the model is loaded. If the engine dies, waiting calls raise EngineDead.
    """

    def __init__(self, model: str | Path = "spool-text", **config: Any) -> None:
        """Load the model and start the engine's thread. Return when the engine runs. ``model``: a folder, a
        hub name or the name of a bundled model. ``config``: see ``LLM``. Raises ConfigError for an invalid
        setting."""
        settings = read_settings(model, config)
        self.config = resolve(settings)
        self._text = load_text(self.config, settings.front.chat_template)
        core = start_engine(self.config)
        self._maker = request_maker(self.config, core, self._text)
        self._requests: dict[str, tuple[Request, Sink]] = {}
        self._patience = settings.front.engine_timeout
        self._thread = EngineThread(core)

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model: a ``weft.text.tokenizer.Tokenizer``."""
        return self._text.tokenizer

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the accumulated output after each change. The last output has ``finished``.

        ``prompt`` is a string, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}`` or ``{"messages":
        [...]}``. Messages are a conversation, rendered by the chat template; the other options of
        ``LLM.chat`` may be further keys. ``grammar`` constrains each whole output: see ``LLM.generate``. A
        smaller ``priority`` runs first. Leaving or cancelling the iterator cancels the request.

        Raise InvalidRequest, ContextLength, Overloaded or EngineDead. If only one sequence fails, its output
        has finish_reason "error" and ``error``.
        """
        (params,) = spread_params(sampling_params, 1)
        seed = self._maker.seeds.mint()
        request = await self._prepare(prompt, params, seed, request_id, grammar)
        try:
            request.prioritise(priority)
        except InvalidRequest:
            self._maker.release(request)
            raise
        if request.request_id in self._requests:
            self._maker.release(request)
            raise InvalidRequest("a request with this request_id is already running", param="request_id")
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        sink = _on_loop(events.put_nowait)
        self._requests[request.request_id] = (request, sink)
        try:
            self._thread.submit(request.submits, sink)
            async for output in self._stream(request, events):
                yield output
        finally:
            self._end(request)

    async def abort(self, request_id: str) -> bool:
        """Cancel a running request: its iterator yields a last output with finish_reason "abort" for each
        choice that has not ended. Return True then.

        Return False if no such request runs.
        """
        found = self._requests.get(request_id)
        if found is None:
            return False
        request, sink = found
        # The engine sends no event for an ended sequence, so the terminal event is made here.
        for choice in request.choices:
            if not choice.finished:
                sink(TokenEvent(sequence=choice.sequence, finish="abort"))
        self._thread.finish([submit.sequence for submit in request.submits])
        return True

    async def stats(self) -> EngineStats:
        """Return the engine's counters, as of the next round of the engine. Raise EngineDead, also after
        ``shutdown`` or without progress of the engine."""
        answers: asyncio.Queue[EngineStats] = asyncio.Queue()
        if not self._thread.stats(_on_loop(answers.put_nowait)):
            raise _dead(self._thread.death)
        return await self._wait(answers)

    def shutdown(self) -> None:
        """End the engine; running iterators raise EngineDead.

        Idempotent. Block until the engine thread has ended.
        """
        self._thread.stop()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)

    async def _prepare(
        self, prompt: Any, params: SamplingParams, seed: int, request_id: str | None, grammar: Grammar | None
    ) -> Request:
        """Make the request in a thread and return the request. If the caller is cancelled meanwhile,
        release the request. Raise InvalidRequest or ContextLength."""
        # A thread cannot be cancelled. The shield lets the thread finish, so that the request can be
        # released.
        making = asyncio.ensure_future(
            asyncio.to_thread(self._make, prompt, params, seed, request_id, grammar)
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(
                lambda made: None if made.exception() else self._maker.release(made.result())
            )
            raise

    async def _wait(self, queue: asyncio.Queue[T]) -> T:
        """Return the next item of ``queue``.

        Raise EngineDead if the engine thread makes no round for ``--engine-timeout``. The engine is then
        declared dead for all callers.
        """
        while True:
            rounds = self._thread.rounds
            try:
                # Not wait_for: in Python 3.11 wait_for loses a cancellation that arrives together with an
                # item.
                async with asyncio.timeout(self._patience):
                    return await queue.get()
            except TimeoutError:
                if self._thread.rounds == rounds:
                    self._thread.give_up(f"the engine made no progress in {self._patience:g} seconds")
                    raise _dead(self._thread.death) from None

    def _make(
        self, prompt: Any, params: SamplingParams, seed: int, request_id: str | None, grammar: Grammar | None
    ) -> Request:
        """Return the request for a prompt, in a worker thread. Raise InvalidRequest, also for an unknown
        option beside ``messages``, or ContextLength."""
        if isinstance(prompt, dict) and "messages" in prompt:
            options = dict(prompt)
            messages = options.pop("messages")
            options["kwargs"] = options.pop("chat_template_kwargs", None)
            known = {"kwargs", "add_generation_prompt", "continue_final_message", "chat_template"}
            if unknown := [name for name in options if name not in known]:
                raise InvalidRequest(f"a prompt with messages has no option {unknown[0]!r}", param="prompt")
            return self._maker.from_messages(messages, params, seed, request_id, grammar, **options)
        return self._maker.from_prompt(prompt, params, seed, request_id, grammar)

    async def _stream(
        self, request: Request, events: asyncio.Queue[TokenEvent]
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs until the request has ended. Events that arrive together make one output. A choice
        that ends early, at a stop string, is finished in the engine. Raise InvalidRequest, Overloaded or
        EngineDead for an error of the whole request."""
        choices = {choice.sequence: choice for choice in request.choices}
        while not request.finished:
            news = False
            event: TokenEvent | None = await self._wait(events)
            while event is not None:
                delta = choices[event.sequence].on_event(event)
                if delta is not None:
                    news = True
                    if delta.error is not None:
                        _raise_whole(delta.error)
                    if delta.send_finish:
                        self._thread.finish([event.sequence])
                # Take all queued events first. A slow reader then gets one output instead of a backlog.
                event = None if events.empty() else events.get_nowait()
            if news:
                yield request.output()

    def _end(self, request: Request) -> None:
        """Remove the request: cancel its open sequences and release its ids. ``abort`` no longer finds the
        request."""
        self._requests.pop(request.request_id, None)
        open_ones = [choice.sequence for choice in request.choices if not choice.finished]
        if open_ones:
            self._thread.finish(open_ones)
        self._maker.release(request)


def _on_loop(put: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function for other threads: the function calls ``put`` on the running event loop.

    Calls after the end of the loop are dropped.
    """
    loop = asyncio.get_running_loop()

    def call(item: T) -> None:
        # RuntimeError: the loop is closed, so nothing waits for the item.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(put, item)

    return call


def _raise_whole(error: ErrorInfo) -> None:
    """Raise InvalidRequest, EngineDead or Overloaded for an error of the whole request.

    Return for an error of one sequence's computation.
    """
    if (found := client_error(error)) is not None:
        raise found
    if error.code == EngineDead.code:
        raise _dead(error)
    if error.blame == "capacity":
        raise Overloaded(error.message, code=error.code)


def _dead(error: ErrorInfo | None) -> WeftError:
    """Return an EngineDead with the message of ``error``."""
    return EngineDead("the engine is dead" if error is None else error.message)
