"""Reading of pairs of texts: the work and the memory for one body are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import weft
from weft.common.errors import ContextLength, InvalidRequest
from weft.front.requests.read_pooled import (
    MOST_REPEATED,
    decode_facts,
    read_embeddings,
    read_rerank,
    read_score,
)
from weft.front.requests.reading import Job, Reader
from weft.text import tokenizer as tokenizers
from weft.text.model import TextModel
from weft.text.scoring import Tasks
from weft.text.submit import ModelLimits
from weft.types.pooled import ClassifySpec

FOLDER = Path(weft.__file__).parent / "checkpoints/spool-text"
LIMITS = ModelLimits(vocab_size=1024, max_model_len=2048, end_ids=(2,))
LONG = "Tom has 12 apples and buys 7 more. " * 100_000


class Counting:
    """A tokenizer that records the lengths of encoded texts."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seen: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode_batch_fast(self, texts: list[Any], **options: Any) -> Any:
        self.seen += [len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts]
        return self._inner.encode_batch_fast(texts, **options)

    def encode(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("this call keeps Python's lock for as long as it takes")


def judge(instructed: bool = False) -> Reader:
    """Return the reader of a model that scores pairs as one prompt."""
    classify = ClassifySpec(names=("LABEL_0",), tokens=(5, 6), difference=True, instructed=instructed)
    return Reader(TextModel.load(FOLDER), ("m",), LIMITS, 1 << 20, tasks=Tasks(classify=classify, hidden=64))


def rerank(reader: Reader, **fields: Any) -> Job:
    return read_rerank(reader, json.dumps({"model": "m", **fields}).encode())


@pytest.mark.parametrize("instructed", [False, True])
def test_pairs_cost_no_more_than_the_context(instructed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = judge(instructed)
    short = [rerank(reader, query="Tom", documents=[LONG[:20000]], truncate_prompt_tokens=n) for n in (1, 90)]
    counting = Counting(reader.text.tokenizer._private)
    monkeypatch.setattr(reader.text.tokenizer, "_private", counting)
    with pytest.raises(ContextLength) as caught:
        rerank(reader, query="Tom", documents=[LONG])
    assert caught.value.param == "documents"
    for tokens, same in zip((1, 90), short, strict=True):
        made = rerank(reader, query="Tom", documents=[LONG], truncate_prompt_tokens=tokens)
        assert made.prompts == same.prompts
    assert sum(counting.seen) < 10 * tokenizers.LONG_CHARS
    counting.seen.clear()
    body = {"model": "m", "input": LONG, "truncate_prompt_tokens": 90}
    cut = read_embeddings(reader, json.dumps(body).encode())
    assert cut.prompts[0].ids == reader.text.tokenizer.encode(LONG[:20000])[:90]
    assert sum(counting.seen) < 4 * tokenizers.LONG_CHARS


def test_a_query_is_not_repeated_without_end() -> None:
    reader, most = judge(True), MOST_REPEATED // 2047
    fields: dict[str, Any] = {"documents": ["a"] * 2048, "truncate_prompt_tokens": 1}
    for more in ({"query": "q" * (most + 1)}, {"query": "q", "instruction": "i" * most}):
        with pytest.raises(InvalidRequest, match="fewer documents") as caught:
            rerank(reader, **fields, **more)
        assert caught.value.param == "documents"
    body = {"model": "m", "text_1": "q" * (most + 1), "text_2": ["a"] * 2048}
    with pytest.raises(InvalidRequest, match="fewer documents"):
        read_score(reader, json.dumps(body).encode())
    assert len(rerank(reader, query="Tom", documents=["a"] * 50).prompts) == 50
    # Different texts are part of the body, and repeat nothing.
    sides = {"text_1": ["q" * (MOST_REPEATED - at) for at in range(2)], "text_2": ["a", "b"]}
    body = {"model": "m", "truncate_prompt_tokens": 1, **sides}
    assert len(read_score(judge(), json.dumps(body).encode()).prompts) == 2


def test_a_beginning_has_the_same_first_tokens() -> None:
    tokenizer = TextModel.load(FOLDER).tokenizer
    text = LONG[: 5 * tokenizers.LONG_CHARS]
    whole = tokenizer.encode(text)
    for limit in (1, 50, 2048, 20_000):
        begin = tokenizer.shortened(text, limit)
        assert tokenizer.encode(begin)[:limit] == whole[:limit]
        assert len(tokenizer.encode(begin)) > limit
        assert text.startswith(begin)
    assert len(tokenizer.shortened(text, 50)) == tokenizers.LONG_CHARS
    assert tokenizer.shortened("Tom", 1) == "Tom"


@pytest.mark.parametrize("top", [0, 3, 1 << 62, 10**30])
def test_any_number_of_results_may_be_asked(top: int) -> None:
    job = rerank(judge(), query="Tom", documents=["a", "b"], top_n=top)
    assert decode_facts(job.facts).top == min(top, 2)
