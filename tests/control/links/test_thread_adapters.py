"""``LinksThread`` loads LoRA adapters on all engine processes with places for adapters."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from weft.common.errors import EngineDead, ErrorInfo, InvalidRequest, WeftError
from weft.control.links.thread import LinksThread
from weft.types.adapters import LoadAdapter

MESSAGES = [LoadAdapter(name=name, digest=name, folder=f"/{name}") for name in "ab"]


class Answering:
    """Links to two engine processes with places and to an encode process. ``answers``: digest -> error."""

    failure = None

    def __init__(self, answers: dict[str, ErrorInfo | None]) -> None:
        self.answers = answers
        self.delivered: list[tuple[str, str]] = []
        self.instances = [
            SimpleNamespace(name=name, alive=True, welcome=SimpleNamespace(max_loras=places), adapters={})
            for name, places in (("one", 1), ("two", 1), ("encode", 0))
        ]

    async def start(self) -> Any:
        return None

    async def close(self) -> None:
        pass

    def tell(self, name: str, message: LoadAdapter) -> None:
        self.delivered.append((name, message.digest))
        found = next(one for one in self.instances if one.name == name)
        if message.digest in self.answers:
            found.adapters[message.digest] = self.answers[message.digest]


@pytest.fixture
def answering(request: pytest.FixtureRequest) -> Iterator[tuple[LinksThread, Answering]]:
    links = Answering(request.param)
    thread = LinksThread(lambda: links)  # type: ignore[arg-type, return-value]
    yield thread, links
    thread.end()


@pytest.mark.parametrize("answering", [{"a": None, "b": None}], indirect=True)
def test_all_processes_with_places(answering: tuple[LinksThread, Answering]) -> None:
    thread, links = answering
    thread.load_adapters(MESSAGES, 5.0)
    assert links.delivered == [("one", "a"), ("one", "b"), ("two", "a"), ("two", "b")]


REFUSED = InvalidRequest("the folder has other content").info()


@pytest.mark.parametrize("answering", [{"a": None, "b": REFUSED}], indirect=True)
def test_a_refusal_is_raised(answering: tuple[LinksThread, Answering]) -> None:
    with pytest.raises(WeftError, match="the folder has other content"):
        answering[0].load_adapters(MESSAGES, 5.0)


@pytest.mark.parametrize("answering", [{"a": None}], indirect=True)
def test_an_answer_that_is_missing(answering: tuple[LinksThread, Answering]) -> None:
    thread, links = answering
    with pytest.raises(EngineDead, match="in time"):
        thread.load_adapters(MESSAGES, 0.05)
    for one in links.instances:
        one.alive = False  # a dead process answers nothing, and the others go on
    thread.load_adapters(MESSAGES, 5.0)
