"""Answers of the Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from weft.common.errors import ErrorInfo
from weft.front.http.answers import Usage, to_json
from weft.front.http.streaming import StreamForm
from weft.front.messages import messages_events as e
from weft.front.messages.messages_content import ContentBlocks
from weft.front.messages.messages_errors import error_body, translated
from weft.front.protocol.messages.messages_conversion import MessagesFacts
from weft.front.requests.generation import Generation
from weft.front.requests.outputs import ChoiceOutput
from weft.front.requests.serving import AnswerShape
from weft.text.choice import TextDelta
from weft.text.token_counts import cache_creation, reasoning_tokens

FORM = StreamForm(named=True, idle=b'event: ping\ndata: {"type": "ping"}\n\n', end=b"")


class MessagesShape(AnswerShape):
    """Answer of one request: a single message."""

    form = FORM

    def __init__(self, generation: Generation, *, block: int) -> None:
        """Name the answer in ``generation``. ``block``: tokens per cache block, see ``cache_creation``."""
        self._generation = generation
        self._block = block
        self._facts = msgspec.json.decode(generation.job.facts, type=MessagesFacts)
        self._id = generation.named("msg_")
        self._blocks = ContentBlocks(omit_reasoning=self._facts.omit_reasoning)
        self._output = ChoiceOutput(generation.parser())

    @property
    def attribution_moved(self) -> bool:
        """True if an attribution line was dropped from the prompt."""
        return self._facts.attribution

    def opening(self) -> list[Any]:
        message = self._message(content=[], output=0)
        return [e.MessageStart(message=message)]

    def weight(self, delta: TextDelta) -> int:
        return 0

    def take(self, delta: TextDelta) -> None:
        self.chunks(delta)

    def chunks(self, delta: TextDelta) -> list[Any]:
        return [event for found in self._output.take(delta) for event in self._blocks.take(found)]

    def closing(self, usage: Usage) -> list[Any]:
        """End the open block. Return its events, the stop reason with the usage, and the end of the
        message."""
        ended = self._blocks.close()
        made = self._usage(usage.completion_tokens)
        delta = e.DeltaUsage(
            input_tokens=made.input_tokens,
            cache_creation_input_tokens=made.cache_creation_input_tokens,
            cache_read_input_tokens=made.cache_read_input_tokens,
            output_tokens=made.output_tokens,
            output_tokens_details=made.output_tokens_details,
        )
        reason, stop = self._ending()
        return [
            *ended,
            e.MessageDelta(delta=e.Ending(stop_reason=reason, stop_sequence=stop), usage=delta),
            e.MessageStop(),
        ]

    def failed(self, error: ErrorInfo) -> list[Any]:
        return [error_body(translated(error))]

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole message as one piece of JSON. Ends the open block."""
        self._blocks.close()
        message = self._message(content=self._blocks.done, output=usage.completion_tokens)
        message.stop_reason, message.stop_sequence = self._ending()
        yield to_json(message)

    def _message(self, *, content: list[Any], output: int) -> e.MessageAnswer:
        return e.MessageAnswer(
            id=self._id, model=self._generation.job.asked.model, content=content, usage=self._usage(output)
        )

    def _ending(self) -> tuple[e.StopReason | None, str | None]:
        """Return (stop reason, matched stop sequence or None). Both are None for an aborted message. A
        length cut by the free context, not by ``max_tokens``, has its own stop reason."""
        choice = self._generation.choices[0]
        if choice.finish_reason == "length":
            cut = self._generation.job.prompts[0].max_tokens < self._facts.max_tokens
            return ("model_context_window_exceeded" if cut else "max_tokens"), None
        if choice.finish_reason == "abort":
            return None, None
        if isinstance(choice.stop_reason, str):
            return "stop_sequence", choice.stop_reason
        return ("tool_use" if self._output.calls_whole else "end_turn"), None

    def _usage(self, output: int) -> e.MessageUsage:
        """Return the usage with ``output`` output tokens. Each prompt token is counted once: as input, as
        cache creation, or as cache read."""
        tokens = self._generation.job.prompts[0].count
        cached = self._generation.choices[0].num_cached
        created = cache_creation(tokens, cached, self._block)
        thinking = reasoning_tokens(self._generation.tokenizer, self._output.reasoning, output)
        return e.MessageUsage(
            input_tokens=tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            output_tokens=output,
            cache_creation=e.CacheCreation(ephemeral_5m_input_tokens=created),
            output_tokens_details=e.ThinkingTokens(thinking_tokens=thinking),
        )
