"""HTTP client of ``weft chat``: an OpenAI-compatible server, its models and streamed replies."""

from __future__ import annotations

import codecs
import json
import socket
import ssl
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeAlias
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from weft.common.client_tls import check_url, client_options, key_headers

CONNECT_S = 10.0
SILENCE_S = 600.0
"""Seconds without a byte before a reply counts as lost. Weft's streams are never silent for so long."""
MAX_EVENT = 16 << 20
MAX_CALLS = 512
"""Maximum number of tool calls in a reply."""


class ChatError(Exception):
    """Refusal or failure of a server, with a message for the user."""


class NothingThere(ChatError):
    """No server listens at the URL."""


class AnswerPiece(msgspec.Struct, frozen=True):
    """Next piece of the reply's text."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Next piece of the model's reasoning."""

    text: str


class CallPart(msgspec.Struct, frozen=True):
    """Piece of a tool call. The first piece has ``id`` and ``name``."""

    index: int
    id: str
    name: str
    arguments: str


class End(msgspec.Struct, frozen=True):
    """End of a reply. ``tokens``: tokens of the reply, None if not reported."""

    reason: str
    tokens: int | None


Piece: TypeAlias = AnswerPiece | ReasoningPiece | CallPart | End


class ChatClient:
    """Client of one server, for use in one thread.

    An exception during ``stream``, Ctrl-C included, cancels the request. All methods raise ChatError, with a
    message for the user, if the server refuses or fails.
    """

    def __init__(
        self, url: str, api_key: str = "", timeout: float = SILENCE_S, client_cert: str | None = None
    ) -> None:
        """``url``: URL in any form that ``base_url`` accepts. ``timeout``: maximum seconds of silence.
        ``client_cert``: PEM file for a server that requires a certificate. Raise ConfigError for an unusable
        URL, key or file."""
        self.url = base_url(url)
        self._http = httpx.Client(
            headers=key_headers(api_key),
            timeout=httpx.Timeout(timeout, connect=CONNECT_S),
            **client_options(self.url, client_cert),
        )

    def models(self) -> list[str]:
        """Return the model names that the server lists."""
        return [name for name, _ in self.cards()]

    def has(self, model: str) -> bool:
        """Return True if the server lists ``model``, or describes ``model`` as an alias. Raises ChatError."""
        if model in self.models():
            return True
        try:
            return self._http.get(f"{self.url}/models/{quote(model, safe='/')}").status_code == 200
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _unreachable(self.url, error) from None

    def cards(self) -> list[tuple[str, str]]:
        """Return (name, abilities) of the listed models; "" for unknown abilities. Raises ChatError."""
        try:
            answer = self._http.get(f"{self.url}/models")
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise _unreachable(self.url, error) from None
        if answer.status_code != 200:
            raise ChatError(_refusal(answer.status_code, answer.content))
        try:
            return [(str(one["id"]), str(one.get("about") or "")) for one in answer.json()["data"]]
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ChatError(f"the server at {self.url} is not OpenAI-compatible") from None

    def stream(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """Yield the reply to ``body`` (a chat completion request) in pieces.

        The last piece is ``End``. Raises ChatError.
        """
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._http.stream("POST", f"{self.url}/chat/completions", json=asked) as answer:
                if answer.status_code != 200:
                    raise ChatError(_refusal(answer.status_code, answer.read()))
                yield from pieces_of(sse_data(answer.iter_bytes()))
        except UnicodeEncodeError:  # bytes of the command line or of standard input
            raise ChatError("the conversation has bytes that are no UTF-8 text") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise _unreachable(self.url, error) from None
        except httpx.TimeoutException:
            raise ChatError("the server did not answer in time") from None
        except httpx.TransportError:
            raise ChatError("the connection to the server was lost") from None

    def close(self) -> None:
        """Close all connections."""
        self._http.close()


def base_url(url: str) -> str:
    """Return ``url`` with a scheme, without trailing slash, and with /v1 if the path is empty. Raise
    ConfigError for a text that is no URL."""
    whole = url if "://" in url else f"http://{url}"
    check_url(whole)
    parts = urlsplit(whole.rstrip("/"))
    path = parts.path.removesuffix("/chat/completions") or "/v1"
    return f"{parts.scheme}://{parts.netloc}{path}"


def sse_data(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event, up to ``[DONE]``. Only CR and LF end lines, as in the
    standard.

    Raise ChatError for an overlong line.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    data: list[str] = []
    for chunk in chunks:
        rest += decode(chunk)
        if len(rest) > MAX_EVENT:
            raise ChatError("the server sent a line that is too long")
        while (found := _line(rest)) is not None:
            line, rest = found
            if not line and data:
                if data == ["[DONE]"]:
                    return
                yield "\n".join(data)
                data = []
            # Other fields and comments of an event carry no data.
            elif line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))


