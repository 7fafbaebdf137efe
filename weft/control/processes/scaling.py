"""Changes of a server's groups while the server runs: which groups start, which groups leave. Pure.

A *pool* is a set of groups with equal settings: one entry of a topology, for instance ``decode`` with the
groups ``decode0`` and ``decode1``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from weft.common.errors import InvalidRequest, NotFound
from weft.control.processes.table import Member, named, with_domains

MOST_GROUPS = 1024
"""Maximum groups of a pool."""


class Change(NamedTuple):
    """The difference between the present groups and the wanted groups."""

    new: dict[str, dict[str, Member]]
    """New group -> engine processes of the group, by name."""
    leaving: list[str]
    """Names of the engine processes to drain and end."""
    like: str = ""
    """An existing group: new groups have the settings of this group."""

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of the new engine processes."""
        return tuple(name for members in self.new.values() for name in members)


def plan_scale(
    pool: str,
    groups: int,
    members: Mapping[str, Member],
    leaving: frozenset[str],
    serves: Callable[[set[str]], bool],
) -> Change:
    """Return the change that gives ``pool`` a number of ``groups``.

    ``members``: engine processes by name. ``leaving``: names of ``members`` that leave already; leaving
    groups do not count. New groups get the smallest free numbers. The newest groups leave first.

    Raise NotFound for an unknown pool. Raise InvalidRequest if the number is out of range, or if the
    remaining roles could not serve requests.
    """
    pools = dict.fromkeys(member.pool for member in members.values() if member.pool)
    if pool not in pools:
        known = ", ".join(pools) or "none: start the server with `weft up FILE`, whose groups have names"
        raise NotFound(f"unknown pool {pool!r}; the pools are {known}", param="pool")
    if not 0 <= groups <= MOST_GROUPS:
        raise InvalidRequest(f"a pool has 0 to {MOST_GROUPS} groups, not {groups}", param="groups")
    of_pool: dict[str, dict[str, Member]] = {}
    for name, member in members.items():
        if member.pool == pool:
            of_pool.setdefault(member.group, {})[name] = member
    present = [group for group, names in of_pool.items() if not names.keys() <= leaving]
    if groups < len(present):
        names = [name for group in present[groups:] for name in of_pool[group]]
        _check_roles(names, members, leaving, serves)
        return Change({}, names)
    like = next(iter(of_pool))
    taken = {member.group for member in members.values()} | members.keys()
    free = (name for name in (f"{pool}{n}" for n in itertools.count()) if name not in taken)
    new = {
        group: _renamed(of_pool[like], like, group) for group in itertools.islice(free, groups - len(present))
    }
    return Change(new, [], like)


def plan_removal(
    name: str,
    members: Mapping[str, Member],
    leaving: frozenset[str],
    serves: Callable[[set[str]], bool],
) -> list[str]:
    """Return the engine processes to drain and end when an operator removes ``name``, a group or a process.

    The result includes the members of the same expert-parallel groups.

    Raise NotFound for an unknown name. Raise InvalidRequest if the remaining roles could not serve requests.
    """
    found = with_domains(named(name, members), members) if name else []
    if not found:
        known = ", ".join(dict.fromkeys(member.group or one for one, member in members.items()))
        raise NotFound(f"unknown group {name!r}; the groups are {known}", param="group")
    names = [one for one in found if one not in leaving]
    _check_roles(names, members, leaving, serves)
    return names


def _check_roles(
    names: list[str],
    members: Mapping[str, Member],
    leaving: frozenset[str],
    serves: Callable[[set[str]], bool],
) -> None:
    """Raise InvalidRequest if the server could not serve requests without ``names``."""
    # A leaving process takes no requests, so its role does not count.
    left = {member.role for one, member in members.items() if one not in leaving and one not in names}
    lost = {members[name].role for name in names} - left
    if names and (lost or not serves(left)):
        roles = " and ".join(sorted(lost)) or "serving"
        raise InvalidRequest(
            f"the server would be left without a {roles} group; add another group first, or drain the "
            "whole server (/admin/drain)",
            param="group",
        )


def _renamed(processes: Mapping[str, Member], old: str, new: str) -> dict[str, Member]:
    """Return ``processes`` of group ``old`` as processes of group ``new``: ``decode0.1`` -> ``decode1.1``."""
    made = {}
    for name, member in processes.items():
        domain = new if member.domain else ""
        made[re.sub(f"^{re.escape(old)}", new, name)] = member._replace(group=new, domain=domain)
    return made
