"""Choice of the vocabulary file in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.lfs import read_model_file, read_model_text
from weft.common.log import get_logger
from weft.config.families.facts import read_json
from weft.gguf.gguf_tokenizer import SEGMENTATION
from weft.text.segments import Segmentation
from weft.text.vocabularies import merges, sentencepiece, tekken, tiktoken
from weft.text.vocabularies.converted import Converted, cached

log = get_logger(__name__)

_OWN = "tokenizer.json"
_ADDED = "added_tokens.json"


def read_vocabulary(root: Path, config: dict[str, Any]) -> Converted:
    """Return the vocabulary of the folder ``root``. ``config`` is the content of tokenizer_config.json.

    Search order: tokenizer.json, tekken.json, tiktoken.model, tokenizer.model, vocab.json. A tokenizer.json
    that contradicts an original file beside it is not used. Raises ConfigError without a readable vocabulary.
    """
    own = root / _OWN
    if own.is_file():
        text = read_model_text(own, "tokenizer")
        return _original_instead(root, config, text) or Converted(
            tokenizer_json=text,
            named={},
            special={},
            segmentation=msgspec.convert(config.get(SEGMENTATION, {}), Segmentation),
        )
    for name, convert in _CONVERTERS.items():
        if (root / name).is_file():
            return convert(root, config)
    raise ConfigError(
        f"the tokenizer's folder has none of {_OWN}, {', '.join(_CONVERTERS)}; name another folder, or save "
        "the tokenizer with a fast Hugging Face class",
        param="tokenizer",
    )


def _tekken(root: Path, config: dict[str, Any]) -> Converted:
    source = _read(root / tekken.NAME)
    return cached("tekken", source, b"", lambda: tekken.convert(source))


def _tiktoken(root: Path, config: dict[str, Any]) -> Converted:
    source = _read(root / tiktoken.NAME)
    return cached("tiktoken", source, _settings(config), lambda: tiktoken.convert(source, config))


def _sentencepiece(root: Path, config: dict[str, Any]) -> Converted:
    """Return the vocabulary of the folder's tokenizer.model, from the cache if possible.

    Raises ConfigError.
    """
    source = _read(root / sentencepiece.NAME)
    added = _read(root / _ADDED) if (root / _ADDED).is_file() else b"{}"
    try:
        names = msgspec.json.decode(added, type=dict[str, int])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{_ADDED} of the model: {error}", param="tokenizer") from error
    settings = _settings(config) + added
    return cached("sentencepiece", source, settings, lambda: sentencepiece.convert(source, config, names))


def _merges(root: Path, config: dict[str, Any]) -> Converted:
    """Return the vocabulary of vocab.json and merges.txt. Raises ConfigError."""
    if not (root / merges.MERGES).is_file():
        raise ConfigError(
            f"the tokenizer's folder has {merges.NAME} without {merges.MERGES}", param="tokenizer"
        )
    source, pairs = _read(root / merges.NAME), _read(root / merges.MERGES)
    added = added_tokens(root, config)
    settings = _settings({**config, "added": {str(number): entry for number, entry in added.items()}}) + pairs
    return cached("merges", source, settings, lambda: merges.convert(source, pairs, config, added))


def added_tokens(root: Path, config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return the added tokens of ``added_tokens_decoder``, or of the older file added_tokens.json, by id.

    Raises ConfigError for invalid JSON.
    """
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        entries = {key: entry for key, entry in decoder.items() if str(key).isdecimal()}
        return {int(key): entry for key, entry in entries.items() if _has_text(entry)}
    named = read_json(root, _ADDED) or {}
    return {number: {"content": text} for text, number in named.items() if type(number) is int and text}


def _has_text(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("content"), str) and bool(entry["content"])


_CONVERTERS: dict[str, Callable[[Path, dict[str, Any]], Converted]] = {
    tekken.NAME: _tekken,
    tiktoken.NAME: _tiktoken,
    sentencepiece.NAME: _sentencepiece,
    merges.NAME: _merges,
}


def _read(path: Path) -> bytes:
    return read_model_file(path, "tokenizer")


def _settings(config: dict[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True).encode()


def _original_instead(root: Path, config: dict[str, Any], text: str) -> Converted | None:
    """Return the original vocabulary beside a wrongly converted tokenizer.json, else None.

    Known faults of published conversions: a different word pattern, and ids of special tokens without the
    gaps between them. A tokenizer.json with additional tokens was trained with its pattern and is kept.
    Every difference is logged as a warning. ``text``: content of tokenizer.json; None is returned for
    unreadable content. Raises ConfigError for an unreadable original.
    """
    if (root / tekken.NAME).is_file():
        original, name = _tekken(root, config), tekken.NAME
    elif (root / tiktoken.NAME).is_file() and tiktoken.known(config):
        original, name = _tiktoken(root, config), tiktoken.NAME
    else:
        return None
    try:
        data = json.loads(text)
        added = {entry["content"]: entry["id"] for entry in data.get("added_tokens") or ()}
        patterns = list(_patterns(data.get("pre_tokenizer")))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # the tokenizer's own error is more helpful
    # Wrong ids always disqualify. A different pattern disqualifies only without additional tokens.
    wrong = [token for token, number in added.items() if original.special.get(token, number) != number]
    if not wrong and patterns == [original.pattern]:
        return None
    fault = f"the id of its special token {wrong[0]!r}" if wrong else "its word pattern"
    if not wrong and not added.keys() <= original.special.keys():
        log.warning(
            "%s and %s have different word patterns; %s is used, because it has additional tokens",
            _OWN,
            name,
            _OWN,
        )
        return None
    log.warning("%s is ignored and the original %s is used, because %s differs", _OWN, name, fault)
    return original


def _patterns(part: Any) -> Iterator[str]:
    """Yield the word patterns of a pre-tokenizer, at any depth; nothing for other values."""
    if not isinstance(part, dict):
        return
    for inner in part.get("pretokenizers") or ():
        yield from _patterns(inner)
    if part.get("type") == "Split":
        pattern = part.get("pattern") or {}
        yield pattern.get("Regex") or pattern.get("String") or ""
