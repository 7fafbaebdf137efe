"""The owner of groups on Ray, over a fleet state in this process: no actor, no cluster."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping

import msgspec
import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.control.directory.test_leases import record
from tests.on_ray.test_fleet_state import plan
from weft.common.errors import ReportedError, Unavailable
from weft.control.directory.record import EngineRecord
from weft.control.links.link import Address
from weft.control.links.owner import Scaled
from weft.on_ray.fleet_state import FleetState
from weft.on_ray.orders import carry_out
from weft.on_ray.plans import GroupPlan, Kept, Order, Ordered
from weft.on_ray.ray_directory import RayDirectory, RayOwner
from weft.parallel.secret import derive

PREFILL = GroupPlan(group="prefill0", base="prefill", role="prefill", engines=("prefill0",))


class Directory(RayDirectory):
    """A directory that sends orders to a fleet state of the test."""

    def __init__(self, state: FleetState) -> None:
        self.state = state
        self.read()

    def read(self) -> Mapping[str, EngineRecord]:
        self._snapshot = self.state.snapshot()
        return {one.name: one for one in self._snapshot.records}

    def order(self, order: Order) -> Ordered:
        answer = carry_out(self.state, order)
        self.read()
        return answer


@pytest.fixture
def directory() -> Directory:
    state = FleetState(Kept(secret="secret" * 4), 0.0)
    state.want([PREFILL, plan("decode0")])
    state.due([], 0.0)
    published = record("decode0", incarnation=5)
    assert state.publish("decode0", state.plans["decode0"].attempt, 1, [published], 0.0)
    return Directory(state)


def test_a_role_scales_to_zero_and_back(directory: Directory) -> None:
    owner = RayOwner(directory, record().model, None, "none")  # type: ignore[arg-type]
    with pytest.raises(ReportedError, match="without a decode group") as refused:
        asyncio.run(owner.remove("decode0"))
    assert refused.value.info().http_status == 400
    assert asyncio.run(owner.scale("decode", 0)).leaving == ("decode0",)
    assert list(directory.state.plans) == ["prefill0"]
    attempt = next(key[1] for key in directory.state._published)
    owner.present()
    # decode0 drains still. The state of the fleet at the order counts, and no earlier one.
    assert asyncio.run(owner.scale("decode", 1)).starting == ("decode1",)
    directory._snapshot = msgspec.structs.replace(directory._snapshot, plans=())
    assert asyncio.run(owner.scale("decode", 1)) == Scaled((), ())
    directory.state.left("decode0", attempt)
    assert asyncio.run(owner.scale("decode", 2)).starting == ("decode0",)
    assert list(directory.state.plans) == ["prefill0", "decode1", "decode0"]
    assert directory.state.plans["decode0"].role == "decode"


def test_new_groups_have_the_plan_of_the_present_topology(directory: Directory) -> None:
    owner = RayOwner(directory, record().model, None, "none")  # type: ignore[arg-type]
    changed = GroupPlan(
        group="decode0",
        base="decode",
        role="decode",
        engines=("decode0.0", "decode0.1"),
        expert_group="decode0",
        cpus=2.0,
    )
    directory.state.want([changed])
    assert asyncio.run(owner.scale("decode", 2)).starting == ("decode1.0", "decode1.1")
    new = directory.state.plans["decode1"]
    assert (new.cpus, new.expert_group, new.engines) == (2.0, "decode1", ("decode1.0", "decode1.1"))
    assert directory.state.plans["decode0"].cpus == 1.0


def test_an_api_server_outlives_a_stop_and_reaches_the_engines_of_the_next_start(
    directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    """The next fleet actor has another secret. An earlier release's fleet actor has none in its state."""
    owner = RayOwner(directory, record().model, derive(b"the first secret"), "none")
    for secret, used in (("", b"the first secret"), ("the next secret!", b"the next secret!")):
        directory.state = FleetState(Kept(secret=secret, note=f"set aside {secret}" if secret else ""), 0.0)
        directory.state.want([plan("decode0")])
        far = msgspec.structs.replace(record("decode0"), endpoint="tcp://10.0.0.2:9", incarnation=len(used))
        attempt = directory.state.plans["decode0"].attempt
        assert directory.state.publish("decode0", attempt, 1, [far], 0.0)
        owner._directory._read()  # type: ignore[attr-defined]
        owner._read_at = -math.inf
        address = owner.present()["decode0"]
        assert isinstance(address, Address)
        assert address.keys == derive(used)
    assert [one.message for one in caplog.records if "set aside" in one.message] == [
        "set aside the next secret!"
    ]


def test_an_order_without_an_answer_is_reported(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = RayOwner(directory, record().model, None, "none")  # type: ignore[arg-type]

    def lost(*_: object) -> None:
        raise OSError("Ray: the fleet actor does not answer")

    monkeypatch.setattr(directory, "order", lost)
    with pytest.raises(Unavailable, match="try again"):
        asyncio.run(owner.scale("decode", 2))


def test_the_end_of_an_engine_is_known_at_once(directory: Directory) -> None:
    owner = RayOwner(directory, record().model, None, "none")  # type: ignore[arg-type]
    address = owner.present()["decode0"]
    assert isinstance(address, Address)
    assert address.process.poll() is None
    state = directory.state
    state.publish("decode0", state.plans["decode0"].attempt, 1, [], 1.0, ended=True)
    directory.read()
    assert address.process.poll() == 1
    state.publish("decode0", state.plans["decode0"].attempt, 1, [record("decode0", incarnation=6)], 2.0)
    directory.read()
    assert address.process.poll() == 1
    again = owner._address(state.snapshot().records[0])
    assert again.process.poll() is None
