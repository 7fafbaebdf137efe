"""The fleet actor in this process, over a store of the test: no cluster."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import msgspec
import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.on_ray.test_fleet_state import offer, plan, wanted
from weft.on_ray import fleet_actor
from weft.on_ray.plans import Kept, Order, Ordered, Snapshot

KEY = "weft/shop/state"


class Fleet(fleet_actor.FleetActor):
    """A fleet actor without group actors, whose thread ends at once."""

    def living(self) -> list[str]:
        return []

    def _look(self) -> None:
        pass

    def _look_on(self) -> None:
        pass

    def read(self) -> Snapshot:
        return msgspec.msgpack.decode(self.snapshot(), type=Snapshot)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Ray's store of keys."""
    kept: dict[str, bytes] = {}
    monkeypatch.setattr(
        fleet_actor,
        "internal_kv",
        SimpleNamespace(
            _internal_kv_get=lambda key, namespace: kept.get(key),
            _internal_kv_put=lambda key, value, overwrite, namespace: kept.__setitem__(key, value),
            _internal_kv_del=lambda key, namespace: kept.pop(key, None),
        ),
    )

    def ended(status: int) -> None:
        raise AssertionError(f"the actor ended with status {status}")

    monkeypatch.setattr(fleet_actor.os, "_exit", ended)
    return kept


OTHER_PLANS = msgspec.msgpack.encode({"secret": "s" * 64, "model": "m", "plans": [1, 2], "retired": "none"})


@pytest.mark.parametrize(
    ("data", "secret", "model"),
    [(OTHER_PLANS, "s" * 64, "m"), (b"\xc1 no msgpack", "new", ""), (b"\x91\x01", "new", "")],
    ids=["another layout", "no msgpack", "a list"],
)
def test_a_state_of_another_release_is_set_aside(
    store: dict[str, bytes], data: bytes, secret: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet actor serves without groups, and says what to do, also after a restart, until an offer. The
    old state may have had placement groups."""
    freed: list[str] = []
    monkeypatch.setattr(fleet_actor.placement, "free", freed.append)
    store[KEY] = data
    for fleet in (Fleet("shop", "new"), Fleet("shop", "newer")):
        found = fleet.read()
        assert "weft up FILE --on ray" in found.note
        assert (found.plans, found.secret) == ((), secret)
        assert store[f"{KEY}/unreadable"] == data
    if model:  # the name still belongs to the model
        assert fleet.offer(msgspec.msgpack.encode(offer("decode0", model="other"))) == model
    assert fleet.offer(msgspec.msgpack.encode(offer("decode0"))) == ""
    assert wanted(fleet._state) == ["decode0"]
    again = Fleet("shop", "newest").read()
    assert (again.note, [one.group for one in again.plans], again.secret) == ("", ["decode0"], secret)
    fleet.stop()
    assert fleet.forget()
    assert store == {}
    assert freed == ["shop"]


def test_a_state_with_further_fields_is_read(store: dict[str, bytes]) -> None:
    first = Fleet("shop", "s" * 64)
    first.offer(msgspec.msgpack.encode(offer("decode0")))
    store[KEY] = msgspec.msgpack.encode({**msgspec.msgpack.decode(store[KEY]), "later": 1})
    again = Fleet("shop", "new").read()
    assert (again.note, again.secret, len(again.plans)) == ("", "s" * 64, 1)
    assert msgspec.msgpack.decode(store[KEY], type=Kept).secret == "s" * 64


def test_one_of_two_orders_at_the_same_time_is_refused(store: dict[str, bytes]) -> None:
    """Orders of two API servers come in two threads of the actor."""
    fleet = Fleet("shop", "s" * 64)
    prefill = msgspec.structs.replace(plan("prefill0"), base="prefill", role="prefill")
    plans = (prefill, plan("decode0"), plan("decode1"))
    fleet.offer(msgspec.msgpack.encode(msgspec.structs.replace(offer(), plans=plans)))
    orders = [msgspec.msgpack.encode(Order(what="drain", name=f"decode{n}")) for n in range(2)]
    with ThreadPoolExecutor(2) as threads:
        answers = [msgspec.msgpack.decode(one, type=Ordered) for one in threads.map(fleet.order, orders)]
    assert sorted(len(one.leaving) for one in answers) == [0, 1]
    assert [len(one.read().plans) for one in (fleet, Fleet("shop", "new"))] == [2, 2]
