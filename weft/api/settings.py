"""Keywords of ``LLM`` and ``AsyncLLM``: every flag of the server, with underscores in the name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.api.loras import as_flags
from weft.common.log import get_logger
from weft.config.flags import from_keywords
from weft.config.sections.all import Config

SERVER_ONLY = (
    "host",
    "port",
    "api_key",
    "generation_config",
    "max_request_bytes",
    "max_response_bytes",
    "media_workers",
    "media_memory",
    "build_ops",
    "drain_timeout",
    "request_timeout",
)
"""Settings of the HTTP server, without effect in the caller's process."""

log = get_logger(__name__)


def read_settings(model: str | Path, keywords: Mapping[str, Any]) -> Config:
    """Return the configuration of an engine in this process. Raise ConfigError for unknown or invalid
    keywords.

    Settings without effect outside a server are valid, but logged as a warning.
    """
    idle = [name for name in SERVER_ONLY if name in keywords]
    if idle:
        log.warning("without a server these settings have no effect: %s", ", ".join(idle))
    return from_keywords({"model": model, **as_flags(keywords)})
