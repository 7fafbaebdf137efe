"""Sequences of one HTTP request, from submission to the end of every choice."""

from __future__ import annotations

import asyncio
import functools
import secrets
import threading
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from weft.common.errors import EngineDead, InvalidRequest, ReportedError, Unavailable, WeftError
from weft.control.fleet.policy import PromptHashes
from weft.control.links.flow import Flow
from weft.front.http.access import session_of
from weft.front.http.answers import Usage, make_usage, shown_miss
from weft.front.http.streaming import late
from weft.front.monitoring.request_times import RequestTimes
from weft.front.requests.context import Front
from weft.front.requests.reading import Job, Prompt
from weft.front.requests.thinking import ReasoningBudget, after, single
from weft.text.choice import Choice, TextDelta
from weft.text.detokenizer import Stops
from weft.text.parsing.parser import OutputParser
from weft.text.parsing.parsing_engine import OutputEngine
from weft.text.parsing.scope import ContentScope
from weft.text.submit import first_route, minted_seed, submits_of
from weft.types.messages import (
    READINESS_SALT,
    Pooling,
    Submit,
    TokenEvent,
    ids_to_bytes,
)
from weft.types.sampling import SEED_MASK, TokenParams
from weft.types.versions import unknown_to

MAX_SUBMITTED = 128 << 20
"""Maximum bytes of prompts, and of forced experts, in one request's submissions; each choice counts with its
own copy."""
MAX_PIXELS = 1 << 30
"""Maximum bytes of pixels in one request's submissions; each choice counts with its own copy."""


Show: TypeAlias = Callable[[list[TextDelta]], bool]
"""Shows deltas to the client at once. Returns False, with nothing shown, if the caller of ``next`` must show
the deltas. Always False for deltas with an end."""


class _Versioned(Protocol):
    """A choice in an answer."""

    weight_version: str | UnsetType
    weight_versions: list[tuple[int, str]] | UnsetType


