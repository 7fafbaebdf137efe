"""Facts of the files of a model in the cards of /v1/models."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.front.http.answers import ModelCard
from weft.front.model_routes import card_named, listed_cards
from weft.front.requests import model_files
from weft.front.requests.text_threads import TextThreads


def test_a_folder_without_files_keeps_its_time(tmp_path: Path) -> None:
    assert model_files.files_of(str(tmp_path)) == model_files.files_of(str(tmp_path))


def test_cards_read_the_files_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters share the card of their model. A slow disk must not hold up the streams of the server."""
    readers: list[threading.Thread] = []

    def files_of(path: str) -> tuple[int, float, str]:
        readers.append(threading.current_thread())
        return 0, 5.5, ""

    def card(name: str, times: dict[str, int]) -> ModelCard:
        return ModelCard(id=name, created=times["/model"], max_model_len=8)

    monkeypatch.setattr(model_files, "files_of", files_of)
    threads = TextThreads()
    adapters = [SimpleNamespace(name=name, created=7, folder=f"/{name}") for name in ("one", "two")]
    known = SimpleNamespace(
        listed=lambda: adapters,
        missing=lambda adapter: 0,
        unloaded=lambda model: False,
        find=lambda model: next((one for one in adapters if one.name == model), None),
    )
    front: Any = SimpleNamespace(
        several=None,
        names=("m", "alias"),
        config=SimpleNamespace(model_path="/model"),
        in_thread=threads.run,
        card=card,
        adapters=known,
        check_model=lambda model: None,
    )
    cards = asyncio.run(listed_cards(front, 0))
    assert [(one.id, one.created) for one in cards] == [("m", 5), ("alias", 5), ("one", 7), ("two", 7)]
    assert len(readers) == 1
    assert asyncio.run(card_named(front, "two", 0)) == cards[3]
    assert asyncio.run(card_named(front, "alias", 0)) == cards[1]
    assert threading.main_thread() not in readers
    threads.close()
