"""POST /v1/rerank, /v1/score and /v1/classify: numbers for whole prompts.

A classifier gives numbers by itself. With any other model a score is the cosine of two embeddings.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
import numpy as np
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.front.http import openapi
from weft.front.http.answers import EmbeddingUsage, Usage, to_json
from weft.front.openai.whole_shape import NUMBER_BYTES, WholeShape, check_size
from weft.front.protocol.scoring_request import ClassifyRequest, RerankRequest, ScoreRequest
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation
from weft.front.requests.read_pooled import PooledFacts, decode_facts
from weft.front.requests.serving import handle
from weft.text.scoring import cosine, probabilities


class ScoredDocument(msgspec.Struct, kw_only=True):
    text: str


class RankedDocument(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    """Number of the document in the request."""
    document: ScoredDocument | None = None
    relevance_score: float


class Ranking(msgspec.Struct, kw_only=True):
    """Documents, the most relevant document first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: EmbeddingUsage


class Score(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class Classified(msgspec.Struct, kw_only=True):
    index: int
    label: str
    """Label with the largest number."""
    probs: list[float]
    num_classes: int


class ClassList(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Classified]
    usage: EmbeddingUsage


def add_scoring(app: FastAPI, front: Front) -> None:
    """Add the routes to ``app``."""

    @app.post("/v1/rerank", openapi_extra=openapi.answers_of(RerankRequest, Ranking))
    @app.post("/rerank", openapi_extra=openapi.answers_of(RerankRequest, Ranking))
    @app.post("/v2/rerank", openapi_extra=openapi.answers_of(RerankRequest, Ranking))
    async def rerank(request: Request) -> Response:
        """Order documents by their relevance for a query."""
        return await handle(front, request, "rerank", functools.partial(PooledShape, ranking))

    @app.post("/v1/score", openapi_extra=openapi.answers_of(ScoreRequest, ScoreList))
    @app.post("/score", openapi_extra=openapi.answers_of(ScoreRequest, ScoreList))
    async def score(request: Request) -> Response:
        """Return the score of each pair of texts."""
        return await handle(front, request, "score", functools.partial(PooledShape, score_list))

    @app.post("/v1/classify", openapi_extra=openapi.answers_of(ClassifyRequest, ClassList))
    @app.post("/classify", openapi_extra=openapi.answers_of(ClassifyRequest, ClassList))
    async def classify(request: Request) -> Response:
        """Return the label of each input, with the probability of each label."""
        return await handle(front, request, "classify", functools.partial(PooledShape, class_list))


class PooledShape(WholeShape):
    """Answer of one request. Never streamed."""

    def __init__(self, make: Callable[[PooledShape, EmbeddingUsage], Any], generation: Generation) -> None:
        """``make``: makes the answer. Raises InvalidRequest for an answer above ``--max-response-bytes``, by
        an estimate of the size."""
        front = generation.front
        self.front, self.generation = front, generation
        self.id = generation.named(
            "rank-" if make is ranking else "score-" if make is score_list else "classify-"
        )
        self.facts: PooledFacts = decode_facts(generation.job.facts)
        self._make = make
        classify = front.config.spec.classify
        labels = 1 if classify is None else classify.labels
        size = len(generation.choices) * labels * NUMBER_BYTES + sum(map(len, self.facts.documents))
        check_size(
            size, front.section.max_response_bytes, generation.job.param, "set return_documents to false"
        )

    @property
    def model(self) -> str:
        return self.generation.job.asked.model

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the answer's JSON."""
        counts = EmbeddingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.prompt_tokens)
        yield to_json(self._make(self, counts))

    def numbers(self) -> list[np.ndarray]:
        """Return the numbers of each prompt of a classifier, as probabilities unless the request says
        otherwise."""
        classify = self.front.config.spec.classify
        assert classify is not None
        given = [np.frombuffer(choice.embedding, "<f4") for choice in self.generation.choices]
        return [probabilities(own, classify, self.facts.activate) for own in given]

    def scores(self) -> list[float]:
        """Return the score of each pair."""
        if self.front.config.spec.classify is not None:
            return [float(own[0]) for own in self.numbers()]
        vectors = [choice.embedding for choice in self.generation.choices]
        return [cosine(vectors[one], vectors[other]) for one, other in self.facts.pairs]


def ranking(shape: PooledShape, usage: EmbeddingUsage) -> Ranking:
    """Return the answer of a rerank request. Equal scores stay in the order of the request."""
    texts = shape.facts.documents
    results = [
        RankedDocument(
            index=number,
            relevance_score=score,
            document=ScoredDocument(text=texts[number]) if texts else None,
        )
        for number, score in enumerate(shape.scores())
    ]
    results.sort(key=lambda one: -one.relevance_score)
    return Ranking(id=shape.id, model=shape.model, results=results[: shape.facts.top or None], usage=usage)


def score_list(shape: PooledShape, usage: EmbeddingUsage) -> ScoreList:
    """Return the answer of a score request."""
    data = [Score(index=number, score=score) for number, score in enumerate(shape.scores())]
    return ScoreList(id=shape.id, created=int(time.time()), model=shape.model, data=data, usage=usage)


def class_list(shape: PooledShape, usage: EmbeddingUsage) -> ClassList:
    """Return the answer of a classify request."""
    classify = shape.front.config.spec.classify
    assert classify is not None
    data = [
        Classified(
            index=number,
            label=classify.names[int(own.argmax())],
            probs=own.tolist(),
            num_classes=classify.labels,
        )
        for number, own in enumerate(shape.numbers())
    ]
    return ClassList(id=shape.id, created=int(time.time()), model=shape.model, data=data, usage=usage)
