"""Reading of requests without output tokens: embeddings, scores, reranking and classes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions, Sharing
from weft.front.protocol.embeddings_request import EmbeddingRequest
from weft.front.protocol.parse import parse
from weft.front.protocol.scoring_request import ClassifyRequest, RerankRequest, ScoreRequest
from weft.front.requests.reading import Job, Prompt, Reader
from weft.text.scoring import Prompts, check_dimensions
from weft.text.submit import prompt_bytes
from weft.text.tokenizer import TooManyTokens, check_text
from weft.types.messages import Pooling
from weft.types.sampling import SamplingParams, TokenParams

MOST_REPEATED = 4 << 20
"""Maximum characters of repeated queries and instructions. A classifier reads a query once per document, so a
small body could otherwise ask for prompts of many gigabytes."""


class PooledFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a request for the shape of the answer."""

    dimensions: int | None = None
    normalize: bool = True
    activate: bool = True
    pairs: tuple[tuple[int, int], ...] = ()
    """For scores by embeddings: numbers of the two prompts of each score; () for one prompt per score."""
    top: int = 0
    """Maximum number of results; 0: all."""
    documents: tuple[str, ...] = ()
    """Texts to repeat in the answer."""


encode_facts = msgspec.msgpack.Encoder().encode
decode_facts = msgspec.msgpack.Decoder(PooledFacts).decode


def read_embeddings(reader: Reader, body: bytes) -> Job:
    """Return the job of an embeddings request. Raises WeftError."""
    asked = reader.named(parse(body, EmbeddingRequest))
    tasks = reader.tasks
    _check_embeds(reader, "input")
    check_dimensions(asked.dimensions, tasks.pooled, tasks.hidden)
    facts = PooledFacts(
        dimensions=asked.dimensions,
        normalize=tasks.pooled.normalize if asked.normalize is None else asked.normalize,
    )
    ids = [_ids(reader, prompt, "input", asked.truncate_prompt_tokens) for prompt in asked.prompts()]
    encoding = asked.encoding_format or "float"
    form = AnswerOptions(model=asked.model or "", stream=False, encoding=encoding)
    return _job(reader, ids, form, asked.sharing(), tasks.pooled.mode, "input", facts)


def read_classify(reader: Reader, body: bytes) -> Job:
    """Return the job of a classify request. Raises WeftError."""
    asked = reader.named(parse(body, ClassifyRequest))
    if reader.tasks.classify is None:
        raise InvalidRequest(
            "this model has no classes: serve a checkpoint for sequence classification, or name tokens with "
            "--hf-overrides (classifier_from_token)",
            param="model",
        )
    facts = PooledFacts(activate=asked.use_activation is not False)
    ids = [_ids(reader, prompt, "input", asked.truncate_prompt_tokens) for prompt in asked.prompts()]
    form = AnswerOptions(model=asked.model or "", stream=False, encoding="float")
    return _job(reader, ids, form, asked.sharing(), "classify", "input", facts)


def read_score(reader: Reader, body: bytes) -> Job:
    """Return the job of a score request. Raises WeftError."""
    asked = reader.named(parse(body, ScoreRequest))
    first, second = asked.pairs()
    return _scores(reader, asked, first, second, PooledFacts(activate=asked.use_activation is not False))


def read_rerank(reader: Reader, body: bytes) -> Job:
    """Return the job of a rerank request. Raises WeftError."""
    asked = reader.named(parse(body, RerankRequest))
    texts = asked.texts()
    facts = PooledFacts(
        activate=asked.use_activation is not False,
        top=min(asked.top_n or 0, len(texts)),
        documents=() if asked.return_documents is False else tuple(texts),
    )
    return _scores(reader, asked, [asked.query] * len(texts), texts, facts)


