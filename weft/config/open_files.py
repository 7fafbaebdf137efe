"""How many files a server's processes have open: sockets, pipes and shared memory are files, too."""

from __future__ import annotations

from collections.abc import Sequence

from weft.common.errors import ConfigError
from weft.common.open_files import allow_files, most_files
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection

OF_EACH = 64
"""Files of a process without peers; an idle one of each kind has 23 to 36."""
OF_PEER = 12
"""Files for one peer: connections with their pipes and monitors, and memory that is shown."""


def files_needed(groups: Sequence[EngineConfig], front: FrontSection) -> int:
    """Files that one process of the server may have open: each may have all others as peers."""
    heads = sum(group.parallel.layout.data for group in groups)
    ranks = sum(group.parallel.layout.ranks for group in groups)
    return OF_EACH + OF_PEER * (heads + ranks + front.fronts + front.spare_processes)


def ask_for_files(groups: Sequence[EngineConfig], front: FrontSection) -> None:
    """Raises this process's limit of open files as far as it may; children inherit the limit.

    Raises ConfigError where that is too few: libraries abort without a reason when files run out.
    """
    needed, most = files_needed(groups, front), most_files()
    if most < needed:
        raise ConfigError(
            f"each process of this server needs up to {needed} open files, and the system allows {most}: "
            f"raise the limit (`ulimit -n {needed}`, or LimitNOFILE={needed} of a systemd unit)"
        )
    allow_files()
