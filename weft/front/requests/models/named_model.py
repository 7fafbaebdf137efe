"""The model that a request names, before the request is read as a whole; and the models of each API key."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from weft.common.errors import ConfigError, InvalidRequest
from weft.front.protocol.keep_alive import kept_seconds
from weft.front.protocol.parse import decode
from weft.front.requests.text_threads import TextThreads

SMALL_BODY = 64 << 10
"""Maximum bytes of a body that is parsed as a whole for the name of the model."""
_FIRST = re.compile(rb'\s*\{\s*"model"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.){1,2048}")')
"""A body that begins with the field model, as the bodies of most clients do."""


class NamedModel(NamedTuple):
    """The fields of a body that choose the model."""

    model: str | None
    keep: float | None = None
    """Seconds of ``keep_alive``; None without the field."""


class _Fields(msgspec.Struct):
    model: Any = None
    keep_alive: Any = None


_fields = msgspec.json.Decoder(_Fields)


async def named_in(body: Sequence[bytes], threads: TextThreads) -> NamedModel:
    """Return the model that a body names. Raises InvalidRequest for a body that is no JSON object, and for a
    field of a wrong type.

    A body above ``SMALL_BODY`` that begins with the model, and has no ``keep_alive``, is not parsed here. The
    reader of the model checks the name again, so a body with two names of models is refused there.
    """
    if sum(map(len, body)) <= SMALL_BODY:
        return _parsed(b"".join(body))
    first = _first(body[0])
    if first is not None and not _has(body, b'"keep_alive"'):
        return NamedModel(first)
    return await threads.run(lambda: _parsed(b"".join(body)))


def _first(piece: bytes) -> str | None:
    """Return the model of a body that begins with the model; None for any other body, and for a name that is
    no valid JSON."""
    found = _FIRST.match(piece[:4096])
    if found is None:
        return None
    try:
        return msgspec.json.decode(found[1], type=str)
    except (msgspec.MsgspecError, ValueError):
        return None


def _has(body: Sequence[bytes], word: bytes) -> bool:
    """Return True if ``word`` is in the body, also across two pieces."""
    before = b""
    for piece in body:
        if word in piece or word in before + piece[: len(word)]:
            return True
        before = (before + piece[-len(word) :])[-len(word) :]
    return False


def _parsed(body: bytes) -> NamedModel:
    """Return the fields of a whole body. Raises InvalidRequest."""
    try:
        found = _fields.decode(body.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        decode(body)  # raises the error of every route
        raise InvalidRequest("the body is not valid JSON", code="invalid_json") from None
    return _checked(found.model, found.keep_alive)


def _checked(model: Any, keep_alive: Any) -> NamedModel:
    """Return the fields with checked types. Raises InvalidRequest."""
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model must be a string", param="model")
    return NamedModel(model, None if keep_alive is None else seconds_of(keep_alive))


def seconds_of(keep_alive: Any) -> float:
    """Return the seconds of a ``keep_alive``; infinity for ever. Raises InvalidRequest."""
    seconds = kept_seconds(keep_alive)
    return math.inf if seconds < 0 else float(seconds)


class KeyModels:
    """The models that each API key may use."""

    def __init__(self, of_key: Mapping[int, Collection[str]] = {}) -> None:
        """``of_key``: number of a key -> names of models. A key without an entry may use all models."""
        self._of_key = {number: frozenset(names) for number, names in of_key.items()}

    def allow(self, key: int, model: str) -> bool:
        """Return True if the key may use the model. ``model``: first name of the model."""
        names = self._of_key.get(key)
        return names is None or model in names


def split_keys(
    keys: Sequence[str], models: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[int, tuple[str, ...]]]:
    """Return (the keys, number of a key -> names of its models) for ``keys`` of the form KEY or
    KEY:MODEL+MODEL. ``models``: every name of a model -> first name of the model.

    The part behind the last colon counts only if all its words are names of models. Otherwise the colon
    belongs to the key. Raises ConfigError for a key that occurs twice.
    """
    plain: list[str] = []
    of_key: dict[int, tuple[str, ...]] = {}
    for number, key in enumerate(keys):
        begin, colon, end = key.rpartition(":")
        words = end.split("+")
        if colon and begin and all(word in models for word in words):
            of_key[number] = tuple(models[word] for word in words)
            key = begin
        if key in plain:
            raise ConfigError(
                "--api-key has the same key twice: give the key once, with all its models as KEY:MODEL+MODEL",
                param="--api-key",
            )
        plain.append(key)
    return tuple(plain), of_key
