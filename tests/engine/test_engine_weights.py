"""The files of an engine's updates: held while an update needs a file, deleted afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.weights import engine_weights
from weft.engine.weights.engine_weights import EngineWeights
from weft.store import fixed_weights
from weft.store.shared_files import new_token, shared_name
from weft.types.weights import (
    DropWeights,
    FreeMemory,
    JoinTrainer,
    ReceiveWeights,
    StageWeights,
    UseWeights,
    WeightsUpdate,
)


class Group:
    """The ranks of an engine: every update fits."""

    def __init__(self) -> None:
        self.version, self.name = 0, None
        self.updates: tuple[WeightsUpdate, ...] = ()
        self.update: WeightsUpdate | None = None

    def stage(self, update: WeightsUpdate) -> None:
        self.update = update

    def staged(self) -> str | None:
        return None if self.update is None else "digest"

    @property
    def staged_version(self) -> int:
        return 0 if self.update is None else self.update.version

    def swap(self, version: int) -> str:
        assert self.update is not None
        assert all(Path(one).exists() for one in self.update.files)
        update, self.update, self.version = self.update, None, version
        self.updates = (*self.updates, update) if update.partial else (update,)
        return "digest"

    def free(self, weights: bool) -> None:
        self.update = None

    def drop(self) -> None:
        self.update = None


class Receivers:
    """Receivers that write a file at once. ``silent``: without a report."""

    def __init__(self, *args: object) -> None:
        self.joined, self.silent = False, False
        self._answer: str | None = None

    def join(self, told: JoinTrainer) -> None:
        self.joined = True

    def receive(self, told: ReceiveWeights) -> None:
        assert self.joined
        Path(told.file).write_bytes(b"x")
        self._answer = None if self.silent else told.file

    def finished(self) -> str | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        self.joined, self._answer = False, None


class Rig:
    def __init__(self, folder: Path) -> None:
        config: Any = SimpleNamespace(
            loaded=SimpleNamespace(quantized=None),
            transfer=SimpleNamespace(role="unified", take_embeddings=False),
            parallel=SimpleNamespace(enable_expert_parallel=False, tensor_parallel_size=1, hosts=1),
            scheduler=SimpleNamespace(on_update="keep"),
            device="cpu",
        )
        self._folder = folder
        self.group: Any = Group()
        nothing: Callable[..., Any] = lambda *args: []  # noqa: E731
        self.weights = EngineWeights(
            config, self.group, None, nothing, lambda: False, nothing, nothing, nothing
        )
        self.receivers: Any = self.weights._receivers
        self.weights.begin(JoinTrainer(token="t", group=None, first_rank=1))  # type: ignore[arg-type]

    def receive(self, token: str = "", number: int = 0) -> str:
        file = str(self._folder / shared_name(number, token or new_token()))
        self.weights.begin(ReceiveWeights(file=file, tensors=None))  # type: ignore[arg-type]
        self.answer()
        return file

    def answer(self) -> None:
        assert all(one.error is None for one in self.weights.finished())

    def use(self, *files: str, partial: bool = False) -> None:
        version = self.group.version + 1
        self.weights.begin(StageWeights(update=WeightsUpdate(version=version, files=files, partial=partial)))
        self.answer()
        self.weights.begin(UseWeights(version=version))
        self.weights.take(None)
        self.answer()
        assert self.group.version == version

    def left(self) -> list[str]:
        return sorted(str(one) for one in self._folder.glob("weft-*"))


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Rig:
    monkeypatch.setattr(engine_weights, "Receivers", Receivers)
    monkeypatch.setattr(engine_weights, "delete_stale", lambda: None)
    start = tmp_path / "model.safetensors"
    start.touch()
    monkeypatch.setattr(fixed_weights, "start_files", lambda config: (str(start),))
    return Rig(tmp_path)


def test_files_stay_while_an_update_needs_them(rig: Rig) -> None:
    token = new_token()
    first = [rig.receive(token, number) for number in range(2)]
    rig.use(*first)
    second = rig.receive()
    assert rig.left() == sorted([*first, second])
    rig.use(second, partial=True)
    assert rig.left() == sorted([*first, second])
    third = rig.receive()
    rig.use(third)
    assert rig.left() == [third]
    rig.weights.close()
    assert rig.left() == []


def test_files_of_an_update_that_was_given_up_are_deleted(rig: Rig) -> None:
    """Before the next broadcast, before a source of another kind, and after an end in the middle."""
    rig.receive()
    second = rig.receive()
    assert rig.left() == [second]
    rig.use()
    assert rig.left() == []
    rig.receivers.silent = True
    rig.receive()
    rig.weights.begin(DropWeights())
    assert rig.left() == []


def test_a_group_ends_with_a_failure_and_stays_after_weights_that_do_not_fit(rig: Rig) -> None:
    file = rig.receive()
    rig.weights.begin(StageWeights(update=WeightsUpdate(version=1, files=(file,))))
    rig.weights.begin(DropWeights())
    assert rig.receivers.joined
    rig.receive()
    rig.weights.begin(DropWeights())  # a receiver of another engine has failed
    assert not rig.receivers.joined


def test_an_api_server_that_is_gone_leaves_nothing(rig: Rig) -> None:
    """Except a version that the other API servers may know."""
    file = rig.receive()
    rig.weights.leave()
    assert (rig.left(), rig.receivers.joined) == ([], False)
    rig.weights.begin(JoinTrainer(token="t", group=None, first_rank=1))  # type: ignore[arg-type]
    file = rig.receive()
    rig.weights.begin(StageWeights(update=WeightsUpdate(version=1, files=(file,))))
    rig.answer()
    rig.weights.begin(UseWeights(version=1))
    rig.weights.leave()
    rig.weights.take(None)
    assert (rig.group.version, rig.left()) == (1, [file])


@pytest.mark.parametrize("whole", [True, False])
def test_a_sleep_keeps_the_files_of_all_former_updates(rig: Rig, tmp_path: Path, whole: bool) -> None:
    """Without a complete update before the sleep, the wake-up begins with the weights of the start."""
    files = list[str]()
    if whole:
        files.append(rig.receive())
        rig.use(files[0])
    for _ in range(2):
        files.append(rig.receive())
        rig.use(files[-1], partial=True)
    for _ in range(2):
        rig.weights.begin(FreeMemory(weights=True))
        rig.weights.take(None)
        rig.answer()
    rig.use(files[0] if whole else str(tmp_path / "model.safetensors"))
    for file in files[whole:]:
        rig.use(file, partial=True)
    assert rig.left() == sorted(files)
    new = rig.receive()
    rig.use(new)
    assert rig.left() == [new]
