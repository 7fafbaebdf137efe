"""Reading of requests that score whole sequences."""

from __future__ import annotations

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import parse
from weft.front.protocol.sequence_request import SequenceFacts, SequenceRequest
from weft.front.protocol.turns import renamed
from weft.front.requests.reading import COLUMN_BYTES, Job, Reader


def read_sequences(reader: Reader, body: bytes) -> Job:
    """Return the job of a request: one prompt per sequence. Raises WeftError."""
    asked = reader.named(parse(body, SequenceRequest))
    if asked.response_format == "binary":
        # Arrays have the length of the longest completion for every sequence.
        size = len(asked.sequences) * asked.longest * (1 + asked.top) * COLUMN_BYTES
        if size > reader.max_response_bytes:
            raise InvalidRequest(
                f"the arrays would have about {size} bytes, padded to the longest completion; this server's "
                f"limit is {reader.max_response_bytes} (--max-response-bytes): send fewer sequences, "
                "sequences of similar lengths, or fewer top_logprobs",
                param="sequences",
                code="response_too_large",
            )
    try:
        job = reader.scored(asked.sequences, asked.params(), asked.form(), "sequences")
    except InvalidRequest as error:
        raise renamed(error, {"prompt_logprobs": "top_logprobs"}) from None
    facts = SequenceFacts(asked.prompt_lengths, asked.top)
    return msgspec.structs.replace(job, facts=msgspec.json.encode(facts))
