"""``LLM``: prompts in, finished outputs back. The engine runs in the calling thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from weft.api.loras import Loras
from weft.api.pooled_calls import PooledCalls
from weft.api.request import Request, RequestMaker, client_error, spread_grammars, spread_params
from weft.api.request_outputs import RequestOutput
from weft.api.settings import read_settings
from weft.api.weights import Weights
from weft.common.errors import EngineDead, InvalidRequest, Overloaded, WeftError
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.engine.server.replicas import Replicas, start_engine
from weft.media.local import LocalPictures
from weft.text.chat import ChatFormat
from weft.text.choice import Choice
from weft.text.image_tokens import image_rules
from weft.text.model import TextModel
from weft.text.submit import ModelLimits
from weft.types.grammar import Grammar
from weft.types.messages import EngineStats, TokenEvent
from weft.types.sampling import SamplingParams
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)

OVERDUE_POLL_S = 0.1
"""Maximum seconds of one sleep while all sequences are blocked.

Bounds how late an expired deadline is noticed.
"""


def load_text(config: EngineConfig, chat_template: str | None) -> TextModel:
    """Return the tokenizer and the chat format of the model.

    Requests may bring chat templates, because the caller runs in the same process.
    """
    facts = None if config.spec.vision is None else config.spec.vision.media
    images, hidden = image_rules(facts, config.media.limit_mm_per_prompt)
    loaded = TextModel.load(config.tokenizer_path, chat_template, hidden=hidden)
    chat = ChatFormat(loaded.tokenizer, loaded.chat.source, allow_request_template=True, images=images)
    return TextModel(loaded.tokenizer, chat)


def request_maker(config: EngineConfig, core: EngineCore | Replicas, text: TextModel) -> RequestMaker:
    """Return a request maker with the limits of this engine."""
    vision = config.spec.vision
    pictures = None if vision is None else LocalPictures(vision.media, config.media)
    limits = model_limits(config, core, text)
    return RequestMaker(text, limits, config.model.seed, config.kv.media, pictures)


def model_limits(config: EngineConfig, core: EngineCore | Replicas, text: TextModel) -> ModelLimits:
    """Return the limits of requests to this engine."""
    welcome = core.welcome(0)
    ends = tuple(sorted({*text.end_ids, *config.spec.eos_ids}))
    return ModelLimits(
        vocab_size=welcome.vocab_size,
        max_model_len=welcome.max_model_len,
        end_ids=ends,
        max_logprobs=config.runner.max_logprobs,
        routes=config.spec.routes,
    )


class LLM(PooledCalls):
    """A model and its engine.

    ``model`` is a folder, a hub name or the name of a bundled model. Every other setting is a keyword (the
    flags of ``weft serve`` with dashes as underscores). Raises ConfigError for an invalid setting. For an
    unknown setting the error suggests the nearest known name.

    Text in prompts and messages never becomes a special token. Use ``LLM.tokenizer.encode(text,
    parse_special=True)`` to encode special tokens. Threads may share an LLM: calls run one after the other.
    """

    def __init__(self, model: str | Path = "spool-text", **config: Any) -> None:
        """Load the model and start the engine. Return when the engine runs. For ``config`` and errors, see
        the class."""
        settings = read_settings(model, config)
        self.config = resolve(settings)
        self._text = load_text(self.config, settings.front.chat_template)
        self._core: EngineCore | Replicas | None = start_engine(self.config)
        self._maker = request_maker(self.config, self._core, self._text)
        self._loras = Loras(self.config)
        self._weights = Weights()
        self._lock = threading.Lock()
        self._death: str | None = None

    @property
    def tokenizer(self) -> Any:
        """Tokenizer of the model: a ``weft.text.tokenizer.Tokenizer``."""
        return self._text.tokenizer

    @property
    def deterministic(self) -> bool:
        """True if logits are bitwise equal for any batch around a request (docs/determinism.md).

        Raises EngineDead after ``shutdown``.
        """
        if self._core is None:
            raise EngineDead("this LLM was shut down")
        return self._core.deterministic

    def stats(self) -> EngineStats:
        """Return the engine's counters and gauges: steps, cache hits, preemptions, drafts.

        Raise EngineDead after ``shutdown``.
        """
        core = self._core
        if core is None:
            raise EngineDead("this LLM was shut down")
        return core.stats()

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache, and return the number of blocks. A KV disk tier keeps the stored blocks.

        Raise EngineDead after ``shutdown``.
        """
        with self._lock:
            before = self.stats().forgotten_blocks
            if self._core is not None:
                self._core.flush(FlushTier(disk=False))
            return self.stats().forgotten_blocks - before

    @property
    def weight_version(self) -> str:
        """Label of the weights in use; "default" before the first update."""
        return self._weights.label

    def update_weights(
        self,
        source: str | Path | Iterable[tuple[str, Any]],
        *,
        version: str | None = None,
        partial: bool = False,
    ) -> str:
        """Replace the weights of the model, and return the label of the new version.

        ``source``: (published name, tensor) pairs on any device, or a folder of safetensors files. The folder
        stays until the next update: a rank that starts again reads the files. ``version``: the label; by
        default the number of the update. ``partial``: the source holds some tensors only; all tensors that
        one layer packs together (such as q, k and v) must be there.

        Later prompts find no prefix of the old weights. Raise InvalidRequest, which names a tensor, if a
        tensor is missing, unknown, misshaped or not finite; the old weights then stay. Raise EngineDead after
        ``shutdown``.
        """
        with self._lock:
            return self._weights.update(self._living(), source, version, partial)

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache; at ``level`` 2 also the memory of the weights.

        All cached prefixes are lost. Call ``wake_up`` before the next prompt. Raise InvalidRequest on a GPU,
        and at level 2 for weights that are in no safetensors file. Raise EngineDead after ``shutdown``.
        """
        with self._lock:
            self._weights.sleep(self._living(), level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End a sleep. ``tags``: "weights" and "kv_cache"; None for both.

        Prompts are possible after both parts are awake. After a sleep of level 2 the weights come from the
        first ``update_weights`` of all tensors, or are read again with the last part. Raise InvalidRequest
        for an unknown tag, and EngineDead after ``shutdown``.
        """
        with self._lock:
            self._weights.wake_up(self._living(), tags)

    @property
    def is_sleeping(self) -> bool:
        """True from ``sleep`` until all parts are awake."""
        return bool(self._weights.asleep)

    def _living(self) -> EngineCore | Replicas:
        """Return the engine. Raise EngineDead after ``shutdown`` and after a failure of the engine."""
        if self._core is None or self._death is not None:
            raise EngineDead(self._death or "this LLM was shut down")
        return self._core

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to completion and return the outputs in the order of the prompts.

        A prompt is a string, ``{"prompt": ...}`` or ``{"prompt_token_ids": [...]}``. ``prompts`` is one
        prompt or a list of prompts. ``sampling_params``, ``priority`` and ``grammar`` are one value for all
        prompts, or a list with one value per prompt. A smaller ``priority`` runs first; equal priorities run
        in order of arrival. ``grammar`` constrains each whole output (``weft.types.grammar``; build grammars
        from JSON schemas, patterns and the like with ``weft.grammar.build``). None in the list leaves a
        prompt unconstrained. ``lora`` is the name of an adapter of ``lora_modules``, or a list with a name or
        None per prompt.

        Raise InvalidRequest for an invalid prompt, before any computation; the error names the prompt. Raise
        EngineDead if the engine fails. If only one sequence fails, its output has finish_reason "error" and
        ``error``.
        """
        many = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
        from_prompt = self._maker.from_prompt
        made = self._run(many, sampling_params, grammar, from_prompt, "prompt", use_tqdm, priority, lora)
        return [request.output() for request in made]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        grammar: Grammar | Sequence[Grammar | None] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of messages with role and content), or a list of conversations.

        Content may have parts, as in chat requests: ``{"type": "image_url", "image_url": {"url": ...}}`` and,
        for images loaded by Pillow, ``{"type": "image", "image": image}``.

        ``chat_template`` replaces the model's template. ``chat_template_kwargs`` sets variables of the
        template. For the other parameters and the errors, see ``generate``.
        """
        # A list of messages is one conversation; a list of lists is several conversations.
        several = bool(messages) and isinstance(messages, list) and isinstance(messages[0], list | tuple)
        conversations = messages if several else [messages]

        def make(conversation: Any, params: SamplingParams, seed: int, *, grammar: Grammar | None) -> Request:
            return self._maker.from_messages(
                conversation,
                params,
                seed,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                kwargs=chat_template_kwargs,
                grammar=grammar,
            )

        what = "conversation"
        made = self._run(conversations, sampling_params, grammar, make, what, use_tqdm, priority, lora)
        return [request.output() for request in made]

    def shutdown(self) -> None:
        """Free the engine. Idempotent. Wait for a call in another thread to return first."""
        with self._lock:
            core = self._core
            self._core = None
            if core is not None:
                core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _run(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        grammar: Grammar | Sequence[Grammar | None] | None,
        make: Callable[..., Request],
        what: str,
        use_tqdm: bool,
        priority: int | Sequence[int],
        lora: str | Sequence[str | None] | None,
    ) -> list[Request]:
        """Make one request per prompt with ``make``, run all requests to completion and return the
        requests. All ids are released at the return.

        ``what`` names a prompt in error messages. Raise InvalidRequest or ContextLength before any
        computation, and the errors of ``_drive``.
        """
        params = spread_params(sampling_params, len(prompts))
        grammars = spread_grammars(grammar, len(prompts))
        # `Request.prioritise` refuses values of a wrong type.
        priorities = list(priority) if isinstance(priority, Sequence) else [priority] * len(prompts)
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"there are {len(prompts)} prompts but {len(priorities)} priorities", param="priority"
            )
        adapters = self._loras.digests(lora, len(prompts))
        requests: list[Request] = []
        try:
            # Make every request before the first one runs, so that an invalid prompt costs no computation.
            for number, (prompt, sampling, constraint) in enumerate(
                zip(prompts, params, grammars, strict=True)
            ):
                try:
                    requests.append(make(prompt, sampling, self._maker.seeds.mint(), grammar=constraint))
                    requests[-1].prioritise(priorities[number])
                    requests[-1].adapt(adapters[number])
                except WeftError as error:
                    raise _naming(error, f"{what} {number}" if len(prompts) > 1 else None) from None
            with self._lock:
                self._drive(requests, use_tqdm)
        finally:
            for request in requests:
                self._maker.release(request)
        return requests

    def _drive(self, requests: list[Request], use_tqdm: bool) -> None:
        """Run the engine until every request has ended. On any error, remove all requests from the engine.

        Raise EngineDead if the engine fails or was shut down; later calls then raise EngineDead at once.
        InvalidRequest and Overloaded refuse the call and leave the engine usable.
        """
        if self._core is None:
            raise EngineDead("this LLM was shut down")
        if self._death is not None:
            raise EngineDead(self._death)
        if self.is_sleeping:
            raise InvalidRequest("this LLM is asleep: call wake_up first")
        bar = progress_bar(total=len(requests), title="Prompts", unit="prompt", shown=use_tqdm)
        run = _Run(self._core, requests, bar)
        try:
            run.drive()
        except WeftError as error:
            # InvalidRequest and Overloaded refuse requests of the caller. Any other error comes from a broken
            # engine.
            if not isinstance(error, InvalidRequest | Overloaded):
                self._death = error.message
            raise
        except Exception as error:
            self._death = f"the engine failed: {type(error).__name__}"
            log.exception("the engine failed")
            raise EngineDead(self._death) from error
        finally:
            bar.close()
            if self._death is None:
                self._clear(run)

    def _clear(self, run: _Run) -> None:
        """Remove the requests of ``run`` from the engine. Log a failure and mark the engine as dead;
        nothing is raised."""
        try:
            run.clear()
        except WeftError as error:
            self._death = error.message
            log.warning("this LLM can't be used any more: %s", error.message)
        except Exception as error:
            self._death = f"the engine failed: {type(error).__name__}"
            log.exception("the engine failed")


