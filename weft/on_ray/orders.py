"""Orders of operators, planned where the state of the fleet is: so two API servers cannot undo each other's
checks. Pure.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from weft.common.errors import WeftError
from weft.config.topology import serves
from weft.control.links.owner import Scaled
from weft.control.processes.scaling import plan_removal, plan_restart, plan_scale, to_revive
from weft.control.processes.table import Member
from weft.on_ray.fleet_state import FleetState
from weft.on_ray.plans import GroupPlan, Order, Ordered


def carry_out(state: FleetState, order: Order) -> Ordered:
    """Change ``state`` as an operator orders. Return the changed engines, or the error of the order."""
    try:
        match order.what:
            case "scale":
                return _scale(state, order)
            case "drain":
                return Ordered(leaving=_drain(state, order))
            case "restart":
                return Ordered(starting=_restart(state, order))
            case "revive":
                return Ordered(starting=_revive(state, order))
    except WeftError as error:
        return Ordered(error=error.info())


def scaled(answer: Ordered) -> Scaled:
    """Return an answer without an error in the form of ``Owner.scale``."""
    return Scaled(answer.starting, answer.leaving)


def _scale(state: FleetState, order: Order) -> Ordered:
    """Start or end groups. Ray finds a place for new groups; without a place they wait. With 0 groups,
    requests wait. Groups that drain do not come back: their commands have the signal to end."""
    known = members(state)
    change = plan_scale(
        order.name,
        order.groups,
        known,
        leaving(state),
        retired(state),
        functools.partial(serves, fallback=order.fallback),
        first=_members_of(state.kept.shapes.values()),
        empty=True,
    )
    starting: tuple[str, ...] = ()
    if change.new:
        # The plan of the present topology: groups that run may have an earlier plan.
        plans = [state.kept.shapes[order.name].named(group) for group in change.new]
        state.want(plans)
        starting = tuple(name for plan in plans for name in plan.engines)
    _unwant(state, known, change.leaving)
    return Ordered(starting=starting, leaving=tuple(change.leaving))


def _drain(state: FleetState, order: Order) -> tuple[str, ...]:
    known = members(state)
    check = functools.partial(serves, fallback=order.fallback)
    names = plan_removal(order.name, known, leaving(state), retired(state), check)
    _unwant(state, known, names)
    return tuple(names)


def _restart(state: FleetState, order: Order) -> tuple[str, ...]:
    known = members(state)
    names = plan_restart(order.name, known, leaving(state) | retired(state))
    state.restart(_groups(known, names))
    return tuple(names)


def _revive(state: FleetState, order: Order) -> tuple[str, ...]:
    known = members(state)
    names = to_revive(order.name, known, retired(state))
    for group in _groups(known, names):
        state.revive(group)
    return tuple(names)


def members(state: FleetState) -> dict[str, Member]:
    """Return all engines, wanted or published. Only a published engine is known to encode images."""
    records = {one.name: one for one in state.records}
    found = {name: Member(r.expert_group, r.group, r.role, r.base, r.tower) for name, r in records.items()}
    wanted = _members_of(state.plans.values())
    return {
        **{name: one._replace(tower=name in found and found[name].tower) for name, one in wanted.items()},
        **{name: one for name, one in found.items() if name not in wanted},
    }


def leaving(state: FleetState) -> frozenset[str]:
    """Return the engines that drain, or whose group is not wanted any more."""
    wanted = {name for plan in state.plans.values() for name in plan.engines}
    return frozenset(one.name for one in state.records if one.draining or one.name not in wanted)


def retired(state: FleetState) -> frozenset[str]:
    """Return the engines that nobody starts again."""
    plans = (plan for plan in state.plans.values() if plan.group in state.kept.retired)
    return frozenset(name for plan in plans for name in plan.engines)


def _unwant(state: FleetState, known: dict[str, Member], names: Iterable[str]) -> None:
    for group in _groups(known, names):
        state.unwant(group)


def _groups(known: dict[str, Member], names: Iterable[str]) -> list[str]:
    """Return the groups of engines, each once, in order."""
    return list(dict.fromkeys(known[name].group for name in names))


def _members_of(plans: Iterable[GroupPlan]) -> dict[str, Member]:
    """Return the engines of ``plans``."""
    return {
        name: Member(plan.expert_group, plan.group, plan.role, plan.base)
        for plan in plans
        for name in plan.engines
    }
