"""One HTTP request's sequences, from submission to the end of every choice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from weft.common.errors import EngineDead, InvalidRequest, Overloaded
from weft.front.context import Front
from weft.front.head_client import HeadError
from weft.front.metrics import RequestTimes
from weft.front.responses import Usage, make_usage
from weft.front.streaming import within
from weft.text.choice import Choice, Delta
from weft.text.submit import build_submits, minted_seed
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import SamplingParams, TokenParams

PROBE_SALT = "weft readiness"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, read: made in a text thread."""

    ids: list[int]
    text: str = ""
    """As ``echo`` shows it."""


class Generation:
    """Choices of all prompts of one request. Choice ``i`` belongs to prompt ``i // n``.

    Owns its sequences: whoever makes one calls ``close``, however the request ended. Used from the event
    loop only.
    """

    def __init__(
        self,
        front: Front,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        continues: bool,
        times: RequestTimes,
        deadline: float,
        param: str,
        seed: int,
    ) -> None:
        """Checks and submits. Raises WeftError, naming ``param`` for the prompt; then nothing was submitted.

        ``deadline``: time of the event loop's clock. ``continues``: see ``Choice``. ``seed``: minted for the
        request, in case it brings none.
        """
        self.prompts = prompts
        self.params = params
        self.choices: list[Choice] = []
        self._front = front
        self._times = times
        self._deadline = deadline
        self._ids: list[int] = []
        self._open = True
        try:
            submits = self._build(param, seed)
            for index, submit in enumerate(submits):
                made = Choice(
                    front.text.tokenizer, params, sequence=submit.sequence, index=index, continues=continues
                )
                self.choices.append(made)
            self._by_sequence = {choice.sequence: choice for choice in self.choices}
            self.flow = front.client.submit(submits, times.event)
        except BaseException:
            self._release_ids()
            raise

    def _build(self, param: str, seed: int) -> list[Submit]:
        front = self._front
        wanted = len(self.prompts) * self.params.n
        # All of them reach the queue before the next step takes any out of it: more would get 429 for ever.
        if wanted > (most := front.config.scheduler.max_queued_requests):
            raise InvalidRequest(f"prompts times n must be at most {most} on this server", param="n")
        if front.client.open_sequences + wanted > front.lifecycle.capacity:
            raise Overloaded("the server's queue is full; try again later")
        submits: list[Submit] = []
        owner = front.ids.mint()
        self._ids.append(owner)
        for number, prompt in enumerate(self.prompts):
            made = build_submits(
                prompt.ids,
                self.params,
                front.limits,
                front.text.tokenizer,
                ids=front.ids,
                seed=minted_seed(seed, number) if number else seed,
                owner=owner,
                prompt_param=param,
            )
            self._ids += [made[0].request, *(submit.sequence for submit in made)]
            submits += made
        return submits

    @property
    def done(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished for choice in self.choices)

    async def next(self) -> list[Delta]:
        """What came since the last call; may be empty. Raises WeftError when the request has failed."""
        async with within(self._deadline):
            events = await self.flow.next()
        deltas = []
        for event in events:
            choice = self._by_sequence[event.sequence]
            delta = choice.on_event(event)
            if delta is None:
                continue
            if delta.send_finish:
                self._front.client.finish(self.flow, choice.sequence)
            if delta.finish_reason == "error" and delta.error is not None:
                raise HeadError(delta.error)
            if delta.finish_reason == "abort":
                raise EngineDead("the engine gave the request up")
            deltas.append(delta)
        return deltas

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever ``n``."""
        n = self.params.n
        drafts = None
        if self._front.config.speculation.drafts:
            drafts = (sum(c.accepted for c in self.choices), sum(c.rejected for c in self.choices))
        return make_usage(
            prompt=sum(len(prompt.ids) for prompt in self.prompts),
            completion=sum(len(choice.token_ids) for choice in self.choices),
            cached=sum(choice.num_cached for choice in self.choices[::n]),
            drafts=drafts,
        )

    def succeeded(self) -> None:
        """Counts the request as answered in full."""
        usage = self.usage()
        reasons = [choice.finish_reason or "" for choice in self.choices]
        self._times.done(usage.prompt_tokens, usage.completion_tokens, reasons)

    def close(self) -> None:
        """Gives everything back: open sequences are finished at the head. Idempotent."""
        if self._open:
            self._open = False
            self._front.client.release(self.flow)
            self._release_ids()

    def _release_ids(self) -> None:
        for made in self._ids:
            self._front.ids.release(made)
        self._ids = []


async def probe(front: Front) -> None:
    """Generates one token through every head: what readiness means. Raises WeftError when that fails."""
    ids = [front.ids.mint() for _ in range(2 * len(front.client.clients))]
    submits = [
        Submit(
            sequence=sequence,
            request=request,
            seed=0,
            prompt_ids=ids_to_bytes([0]),
            params=TokenParams(temperature=0.0, max_tokens=1),
            salt=PROBE_SALT,
        )
        for sequence, request in zip(ids[::2], ids[1::2], strict=True)
    ]
    flow = front.client.submit_each(submits)
    try:
        async with asyncio.timeout(front.section.engine_timeout):
            while flow.open:
                for event in await flow.next():
                    if event.error is not None:
                        raise HeadError(event.error)
    except TimeoutError:
        raise EngineDead("the engine did not make a first token in time") from None
    finally:
        front.client.release(flow)
        for made in ids:
            front.ids.release(made)
