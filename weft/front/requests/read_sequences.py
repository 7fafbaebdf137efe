"""Reading of requests that score whole sequences."""

from __future__ import annotations

import msgspec

from weft.front.protocol.parse import parse
from weft.front.protocol.sequence_request import SequenceFacts, SequenceRequest
from weft.front.requests.reading import Job, Reader


def read_sequences(reader: Reader, body: bytes) -> Job:
    """Return the job of a request: one prompt per sequence. Raises WeftError."""
    asked = reader.named(parse(body, SequenceRequest))
    job = reader.scored(asked.sequences, asked.params(), asked.form(), "sequences")
    facts = SequenceFacts(asked.prompt_lengths, asked.top)
    return msgspec.structs.replace(job, facts=msgspec.json.encode(facts))