class _Run:
    """The requests of one call, and the loop that runs the engine for the call."""

    def __init__(self, core: EngineCore | Replicas, requests: list[Request], bar: Any) -> None:
        """``requests``: requests of one call, still to be submitted. ``bar``: progress bar, advanced by one
        per ended request."""
        self._core = core
        self._bar = bar
        # All sequences of a call count as one client request. So the prompts need no fairness among each
        # other, and parallel samples run side by side and share blocks.
        owner = requests[0].submits[0].request if requests else 0
        self._waiting = deque(
            (msgspec.structs.replace(submit, owner=owner), request)
            for request in requests
            for submit in request.submits
        )
        self._live: dict[int, tuple[Request, Choice]] = {}
        self._tokens = 0

    def drive(self) -> None:
        """Submit and step the engine until every sequence has ended. Events fill the choices of the
        requests. Raise EngineDead if the engine loses a sequence, Overloaded if the queue has no room for
        the call, and InvalidRequest if the engine refuses a request."""
        while self._waiting or self._live:
            self._submit()
            for event in (*self._core.poll(), *self._core.step()):
                self._take(event)
            if not self._live or self._core.has_work():
                continue
            if not self._core.blocked:
                raise EngineDead("the engine lost a sequence")
            # Every sequence is blocked on external input. Each sequence has a deadline, so the loop ends.
            self._core.sleep(OVERDUE_POLL_S)

    def clear(self) -> None:
        """Cancel the remaining sequences of the call, and commit the steps in flight."""
        for sequence in self._live:
            self._core.finish(sequence)
        self._live.clear()
        while self._core.has_work():
            self._core.step()

    def _submit(self) -> None:
        """Submit sequences in order until the engine's queue is full.

        Raise Overloaded if the queue is full and the engine has no sequence of the call.
        """
        while self._waiting:
            submit, request = self._waiting[0]
            try:
                ends = self._core.submit(submit)
            except Overloaded:
                if not self._live:
                    raise
                return
            self._waiting.popleft()
            self._live[submit.sequence] = (request, request.choices[submit.choice])
            for event in ends:
                self._take(event)

    def _take(self, event: TokenEvent) -> None:
        """Apply an event to its choice. A sequence that ends is no longer live; an ended request advances
        the progress bar.

        Raise the error of an invalid request. Ignore events of ended sequences.
        """
        found = self._live.get(event.sequence)
        if found is None:
            return
        request, choice = found
        delta = choice.on_event(event)
        if delta is None:
            return
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is None:
            return
        del self._live[event.sequence]
        if delta.send_finish:
            self._core.finish(event.sequence)
        if delta.error is not None and (error := client_error(delta.error)) is not None:
            raise error
        if request.finished:
            self._bar.update(1)
            self._bar.set_postfix_str(f"{self._tokens} tokens", refresh=False)


def _naming(error: WeftError, where: str | None) -> WeftError:
    """Return a copy of ``error`` with ``where`` in front of the message, or ``error`` without ``where``."""
    if where is None:
        return error
    return type(error)(f"{where}: {error.message}", param=error.param, code=error.error_code)
