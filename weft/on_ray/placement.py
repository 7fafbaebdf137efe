"""Actors of groups on nodes of the cluster.

A group on one host is one actor with all resources of its ranks, so all ranks have one node. A group on
several hosts has one actor per host, and a placement group with one bundle per host, each on another node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import ray
from ray.util.placement_group import (
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from weft.on_ray.actors import NAMESPACE, GroupActor, group_name
from weft.on_ray.host_actors import HeadActor, HostActor
from weft.on_ray.plans import GroupPlan


def start_group(server: str, plan: GroupPlan) -> None:
    """Start the actors of a group, except actors that live. Ray restarts the actors without a limit;
    ``FleetActor.admit`` has the limit."""
    if plan.hosts == 1:
        # The loss of one node should leave groups of each role.
        _start(GroupActor, server, plan, 0, "SPREAD", label_selector=plan.labels or None)
        return
    bundles = _bundles(server, plan)
    for index in range(plan.hosts):
        place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=index)
        _start(HostActor if index else HeadActor, server, plan, index, place)


def free(server: str, wanted: Iterable[GroupPlan] = (), ending: Collection[str] = ()) -> None:
    """Remove all placement groups of a server, except those of ``wanted`` plans, and of groups that are
    ``ending``."""
    keep = {_bundles_name(server, plan) for plan in wanted}
    busy = {group_name(server, group) for group in ending}
    for one in placement_group_table().values():
        name, _, attempt = one["name"].rpartition("#")
        if not name.startswith(group_name(server, "")) or one["state"] == "REMOVED":
            continue
        if f"{name}#{attempt}" not in keep and name not in busy:
            remove_placement_group(get_placement_group(one["name"]))


def _start(
    kind: type[GroupActor], server: str, plan: GroupPlan, index: int, place: Any, **options: Any
) -> None:
    """Start one actor. ``index``: number of the host in the group. ``place``: Ray's scheduling strategy."""
    ray.remote(kind).options(
        name=group_name(server, plan.group, index),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=4,
        num_gpus=plan.gpus,
        num_cpus=plan.cpus,
        scheduling_strategy=place,
        **options,
    ).remote(server, plan.group, plan.attempt, index)


def _bundles(server: str, plan: GroupPlan) -> Any:
    """Return the placement group of a group: the present one, or a new one."""
    name = _bundles_name(server, plan)
    try:
        return get_placement_group(name)
    except ValueError:
        resources = {name: number for name, number in (("CPU", plan.cpus), ("GPU", plan.gpus)) if number}
        return placement_group(
            [resources] * plan.hosts,
            strategy="STRICT_SPREAD",
            name=name,
            lifetime="detached",
            bundle_label_selector=[plan.labels] * plan.hosts if plan.labels else None,
        )


def _bundles_name(server: str, plan: GroupPlan) -> str:
    """Return the name of the placement group of an attempt."""
    return f"{group_name(server, plan.group)}#{plan.attempt}"
