"""Start real server processes for the tests: the API server over a scripted engine, and ``weft serve``."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from tests.support.servers import Running, Servers, events

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def sse() -> Callable[[httpx.Response | Iterator[str]], list[Any]]:
    return events


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """Return the module of the scripted engine, for the names of its seeds."""
    spec = importlib.util.spec_from_file_location("weft_fake_head", HERE / "fake_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    made = Servers()
    with made.scope():
        yield made


# Idle servers use a few percent of a core each, so a server ends with the test or module that started it.
@pytest.fixture(scope="module", autouse=True)
def _module_scope(servers: Servers) -> Iterator[None]:
    with servers.scope():
        yield


@pytest.fixture(autouse=True)
def _test_scope(_module_scope: None, servers: Servers) -> Iterator[None]:
    with servers.scope():
        yield


@pytest.fixture(scope="session")
def start_fake(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts fronts over fake heads; keywords are FrontSection fields, or ``max_num_seqs`` and the like."""

    def start(**fields: Any) -> Running:
        folder = tmp_path_factory.mktemp("front")
        command = [sys.executable, str(HERE / "fake_server.py"), str(folder), json.dumps(fields)]
        return servers.start(command, 180)

    return start


@pytest.fixture(scope="session")
def start_weft(servers: Servers) -> Start:
    """Starts ``weft serve`` on the bundled model, with the given flags."""

    def start(*flags: str) -> Running:
        return servers.weft("--threads", "1", *flags)

    return start


@pytest.fixture(scope="session")
def start_scripted(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Starts ``weft serve --scripted`` with a script of the given entries (docs/scripted.md), and flags."""

    def start(entries: list[dict[str, Any]], *flags: str) -> Running:
        return servers.scripted(tmp_path_factory.mktemp("script"), entries, *flags)

    return start


@pytest.fixture(scope="module")
def weft_server(start_weft: Start) -> Running:
    """Return a shared ``weft serve`` for tests that restore its state."""
    return start_weft()


@pytest.fixture(scope="module")
def fake(start_fake: Start) -> Running:
    """Return a shared API server over a scripted engine, for tests that restore its state."""
    return start_fake()
