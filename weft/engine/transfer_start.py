"""Creates the transfers of an engine process, for KV caches and for image embeddings, from a
configuration.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from weft.common.clock import Clock
from weft.common.errors import EngineDead
from weft.common.folder import private_folder
from weft.config.resolved import EngineConfig
from weft.disagg.protocol.pairing import Pairing
from weft.engine.disagg.engine_transfers import EngineTransfers
from weft.engine.disagg.group_transfers import GroupTransfers
from weft.engine.disagg.rank_transfers import embeddings_of, transports_of
from weft.engine.disagg.reach import reaches
from weft.engine.disagg.transfer_channel import ZmqTransferChannel
from weft.engine.group import GroupExecutor
from weft.parallel.address import tcp
from weft.parallel.secret import read_keys


def make_transfers(
    config: EngineConfig, group: GroupExecutor, incarnation: int, clock: Clock
) -> EngineTransfers | None:
    """Return the KV transfers of an engine process, or None for a group with another role than ``prefill`` or
    ``decode``.

    ``incarnation``: the engine's number. Raises EngineDead when the ranks have no transfers.
    """
    role = config.transfer.role
    if role not in ("prefill", "decode"):
        return None
    return _made(config, group.transfers, "r", role == "prefill", incarnation, clock)


def make_embeddings(
    config: EngineConfig, group: GroupExecutor, incarnation: int, clock: Clock
) -> EngineTransfers | None:
    """Return the embedding transfers of an engine process, or None for a group without embedding
    transfers.
    """
    does = embeddings_of(config)
    if does is None:
        return None
    return _made(config, group.embeddings, "e", does == "sends", incarnation, clock)


def _made(
    config: EngineConfig,
    ranks: GroupTransfers | None,
    name: str,
    sends: bool,
    incarnation: int,
    clock: Clock,
) -> EngineTransfers:
    """Open the channel of an engine process and return the transfers.

    On one host the channel's socket lies in the group's socket folder (``EngineConfig.socket_folder``).
    Without the folder the socket lies in a private folder, removed with the channel. Raises EngineDead if the
    ranks have no transfers.
    """
    if ranks is None:
        raise EngineDead(f"the ranks of a group of role {config.transfer.role} have no KV transfers")
    if config.parallel.advertise is not None:
        channel = _over_hosts(config, incarnation)
        return EngineTransfers(
            sends, ranks, channel, incarnation=incarnation, clock=clock, pairing=_pairing(config)
        )
    folder = Path(config.socket_folder) if config.socket_folder else private_folder()
    try:
        # Short name: the path of a Unix socket is limited to 107 bytes.
        channel = ZmqTransferChannel(
            f"ipc://{folder}/{name}{config.replica}-{secrets.token_hex(4)}", incarnation
        )
    except BaseException:
        if not config.socket_folder:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if not config.socket_folder:
        channel.folder = folder
    pairing = _pairing(config)
    return EngineTransfers(sends, ranks, channel, incarnation=incarnation, clock=clock, pairing=pairing)


def _pairing(config: EngineConfig) -> Pairing:
    """Return the choice of transports for an engine that sends."""
    return Pairing(transports_of(config), reaches)


def _over_hosts(config: EngineConfig, incarnation: int) -> ZmqTransferChannel:
    """Return a channel at a TCP port of the local host, chosen by the system."""
    assert config.parallel.group_secret is not None, "checked when the configuration was resolved"
    keys = read_keys(config.parallel.group_secret)
    assert config.parallel.advertise is not None
    return ZmqTransferChannel(tcp(config.parallel.advertise, "*"), incarnation, keys)
