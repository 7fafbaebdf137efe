"""Greedy answers to chat questions from a server, from an engine in this process, or from transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import httpx

from weft.common.client_tls import client_options, key_headers, versioned_url
from weft.common.errors import ConfigError, WeftError
from weft.common.progress import progress_bar
from weft.config.sections.all import Config

TIMEOUT = httpx.Timeout(600.0, connect=10.0)

Question = TypeVar("Question")
Answer = TypeVar("Answer")
Chat: TypeAlias = list[dict[str, Any]]
"""Messages of one conversation."""


def from_server(
    url: str,
    model: str | None,
    chats: Sequence[Chat],
    concurrency: int,
    max_tokens: int | None,
    key: str | None,
    title: str = "gsm-mini",
) -> tuple[str, list[str]]:
    """Return (model name, one text per chat) from an OpenAI-compatible server.

    ``url``: base URL, with or without ``/v1``. Raise ConfigError if the server cannot be reached, and
    WeftError if the server returns an error.
    """
    return asyncio.run(_ask_server(versioned_url(url), model, chats, concurrency, max_tokens, key, title))


def http_client(base: str, key: str | None, concurrency: int) -> httpx.AsyncClient:
    """Return a client with at most ``concurrency`` connections to the server at ``base``. Raise ConfigError
    for an unusable URL or key."""
    limits = httpx.Limits(max_connections=concurrency)
    return httpx.AsyncClient(timeout=TIMEOUT, limits=limits, headers=key_headers(key), **client_options(base))


async def _ask_server(
    base: str,
    model: str | None,
    chats: Sequence[Chat],
    concurrency: int,
    max_tokens: int | None,
    key: str | None,
    title: str,
) -> tuple[str, list[str]]:
    """Ask all chats, ``concurrency`` at a time, and return (model name, texts in order).

    Shows a bar. Raises the errors of ``call`` at the first failure.
    """
    async with http_client(base, key, concurrency) as client:
        if model is None:
            model = await served_model(client, base)
        with progress_bar(total=len(chats), title=title, unit="problem") as bar:

            async def one(chat: Chat) -> str:
                body: dict[str, Any] = {"model": model, "temperature": 0, "messages": chat}
                if max_tokens is not None:
                    body["max_tokens"] = max_tokens
                answer = await call(client, "POST", f"{base}/chat/completions", body)
                bar.update()
                return str(message_of(answer).get("content") or "")

            return model, await in_turns(one, chats, concurrency)


async def in_turns(
    ask: Callable[[Question], Awaitable[Answer]], each: Sequence[Question], most: int
) -> list[Answer]:
    """Return the results of ``ask`` for ``each``, in order, with at most ``most`` calls at a time.

    On the first failure, cancel the running calls, start no further calls and raise the error.
    """
    left = iter(enumerate(each))
    made: dict[int, Answer] = {}

    async def work() -> None:
        # All workers share one iterator, so each takes the next open question.
        for number, question in left:
            made[number] = await ask(question)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most, len(each))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        # A task group wraps all failures; callers expect the first error itself.
        raise failed.exceptions[0] from None
    return [made[number] for number in range(len(each))]


async def served_model(client: httpx.AsyncClient, base: str) -> str:
    """Return the first model that the server lists."""
    found = await call(client, "GET", f"{base}/models")
    try:
        return str(found["data"][0]["id"])
    except (LookupError, TypeError):
        raise ConfigError("--url: the server lists no model: name the model", param="--url") from None


def message_of(answer: Any) -> dict[str, Any]:
    """Return the message of a chat completion. Raise ConfigError for an answer of another form."""
    try:
        message = answer["choices"][0]["message"]
    except (LookupError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise ConfigError(
            "--url: the answer is no chat completion; does --url name an OpenAI-compatible server?",
            param="--url",
        )
    return message


async def call(client: httpx.AsyncClient, method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """Return the server's JSON answer.

    Raise ConfigError without a valid answer, WeftError for an error status.
    """
    try:
        response = await client.request(method, url, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"--url: no answer from the server ({type(error).__name__})", param="--url"
        ) from error
    if response.status_code != 200:
        raise WeftError(f"the server answered {response.status_code}: {response.text[:300]}")
    try:
        return response.json()
    except ValueError as error:
        raise ConfigError(
            "--url: the response is not JSON; does --url name an OpenAI-compatible server?", param="--url"
        ) from error


def chat_of(question: str) -> Chat:
    """Return a conversation with one question."""
    return [{"role": "user", "content": question}]


def from_engine(
    config: Config,
    chats: Sequence[Chat],
    concurrency: int,
    max_tokens: int | None,
    drafts: dict[str, list[int]] | None = None,
) -> tuple[str, list[str]]:
    """Return (model name, one text per chat) from an engine in this process, which is ended afterwards.

    If given, ``drafts`` receives the numbers of "proposed" and "accepted" drafts, by position in a step.
    """
    from weft import LLM, SamplingParams
    from weft.cli.options import keywords

    settings = {**keywords(config), "max_num_seqs": min(concurrency, config.scheduler.max_num_seqs)}
    llm = LLM(**settings)
    try:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        outputs = llm.chat(list(chats), params, use_tqdm=True)
        if drafts is not None:
            stats = llm.stats()
            drafts.update(proposed=list(stats.drafts), accepted=list(stats.drafts_accepted))
        return config.model.model, [output.outputs[0].text for output in outputs]
    finally:
        llm.shutdown()


def from_reference(
    config: Config, questions: Sequence[str], concurrency: int, max_tokens: int | None
) -> tuple[str, list[str]]:
    """Return (model name, one text per question) from ``transformers`` in this process, in batches of
    ``concurrency``.

    Shows a bar.
    """
    from weft.cli.reference import Reference

    reference = Reference(config)
    texts: list[str] = []
    with progress_bar(total=len(questions), title="gsm-mini", unit="problem") as bar:
        for begin in range(0, len(questions), concurrency):
            part = reference.chat(questions[begin : begin + concurrency], max_tokens)
            texts += part
            bar.update(len(part))
    return f"{config.model.model} (transformers)", texts
