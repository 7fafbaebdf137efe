"""Reading of a body in a thread or in a process, and the bounds before any work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import weft
from weft.common.errors import ContextLength, InvalidRequest
from weft.front.protocol.responses.read import NONE
from weft.front.requests import reading
from weft.front.requests.read_worker import ReadAnswer, answer_to, decode_answer, payload_of, read_with
from weft.front.requests.reading import Job, Reader
from weft.text import tokenizer as tokenizers
from weft.text.model import TextModel
from weft.text.submit import ModelLimits
from weft.types.sampling import MAX_BAD_TOKENS

FOLDER = Path(weft.__file__).parent / "checkpoints/spool-text"
LIMITS = ModelLimits(vocab_size=1024, max_model_len=2048, end_ids=(2,))


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(TextModel.load(FOLDER), ("m", "other"), LIMITS, 1 << 20)


def completion(reader: Reader, prompt: Any = "Tom has 12", **fields: Any) -> Job:
    return reader.completions(json.dumps({"model": "m", "prompt": prompt, **fields}).encode())


def chat(reader: Reader, text: str = "Tom has 12", **fields: Any) -> Job:
    messages = [{"role": "user", "content": text}]
    return reader.chat(json.dumps({"model": "m", "messages": messages, **fields}).encode())


def test_a_process_reads_what_a_thread_reads(reader: Reader) -> None:
    fields = {"n": 3, "logprobs": 2, "echo": True, "stop": ["x"], "seed": -5, "logit_bias": {"7": 1.5}}
    body = json.dumps({"model": "m", "prompt": ["Tom has", "Ann"], "bad_words": ["12"], **fields}).encode()
    answer = answer_to(reader, b"".join(payload_of("completions", [body[:9], body[9:]])))
    sent = reading.msgspec.msgpack.encode(answer)
    assert decode_answer(sent) == answer == ReadAnswer(job=reader.completions(body))
    refused = answer_to(reader, b"".join(payload_of("chat", [b"[]"])))
    assert refused.error is not None
    assert refused.error.http_status == 400
    assert decode_answer(reading.msgspec.msgpack.encode(refused)) == refused


def test_a_request_read(reader: Reader) -> None:
    job = completion(reader, ["Tom has 12", "Ann"], echo=True, n=2, logprobs=1, bad_words=["12"])
    tokenizer = reader.text.tokenizer
    assert [prompt.ids for prompt in job.prompts] == [tokenizer.encode("Tom has 12"), tokenizer.encode("Ann")]
    assert [prompt.text for prompt in job.prompts] == ["Tom has 12", "Ann"]
    assert completion(reader, [5, 6], echo=True).prompts[0].text == tokenizer.decode([5, 6])
    assert completion(reader, "Ann").prompts[0].text == ""
    assert [prompt.max_tokens for prompt in job.prompts] == [16, 16]
    assert job.token_params.bad
    assert job.params.bad_words == ()  # the engine's alone
    assert (job.params.n, job.asked.top, job.asked.echo, job.continues) == (2, 1, True, True)
    assert not chat(reader).continues
    room = chat(reader).prompts[0]
    assert room.max_tokens == LIMITS.max_model_len - room.count


def test_text_far_beyond_the_context_costs_no_more_than_the_context(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    class Counting:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            seen.extend(map(len, texts))
            return self._inner.encode_batch_fast(texts, **options)

        def encode(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("this call keeps Python's lock for as long as it takes")

    monkeypatch.setattr(reader.text.tokenizer, "_private", Counting(reader.text.tokenizer._private))
    long = "Tom has 12 apples and buys 7 more. " * 200_000
    for read, param in ((completion, "prompt"), (chat, "messages")):
        seen.clear()
        with pytest.raises(ContextLength, match="2048 tokens, but the prompt has at least") as caught:
            read(reader, long)
        assert caught.value.param == param
        assert sum(seen) <= 2 * tokenizers.LONG_CHARS
    with pytest.raises(ContextLength, match="at least 5000"):
        completion(reader, [5] * 5000)


def test_long_texts_that_fit_are_not_refused(reader: Reader) -> None:
    """The estimate by pieces refuses only texts that cannot fit."""
    limits = ModelLimits(vocab_size=1024, max_model_len=40_000, end_ids=())
    wide = Reader(reader.text, ("m",), limits, 1 << 20)
    text = "Tom has 12 apples and buys 7 more. " * 3200
    expected = reader.text.tokenizer.encode(text)
    assert len(text) > tokenizers.LONG_CHARS
    assert len(expected) < 40_000
    assert completion(wide, text).prompts[0].ids == expected
    tight = ModelLimits(vocab_size=1024, max_model_len=len(expected) - 1, end_ids=())
    with pytest.raises(ContextLength):
        completion(Reader(reader.text, ("m",), tight, 1 << 20), text)


def test_bad_words_are_resolved_once_and_bounded(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = reader.text.tokenizer.encode

    def counting(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(reader.text.tokenizer, "encode", counting)
    completion(reader, [[5]] * 256, bad_words=["one", "two"])
    assert encoded == ["one", " one", "two", " two"]
    encoded.clear()
    with pytest.raises(InvalidRequest, match=f"more than {MAX_BAD_TOKENS} tokens") as caught:
        completion(reader, [[5]] * 256, bad_words=[f"word {number:04d} " * 20 for number in range(1024)])
    assert caught.value.param == "bad_words"
    assert sum(map(len, encoded)) < 100_000  # of 500,000 characters
    with pytest.raises(InvalidRequest, match="at most 128 tokens"):
        completion(reader, bad_words=["Tom has 12 " * 90])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True, "logprobs": 20, "n": 4}, "logprobs"),
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "n": 100}, "echo"),
        ({"prompt_logprobs": 0, "n": 100}, "prompt_logprobs"),
        ({"return_token_ids": True, "n": 100}, "return_token_ids"),
    ],
)
def test_answers_that_repeat_too_much_are_refused_before_they_begin(
    reader: Reader, fields: dict[str, Any], param: str
) -> None:
    prompts = ["Tom has 12 apples. " * 100] * (8 if fields.get("n") == 100 else 64)
    with pytest.raises(InvalidRequest, match="--max-response-bytes") as caught:
        completion(reader, prompts, **fields)
    assert caught.value.param == param
    assert completion(reader, prompts[:1], **{**fields, "n": 1}).prompts


def test_a_stream_may_repeat_more_than_it_holds(reader: Reader) -> None:
    prompts = ["Tom has 12 apples. " * 100] * 2
    with pytest.raises(InvalidRequest):
        completion(reader, prompts, echo=True, logprobs=20, n=4)
    assert completion(reader, prompts, echo=True, logprobs=20, n=4, stream=True).asked.stream


def test_prompt_ids_travel_as_bytes(reader: Reader) -> None:
    (prompt,) = completion(reader, [5, 1023]).prompts
    assert np.frombuffer(prompt.data, "<i4").tolist() == prompt.ids == [5, 1023]
    assert prompt.count == 2


def test_the_models_defaults_of_sampling_parameters(reader: Reader) -> None:
    """Requests of every API get the values of generation_config.json, unless they set their own."""
    values = {"temperature": 0.5, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.5}
    limits = msgspec.structs.replace(LIMITS, defaults=values)
    # A process for large bodies gets the limits as msgpack: top_k must stay an integer there.
    limits = msgspec.msgpack.decode(msgspec.msgpack.encode(limits), type=ModelLimits)
    made = Reader(reader.text, ("m",), limits, 1 << 20)

    def sampled(job: Job | None) -> tuple[float, ...]:
        assert job is not None
        params = job.token_params
        return params.temperature, params.top_k, params.min_p, params.repetition_penalty, params.top_p

    def read(kind: str, **fields: Any) -> tuple[float, ...]:
        line = NONE if kind == "responses" else b""
        return sampled(read_with(made, kind, line + json.dumps({"model": "m", **fields}).encode()).job)

    turn = [{"role": "user", "content": "x"}]
    expected = (0.5, 20, 0.1, 1.5, 1.0)
    for job in (chat(made), completion(made), completion(made, temperature=None)):
        assert sampled(job) == expected
    assert read("messages", max_tokens=5, messages=turn) == expected
    assert read("responses", input="x") == expected
    assert read("ollama_generate", prompt="x") == read("ollama_chat", messages=turn) == expected
    # A value of the request wins, also one that turns the parameter off.
    own = {"temperature": 0, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    off = (0, 0, 0, 1, 1.0)
    assert sampled(chat(made, **own)) == sampled(completion(made, **own)) == off
    assert read("messages", max_tokens=5, messages=turn, **own) == read("responses", input="x", **own) == off
    assert read("ollama_generate", prompt="x", options={"temperature": 1}) == (1, *expected[1:])
    # Token ids of a router come with all their parameters: a default that is left out means off.
    assert read("generate", token_ids=[5], sampling_params={"max_tokens": 1}) == (1, 0, 0, 1, 1)
    answer = read_with(made, "chat_render", json.dumps({"model": "m", "messages": turn, "top_k": 0}).encode())
    rendered = json.loads(answer.made)
    assert "top_k" not in rendered["sampling_params"]
    assert read("generate", **{n: rendered[n] for n in ("token_ids", "sampling_params")})[:3] == (0.5, 0, 0.1)
