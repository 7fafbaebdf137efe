"""From a configuration to a head's part in rooms."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from weft.common.clock import Clock
from weft.common.errors import EngineDead
from weft.common.folder import private_folder
from weft.config.resolved import EngineConfig
from weft.engine.group import GroupExecutor
from weft.engine.room_channel import ZmqRooms
from weft.engine.rooms import HeadRooms


def make_rooms(
    config: EngineConfig, group: GroupExecutor, incarnation: int, clock: Clock
) -> HeadRooms | None:
    """None for a group without a role: then nothing was made. ``incarnation``: of this head.

    It listens in the folder of its group's sockets (``EngineConfig.domain``), or in one of its own, which
    goes with it. Raises EngineDead when ranks have no transfers.
    """
    role = config.transfer.role
    if role == "unified":
        return None
    ranks = group.rooms
    if ranks is None:
        raise EngineDead(f"a group with the role {role}, and its ranks take no part in transfers")
    folder = Path(config.domain) if config.domain else private_folder()
    try:
        # A Unix socket's path is short.
        channel = ZmqRooms(f"ipc://{folder}/r{config.replica}-{secrets.token_hex(4)}", incarnation)
    except BaseException:
        if not config.domain:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if not config.domain:
        channel.folder = folder
    return HeadRooms(role == "prefill", ranks, channel, incarnation=incarnation, clock=clock)
