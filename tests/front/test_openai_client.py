"""openai-python against a real server process: sync, async, the stream helper, errors, retries."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.support.slowness import deadline

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(fake: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0, timeout=deadline(20))


def test_chat(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(model="fake", messages=MESSAGES, max_completion_tokens=11, n=2)
    assert [c.message.content for c in got.choices] == ["user\nhello"] * 2
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert got.usage.prompt_tokens_details.cached_tokens == 2


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            max_tokens=11,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "user\nhello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 11


def test_the_stream_helper(client: openai.OpenAI) -> None:
    seen = []
    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, stop="o", logprobs=True, top_logprobs=1
    ) as stream:
        for event in stream:
            seen.append(event.type)
            if event.type == "content.done":
                assert event.content == "user\nhell"
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "user\nhell"
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 11
    assert {"chunk", "content.delta", "content.done"} <= set(seen)


def test_completions(client: openai.OpenAI) -> None:
    got = client.completions.create(model="fake", prompt=["ab", "cd"], max_tokens=2, logprobs=1, echo=True)
    assert [c.text for c in got.choices] == ["abab", "cdcd"]
    assert got.choices[1].logprobs is not None
    assert got.choices[1].logprobs.text_offset == [0, 1, 2, 3]
    chunks = client.completions.create(model="fake", prompt="ab", max_tokens=4, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == "abab"


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["fake", "org/alias"]
    assert client.models.retrieve("org/alias").owned_by == "weft"


def test_beyond_openais_parameters(client: openai.OpenAI) -> None:
    got = client.completions.create(
        model="fake", prompt="ab", max_tokens=3, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True}
    )
    assert got.choices[0].text == "aba"


def test_errors_have_their_classes(client: openai.OpenAI, script: Any) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_request")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=MESSAGES, seed=script.REJECT)
    with pytest.raises(openai.APIError) as failed:
        list(client.chat.completions.create(model="fake", messages=MESSAGES, seed=script.FAIL, stream=True))
    assert failed.value.code == "non_finite_logits"


def test_the_client_retries_what_is_retryable(fake: Any, script: Any) -> None:
    client = openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=1, timeout=deadline(20))
    answered = 'weft:http_requests_total{method="POST",route="/v1/chat/completions",status="429"}'

    def refusals() -> float:
        lines = fake.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[1]) for line in lines if line.startswith(answered))

    before = refusals()
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="fake", messages=MESSAGES, seed=script.REJECT)
    assert refusals() == before + 2


def test_a_closed_stream_frees_its_sequence(fake: Any, client: openai.OpenAI, script: Any) -> None:
    stream = client.chat.completions.create(
        model="fake", messages=MESSAGES, seed=script.HANG_AFTER, stream=True
    )
    next(iter(stream))
    stream.close()
    assert fake.wait(lambda: fake.metric("num_requests_running") == 0) < deadline(1)


def test_async(fake: Any) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=fake.url + "/v1", api_key="none", timeout=deadline(20)
        ) as client:

            async def one(number: int) -> str:
                text = f"number {number}"
                stream = await client.chat.completions.create(
                    model="fake", messages=[{"role": "user", "content": text}], max_tokens=15, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            texts = await asyncio.gather(*(one(number) for number in range(20)))
            assert texts == [f"user\nnumber {number}"[:14] for number in range(20)]
            async with client.chat.completions.stream(model="fake", messages=MESSAGES, stop="o") as helper:
                final = await helper.get_final_completion()
            assert final.choices[0].message.content == "user\nhell"

    asyncio.run(run())
