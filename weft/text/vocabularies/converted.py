"""The result of a vocabulary conversion, and the cache of results."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.common.folder import cache_folder
from weft.common.log import get_logger
from weft.text.segments import Segmentation

log = get_logger(__name__)

_VERSION = 1
"""Version of the conversions. A new version invalidates all cached results."""


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """A vocabulary in the form read by the ``tokenizers`` library."""

    tokenizer_json: str
    named: dict[str, str]
    """Role (``tokenizer_files.NAMED``) to the token's text, used if tokenizer_config.json names no token."""
    special: dict[str, int]
    """Text to id of the added tokens (for SentencePiece: of the unknown and control pieces)."""
    pattern: str = ""
    """Regular expression that cuts texts into words; empty without cuts."""
    segmentation: Segmentation = Segmentation()


def token_text(token: Any) -> str | None:
    """Return a token's text from a string or an object with ``content``; None without a text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def cached(kind: str, source: bytes, settings: bytes, make: Callable[[], Converted]) -> Converted:
    """Return the result of ``make`` for the file content ``source`` and ``settings``, from the user's cache
    if present.

    A new result is stored in the cache. The file name is a digest of the content, so a changed file is
    converted again. Files are replaced atomically, and concurrent processes write the same content. A cache
    that cannot be written is logged and only costs time. Errors of ``make`` pass through.
    """
    seen = hashlib.sha256(f"{_VERSION}\0{len(source)}\0".encode())
    seen.update(source)
    seen.update(settings)
    path = cache_folder("vocabularies") / f"{kind}-{seen.hexdigest()[:32]}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Converted)
    except (OSError, msgspec.MsgspecError):  # absent or incomplete
        pass
    made = make()
    try:
        _replace(path, msgspec.json.encode(made))
    except OSError as error:
        log.warning(
            "the converted vocabulary cannot be stored in %s (%s), and every start converts the vocabulary "
            "again; set XDG_CACHE_HOME to another folder",
            path.parent,
            error.strerror,
        )
    return made


def _replace(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` atomically and create the folder.

    Raises OSError; the temporary file is then removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".making-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def unusable(name: str, why: str) -> ConfigError:
    """Return the error for the vocabulary file ``name``."""
    return ConfigError(
        f"{name} cannot be used: {why}. Give a folder with the model's tokenizer.json", param="tokenizer"
    )
