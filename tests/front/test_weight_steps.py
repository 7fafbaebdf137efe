"""The steps of an update on scripted engine processes: order, refusals, and two calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weft.common.errors import InvalidRequest, ReportedError, Unavailable
from weft.front.requests import weight_updates
from weft.front.requests.weight_updates import WeightUpdates
from weft.front.siblings import Siblings
from weft.store import fixed_weights
from weft.store.new_weights import source_files
from weft.store.shared_files import new_token, shared_name
from weft.types.messages import RECEIVE_SINCE
from weft.types.weights import (
    AnnouncedTensors,
    DropWeights,
    FreeMemory,
    JoinTrainer,
    ReceiveWeights,
    StageWeights,
    TrainerGroup,
    UseWeights,
    WeightsChanged,
)


def config(**more: Any) -> Any:
    """Return the settings that ``why_fixed`` and ``WeightUpdates`` read."""
    spec = SimpleNamespace(quantized=None)
    made = SimpleNamespace(
        loaded=spec,
        served_names=("m",),
        parallel=SimpleNamespace(eplb_interval=0, enable_expert_parallel=False, tensor_parallel_size=2),
    )
    vars(made).update(more)
    return made


class Engines:
    """Links to engine processes that answer at once, except messages in ``silent``."""

    def __init__(self, weights: int = 0) -> None:
        self.weights = weights
        self.silent: type | None = None
        self.refused = ""
        """A file that both engines refuse."""
        self.failing = ""
        """Name of an engine that receives nothing."""
        self.told: list[Any] = []
        self.instances = [
            SimpleNamespace(
                name=name,
                alive=True,
                incarnation=1,
                role="unified",
                weights=weights,
                weights_answer=None,
                welcome=SimpleNamespace(weights=weights, versions=(1, RECEIVE_SINCE), ranks=ranks),
            )
            for name, ranks in (("a", 2), ("b", 1))
        ]

    def use_version(self, version: int) -> None:
        assert version > self.weights
        self.weights = version

    def tell(self, name: str, message: Any) -> None:
        self.told.append(message)
        if isinstance(message, self.silent or ()):
            return
        one = next(each for each in self.instances if each.name == name)
        if isinstance(message, StageWeights):
            number = message.update.version
            if self.refused in message.update.files:
                error = InvalidRequest("no such file").info()
                one.weights_answer = WeightsChanged(version=one.weights, error=error)
                return
            one.weights_answer = WeightsChanged(version=one.weights, staged=number, digest="d")
        elif isinstance(message, JoinTrainer | ReceiveWeights):
            digest = message.token if isinstance(message, JoinTrainer) else message.file
            error = Unavailable("the trainer has ended").info() if name == self.failing else None
            one.weights_answer = WeightsChanged(version=one.weights, digest=digest, error=error)
        elif isinstance(message, UseWeights | FreeMemory):
            one.weights = getattr(message, "version", one.weights)
            one.weights_answer = WeightsChanged(version=one.weights)


def updates(engines: Engines, **more: Any) -> WeightUpdates:
    made = WeightUpdates(config(**more), engines)  # type: ignore[arg-type]
    made.start()
    made.add(("/x/model.safetensors",), False)
    return made


def never() -> bool:
    return False


async def begun(made: WeightUpdates, engines: Engines) -> asyncio.Task[None]:
    """Start an update, and return its call once both engines have been told to stage."""
    call = asyncio.create_task(made.finish(None, never))
    while len(engines.told) < 2:
        await asyncio.sleep(0)
    return call


def in_loop(engines: Engines, check: Callable[[WeightUpdates], Any], **more: Any) -> None:
    async def run() -> None:
        made = updates(engines, **more)
        try:
            await check(made)
        finally:
            made.close()

    asyncio.run(run())


def test_an_api_server_that_starts_later_goes_on_from_the_version_of_the_engines() -> None:
    engines = Engines(weights=3)

    async def check(made: WeightUpdates) -> None:
        assert (made.number, made.label) == (3, "3")
        await made.finish("new", never)
        assert (made.number, made.label) == (4, "new")
        assert [one.weights for one in engines.instances] == [4, 4]

    in_loop(engines, check)


def test_of_two_calls_at_once_one_is_refused() -> None:
    engines = Engines()

    async def check(made: WeightUpdates) -> None:
        both = await asyncio.gather(made.finish("a", never), made.finish("b", never), return_exceptions=True)
        assert both[0] is None
        assert isinstance(both[1], InvalidRequest)
        assert made.label == "a"

    in_loop(engines, check)


def test_a_call_that_is_cancelled_frees_staged_weights() -> None:
    engines = Engines()
    engines.silent = StageWeights

    async def check(made: WeightUpdates) -> None:
        call = await begun(made, engines)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [type(one) for one in engines.told[2:]] == [DropWeights, DropWeights]
        assert made.number == 0

    in_loop(engines, check)


def test_a_cancelled_call_after_the_decision_is_carried_on() -> None:
    engines = Engines()
    engines.silent = UseWeights

    async def check(made: WeightUpdates) -> None:
        call = asyncio.create_task(made.finish(None, never))
        while len(engines.told) < 4:
            await asyncio.sleep(0.001)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert made.number == 1
        assert made._following is not None

    in_loop(engines, check)


def test_a_server_that_resumes_during_the_update_keeps_the_old_weights() -> None:
    engines = Engines()
    parallel = SimpleNamespace(eplb_interval=0, enable_expert_parallel=True)

    async def check(made: WeightUpdates) -> None:
        states = iter((True, False))
        with pytest.raises(InvalidRequest, match="during a pause"):
            await made.finish(None, lambda: next(states))
        assert made.number == 0
        assert not any(isinstance(one, UseWeights) for one in engines.told)

    in_loop(engines, check, parallel=parallel)


def test_an_engine_that_ends_is_no_refusal_of_the_client() -> None:
    engines = Engines()
    engines.silent = StageWeights

    async def check(made: WeightUpdates) -> None:
        call = await begun(made, engines)
        engines.instances[1].alive = False
        with pytest.raises(Unavailable):
            await call

    in_loop(engines, check)


@pytest.mark.parametrize("place", ["/" + "a" * 300, "/\udc80", "/dev/null", "relative"])
def test_a_path_that_names_no_files_is_refused(place: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        source_files("file", place)


FIRST = ("/start/model.safetensors",)


def staged(engines: Engines) -> list[tuple[tuple[str, ...], bool]]:
    """Return (files, partial) of the updates that engine "a" was told to stage, and forget the messages."""
    told = [one.update for one in engines.told[::2] if isinstance(one, StageWeights)]
    engines.told.clear()
    return [(one.files, one.partial) for one in told]


async def partly(made: WeightUpdates, file: str) -> None:
    made.start()
    made.add((file,), True)
    await made.finish(file, lambda: True)


@pytest.fixture
def start_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_weights, "start_files", lambda config: FIRST)


@pytest.mark.usefixtures("start_weights")
def test_a_wake_up_loads_every_update_and_begins_again_after_an_error() -> None:
    """Before any complete update the weights of the start come first."""
    engines = Engines()

    async def check(made: WeightUpdates) -> None:
        await partly(made, "/1")
        await partly(made, "/2")
        staged(engines)
        expected = [(FIRST, False), (("/1",), True), (("/2",), True)]
        await made.free(2, lambda: True)
        engines.refused = "/2"
        with pytest.raises(ReportedError):
            await made.restore()
        assert staged(engines) == expected
        assert made.freed
        await made.free(2, lambda: True)  # a second sleep loses no update
        engines.refused = ""
        await made.restore()
        assert staged(engines) == expected
        assert (made.label, made.freed) == ("/2", False)
        await made.restore()
        assert staged(engines) == []
        await made.free(2, lambda: True)  # the history now begins with a complete update
        made.start()
        made.add(("/new",), False)
        await made.finish("new", lambda: True)
        assert not made.freed
        staged(engines)
        await made.free(2, lambda: True)
        await made.restore()
        assert staged(engines) == [(("/new",), False)]

    in_loop(engines, check)


@pytest.mark.usefixtures("start_weights")
def test_memory_is_not_freed_after_the_wake_up() -> None:
    """A call that waited frees no memory. Nor does an engine that was busy at the end of the call."""
    engines = Engines()

    async def check(made: WeightUpdates) -> None:
        with pytest.raises(Unavailable, match="woke up"):
            await made.free(2, never)
        assert engines.told == []
        engines.silent = FreeMemory
        call = asyncio.create_task(made.free(2, lambda: True))
        while len(engines.told) < 2:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert [type(one) for one in engines.told] == [FreeMemory] * 2 + [DropWeights] * 2
        assert made.freed

    in_loop(engines, check)


GROUP = TrainerGroup(backend="gloo", address="trainer", port=1, world_size=4, seconds=1.0)
TENSORS = AnnouncedTensors(names=("a",), dtypes=("float32",), shapes=((2,),))


def test_every_rank_joins_and_receives_and_a_failure_ends_the_group() -> None:
    engines = Engines()

    async def check(made: WeightUpdates) -> None:
        with pytest.raises(InvalidRequest, match="no trainer's group is formed"):
            await made.receive(TENSORS, False)
        assert made.ranks == 3
        await made.join(GROUP, 1)
        assert [one.first_rank for one in engines.told] == [1, 3]
        made.start()
        await made.receive(TENSORS, False)
        await made.receive(TENSORS, True)
        files = [one.file for one in engines.told if isinstance(one, ReceiveWeights)][::2]
        engines.told.clear()
        await made.finish("new", never)
        assert staged(engines) == [(tuple(files), True)]
        engines.failing = "b"
        made.start()
        with pytest.raises(ReportedError, match="ended"):
            await made.receive(TENSORS, False)
        assert [type(one) for one in engines.told[2:]] == [DropWeights] * 2
        engines.failing = ""
        with pytest.raises(InvalidRequest, match="no trainer's group is formed"):
            await made.receive(TENSORS, False)
        await made.join(GROUP, 1)
        engines.instances[1].incarnation += 1
        with pytest.raises(InvalidRequest, match="have started since"):
            await made.receive(TENSORS, False)

    in_loop(engines, check)


class Folder:
    """The API servers of one server, as each other's ``Siblings``."""

    def __init__(self) -> None:
        self.up: dict[str, Any] = {}
        self.names: list[str] = []

    def one(self, name: str) -> Any:
        made = Siblings(name, Path(), lambda: self.names, lambda: self.names[0])

        async def tell(model: str, state: str) -> list[bytes]:
            others = [self.up[other] for other in self.names if other != name]
            return [other.weights[model](state) for other in others]

        made.tell_weights = tell  # type: ignore[method-assign]
        self.up[name] = made
        self.names.append(name)
        return made


