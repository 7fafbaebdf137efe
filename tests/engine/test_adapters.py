"""Adapters of an engine: the files are read once, for any number of API servers."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import Future
from pathlib import Path

from tests.config.test_adapters import write
from weft.common.errors import ConfigError
from weft.config.adapters import AdapterFile, read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.engine.adapters import EngineAdapters
from weft.scheduler.adapters import AdapterBook
from weft.types.adapters import DropAdapter, LoadAdapter
from weft.types.plan import HoldAdapter, ReadAdapter, ReleaseAdapter, SlotUpdate


class Anything:
    """A model that every adapter fits."""

    def __init__(self) -> None:
        self.reads: dict[str, Future[AdapterFile]] = {}

    def changes_experts(self, adapter: AdapterFile) -> bool:
        return False

    def check(self, adapter: AdapterFile) -> None:
        pass

    def prefetch(self, digest: str, folder: str, name: str = "") -> Future[AdapterFile]:
        """Return a future that the test completes."""
        return self.reads.setdefault(digest, Future())


def test_a_known_adapter_is_not_read_again(tmp_path: Path) -> None:
    ops: list[SlotUpdate] = []
    adapters = EngineAdapters(LoraSection(max_loras=2), AdapterBook(2, ops.append), Anything())
    digest = read_adapter(write(tmp_path / "a")).digest
    load = LoadAdapter(name="a", digest=digest, folder=str(tmp_path / "a"))
    assert adapters.apply(load).loaded
    shutil.rmtree(tmp_path / "a")
    again = adapters.apply(load)
    assert (again.loaded, again.error) == (True, None)
    assert len(ops) == 1
    adapters.apply(DropAdapter(digest=digest))
    refused = adapters.apply(load)
    assert not refused.loaded
    assert refused.error is not None


def test_an_adapter_that_no_rank_has_read_is_dropped_after_a_loss(tmp_path: Path) -> None:
    book = AdapterBook(2, lambda op: None)
    adapters = EngineAdapters(LoraSection(max_loras=2), book, Anything())
    digests = []
    for number, name in enumerate("ab"):
        digests.append(read_adapter(write(tmp_path / name, lora_alpha=7 + number)).digest)
        load = LoadAdapter(name=name, digest=digests[-1], folder=str(tmp_path / name))
        assert adapters.apply(load).loaded
        for _ in range(3 - 2 * number):
            book.committed()
    adapters.lost(lambda digest: [])
    assert [digest for digest, _ in book.folders()] == digests[:1]
    assert [book.accepts(digest) for digest in digests] == [True, False]


def test_a_load_beside_the_steps(tmp_path: Path) -> None:
    """The answer comes after the thread's end, and an adapter that cannot be loaded leaves no trace."""
    ops: list[SlotUpdate] = []
    book, model = AdapterBook(2, ops.append), Anything()
    adapters = EngineAdapters(LoraSection(max_loras=2), book, model)
    loads = [
        LoadAdapter(
            name=name,
            digest=read_adapter(write(tmp_path / name, lora_alpha=7 + number)).digest,
            folder=str(tmp_path / name),
        )
        for number, name in enumerate("abc")
    ]
    assert [adapters.begin(load) for load in (*loads, loads[0])] == [None] * 4
    assert [type(op) for op in ops] == [ReadAdapter] * 3
    assert (adapters.finished(), book.accepts(loads[0].digest)) == ([], False)
    model.reads[loads[0].digest].set_result(read_adapter(loads[0].folder))
    model.reads[loads[1].digest].set_exception(ConfigError("no adapter of the model"))
    dropped = adapters.begin(DropAdapter(digest=loads[2].digest))
    assert dropped is not None
    assert not dropped.loaded
    assert os.eventfd_read(adapters.sockets[0])
    answers = {answer.digest: answer for answer in adapters.finished()}
    assert [answers[load.digest].loaded for load in loads] == [True, False, False]
    assert "'b'" in answers[loads[1].digest].error.message
    assert [book.accepts(load.digest) for load in loads] == [True, False, False]
    assert [type(op) for op in ops[3:]] == [ReleaseAdapter, HoldAdapter, ReleaseAdapter]
    adapters.close()


def test_an_error_that_no_check_foresees_is_an_answer(tmp_path: Path) -> None:
    model = Anything()
    adapters = EngineAdapters(LoraSection(max_loras=2), AdapterBook(2, lambda op: None), model)
    digest = read_adapter(write(tmp_path / "a")).digest
    assert adapters.begin(LoadAdapter(name="a", digest=digest, folder=str(tmp_path / "a"))) is None
    model.reads[digest].set_exception(TypeError("of a library"))
    (answer,) = adapters.finished()
    assert answer.error is not None
    assert (answer.loaded, answer.error.message) == (False, "the files of adapter 'a' can't be read")
    adapters.close()
