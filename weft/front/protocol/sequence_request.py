"""POST /get_sequence_logprobs/: logprobs of given sequences, with the names of TRL."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions
from weft.front.protocol.parse import Body, between, short
from weft.types.sampling import MOST_TOP_LOGPROBS, SamplingParams

TOP = 100
"""Default of ``top_logprobs``, as TRL's."""


class SequenceRequest(Body, frozen=True, kw_only=True):
    """Sequences whose tokens after a prompt are scored."""

    sequences: list[list[int]]
    """Token ids, prompt and completion."""
    prompt_lengths: list[int]
    """Number of prompt tokens of each sequence. Only later tokens are in the answer."""
    top_logprobs: int | None = None
    """Likeliest tokens at each position. Default: 100."""
    temperature: float | None = None
    """Only 1: logprobs are of the model's own logits."""
    response_format: Literal["json", "binary"] | None = None
    """binary: base64 of arrays. Default: json."""
    model: str | None = None
    """Model name; default: the server's model."""

    def check(self) -> None:
        """Raise InvalidRequest for parameters out of range."""
        if self.model is not None:
            short("model", self.model)
        if not self.sequences:
            raise InvalidRequest("sequences must not be empty", param="sequences")
        if len(self.sequences) != len(self.prompt_lengths):
            raise InvalidRequest(
                "sequences and prompt_lengths must have the same length", param="prompt_lengths"
            )
        for number, (ids, length) in enumerate(zip(self.sequences, self.prompt_lengths, strict=True)):
            if not 0 <= length <= len(ids):
                raise InvalidRequest(
                    f"prompt_lengths[{number}] is {length}; the sequence has {len(ids)} tokens",
                    param="prompt_lengths",
                )
        between("top_logprobs", self.top, 1, MOST_TOP_LOGPROBS)
        if self.temperature is not None and self.temperature != 1:
            raise InvalidRequest(
                "temperature must be 1: logprobs are of the model's own logits", param="temperature"
            )

    @property
    def top(self) -> int:
        return TOP if self.top_logprobs is None else self.top_logprobs

    @property
    def longest(self) -> int:
        """Tokens of the longest completion."""
        pairs = zip(self.sequences, self.prompt_lengths, strict=True)
        return max(len(ids) - length for ids, length in pairs)

    def params(self) -> SamplingParams:
        """Return the sampling parameters: one token, which the answer leaves out."""
        return SamplingParams(max_tokens=1, prompt_logprobs=self.top)

    def form(self) -> AnswerOptions:
        """Return the form of the answer."""
        binary: Literal["", "float32"] = "float32" if self.response_format == "binary" else ""
        return AnswerOptions(model=self.model or "", stream=False, prompt_logprobs=True, binary=binary)


class SequenceFacts(msgspec.Struct, frozen=True):
    """Facts of a request for the shape of the answer."""

    lengths: list[int]
    top: int