class Generation:
    """Choices of all prompts of one request. Choice ``i`` belongs to prompt ``i // n``.

    Order of calls: ``build``, ``submit``, then ``next`` until ``done``. Owns the sequences. The creator
    must call ``close``, however the request ends. ``build`` runs in a thread, everything else on the event
    loop.
    """

    job: Job

    def __init__(self, front: Front, *, times: RequestTimes, deadline: float, seed: int) -> None:
        """``times``: receives marks and token events. ``deadline``: time of the event loop's clock at which
        the request fails. ``seed``: used if the request sets no seed."""
        self.choices: list[Choice] = []
        self.headers: Mapping[str, str] = {}
        """HTTP headers of the request, which may name a session. Set before ``build``."""
        self.client = 0
        """Number of the request's API key. Set before ``build``."""
        self.explain = False
        """True if the engine must explain the end of each cached prefix. Set before ``build``."""
        self.tokenizer = front.text.tokenizer
        self.front = front
        self._times = times
        self._deadline = deadline
        self._timer: asyncio.TimerHandle | None = None
        self._seed = seed
        self._ids: list[int] = []
        self._submits: list[Submit] = []
        self._hashes: Mapping[int, PromptHashes] = {}
        self._flow: Flow | None = None
        self._open = True
        self._lock = threading.Lock()
        """Guards ``build`` against ``close``: a request may be given up while the thread is still
        building."""
        self.id = ""
        """Id of the answer; "" before ``named``."""
        self._aborted = False
        self._budgets: dict[int, ReasoningBudget] = {}
        """Choice index -> reasoning budget, while the budget may still be exhausted."""
        self._submitted: dict[int, Submit] = {}
        """Choice index -> submission, for the same choices."""
        self._ended_reasoning: set[int] = set()
        """Indices of choices continued in another sequence after the forced end of their reasoning."""
        self._ready: list[TextDelta] = []
        """Deltas for the next return of ``next``: known before the first event of the engine, or not shown by
        the caller's ``show``."""
        self._held_bytes = 0
        """Bytes of the logprobs and routes collected for an answer that is not streamed."""
        self._failure: Exception | None = None
        """Error for the next call of ``next``, found after deltas that were returned or shown."""

    def show_weights(self, answer: _Versioned, index: int) -> None:
        """Set the versions of the weights of a choice in ``answer``, once the server has had new weights."""
        updates = self.front.model.weights
        if not updates.shown:
            return
        changes = [(position, updates.label_of(number)) for position, number in self.choices[index].weights]
        if changes:
            answer.weight_version, answer.weight_versions = changes[-1][1], changes

    def build(self, job: Job) -> None:
        """Create the choices and submissions of ``job``, and store the job. Raises WeftError; then nothing is
        created. No effect after ``close``."""
        most = self.front.config.scheduler.max_queued_requests
        # All sequences reach the queue before the next step takes any, so a larger request would always get
        # 429.
        if len(job.prompts) * job.params.n > most:
            raise InvalidRequest(
                f"the number of prompts times n must be at most {most} on this server",
                param=job.param if job.pooling else "n",
            )
        forced = job.params.force_routed_experts
        if forced is not None and len(forced.ids) * len(job.prompts) * job.params.n > MAX_SUBMITTED:
            raise InvalidRequest(
                f"the bytes of force_routed_experts (2 per expert) times n must be at most {MAX_SUBMITTED}; "
                "use a smaller n",
                param="n",
            )
        size = sum(prompt.count for prompt in job.prompts) * 4 * job.params.n
        if size > MAX_SUBMITTED:
            raise InvalidRequest(
                f"prompt tokens times n must be at most {MAX_SUBMITTED // 4}; send fewer prompts",
                param=job.param if job.pooling else "n",
            )
        pixels = sum(len(item.pixels) for item in job.media) * job.params.n
        if pixels > MAX_PIXELS:
            raise InvalidRequest(
                f"the bytes of all images times n must be at most {MAX_PIXELS}; use a smaller n",
                param="n",
            )
        with self._lock:
            if self._open:
                self.job = job
                self._build(job)

    def _build(self, job: Job) -> None:
        """Mint the ids, and fill ``choices`` and the submissions. Call with the lock held."""
        # A request's own seed is used as is for every prompt; a minted seed is varied by prompt number.
        given = job.params.seed
        seed = self._seed if given is None else given & SEED_MASK
        stops = Stops(job.params.stop)
        visible = self.front.text.output.visible_for(job.output)
        owner = self.front.ids.mint()
        self._ids.append(owner)
        shared = self.front.config.cache.share_cache_across_keys
        salt = job.sharing.salt if shared else self.front.access.salt_of(self.client, job.sharing.salt)
        session = session_of(self.headers, job.sharing.session)
        adapter = self.front.adapters.digest_of(job.asked.model)
        for number, prompt in enumerate(job.prompts):
            made = submits_of(
                prompt.data,
                msgspec.structs.replace(job.token_params, max_tokens=prompt.max_tokens),
                job.params.n,
                ids=self.front.ids,
                seed=minted_seed(seed, number) if number and given is None else seed,
                owner=owner,
                client=self.client,
                grammar=job.grammar,
                explain=self.explain,
                session=session,
                pooling=job.pooling,
                priority=job.sharing.priority,
                salt=salt,
                media=job.media,
                adapter=adapter,
                payer=self.front.access.payer_of(self.client),
                routes=first_route(job.params),
                forced=job.params.force_routed_experts,
            )
            self._ids += [made[0].request, *(submit.sequence for submit in made)]
            self._submits += made
        self._hashes = self.front.links.hash_prompts(self._submits)
        for index, submit in enumerate(self._submits):
            choice = Choice(
                self.tokenizer,
                job.params,
                sequence=submit.sequence,
                index=index,
                continues=job.continues,
                stops=stops,
                keep_logprobs=not job.asked.stream,
                visible=visible,
                scope=self._scope(job),
            )
            self.choices.append(choice)
        self._by_sequence = {choice.sequence: choice for choice in self.choices}
        if job.thinking_budget is not None:
            self._set_budgets(job, job.thinking_budget)

    def _scope(self, job: Job) -> ContentScope | None:
        """Return the part of the output in which stop strings count; None for the whole output."""
        if not job.params.stop or job.params.stop_in == "everything":
            return None
        return self.front.text.output.scope(job.output)

    def _set_budgets(self, job: Job, tokens: int) -> None:
        """Give each choice a reasoning budget of ``tokens``. With budget 0, end the reasoning at once: the
        end marker becomes an early delta and part of the submission."""
        for number, choice in enumerate(self.choices):
            reader = self.parser()
            assert isinstance(reader, OutputEngine)  # guaranteed by the request's reader
            budget = ReasoningBudget(tokens, reader)
            self._budgets[choice.index] = budget
            self._submitted[choice.index] = self._submits[number]
            # Budget 0: the end marker is output before the engine starts, so the submission includes the
            # marker.
            if budget.spent and (forced := self._force_end(choice)) is not None:
                self._ready.append(forced)
                emitted = ids_to_bytes(choice.token_ids)
                self._submits[number] = msgspec.structs.replace(self._submits[number], emitted_ids=emitted)

    def submit(self) -> None:
        """Submit the sequences to the engine, and start the timer. Raises WeftError; then nothing runs."""
        links = self.front.links
        submits = self._submits
        self._submits = []
        self._check_versions(submits)
        # The engines would refuse these sequences, too.
        if links.open_sequences + len(submits) > self.front.lifecycle.capacity:
            raise self.front.lifecycle.full()
        self._times.mark("submitted")
        prompts = self.job.prompts
        most = max(prompt.max_tokens for prompt in prompts)
        self._times.asked(sum(prompt.count for prompt in prompts), self.job.params.n, most)
        self._flow = links.submit(submits, self._times.event, self._hashes, self._times.context)
        # One timer for the whole request: a time-out around each wait would cost two timers per token.
        self._timer = asyncio.get_running_loop().call_at(self._deadline, self._late)
        if self._ready:
            self._flow.wake()

    def _check_versions(self, submits: list[Submit]) -> None:
        """Raise Unavailable if an engine process of an earlier release does not know a feature of the
        request."""
        for instance in self.front.links.instances:
            if instance.welcome is not None and (unknown := unknown_to(instance.welcome, submits)):
                raise Unavailable(
                    f"an engine process of an earlier release knows no {unknown}; try again after the "
                    "restart of all groups"
                )

    def _late(self) -> None:
        """Fail the flow with DeadlineExceeded, unless all tokens have arrived."""
        if self.flow.open:  # otherwise all tokens have arrived, and a slow client still gets the rest
            self.flow.fail(late())

    @property
    def flow(self) -> Flow:
        """Flow of events of the submitted sequences."""
        assert self._flow is not None
        return self._flow

    def parser(self) -> OutputParser:
        """Return a new parser for one choice's text."""
        return self.front.parser(self.job.output)

    def prompt_of(self, index: int) -> Prompt:
        """Return the prompt of choice ``index``."""
        return self.job.prompts[index // self.job.params.n]

    @property
    def done(self) -> bool:
        """True if every choice has ended without an error, and ``next`` has returned all deltas."""
        return self._failure is None and not self._ready and all(choice.finished for choice in self.choices)

    async def next(self, show: Show | None = None) -> list[TextDelta]:
        """Wait for events and return the deltas since the last call; may be empty, for example after a
        wake-up. After ``abort``, every open choice gets its last delta. Raises WeftError for a failed
        request, after all deltas before the failure were returned.

        ``show``: shows deltas at once during the wait. ``next`` returns only deltas that were not shown.
        """
        if self._failure is not None and not self._ready:
            raise self._failure
        taker = None if show is None else functools.partial(self._take_at_once, show)
        try:
            events = await self.flow.next(taker)
        except WeftError:
            if not self._ready:
                raise
            events = []  # the next call raises the error again
        return self._take(events)

    def _take_at_once(self, show: Show, events: list[TokenEvent]) -> bool:
        """Take events while the caller of ``next`` waits. Return True if ``show`` has shown all deltas; else
        ``next`` returns the deltas, or raises the error."""
        try:
            deltas = self._take(events)
            if self._failure is None and show(deltas):
                return True
            self._ready = deltas
        except Exception as error:
            self._failure = error
        return False

    def _take(self, events: list[TokenEvent]) -> list[TextDelta]:
        """Return the deltas that are ready, and those of ``events``. An error behind deltas becomes
        ``_failure``. Raises WeftError for an error without deltas before."""
        deltas, self._ready = self._ready, []
        if self._failure is not None:
            return deltas
        try:
            for event in events:
                # With reasoning budgets, the event is taken token by token. The deltas before an error stay.
                for part in single(event) if self._budgets else (event,):
                    deltas += self._take_all(part)
        except WeftError as error:
            if not deltas:
                raise
            self._failure = error
        # Deltas received before the abort still count.
        if self._aborted:
            deltas += self._cut()
        return deltas

    def _take_all(self, event: TokenEvent) -> list[TextDelta]:
        """Apply one event to its choice and return the deltas; [] for an event without visible change. A
        choice that ends early is finished in the engine. Raises ReportedError for an event with an error,
        EngineDead for an abort by the engine, and InvalidRequest for too many logprobs."""
        choice = self._by_sequence.get(event.sequence)
        if choice is None:  # replaced by a continuation sequence
            return []
        if choice.index in self._ended_reasoning:
            # The first sequence has counted the cached prompt already.
            event = msgspec.structs.replace(event, num_cached=0)
        if event.routes is not None and not choice.finished:
            self._hold(len(event.routes.ids))
        delta = choice.on_event(event)
        if delta is None:
            return []
        if delta.send_finish:
            self.front.links.finish(self.flow, choice.sequence)
        if delta.finish_reason == "error" and delta.error is not None:
            raise ReportedError(delta.error)
        if delta.finish_reason == "abort":
            raise EngineDead("the engine aborted the request")
        if delta.logprobs is not None:
            self._hold(delta.logprobs.nbytes)
        return [delta, *self._watch_reasoning(choice, delta)] if self._budgets else [delta]

    def _watch_reasoning(self, choice: Choice, delta: TextDelta) -> list[TextDelta]:
        """Count ``delta`` against the choice's budget, and force the end of the reasoning at the limit. The
        choice then continues in a new sequence. Return the delta of the end marker; [] without an end."""
        budget = self._budgets.get(choice.index)
        if budget is None or choice.finished:
            return []
        budget.take(delta.text)
        forced = self._force_end(choice) if budget.spent else None
        if forced is None:
            return []
        links, old = self.front.links, self._submitted[choice.index]
        # The old sequence ends. A new sequence of the same choice continues from all tokens so far.
        links.finish(self.flow, choice.sequence)
        self._ended_reasoning.add(choice.index)
        ids = self.front.ids
        made = after(old, choice.token_ids, sequence=ids.mint(), request=ids.mint())
        self._ids += [made.sequence, made.request]
        del self._by_sequence[choice.sequence]
        choice.sequence = made.sequence
        self._by_sequence[made.sequence] = choice
        # The end marker may have completed a stop string.
        if not choice.finished:
            known = self._hashes.get(old.request)
            links.extend(self.flow, made, {} if known is None else {made.request: known})
        return [forced]

    def _force_end(self, choice: Choice) -> TextDelta | None:
        """Append the end-of-reasoning marker to the choice, and remove the choice's budget. Return the
        marker's delta; None without room for the marker and an answer."""
        del self._budgets[choice.index]
        closing = self.front.reasoning_end
        if len(choice.token_ids) + len(closing) >= self._submitted[choice.index].params.max_tokens:
            return None
        return choice.on_event(TokenEvent(sequence=choice.sequence, token_ids=closing))

    def named(self, prefix: str) -> str:
        """Set and return the answer's id: ``prefix`` and random digits. Registers the request under the id
        in ``Front.running``, for ``abort``."""
        self.id = prefix + secrets.token_hex(12)
        self.front.running[self.id] = self
        self._times.named(self.id)
        return self.id

    def abort(self) -> None:
        """Request the end of every open choice at the present token, with finish reason "abort". The next
        return of ``next`` has the last deltas."""
        self._aborted = True
        self.flow.wake()

    def _cut(self) -> list[TextDelta]:
        """End every open choice with finish reason "abort", and finish all sequences in the engine. Return
        the last deltas."""
        deltas = [choice.abort() for choice in self.choices]
        for choice in self.choices:
            self.front.links.finish(self.flow, choice.sequence)
        return [delta for delta in deltas if delta is not None]

    def spent(self) -> int:
        """Return the number of tokens processed by the engine for the request."""
        return 0 if self._flow is None else self.usage().total_tokens

    def _hold(self, size: int) -> None:
        """Count ``size`` bytes of logprobs or routes collected for an answer that is not streamed.
        Raises InvalidRequest over the limit."""
        if self.job.asked.stream:
            return
        self._held_bytes += size
        if self._held_bytes > (most := self.front.section.max_response_bytes):
            raise InvalidRequest(
                f"the answer's logprobs and routed experts have more than {most} bytes "
                "(--max-response-bytes); request fewer tokens or fewer logprobs per token"
                + ("" if self.job.asked.binary else ", or stream the answer"),
                param="logprobs",
                code="response_too_large",
            )

    def usage(self) -> Usage:
        """Return the token counts so far. A prompt counts once, whatever ``n``. Counts of drafts are
        present only if the server speculates."""
        n = self.job.params.n
        drafts = None
        if self.front.config.speculation.drafts:
            drafts = (sum(c.accepted for c in self.choices), sum(c.rejected for c in self.choices))
        return make_usage(
            prompt=sum(prompt.count for prompt in self.job.prompts),
            completion=sum(len(choice.token_ids) for choice in self.choices),
            cached=sum(choice.num_cached for choice in self.choices[::n]),
            drafts=drafts,
            miss=shown_miss(self.choices[0].cache_miss, self.job.prompts[0].data, self.tokenizer),
        )

    def succeeded(self) -> None:
        """Record the request as a success in metrics, log and trace. Call at most once."""
        usage = self.usage()
        reasons = [choice.finish_reason or "" for choice in self.choices]
        generated = [len(choice.token_ids) for choice in self.choices]
        self._times.done(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, generated, reasons)

    def close(self) -> None:
        """Release everything: open sequences are finished in the engine, all ids are freed, and the
        answer's id is no longer known to ``abort``. A submitted request counts as ended for the retry
        times. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open = False
        if self._timer is not None:
            self._timer.cancel()
        # The rate of ended requests gives the retry times of refused requests.
        if self._flow is not None:
            self.front.links.release(self._flow)
            self.front.retry_after.ended(asyncio.get_running_loop().time())
        if self.id:
            self.front.running.pop(self.id, None)
        for made in self._ids:
            self.front.ids.release(made)


async def probe(front: Front) -> None:
    """Generate a token in every live engine process, to prove readiness. A model without an output head
    makes an embedding. Raises ReportedError for an error of an engine, and EngineDead after
    ``engine_timeout`` seconds.

    Waits for all answers. Where engines come and go, one good answer is enough: one bad engine must not keep
    a new API server from starting.
    """
    pooling: Pooling = "" if front.config.spec.head else "last"
    # Two ids per instance: a sequence and a request.
    ids = [front.ids.mint() for _ in range(2 * len(front.links.instances))]
    submits = [
        Submit(
            sequence=sequence,
            request=request,
            seed=0,
            prompt_ids=ids_to_bytes([0]),
            params=TokenParams(temperature=0.0, max_tokens=1),
            salt=READINESS_SALT,
            pooling=pooling,
        )
        for sequence, request in zip(ids[::2], ids[1::2], strict=True)
    ]
    flow = front.links.submit_each(submits)
    elastic, good = front.links.elastic, False
    try:
        async with asyncio.timeout(front.section.engine_timeout):
            while flow.open and not (elastic and good):
                for event in await flow.next():
                    if event.error is None:
                        good = good or event.finish is not None
                    elif not elastic or not (flow.open or good):
                        raise ReportedError(event.error)
    except TimeoutError:
        raise EngineDead("the engine did not generate a first token in time") from None
    finally:
        front.links.release(flow)
        for made in ids:
            front.ids.release(made)


def usage_of_chunk(generation: Generation) -> Usage | UnsetType | None:
    """Return the usage for a chunk that is not the last; null or absent unless usage in each chunk was
    requested."""
    if generation.job.asked.usage_in_chunks:
        return generation.usage()
    return None if generation.job.asked.usage_in_stream else UNSET
