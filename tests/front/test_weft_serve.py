"""``weft serve`` on the bundled model: a real engine behind a real API server, used through openai-python."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.slowness import deadline
from weft.text.submit import minted_seed

QUESTION = "Tom has 12 apples and buys 7 more. How many apples does he have?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
LONG = {"max_tokens": 1900, "ignore_eos": True}
JSON_BODY = {"content-type": "application/json"}


@pytest.fixture
def client(weft_server: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=weft_server.url + "/v1", api_key="none", max_retries=0, timeout=deadline(60)
    )


@pytest.fixture(scope="module")
def four(start_weft: Any) -> Any:
    """Start a server with four slots. One test kills its engine, and the last test stops the server."""
    return start_weft("--max-num-seqs", "4", "--drain-timeout", str(deadline(60)))


def idle(server: Any) -> bool:
    """Return True if no sequence is left. The engine's figures come from its last heartbeat."""
    names = ("num_requests_running", "num_requests_waiting", "front_sequences")
    return all(server.metric(name) == 0 for name in names)


def test_a_right_answer_in_every_way_of_asking(weft_server: Any, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": weft_server.model, "messages": MESSAGES, "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.content is not None
    assert whole.message.content.endswith("#### 19")
    chunks = client.chat.completions.create(**asked, stream=True)
    texts = ["".join(c.choices[0].delta.content or "" for c in chunks)]
    with client.chat.completions.stream(**asked) as helper:
        texts.append(helper.get_final_completion().choices[0].message.content or "")

    async def ask() -> str:
        async with openai.AsyncOpenAI(
            base_url=weft_server.url + "/v1", api_key="none", timeout=deadline(60)
        ) as other:
            stream = await other.chat.completions.create(**asked, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    texts.append(asyncio.run(ask()))
    assert texts == [whole.message.content] * 3


def test_a_seed_fixes_every_choice(weft_server: Any, client: openai.OpenAI) -> None:
    open_ended: list[Any] = [{"role": "user", "content": "Tell me a story."}]

    def ask(seed: int, n: int) -> list[str | None]:
        got = client.chat.completions.create(
            model=weft_server.model, messages=open_ended, seed=seed, n=n, temperature=1.5, max_tokens=40
        )
        return [choice.message.content for choice in got.choices]

    first = ask(5, 3)
    assert len(set(first)) > 1
    assert ask(5, 3) == first
    assert ask(5, 1) == first[:1]
    assert ask(6, 3) != first


def test_echo_gives_the_logprobs_of_prompt_and_output(weft_server: Any, client: openai.OpenAI) -> None:
    text = "Tom has 12 apples and buys 7 more."
    one = client.completions.create(
        model=weft_server.model, prompt=text, max_tokens=6, temperature=0, logprobs=3, echo=True
    ).choices[0]
    assert one.text.startswith(text)
    assert one.logprobs is not None
    assert one.logprobs.token_logprobs is not None
    assert one.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in one.logprobs.token_logprobs[1:] if value is not None)
    assert "".join(one.logprobs.tokens or []) == one.text
    offsets = one.logprobs.text_offset or []
    assert [
        one.text[at:].startswith(token) for at, token in zip(offsets, one.logprobs.tokens or [], strict=True)
    ]
    # The whole text as a prompt has the same logprobs: prompt scores equal the scores at sampling.
    again = client.completions.create(
        model=weft_server.model, prompt=one.text, max_tokens=1, temperature=0, logprobs=3, echo=True
    ).choices[0]
    assert again.logprobs is not None
    assert again.logprobs.token_logprobs is not None
    if again.logprobs.tokens is not None and again.logprobs.tokens[:-1] == one.logprobs.tokens:
        assert again.logprobs.token_logprobs[1:-1] == pytest.approx(one.logprobs.token_logprobs[1:], abs=1e-3)


def test_stop_strings_end_the_sequence_at_the_engine(weft_server: Any, client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        model=weft_server.model, messages=MESSAGES, temperature=0, stop="####", extra_body=LONG
    )
    assert got.choices[0].finish_reason == "stop"
    assert "####" not in (got.choices[0].message.content or "")
    weft_server.wait(lambda: idle(weft_server), 3)


@pytest.mark.requirement("F30")
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequences(weft_server: Any, stream: bool) -> None:
    """The client disconnects while sequences run. So many take seconds; a few could end in less than one."""
    weft_server.wait(lambda: idle(weft_server))
    body = {"model": weft_server.model, "messages": MESSAGES, "n": 32, "stream": stream, **LONG}
    at = httpx.URL(weft_server.url)
    connection = http.client.HTTPConnection(at.host, at.port, timeout=deadline(60))
    with contextlib.closing(connection):
        connection.request("POST", "/v1/chat/completions", json.dumps(body), JSON_BODY)
        if stream:
            assert connection.getresponse().readline()
        weft_server.wait(lambda: weft_server.metric("num_requests_running") >= 2)
    # The engine frees within a second; the next heartbeat comes up to half a second later.
    assert weft_server.wait(lambda: idle(weft_server)) < deadline(1.5)


def test_hostile_clients_leave_no_trace(weft_server: Any) -> None:
    """After sixty requests, many cancelled at random times, the pools have their idle counts."""
    weft_server.wait(lambda: idle(weft_server))
    names = ("free_blocks", "free_slots")
    before = {name: weft_server.metric(name) for name in names}
    rng = random.Random(7)

    async def one(client: httpx.AsyncClient, number: int, patience: float) -> None:
        body: dict[str, Any] = {"model": weft_server.model, "max_tokens": rng.choice([1, 20, 200])}
        body |= {"stream": rng.random() < 0.5, "n": rng.choice([1, 1, 3]), "seed": number}
        body["prompt"] = f"{number} apples " * rng.choice([1, 30])
        with contextlib.suppress(httpx.TimeoutException):
            answer = await client.post("/v1/completions", json=body, timeout=patience)
            assert answer.status_code == 200, answer.text

    async def run() -> None:
        async with httpx.AsyncClient(
            base_url=weft_server.url, limits=httpx.Limits(max_connections=60)
        ) as client:
            await asyncio.gather(*(one(client, n, rng.choice([0.05, 0.2, 60])) for n in range(60)))

    asyncio.run(run())
    weft_server.wait(lambda: idle(weft_server), 20)
    weft_server.wait(lambda: {name: weft_server.metric(name) for name in names} == before, 3)
    assert weft_server.chat(max_tokens=2).status_code == 200


@pytest.mark.requirement("G11")
def test_prefix_hits_are_reported(weft_server: Any) -> None:
    prompt = "Tom has many apples. " * 40
    first, second = (weft_server.complete(prompt, max_tokens=1).json()["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["prompt_tokens"] // 64 * 64 - 64 > 0
    assert cached < second["prompt_tokens"]


def test_why_a_prompt_was_not_cached_is_told_of_when_asked_for(weft_server: Any) -> None:
    """``--explain-cache`` is off by default; tests/front/test_explain_cache.py covers the enabled case."""
    body = {"model": weft_server.model, "prompt": "Tom has 3 pens. " * 12, "max_tokens": 1}
    answer = weft_server.http.post("/v1/completions", json=body, headers={"x-weft-explain-cache": "1"})
    assert answer.status_code == 200, answer.text
    assert "cache_miss" not in answer.json()["usage"]["prompt_tokens_details"]


@pytest.mark.requirement("F33")
def test_a_salt_keeps_prefixes_apart(weft_server: Any) -> None:
    prompt = "Ann has some pears. " * 40

    def cached(salt: str | None) -> int:
        usage = weft_server.complete(prompt, max_tokens=1, cache_salt=salt).json()["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    first = [cached(salt) for salt in ("tenant-a", "tenant-b", None)]
    again = [cached(salt) for salt in ("tenant-a", "tenant-b", None)]
    assert first == [0, 0, 0]
    assert min(again) >= 64


@pytest.mark.requirement("F9")
def test_hostile_parameters_are_refused_by_name(weft_server: Any) -> None:
    cases: list[tuple[str, Any]] = [
        ("n", 10**9),
        ("max_tokens", 2**63),
        ("temperature", -1),
        ("logit_bias", {"1024": 1}),
        ("allowed_token_ids", [1024]),
        ("top_p", 1.5),
        ("repetition_penalty", 1e-39),
        ("seed", 2**64),
        ("min_tokens", 5000),
        ("stop", [""]),
        ("tools", [{}]),
    ]
    for name, value in cases:
        answer = weft_server.chat(**{name: value})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == name
    assert weft_server.complete([1, 1024]).status_code == 400
    assert weft_server.complete([1] * 2048).json()["error"]["code"] == "context_length_exceeded"
    assert weft_server.chat(max_tokens=2).status_code == 200


@pytest.mark.requirement("F31")
def test_minted_seeds_and_a_full_queue(start_weft: Any) -> None:
    server = start_weft("--max-num-seqs", "1", "--max-queued-requests", "1", "--seed", "3")
    fields = {"max_tokens": 30, "temperature": 1.5}
    first = server.chat(**fields).json()["choices"]
    assert server.chat(**fields, seed=minted_seed(3, 0)).json()["choices"] == first
    assert server.chat(**fields).json()["choices"] != first
    with server.stream(**LONG) as running, concurrent.futures.ThreadPoolExecutor(6) as pool:
        lines = running.iter_lines()
        next(lines)
        # Enough concurrent requests to have some refused, however soon the first ones end.
        asked = [pool.submit(server.chat, **{**LONG, "max_tokens": 600}) for _ in range(6)]
        answers = (one.result() for one in concurrent.futures.as_completed(asked, deadline(60)))
        refused = next(answer for answer in answers if answer.status_code != 200)
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        running.close()
        assert {one.result(deadline(60)).status_code for one in asked} == {200, 429}
    assert server.chat(max_tokens=3).status_code == 200
    assert server.stop() == 0


def text_of(lines: Any, sse: Any) -> tuple[str, str]:
    """Return (text, finish reason) of the rest of a stream."""
    chunks = [event["choices"][0] for event in sse(lines) if event != "[DONE]"]
    assert chunks, "nothing came"
    return "".join(c["delta"].get("content") or "" for c in chunks), chunks[-1]["finish_reason"]


@pytest.mark.requirement("F40")
@pytest.mark.parametrize(
    "death",
    [
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, marks=pytest.mark.grid),
    ],
    ids=lambda d: d.name,
)
def test_streams_outlive_the_engine(start_weft: Any, sse: Any, death: signal.Signals) -> None:
    """Greedy and sampled, streamed and whole, with stop strings and logprobs: all as without the death."""
    server = start_weft("--max-num-seqs", "4", "--dtype", "float64", "--rank-timeout", str(deadline(8)))
    asked: list[dict[str, Any]] = [
        {"max_tokens": 1200, "ignore_eos": True, "temperature": 0},
        {"max_tokens": 600, "ignore_eos": True, "temperature": 1.0, "seed": 5, "logprobs": True, "n": 2},
        {"max_tokens": 900, "ignore_eos": True, "temperature": 1.2, "seed": 6, "stop": ["zzzz", "#### 77"]},
    ]

    def told(answer: httpx.Response) -> list[Any]:
        """Text, finish reason and the tokens of the logprobs of each choice."""
        assert answer.status_code == 200, answer.text
        tokens = [
            [t["token"] for t in (c["logprobs"] or {"content": []})["content"]]
            for c in answer.json()["choices"]
        ]
        said = [(c["message"]["content"], c["finish_reason"]) for c in answer.json()["choices"]]
        return list(zip(said, tokens, strict=True))

    server.http.timeout = 120
    with concurrent.futures.ThreadPoolExecutor() as pool:  # in float64 none depends on the others
        wanted = [told(one) for one in pool.map(lambda fields: server.chat(QUESTION, **fields), asked)]
    first = server.engine()
    with (
        server.stream(messages=MESSAGES, **asked[0]) as stream,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        lines = stream.iter_lines()
        before = text_of([next(line for line in lines if '"content"' in line) for _ in range(5)], sse)[0]
        whole = [pool.submit(server.chat, QUESTION, **fields) for fields in asked[1:]]
        # the engine's own count would come later
        server.wait(lambda: server.metric("front_sequences") == 4, 20)
        os.kill(first, death)
        server.wait(lambda: server.metric("engine_up") == 0, 20)
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (
            200,
            {"status": "recovering", "missing": {"unified": 1}},
        )
        assert server.http.get("/ready").status_code == 503
        late = pool.submit(server.chat, QUESTION, max_tokens=30, temperature=0)
        rest, reason = text_of(lines, sse)
        assert (before + rest, reason) == wanted[0][0][0]
        assert [told(one.result(deadline(90))) for one in whole] == wanted[1:]
        assert late.result(deadline(90)).status_code == 200
    assert server.metric("engine_restarts_total") >= 1
    assert server.metric("front_failovers_total") >= 4
    assert not Path(f"/proc/{first}").exists() or server.engine() != first
    server.wait(lambda: idle(server), 10)
    assert server.metric("free_slots") == 4
    assert server.http.get("/ready").status_code == 200
    assert server.stop() == 0


def test_clients_that_leave_while_there_is_no_engine(four: Any) -> None:
    server = four
    with server.stream(**LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(server.engine(), signal.SIGKILL)
        server.wait(lambda: server.metric("engine_up") == 0, 20)
    server.wait(lambda: server.metric("front_sequences") == 0, 10)
    server.wait(lambda: server.http.get("/ready").status_code == 200, 60)
    assert server.chat(max_tokens=2).status_code == 200
    assert server.metric("front_failovers_total") == 0
    server.wait(lambda: idle(server))


def test_an_engine_that_is_not_back_in_time(start_weft: Any, sse: Any) -> None:
    """Waiting requests get 503 with Retry-After. The server continues and answers later requests."""
    server = start_weft("--recovery-timeout", "0.01")
    with server.stream(**LONG) as stream, concurrent.futures.ThreadPoolExecutor() as pool:
        lines = stream.iter_lines()
        next(lines)
        os.kill(server.engine(), signal.SIGKILL)
        refused = pool.submit(server.chat, max_tokens=2)
        assert sse(lines)[-1]["error"]["code"] == "unavailable"
        assert refused.result(deadline(30)).status_code == 503
        assert refused.result().headers["retry-after"]
    server.wait(lambda: server.http.get("/ready").status_code == 200, 60)
    assert server.chat(max_tokens=2).status_code == 200


@pytest.mark.requirement("F40")
def test_an_engine_that_must_not_be_started_again(start_weft: Any, sse: Any) -> None:
    server = start_weft("--engine-restarts", "0")
    with server.stream(**LONG) as stream, concurrent.futures.ThreadPoolExecutor() as pool:
        lines = stream.iter_lines()
        next(lines)
        whole = pool.submit(server.chat, **LONG, n=8)
        server.wait(lambda: server.metric("front_sequences") == 9)
        os.kill(server.engine(), signal.SIGKILL)
        assert sse(lines)[-1]["error"]["code"] == "engine_dead"
        assert whole.result(deadline(10)).status_code == 500
    with contextlib.suppress(httpx.TransportError):  # the server may have ended already
        assert server.http.get("/health").status_code == 503
    assert server.process.wait(deadline(10)) == 1


def test_equal_prompts_of_one_request_have_seeds_of_their_own(start_weft: Any) -> None:
    """Prompt 0 has the seed minted for the request; prompt i has the seed minted from prompt 0's seed and
    i.
    """
    server = start_weft("--seed", "3")
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1}

    def texts(prompts: list[str], **more: Any) -> list[str]:
        return [c["text"] for c in server.complete(prompts, **fields, **more).json()["choices"]]

    made = texts(["Tom has"] * 3)
    assert len(set(made)) == 3
    first = minted_seed(3, 0)
    seeds = [first, minted_seed(first, 1), minted_seed(first, 2)]
    assert [texts(["Tom has"], seed=seed)[0] for seed in seeds] == made
    assert len(set(texts(["Tom has"] * 2, seed=5))) == 1  # a client's seed applies to every prompt


@pytest.mark.requirement("B4")
def test_a_small_request_is_answered_beside_a_large_one(four: Any) -> None:
    """A hundred long sequences of one request hold all four slots, and give one up for a small request."""
    server = four

    def preempts() -> bool:
        """Send a small request. Return True after a preemption; if a sequence ends just then, a slot is free
        anyway.
        """
        assert server.complete("Ann has", max_tokens=3).status_code == 200
        return bool(server.metric("num_preemptions_total") >= 1)

    with server.stream("/v1/completions", prompt=["Tom has"] * 25, n=4, **LONG) as large:
        lines = large.iter_lines()
        next(lines)
        server.wait(lambda: server.metric("num_requests_running") == 4)
        server.wait(preempts)
        assert server.metric("front_sequences") > 4  # the small request did not wait for all of the large one
        large.close()
    server.wait(lambda: idle(server))


@pytest.mark.slow
def test_sigterm_finishes_what_runs(four: Any) -> None:
    """Must be the last test with the shared server."""
    server = four
    engine = server.engine()
    with server.stream(n=4, **LONG) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: server.http.get("/ready").status_code == 503)
        assert server.chat(max_tokens=1).status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.process.wait(deadline(15)) == 0
    assert not Path(f"/proc/{engine}").exists()


def test_usage_and_metrics_tell_of_drafts(start_weft: Any, weft_server: Any) -> None:
    flags = ("--num-speculative-tokens", "2", "--no-speculative-adaptive", "--ngram-min-length", "1")
    server = start_weft("--speculative-method", "ngram", *flags)
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain, drafted = (one.chat(QUESTION, **fields).json() for one in (weft_server, server))
    assert drafted["choices"] == plain["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    details = drafted["usage"].pop("completion_tokens_details")
    assert drafted["usage"] == plain["usage"]
    assert 0 < details["accepted_prediction_tokens"] < 60
    accepted = details["accepted_prediction_tokens"]
    server.wait(lambda: server.metric("spec_decode_num_accepted_tokens_total") >= accepted)
    assert server.metric("spec_decode_num_draft_tokens_total") >= accepted
    by_place = server.metric("spec_decode_num_accepted_tokens_per_pos_total")
    assert by_place == server.metric("spec_decode_num_accepted_tokens_total")
    assert weft_server.metric("spec_decode_num_draft_tokens_total") == 0
