"""Servers for clients: scripted servers with tool calls and reasoning, and the bundled model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import Running, Servers
from tests.support.text_folders import TOOL_TEMPLATE, TOOL_TOKENS, write_tokenizer

Play = Callable[..., Running]
MODEL = "recorded"
"""Name of a scripted server's model."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    """Yield servers that end with the module."""
    made = Servers()
    with made.scope():
        yield made


@pytest.fixture(scope="module")
def play(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Play:
    """Return a function that starts a scripted server, with calls in the form of Hermes and reasoning in
    Qwen's form.
    """
    folder = tmp_path_factory.mktemp("text")
    write_tokenizer(folder, added=TOOL_TOKENS, template=TOOL_TEMPLATE)

    def start(entries: list[dict[str, Any]], *flags: str) -> Running:
        model = ["--tokenizer", str(folder), "--max-model-len", "1000000", "--served-model-name", MODEL]
        parsers = ["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
        return servers.scripted(tmp_path_factory.mktemp("script"), entries, *model, *parsers, *flags)

    return start


@pytest.fixture(scope="module")
def bundled(servers: Servers) -> Running:
    """Start the bundled model. Requests without a seed get a seed that depends only on their number."""
    return servers.weft("--threads", "1", "--seed", "7", "--max-model-len", "2048")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return an empty home folder for a client that keeps files."""
    made = tmp_path / "home"
    made.mkdir()
    return made
