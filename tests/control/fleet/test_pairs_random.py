"""Pairs under random deaths, refusals, returns, pauses and leaving clients: see ``pair_model``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from msgspec import structs

from tests.control.fleet.pair_model import Model
from weft.control.fleet import pairs
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instances import Instance
from weft.control.fleet.ledger import LedgerEntry
from weft.control.fleet.server_pause import ServerPause
from weft.types.messages import Finish, Submit, ToEngine, TokenEvent

SEEDS = range(160)
SEEN_BY = {"_nobody_misses_the_sender": 302}
"""Bug -> the seed that detected the bug before. This seed is tried first."""


def _run_all(seeds: Iterable[int] = SEEDS) -> Iterator[Model]:
    for seed in seeds:
        model = Model(seed)
        model.run()
        yield model


@pytest.mark.requirement("D19", "E20")
@pytest.mark.parametrize(
    "seeds",
    [
        SEEDS,
        pytest.param(range(SEEDS.stop, 320), marks=pytest.mark.slow),
        pytest.param(range(320, 1000), marks=pytest.mark.grid),
    ],
)
def test_every_sequence_gives_its_tokens_and_ends_once_everywhere(seeds: range) -> None:
    seen: Counter[str] = Counter()
    for model in _run_all(seeds):
        seen.update(model.seen)
        seen["paired"] += model.fleet.paired
        seen["failovers"] += model.fleet.failovers
        seen["local prefills"] += model.fleet.local_prefills
        seen["images sent to be encoded"] += sum(model.fleet.encodes.values())
    for what in (
        "moved",
        "ended at prefill",
        "killed prefill",
        "killed decode",
        "killed unified",
        "killed encode",
        "encoded",
        "evicted by encode",
        "evicted by prefill",
        "evicted by decode",
        "rooms failed",
        "rooms failed, the peer has ended",
        "refused",
        "paused",
        "left",
        "paired",
        "failovers",
        "local prefills",
        "drained",
        "server paused",
        "server paused for new sequences",
        "server resumed",
    ):
        assert seen[what] >= 10, (what, seen)
    failed = sum(count for what, count in seen.items() if what.startswith("failed"))
    assert failed < seen["done"] / 10, seen


def _no_positions(patch: pytest.MonkeyPatch) -> None:
    take = LedgerEntry.take

    def change(self: LedgerEntry, event: TokenEvent, receives: bool = False) -> TokenEvent | None:
        return take(self, TokenEvent(**{**_fields(event), "position": -1}), receives)

    patch.setattr(LedgerEntry, "take", change)


def _fields(event: TokenEvent) -> dict[str, object]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def _nothing_is_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerEntry, "in_order", lambda self, name, event: event)


def _what_was_held_is_lost(patch: pytest.MonkeyPatch) -> None:
    hand_over = Fleet._hand_over

    def change(self: Fleet, sender: Instance, entry: LedgerEntry) -> None:
        entry.held.clear()
        hand_over(self, sender, entry)

    patch.setattr(Fleet, "_hand_over", change)


def _nobody_misses_the_sender(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerEntry, "needs_sender", False)


def _one_finish_is_enough(patch: pytest.MonkeyPatch) -> None:
    send = Fleet._send

    def change(self: Fleet, instance: Instance, message: ToEngine) -> None:
        if not isinstance(message, Finish) or instance.role != "decode":
            send(self, instance, message)

    patch.setattr(Fleet, "_send", change)


def _a_place_is_left_in_the_books(patch: pytest.MonkeyPatch) -> None:
    def change(self: Fleet, instance: Instance, entry: LedgerEntry) -> None:
        del entry.places[instance.name]

    patch.setattr(Fleet, "_depart", change)


def _transfers_are_used_again(patch: pytest.MonkeyPatch) -> None:
    divide = pairs.divided_submit

    def change(
        compute: Instance, encoders: Sequence[Instance], submit: Submit, seconds: float
    ) -> tuple[Submit, list[tuple[Instance, Submit]]]:
        received, parts = divide(compute, encoders, structs.replace(submit, attempt=0), seconds)
        return structs.replace(received, attempt=submit.attempt), [
            (one, structs.replace(its, attempt=submit.attempt)) for one, its in parts
        ]

    patch.setattr(pairs, "divided_submit", change)


def _encoders_hear_of_no_end(patch: pytest.MonkeyPatch) -> None:
    send = Fleet._send

    def change(self: Fleet, instance: Instance, message: ToEngine) -> None:
        if not isinstance(message, Finish) or instance.role != "encode":
            send(self, instance, message)

    patch.setattr(Fleet, "_send", change)


def _a_pause_holds_nothing_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServerPause, "admitted", lambda self, ready: ready)


@pytest.mark.requirement("D27")
@pytest.mark.parametrize(
    "plant",
    [
        _transfers_are_used_again,
        _encoders_hear_of_no_end,
        _no_positions,
        _nothing_is_held,
        _what_was_held_is_lost,
        _nobody_misses_the_sender,
        _one_finish_is_enough,
        _a_place_is_left_in_the_books,
        _a_pause_holds_nothing_back,
    ],
)
def test_a_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        list(_run_all((SEEN_BY.get(plant.__name__, 0), *SEEDS)))
