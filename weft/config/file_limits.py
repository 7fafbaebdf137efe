"""Number of open files of a server's processes. Sockets, pipes and shared memory count as files."""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.errors import ConfigError
from weft.common.open_files import allow_files, most_files
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection

OF_EACH = 64
"""Files of a process without peers. An idle process has 23 to 36, depending on the role."""
OF_PEER = 12
"""Files per peer: connections with pipes and monitors, and shared memory."""


def files_needed(groups: Sequence[EngineConfig], front: FrontSection) -> int:
    """Return the maximum number of open files of one process, with all other processes as peers."""
    engines = sum(group.parallel.layout.data for group in groups)
    ranks = sum(group.parallel.layout.ranks for group in groups)
    return OF_EACH + OF_PEER * (engines + ranks + front.fronts + front.spare_processes)


def ask_for_files(groups: Sequence[EngineConfig], front: FrontSection) -> None:
    """Raise the limit of open files of this process to the maximum; child processes inherit the limit.

    Raise ConfigError if the maximum is too low. Without the check, libraries abort without a reason when
    files run out.
    """
    needed, most = files_needed(groups, front), most_files()
    if most < needed:
        raise ConfigError(
            f"each process of this server needs up to {needed} open files, and the system allows {most}: "
            f"raise the limit (`ulimit -n {needed}`, or LimitNOFILE={needed} of a systemd unit)"
        )
    allow_files()
