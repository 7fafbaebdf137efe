"""Running sequences decode in every step, whatever happens to transfers that are being received."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.pair_rig import EnginePair, pair_of, submit
from weft.engine.core import EngineCore
from weft.types import messages as m
from weft.types.plan import StepPlan
from weft.types.sampling import TokenParams

STEPS = 60
RUNNING = (1, 2)
ARRIVALS = range(10, 22)
LONG = TokenParams(temperature=0.0, max_tokens=120)
SHORT = TokenParams(temperature=0.0, max_tokens=2)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., EnginePair]]:
    pairs: list[EnginePair] = []

    def one(**more: Any) -> EnginePair:
        pairs.append(pair_of(tmp_path, "llama", max_num_seqs=6, **more))
        return pairs[-1]

    yield one
    for pair in pairs:
        pair.close()


class Decoding:
    """A decode engine with two running sequences. Records every plan."""

    def __init__(self, pair: EnginePair, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pair = pair
        self.plans: list[StepPlan] = []
        forward = pair.decode.runner.forward

        def noted(plan: StepPlan) -> Any:
            self.plans.append(plan)
            return forward(plan)

        monkeypatch.setattr(pair.decode.runner, "forward", noted)
        self.tokens = 0
        """Number of tokens of the running sequences, which came without a transfer."""
        take = pair.take

        def kept(core: EngineCore, events: list[m.TokenEvent]) -> None:
            self.tokens += sum(len(event.token_ids) for event in events if event.sequence in RUNNING)
            take(core, [event for event in events if event.sequence not in RUNNING])

        monkeypatch.setattr(pair, "take", kept)
        for number in RUNNING:
            pair.take(pair.decode, pair.decode.submit(submit(number, [3, 4, 5 + number], LONG)))
        while not self.plans or self.plans[-1].decode.rows < len(RUNNING):
            pair.take(pair.decode, pair.decode.step())
        self.slots = set(self.plans[-1].decode.slot.tolist())

    def turn(self) -> bool:
        """Run one iteration of the decode engine. Return True if a transfer was being received."""
        core, pair = self.pair.decode, self.pair
        core.check()
        pair.take(core, core.poll())
        stats = core.stats().transfers
        assert stats is not None
        before = len(self.plans)
        pair.take(core, core.step())
        (plan,) = self.plans[before:]
        assert self.slots <= set(plan.decode.slot.tolist())
        assert plan.prefill.rows == 0, "what was prefilled elsewhere is not prefilled here"
        return stats.blocked + stats.fetching > 0


def arrive(pair: EnginePair, number: int) -> None:
    pair.submit(submit(number, [3 + (7 * number + 5 * i) % 90 for i in range(40)], SHORT))


@pytest.mark.requirement("E26", "E28")
@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_decodes_those_that_run_while_transfers_come_and_land(
    made: Callable[..., EnginePair], monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    pair = made(steps_in_flight=depth)
    decoding = Decoding(pair, monkeypatch)
    arrivals = list(ARRIVALS)
    receiving = 0
    for number in range(STEPS):
        if arrivals and number % 4 == 0:
            arrive(pair, arrivals.pop())
        core = pair.prefill
        core.check()
        pair.take(core, core.poll())
        if core.has_work():
            pair.take(core, core.step())
        receiving += decoding.turn()
    assert receiving >= len(ARRIVALS)
    pair.run()
    assert all(len(pair.answers[number].ids) == 2 for number in ARRIVALS)
    assert decoding.tokens == len(RUNNING) * LONG.max_tokens


@pytest.mark.requirement("E28")
@pytest.mark.parametrize("stage", ["nothing was offered", "no byte comes", "no end comes"])
def test_a_transfer_that_goes_no_further_costs_no_step(
    made: Callable[..., EnginePair], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """The sender is silent, or offers and sends nothing, or sends all but the metadata."""
    pair = made()
    decoding = Decoding(pair, monkeypatch)
    held: list[Any] = []
    ranks, transfers = pair.prefill.runner.transfers, pair.prefill.transfers
    assert ranks is not None
    assert transfers is not None
    transfer: Any = ranks._own
    with monkeypatch.context() as patch:
        if stage == "no byte comes":
            patch.setattr(transfer, "computed", lambda *told: held.append(told))
        if stage == "no end comes":
            patch.setattr(
                transfers, "_request", lambda asked, real=transfers._request: _but_ends(asked, real, held)
            )
        for number in ARRIVALS[:3]:
            arrive(pair, number)
        for _ in range(STEPS):
            if stage != "nothing was offered":
                core = pair.prefill
                pair.take(core, core.poll())
                if core.has_work():
                    pair.take(core, core.step())
            assert decoding.turn()
    stats = pair.decode.stats().transfers
    assert stats is not None
    assert (stats.blocked, stats.fetching) == ((3, 0) if stage == "nothing was offered" else (0, 3))
    for told in held:
        transfer.computed(*told) if stage == "no byte comes" else transfers._request(told)
    pair.run()
    assert all(len(pair.answers[number].ids) == 2 for number in ARRIVALS[:3])


def _but_ends(asked: Any, real: Callable[[Any], None], held: list[Any]) -> None:
    if type(asked).__name__ == "FinishTransfer":
        held.append(asked)
    else:
        real(asked)