def test_another_api_server_goes_on_after_the_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others know version and label before an engine reports the version. The next carrier asks the
    others, and brings an engine that starts again to the newest weights. A later API server asks, too."""
    monkeypatch.setattr(weight_updates, "FOLLOW_S", 0.01)
    engines, folder = Engines(), Folder()
    seen = [Engines(), Engines(), Engines()]  # what each other API server knows

    async def check(made: WeightUpdates) -> None:
        others = [WeightUpdates(config(), one) for one in seen]  # type: ignore[arg-type]
        await made.share(folder.one("0"))
        await others[0].share(folder.one("1"))
        folder.names.remove("1")  # misses the update
        await others[1].share(folder.one("2"))
        await made.finish("new", never)
        assert (others[1].number, others[1].label) == (1, "new")
        folder.names[:] = ["2", "3", "1"]
        await others[2].share(folder.one("3"))
        assert (others[2].number, others[2].label) == (1, "new")
        await others[1].rename("named")
        assert [one.label for one in others] == ["named"] * 3
        assert seen[0].told == seen[2].told == []
        folder.names[:] = ["1", "3"]
        while not all(one.weights == 1 for one in seen[0].instances):
            await asyncio.sleep(0.005)
        assert seen[2].told == []  # the first in order carries, and nobody else
        for one in others:
            one.close()

    in_loop(engines, check)


def test_requests_end_after_new_ones_wait_and_before_the_weights_change() -> None:
    """So no request sees both versions. A call that is cancelled meanwhile is carried on."""
    engines = Engines()

    async def check(made: WeightUpdates) -> None:
        left = asyncio.Event()

        async def leave() -> None:
            assert engines.weights == 1
            assert not any(isinstance(one, UseWeights) for one in engines.told)
            left.set()
            await asyncio.sleep(60)

        call = asyncio.create_task(made.finish("new", never, leave))
        await left.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (made.number, made.label) == (1, "new")
        assert made._following is not None
        assert not any(isinstance(one, DropWeights) for one in engines.told)

    in_loop(engines, check)


def test_an_update_that_is_refused_without_a_pause_stays() -> None:
    engines = Engines()
    parallel = SimpleNamespace(eplb_interval=0, enable_expert_parallel=True)

    async def check(made: WeightUpdates) -> None:
        with pytest.raises(InvalidRequest, match="during a pause"):
            await made.finish("new", never)
        assert engines.told == []
        await made.finish("new", lambda: True)
        assert made.label == "new"

    in_loop(engines, check, parallel=parallel)


def test_a_group_of_no_engine_is_not_formed() -> None:
    engines = Engines()
    for one in engines.instances:
        one.alive = False

    async def check(made: WeightUpdates) -> None:
        with pytest.raises(Unavailable, match="no engine process runs"):
            await made.join(GROUP, 1)

    in_loop(engines, check)


def shared_file(folder: Path) -> Path:
    path = folder / shared_name(0, new_token())
    path.touch()
    return path


def test_every_api_server_holds_the_files_of_the_weights(tmp_path: Path) -> None:
    """Until the next complete update. A file of an update that was replaced is deleted at once."""
    engines, folder = Engines(), Folder()

    async def check(made: WeightUpdates) -> None:
        other = WeightUpdates(config(), Engines())  # type: ignore[arg-type]
        await made.share(folder.one("0"))
        await other.share(folder.one("1"))
        first, part, second, lost = (shared_file(tmp_path) for _ in range(4))
        made._files = [str(first)]
        await made.finish("1", never)
        await partly(made, str(part))
        made.close()
        assert first.exists()
        assert part.exists()  # the other API server may become the carrier
        made.start()
        made.add((str(lost),), False)
        made._shared.hold((str(lost),))
        made.start()
        assert not lost.exists()
        made.add((str(second),), False)
        await made.finish("2", never)
        assert not first.exists()
        assert not part.exists()
        made.close()
        assert second.exists()
        other.close()
        assert not second.exists()

    in_loop(engines, check)
