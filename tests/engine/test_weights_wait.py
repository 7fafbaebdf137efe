"""When an engine waits for its sequences before weights change or memory sleeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.weights import engine_weights
from weft.engine.weights.engine_weights import EngineWeights
from weft.types.weights import FreeMemory, UseWeights


class Group:
    """Ranks that have staged version 1."""

    version, name, updates = 0, None, (SimpleNamespace(files=()),)

    def swap(self, version: int) -> str:
        self.version = version
        return "digest"

    def free(self, weights: bool) -> None:
        pass


def engine(busy: bool = False, stepping: bool = False, held: bool = False, **settings: Any) -> EngineWeights:
    parallel = SimpleNamespace(enable_expert_parallel=False, tensor_parallel_size=1, hosts=1)
    transfer = SimpleNamespace(role="unified", take_embeddings=False)
    for name, value in settings.items():
        setattr(transfer if hasattr(transfer, name) else parallel, name, value)
    spec = SimpleNamespace(quantized=None)
    scheduler = SimpleNamespace(on_update="keep")
    config: Any = SimpleNamespace(
        parallel=parallel, transfer=transfer, loaded=spec, scheduler=scheduler, device="cpu"
    )
    group, nothing = Group(), lambda *_: None
    made: Any = EngineWeights(
        *(config, group, None, list, lambda: busy, nothing, nothing, nothing),  # type: ignore[arg-type]
        stepping=lambda: stepping,
        held=lambda: held,
    )
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"busy": True}, False),
        ({"busy": True, "role": "decode"}, True),
        # An embedding of the old tower may still be on the way to the engine.
        ({"busy": True, "take_embeddings": True}, True),
        # Another replica computes with experts of this engine.
        ({"enable_expert_parallel": True, "stepping": True}, True),
        ({"enable_expert_parallel": True, "busy": True}, True),
        # No replica steps: the open sequences wait for this update.
        ({"enable_expert_parallel": True, "busy": True, "held": True}, False),
        ({"enable_expert_parallel": True, "busy": True, "held": True, "role": "decode"}, True),
        ({"enable_expert_parallel": True, "held": True, "role": "decode"}, False),
    ],
    ids=str,
)
def test_open_sequences_of_others_keep_their_weights(
    settings: dict[str, Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_weights, "BUSY_S", 0.0)
    weights = engine(**settings)
    weights.begin(UseWeights(version=1))
    weights.take(None)
    (answer,) = weights.finished()
    assert (answer.error is not None, answer.version) == (refused, int(not refused))


@pytest.mark.parametrize("settings", [{"busy": True, "held": True}, {"stepping": True}], ids=str)
def test_memory_in_use_does_not_sleep(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_weights, "BUSY_S", 0.0)
    weights = engine(enable_expert_parallel=True, **settings)
    weights.begin(FreeMemory())
    weights.take(None)
    (answer,) = weights.finished()
    assert answer.error is not None
