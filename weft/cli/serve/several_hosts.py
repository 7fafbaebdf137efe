"""The hosts of one group, as options of ``weft engine``: the head, and the hosts that join the head."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from weft.common.errors import ConfigError
from weft.config.group_settings import host_settings
from weft.config.resolved import EngineConfig
from weft.config.sections.all import ParallelSection
from weft.control.directory.host_gates import HeadGate, JoinGate
from weft.parallel.address import own_address, tcp
from weft.parallel.rendezvous import RendezvousClient, RendezvousStore
from weft.parallel.secret import read_keys

PORT_S = 30.0
"""Maximum seconds to wait for ``--join-port``, which a killed head may still have."""


class HostPlace(NamedTuple):
    """Place of this host among the hosts of a group."""

    number: int = 0
    """``--host-index``; 0 for the head."""
    join: str | None = None
    """``--join``: HOST:PORT of the head. The head needs either ``port`` or ``join``."""
    port: int | None = None
    """``--join-port`` of the head."""

    def address(self, parallel: ParallelSection, advertise: str | None) -> str | None:
        """Return the address of this host for other hosts: ``advertise``, or, for a host that joins, the
        address on the route to the head. None for a group on one host.

        Raise ConfigError if the options do not fit the group.
        """
        if parallel.hosts == 1:
            given = {"--join": self.join, "--host-index": self.number, "--join-port": self.port}
            for flag, value in given.items():
                if value:
                    raise ConfigError(
                        f"{flag}: the group runs on one host; set `hosts` in FILE, or remove {flag}",
                        param=flag,
                    )
            return advertise
        if self.number >= parallel.hosts:
            raise ConfigError(
                f"--host-index {self.number} must be at most {parallel.hosts - 1}: the group runs on "
                f"{parallel.hosts} hosts, counted from 0",
                param="--host-index",
            )
        if self.port is not None and self.join is not None:
            raise ConfigError("give --join or --join-port, not both", param="--join-port")
        if not self.number:
            return self._address_of_head(parallel, advertise)
        if self.port is not None:
            raise ConfigError(
                f"--join-port is for the first host only: remove --join-port on host {self.number}",
                param="--join-port",
            )
        return advertise or own_address(*self.head())

    def _address_of_head(self, parallel: ParallelSection, advertise: str | None) -> str:
        """Return ``advertise``. Raise ConfigError for an option that the head lacks or cannot use."""
        if (self.port is None and self.join is None) or advertise is None:
            flag = "--advertise" if advertise is None else "--join-port"
            raise ConfigError(
                f"the group runs on {parallel.hosts} hosts: the first host needs --advertise ADDRESS and "
                "--join-port PORT; every other host needs --join HOST:PORT and --host-index N",
                param=flag,
            )
        if self.join is not None:
            self.head()
        return advertise

    def head(self) -> tuple[str, int]:
        """Return (host, port) of ``--join``. Raise ConfigError."""
        host, _, port = (self.join or "").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError("--join must be HOST:PORT, e.g. 10.0.0.7:5600", param="--join")
        return host.strip("[]"), int(port)


def open_gate(config: EngineConfig, place: HostPlace) -> tuple[EngineConfig, HeadGate | JoinGate | None]:
    """Connect this host to the other hosts of the group. Return the configuration with the address of the
    rendezvous store, and the gate: None for a group on one host.

    The head waits up to ``PORT_S`` seconds for the port. Raise ConfigError.
    """
    parallel = config.parallel
    if parallel.hosts == 1:
        return config, None
    assert parallel.group_secret is not None, "checked when the configuration was resolved"
    assert parallel.advertise is not None, "checked by HostPlace.address"
    keys, settings = read_keys(parallel.group_secret), host_settings(config)
    if not place.number:
        port = place.port or place.head()[1]
        store = RendezvousStore(tcp(parallel.advertise, port), keys, PORT_S)
        config = msgspec.structs.replace(config, rendezvous=store.address)
        return config, HeadGate(store, settings, parallel.hosts)
    address = tcp(*place.head())
    client = RendezvousClient(address, keys)
    return msgspec.structs.replace(config, rendezvous=address), JoinGate(client, settings, place.number)
