"""Creates a group from a configuration, with the local process as the engine process."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from weft.common.errors import ConfigError
from weft.common.folder import private_folder
from weft.common.log import get_logger, settings
from weft.config.group_settings import shared_settings
from weft.config.hosts import expert_group_spans, ranks_on, replica_spans
from weft.config.resolved import EngineConfig, KVConfig
from weft.engine.build import rank_mesh
from weft.engine.build_encoder import load_rank
from weft.engine.expert_group import ExpertGroup
from weft.engine.group import GroupExecutor
from weft.engine.group_links import GroupLinks, Share
from weft.engine.ranks.executor import RankRunner
from weft.engine.ranks.fault_injection import Faults
from weft.engine.ranks.ranks import RankProcesses, rank_address, ranks_of
from weft.engine.ranks.supervised_ranks import SupervisedRanks
from weft.group.meeting import Meeting
from weft.group.membership import Membership
from weft.parallel.address import tcp
from weft.parallel.agreement import AgreementGroup
from weft.parallel.control import ZmqEngineChannel
from weft.parallel.leases import FolderLeases, Leases, RendezvousLeases
from weft.parallel.rendezvous import RendezvousClient
from weft.parallel.secret import CurveKeys, read_keys
from weft.parallel.store import host_store
from weft.parallel.wakeup import WakeupSocket
from weft.types.layout import Layout
from weft.types.rendezvous import control_key

log = get_logger(__name__)

CLOSE_S = 5.0
STORE_S = 30.0
"""Timeout in seconds of each operation on the communicator store of the first engine process. Clients have
separate timeouts.
"""


def layout_of(config: EngineConfig) -> Layout:
    """Return the layout of the model over ranks."""
    parallel = config.parallel
    return Layout(
        tensor=parallel.tensor_parallel_size,
        data=parallel.data_parallel_size,
        expert=parallel.enable_expert_parallel,
    )


def start_executor(
    config: EngineConfig, *, progress: bool = True, supervised: SupervisedRanks | None = None
) -> GroupExecutor:
    """Start the group of one replica and return the group, ready for the first step.

    Starts the local workers, loads the local share of the model and forms an epoch. Blocks meanwhile. The
    caller has set the CPU threads (``weft.engine.cpu_threads``).

    ``supervised``: the workers, if the server owns the workers. Workers of an earlier engine process have
    weights already. Raises ConfigError for an unusable configuration, and GroupLost when a rank does not
    start.
    """
    layout = layout_of(config)
    timeout = config.parallel.rank_timeout
    engine, *workers = ranks_of(config.replica, layout.tensor)
    faults = Faults(config.faults, engine)
    # A single rank needs no workers, channels or stores.
    if layout.expert_ranks == 1:
        faults.reach("load")
        loaded = load_rank(config, progress=progress)
        return alone(loaded.kv, lambda kv: faults.around(loaded.runner(kv)))
    # The stack closes everything if the start fails. `pop_all` hands the resources to the group.
    with ExitStack() as resources:
        folder = _folder(config)
        resources.callback(shutil.rmtree, folder, ignore_errors=True)
        client = _rendezvous(config, resources)
        channel, heartbeats = _channels(config, folder, client)
        processes = supervised or RankProcesses(config, channel.address, settings())
        resources.callback(processes.close, CLOSE_S)
        resources.callback(channel.close)
        host = mesh_host(config)
        mesh = faults.within(rank_mesh(config, engine, host))
        stores = _stores(config, folder, host, resources)
        expert_group, meeting, leases = _expert_group(config, layout, host, stores, client)

        def load_share() -> Share:
            faults.reach("load")
            loaded = load_rank(config, progress=progress, mesh=mesh)
            return Share(loaded.kv, lambda kv: faults.around(loaded.runner(kv)))

        membership = Membership(
            engine,
            {rank: rank in ranks_on(config.parallel, config.host.index) for rank in workers},
            settings=shared_settings(config),
            rank_timeout=timeout,
            incarnation=secrets.token_hex(8),
            heartbeats=heartbeats.address,
            stores=stores,
            meeting=meeting,
        )
        links = GroupLinks(
            channel=channel,
            heartbeats=heartbeats,
            processes=processes,
            mesh=mesh,
            leases=leases,
            expert_group=expert_group,
            resources=resources.pop_all(),
        )
        return GroupExecutor(membership, load_share, links, rank_timeout=timeout)


def alone(kv: KVConfig, runner: Callable[[KVConfig], RankRunner]) -> GroupExecutor:
    """Return a group of one rank. See ``Share``."""
    return GroupExecutor(Membership(0, {}, settings={}), lambda: Share(kv, runner), GroupLinks())


def _folder(config: EngineConfig) -> Path:
    """Create a folder for the engine's sockets and return the path. If the engine process is killed, the
    starter of the engine removes the folder.
    """
    return (
        Path(tempfile.mkdtemp(prefix="stores-", dir=config.socket_folder))
        if config.socket_folder
        else private_folder()
    )


def mesh_host(config: EngineConfig) -> str | None:
    """Return the address on which a rank of the replica listens for collectives, or None if all ranks of the
    expert-parallel group are on one host.
    """
    if not expert_group_spans(config.parallel, config.replica):
        return None
    assert config.parallel.advertise is not None, "a host of several has an address"
    return config.parallel.advertise


def _keys(config: EngineConfig) -> CurveKeys:
    """Return the keys of a group over several hosts."""
    assert config.parallel.group_secret is not None, "checked when the configuration was resolved"
    return read_keys(config.parallel.group_secret)


def _rendezvous(config: EngineConfig, resources: ExitStack) -> RendezvousClient | None:
    """Connect to the rendezvous store of the group, and return the client; None for a group on one host."""
    if not config.rendezvous:
        return None
    client = RendezvousClient(config.rendezvous, _keys(config))
    resources.callback(client.close)
    return client


def _channels(
    config: EngineConfig, folder: Path, client: RendezvousClient | None
) -> tuple[ZmqEngineChannel, ZmqEngineChannel]:
    """Open the control channels of the engine process. Return (channel for frames, channel for heartbeats).

    With ranks on other hosts, ``client`` publishes the address. Raises zmq.ZMQError.
    """
    parallel = config.parallel
    replica = config.replica
    # Inside a server's folder, the next engine process will listen at the same address.
    if not replica_spans(parallel, replica):
        ranks = rank_address(config) if config.socket_folder else f"ipc://{folder}/ranks"
        return ZmqEngineChannel(ranks), ZmqEngineChannel(f"{ranks}.heartbeats")
    assert client is not None, "a group over several hosts"
    assert parallel.advertise is not None, "a host of several has an address"
    keys, place = _keys(config), tcp(parallel.advertise, "*")
    channel, heartbeats = ZmqEngineChannel(place, keys), ZmqEngineChannel(place, keys)
    client.post(control_key(replica), channel.address.encode())
    return channel, heartbeats


def _stores(config: EngineConfig, folder: Path, host: str | None, resources: ExitStack) -> str:
    """Return the prefix of the addresses of communicator stores, or "" where the first engine process hosts
    the stores.

    ``host``: see ``mesh_host``. Raises CommLost.
    """
    shares = layout_of(config).expert_ranks > config.parallel.tensor_parallel_size
    if host is None:
        return f"file://{config.socket_folder if shares else folder}"
    if shares and config.replica:
        return ""
    store, address = host_store(host, STORE_S)
    resources.callback(lambda: store)  # the closure keeps the store alive as long as the group
    return address


def _expert_group(
    config: EngineConfig, layout: Layout, host: str | None, stores: str, client: RendezvousClient | None
) -> tuple[ExpertGroup | None, Meeting | None, Leases | None]:
    """Open the wake-up socket and the leases of an expert-parallel group.

    Return (group of the replica, meeting, leases). All None without other replicas.

    Raises ConfigError if the replicas were not started together.
    """
    replica = config.replica
    if layout.expert_ranks == layout.tensor:
        return None, None, None
    if host is not None:
        assert client is not None, "a group over several hosts"
        wakeup = WakeupSocket(tcp(host, "*"), replica, _keys(config))
        leases: Leases = RendezvousLeases(client, replica, layout.data)
    elif config.socket_folder:
        wakeup = WakeupSocket(f"ipc://{config.socket_folder}/wake{replica}", replica)
        leases = FolderLeases(config.socket_folder, replica, layout.data)
    else:
        raise ConfigError(
            "--enable-expert-parallel with --data-parallel-size: replicas must be started together",
            param="--data-parallel-size",
        )
    expert_group = ExpertGroup(AgreementGroup(replica, layout.data, wakeup, host))
    return expert_group, Meeting(replica, stores, wakeup.address), leases