def _scores(
    reader: Reader,
    asked: ScoreRequest | RerankRequest,
    first: Sequence[str],
    second: Sequence[str],
    facts: PooledFacts,
) -> Job:
    """Return the job of the scores of pairs. A classifier reads each pair as one prompt; otherwise the score
    is the cosine of two embeddings. Raises WeftError."""
    tasks, limit = reader.tasks, asked.truncate_prompt_tokens
    form = AnswerOptions(model=asked.model or "", stream=False, encoding="float")
    prompts = Prompts(reader.text.tokenizer, tasks.classify)
    prompts.check_instruction(asked.instruction)
    if tasks.classify is None:
        _check_embeds(reader, "model")
        # Equal texts are one prompt.
        texts = list(dict.fromkeys([*first, *second]))
        number = {text: at for at, text in enumerate(texts)}
        pairs = tuple((number[one], number[two]) for one, two in zip(first, second, strict=True))
        ids = [_ids(reader, text, "documents", limit) for text in texts]
        facts = msgspec.structs.replace(facts, pairs=pairs)
        return _job(reader, ids, form, asked.sharing(), tasks.pooled.mode, "documents", facts)
    if tasks.classify.labels != 1:
        raise InvalidRequest(
            f"this model has {tasks.classify.labels} classes, and a score needs a model with one: use "
            "/v1/classify",
            param="model",
        )
    again = len(asked.instruction or "") * (len(first) - 1)
    repeated = sum(map(len, first)) - sum(map(len, set(first))) + again
    if repeated > MOST_REPEATED:
        raise InvalidRequest(
            f"the query and the instruction are read once per document: {repeated} repeated characters; the "
            f"limit is {MOST_REPEATED}: send fewer documents per request, or a shorter query",
            param="documents",
        )
    ids = []
    most = _limit(reader, limit)
    for one, two in zip(first, second, strict=True):
        check_text(one, "query")
        check_text(two, "documents")
        # A text longer than the context stays longer, so that the error below names the cause.
        one, two = (reader.text.tokenizer.shortened(text, reader.limits.max_model_len) for text in (one, two))
        made = prompts.pair(one, two, asked.instruction, most)
        ids.append(_within(reader, made, "documents"))
    return _job(reader, ids, form, asked.sharing(), "classify", "documents", facts)


def _check_embeds(reader: Reader, param: str) -> None:
    """Raise InvalidRequest if the checkpoint's layout gives no embeddings here."""
    if reader.tasks.pooled.refused:
        raise InvalidRequest(f"no embeddings: {reader.tasks.pooled.refused}", param=param)


def _limit(reader: Reader, tokens: int | None) -> int | None:
    """Return the maximum tokens of ``truncate_prompt_tokens``; None without a maximum. Raises
    InvalidRequest for a number above the model's context."""
    most = reader.limits.max_model_len
    if tokens is not None and tokens > most:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be at most {most}, the model's context",
            param="truncate_prompt_tokens",
        )
    return most if tokens == -1 else tokens


def _ids(reader: Reader, prompt: str | list[int], param: str, tokens: int | None) -> list[int]:
    """Return the token ids of a prompt, cut to ``tokens``. Raises WeftError."""
    limit = _limit(reader, tokens)
    if limit is None:
        return reader.ids_of(prompt, param)
    if isinstance(prompt, str):
        check_text(prompt, param)
        return reader.text.tokenizer.encode_cut(prompt, limit=limit)
    return prompt[:limit]


def _within(reader: Reader, ids: list[int], param: str) -> list[int]:
    """Return ``ids``. Raises ContextLength for too many."""
    if len(ids) > reader.limits.max_model_len:
        raise reader.too_long(TooManyTokens(len(ids)), param)
    return ids


def _job(
    reader: Reader,
    prompts: Sequence[list[int]],
    form: AnswerOptions,
    sharing: Sharing,
    pooling: Pooling,
    param: str,
    facts: PooledFacts,
) -> Job:
    """Return the job of prompts without output. Raises InvalidRequest."""
    return Job(
        prompts=[Prompt(data=prompt_bytes(ids, reader.limits, param), max_tokens=1) for ids in prompts],
        params=SamplingParams(max_tokens=1),
        token_params=TokenParams(max_tokens=1),
        asked=form,
        continues=True,
        param=param,
        sharing=sharing,
        pooling=pooling,
        facts=encode_facts(facts),
    )
