"""The bodies that name a model."""

from __future__ import annotations

from typing import TypeAlias

from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.completions_request import CompletionRequest
from weft.front.protocol.embeddings_request import EmbeddingRequest
from weft.front.protocol.messages.messages_request import CountRequest
from weft.front.protocol.responses.protocol import TokensRequest
from weft.front.protocol.scoring_request import ClassifyRequest, RerankRequest, ScoreRequest
from weft.front.protocol.sequence_request import SequenceRequest
from weft.front.protocol.tokens_request import GenerateRequest

Named: TypeAlias = (
    ChatRequest
    | CompletionRequest
    | EmbeddingRequest
    | RerankRequest
    | ScoreRequest
    | ClassifyRequest
    | CountRequest
    | TokensRequest
    | GenerateRequest
    | SequenceRequest
)
