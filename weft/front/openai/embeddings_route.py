"""POST /v1/embeddings: vectors made from a prompt's final hidden states."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.front.http import openapi
from weft.front.http.answers import Embedding, EmbeddingList, EmbeddingUsage, Usage, to_json
from weft.front.openai.whole_shape import NUMBER_BYTES, WholeShape, check_size
from weft.front.protocol.embeddings_request import EmbeddingRequest
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation
from weft.front.requests.read_pooled import decode_facts
from weft.front.requests.serving import handle
from weft.text.choice import Choice
from weft.text.scoring import shown


def add_embeddings(app: FastAPI, front: Front) -> None:
    """Add the route to ``app``."""

    @app.post("/v1/embeddings", openapi_extra=openapi.answers_of(EmbeddingRequest, EmbeddingList))
    async def create_embedding(request: Request) -> Response:
        """Make a vector of each text, from the model's last hidden states."""
        return await handle(front, request, "embeddings", EmbeddingShape)


class EmbeddingShape(WholeShape):
    """Answer of one embeddings request. Never streamed."""

    def __init__(self, generation: Generation) -> None:
        """Raises InvalidRequest for an answer above ``--max-response-bytes``, by an estimate of the size."""
        front, self._generation = generation.front, generation
        self._asked = generation.job.asked
        self._facts = decode_facts(generation.job.facts)
        each = 6 if self._asked.encoding == "base64" else NUMBER_BYTES
        dimensions = self._facts.dimensions or front.config.spec.hidden
        size = len(generation.choices) * dimensions * each
        check_size(size, front.section.max_response_bytes, "input", "set encoding_format to base64")

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the answer's JSON: one piece per vector, with a head and an end."""
        yield b'{"object":"list","data":['
        for number, choice in enumerate(self._generation.choices):
            yield (b"," if number else b"") + to_json(self._embedding(choice))
        counts = EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)
        yield b'],"model":' + to_json(self._asked.model) + b',"usage":' + to_json(counts) + b"}"

    def _embedding(self, choice: Choice) -> Embedding:
        vector = shown(choice.embedding, self._facts.dimensions, self._facts.normalize)
        if self._asked.encoding == "base64":
            return Embedding(index=choice.index, embedding=base64.b64encode(vector.tobytes()).decode())
        return Embedding(index=choice.index, embedding=np.asarray(vector).tolist())
