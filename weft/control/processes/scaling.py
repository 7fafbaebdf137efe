"""Changes of a server's groups while the server runs: which groups start, leave, restart or come back. Pure.

Groups with one *base* name can be scaled: ``decode`` is the base name of ``decode0`` and ``decode1``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from weft.common.errors import InvalidRequest, NotFound
from weft.control.processes.table import Member, named, with_expert_groups

MOST_GROUPS = 1024
"""Maximum groups of one base name."""


class Change(NamedTuple):
    """The difference between the present groups and the wanted groups."""

    new: dict[str, dict[str, Member]]
    """New group -> engine processes of the group, by name."""
    leaving: list[str]
    """Names of the engine processes to drain and end."""
    like: str = ""
    """The first group of the base name. New groups have the settings of this group."""
    returning: Sequence[str] = ()
    """Names of the engine processes that stay after all: they drain for an earlier removal."""

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of the new engine processes."""
        return tuple(name for members in self.new.values() for name in members)


def plan_scale(
    base: str,
    groups: int,
    members: Mapping[str, Member],
    leaving: frozenset[str],
    retired: frozenset[str],
    serves: Callable[[set[str]], bool],
    *,
    first: Mapping[str, Member] | None = None,
    returnable: Sequence[str] = (),
    empty: bool = False,
) -> Change:
    """Return the change that gives ``base`` a number of ``groups``.

    ``members``: engine processes by name. ``leaving``: names of ``members`` that leave already; leaving
    groups do not count. ``retired``: names without a process. ``first``: members at the start of the server,
    which define the base names. ``returnable``: names of ``leaving`` that may stay, newest removal first.
    ``empty``: True if requests wait for a role without groups, so the last group of a role may leave.

    Missing groups come from ``returnable`` first. New groups get the smallest free numbers. Retired groups
    leave first, then the newest.

    Raise NotFound for an unknown name. Raise InvalidRequest if the number is out of range, or if the
    remaining groups could not do all work of the server.
    """
    of_base = _groups_of(base, members)
    # The definition of a name outlives its last group.
    shape = of_base or _groups_of(base, first or {})
    if not shape:
        bases = dict.fromkeys(one.base for one in {**(first or {}), **members}.values() if one.base)
        known = ", ".join(bases) or "none: start the server with `weft up FILE`, whose groups have names"
        raise NotFound(f"no groups are called {base!r} and a number; the names are {known}", param="base")
    if not 0 <= groups <= MOST_GROUPS:
        raise InvalidRequest(f"a name has 0 to {MOST_GROUPS} groups, not {groups}", param="groups")
    present = [group for group, names in of_base.items() if not names.keys() <= leaving]
    present.sort(key=lambda group: of_base[group].keys() <= retired)  # stable: else in order of the start
    if groups < len(present):
        names = [name for group in present[groups:] for name in of_base[group]]
        if groups or not empty:
            _check_roles(names, members, leaving | retired, serves)
        return Change({}, names)
    missing = groups - len(present)
    back = dict.fromkeys(members[name].group for name in returnable if members[name].base == base)
    # A group with a process that ends already cannot stay.
    whole = [group for group in back if of_base[group].keys() <= set(returnable)][:missing]
    returning = [name for group in whole for name in of_base[group]]
    like = next(iter(shape))
    taken = {member.group for member in members.values()} | members.keys()
    free = (name for name in (f"{base}{n}" for n in itertools.count()) if name not in taken)
    new = {
        group: _renamed(shape[like], like, group) for group in itertools.islice(free, missing - len(whole))
    }
    return Change(new, [], like, returning)


def _groups_of(base: str, members: Mapping[str, Member]) -> dict[str, dict[str, Member]]:
    """Return group -> engine processes by name, of all groups with a base name."""
    groups: dict[str, dict[str, Member]] = {}
    for name, member in members.items():
        if base and member.base == base:
            groups.setdefault(member.group, {})[name] = member
    return groups


