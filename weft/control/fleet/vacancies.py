"""Roles that an operator has scaled to zero. Pure.

In an elastic fleet the last group of a role may leave in order. Then each request waits for a group of the
role, for its own time: nobody restarts anything, so the time since the departure says nothing.
"""

from __future__ import annotations

from weft.control.fleet.instance_table import InstanceTable


def vacant(table: InstanceTable) -> bool:
    """Return True if roles are missing, and all missing roles are vacant.

    A role is vacant if the last instance of the role left alive, and no present instance has ever had the
    role. An instance that was lost, or is being restarted, makes no vacancy.
    """
    missing = table.missing(images=True)
    had = {one.role for one in table.wanted}
    return bool(missing) and all(table.roles.get(role, False) and role not in had for role in missing)