def _line(text: str) -> tuple[str, str] | None:
    """Return (first line, rest), or None if no line is complete. A CR at the end may still become CR LF."""
    ends = [at for mark in "\r\n" if (at := text.find(mark)) >= 0]
    if not ends or (min(ends) == len(text) - 1 and text[-1] == "\r"):
        return None
    end = min(ends)
    return text[:end], text[end + (2 if text[end : end + 2] == "\r\n" else 1) :]


def pieces_of(events: Iterator[str]) -> Iterator[Piece]:
    """Yield the pieces of a streamed chat completion, ``End`` last.

    Raise ChatError for an error event, for another format, and if the stream ends without a finish reason.
    """
    reason, tokens = "", None
    for data in events:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise ChatError("the server sent an event that is not JSON") from None
        if not isinstance(event, dict):
            continue
        if event.get("error"):
            raise ChatError(f"the reply broke off: {_message(event['error'])}")
        # With include_usage, the last event has the usage and no choices.
        usage = event.get("usage")
        if isinstance(usage, dict) and isinstance(found := usage.get("completion_tokens"), int):
            tokens = found
        try:
            for choice in event.get("choices") or []:
                yield from _delta_pieces(choice.get("delta") or {})
                reason = _word(choice.get("finish_reason")) or reason
        except (AttributeError, TypeError, KeyError):
            raise ChatError("the server sent an event that is not in OpenAI's format") from None
    if not reason:
        raise ChatError("the reply broke off: the server closed the stream before its end")
    yield End(reason, tokens)


def _delta_pieces(delta: dict[str, Any]) -> Iterator[Piece]:
    """Yield the pieces of one delta. Raise TypeError for a wrong form."""
    reasoning = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(reasoning, str) and reasoning:
        yield ReasoningPiece(reasoning)
    for name in ("content", "refusal"):
        if text := _word(delta.get(name)):
            yield AnswerPiece(text)
    for call in delta.get("tool_calls") or []:
        function = call.get("function") or {}
        index = call.get("index") or 0
        if not isinstance(index, int) or not 0 <= index < MAX_CALLS:
            raise TypeError(index)
        # Some servers send arguments as an object instead of JSON text.
        arguments = function.get("arguments") or ""
        yield CallPart(
            index=index,
            id=_word(call.get("id")),
            name=_word(function.get("name")),
            arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        )


def _word(value: Any) -> str:
    """Return a text, "" for None. Raise TypeError for any other type."""
    if value is not None and not isinstance(value, str):
        raise TypeError(value)
    return value or ""


def _message(error: Any) -> str:
    """Return the message of an error object."""
    if isinstance(error, dict):
        return str(error.get("message") or error.get("code") or error)
    return str(error)


def _refusal(status: int, content: bytes) -> str:
    """Return the message for the user about an error status, with the server's reason if given."""
    try:
        data = json.loads(content)
        found = data.get("error") or data.get("detail") or data.get("message")
        message = _message(found) if found else ""
    except (ValueError, AttributeError):
        message = ""
    text = message or "the server gave no reason"
    if status == 401:
        return f"the server requires an API key ({text}): give --api-key, or set WEFT_CHAT_API_KEY"
    return f"the server refused the request with {status}: {text}"


def _unreachable(url: str, error: Exception) -> ChatError:
    """Return the error for a failed connection, by cause: DNS, TLS, time-out or refusal."""
    host = urlsplit(url).hostname or url
    causes = list(_causes(error))
    # httpx wraps all errors alike; the innermost causes are the errors of the system.
    if any(isinstance(one, socket.gaierror) for one in causes):
        return ChatError(f"the host name {host!r} is unknown (DNS): check the spelling and the network")
    certificate = next((one for one in causes if isinstance(one, ssl.SSLCertVerificationError)), None)
    if certificate is not None:
        return ChatError(f"{host} has a TLS certificate that is not trusted: {certificate.verify_message}")
    if any(isinstance(one, ssl.SSLError) for one in causes):
        return ChatError(f"no TLS connection with {url}: a server without TLS needs http://, not https://")
    if isinstance(error, httpx.ConnectTimeout):
        return ChatError(
            f"{url} accepted no connection within {CONNECT_S:g} s (timeout): does a firewall block it?"
        )
    if any(isinstance(one, ConnectionRefusedError) for one in causes):
        return NothingThere(f"nothing listens at {url} (connection refused)")
    if isinstance(error, httpx.ConnectError):
        return ChatError(f"no connection to {url}: {str(error) or type(error).__name__}")
    return ChatError(f"no answer from {url} ({type(error).__name__})")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and all nested causes, contexts and group members."""
    waiting = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