def plan_removal(
    name: str,
    members: Mapping[str, Member],
    leaving: frozenset[str],
    retired: frozenset[str],
    serves: Callable[[set[str]], bool],
) -> list[str]:
    """Return the engine processes to drain and end when an operator removes ``name``, a group or a process.

    The result includes the members of the same expert-parallel groups.

    Raise NotFound for an unknown name. Raise InvalidRequest if the remaining roles could not serve requests,
    for one engine of a larger group, and for a group that leaves already.
    """
    found = with_expert_groups(named(name, members), members) if name else []
    if not found:
        raise _unknown(name, members)
    group = members[found[0]].group
    if len(found) < len([one for one in members.values() if one.group == group]):
        raise InvalidRequest(f"{name} is one engine of a larger group: give the group {group}", param="group")
    names = [one for one in found if one not in leaving]
    if not names:
        raise InvalidRequest(f"{name} leaves the server already", param="group")
    _check_roles(names, members, leaving | retired, serves)
    return names


def plan_restart(name: str, members: Mapping[str, Member], absent: frozenset[str]) -> list[str]:
    """Return the engine processes to replace when an operator restarts ``name``, a group or a process; "" for
    all.

    ``absent``: members that leave or have no process. The result includes the members of the same
    expert-parallel groups. Raise NotFound for an unknown name, and InvalidRequest if all its members are
    absent.
    """
    found = with_expert_groups(named(name, members), members) if name else list(members)
    if not found:
        raise _unknown(name, members)
    present = [one for one in found if one not in absent]
    if not present:
        raise InvalidRequest(
            f"{name or 'the server'} has no engine to restart: the engines leave, or are retired "
            "(`weft revive` starts retired engines)",
            param="group",
        )
    return present


def _unknown(name: str, members: Mapping[str, Member]) -> NotFound:
    """Return the error for a name that is no group and no process."""
    known = ", ".join(dict.fromkeys(member.group or one for one, member in members.items()))
    return NotFound(f"unknown group {name!r}; the groups are {known}", param="group")


def to_revive(name: str, members: Mapping[str, Member], retired: Iterable[str]) -> list[str]:
    """Return the ``retired`` processes to start when an operator revives ``name`` (a group or a process).

    The result includes retired members of the same expert-parallel groups. Raise NotFound for an unknown
    name, and InvalidRequest if no process of ``name`` is retired.
    """
    names = with_expert_groups(named(name, members), members)
    if not name or not names:
        raise _unknown(name, members)
    gone = set(retired)
    found = [one for one in names if one in gone]
    if not found:
        raise InvalidRequest(
            f"no engine of {name!r} is retired; engines that die are restarted automatically",
            param="group",
        )
    return found


def _check_roles(
    names: list[str],
    members: Mapping[str, Member],
    absent: frozenset[str],
    serves: Callable[[set[str]], bool],
) -> None:
    """Raise InvalidRequest if the server could not do all work without ``names``.

    ``absent``: members that take no requests, because they leave or are retired. The last group of a role may
    leave if other groups do its work. ``--prefill-fallback`` does not count, because the fallback is for
    failures.
    """
    if absent.issuperset(names):
        return
    present = {one: member for one, member in members.items() if one not in absent}
    left = [member for one, member in present.items() if one not in names]
    roles = {member.role for member in left}
    lost = {present[name].role for name in names if name in present} - roles
    images = any(member.tower or member.role == "encode" for member in present.values())
    complete = "unified" in roles or roles >= {"prefill", "decode"}
    if serves(roles) and (not lost or (complete and (not images or _sees(left)))):
        return
    lacks = " and ".join(sorted(lost)) or "serving"
    raise InvalidRequest(
        f"the server would be left without {'an' if lacks.startswith('e') else 'a'} {lacks} group; add "
        "another group first, or drain the whole server (/admin/drain)",
        param="group",
    )


def _sees(left: list[Member]) -> bool:
    """Return True if all groups of ``left`` that compute prompts can have images encoded."""
    computing = [member for member in left if member.role in ("prefill", "unified")]
    return any(member.role == "encode" for member in left) or all(one.tower for one in computing)


def _renamed(processes: Mapping[str, Member], old: str, new: str) -> dict[str, Member]:
    """Return ``processes`` of group ``old`` as processes of group ``new``: ``decode0.1`` -> ``decode1.1``."""
    made = {}
    for name, member in processes.items():
        expert_group = new if member.expert_group else ""
        made[re.sub(f"^{re.escape(old)}", new, name)] = member._replace(group=new, expert_group=expert_group)
    return made
