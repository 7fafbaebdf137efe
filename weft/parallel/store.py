"""The store through which the ranks of an epoch exchange the addresses of their communicators.

file:///folder/name     ranks of one host: a file in a folder that only this user can enter, and no port
tcp://host:port/name    ranks of several hosts: rank 0 listens, and each epoch has a name of its own
"""

from __future__ import annotations

import fcntl
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.parallel.group_comm import CommLost

_FILE, _TCP = "file://", "tcp://"
_LOCKED_S = 0.01
"""Seconds between two checks of a locked file."""


def host_store(host: str, timeout: float) -> tuple[Any, str]:
    """Open a store at a free port of ``host``. Return (store, address). Raise CommLost.

    The caller must keep a reference to the store.
    """
    try:
        store = dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
    except Exception as error:
        raise CommLost(f"cannot open a store on {host}") from error
    return store, f"{_TCP}{host}:{store.port}"


def join_store(address: str, timeout: float) -> Any:
    """Join the store at ``address`` and return the store. Raise CommLost.

    ``timeout``: seconds to reach the store, and of each later wait.
    """
    patience = timedelta(seconds=timeout)
    try:
        if address.startswith(_FILE):
            path = address.removeprefix(_FILE)
            _until_unlocked(path, timeout)
            store: Any = dist.FileStore(path, -1)
        elif address.startswith(_TCP):
            place, _, name = address.removeprefix(_TCP).partition("/")
            host, _, port = place.rpartition(":")
            store = dist.TCPStore(host, int(port), None, False, patience, wait_for_workers=False)
            store = dist.PrefixStore(name, store) if name else store
        else:
            raise ValueError("neither file:// nor tcp://")
        store.set_timeout(patience)
    except Exception as error:
        raise CommLost(f"cannot join the store {address}") from error
    return store


def _until_unlocked(path: str, timeout: float) -> None:
    """Wait until no process has the store's file locked. Raise TimeoutError.

    The constructor of a FileStore waits for the lock without releasing the GIL. If a process was stopped
    while holding the lock, no thread of this process could even send a heartbeat.
    """
    until = time.monotonic() + timeout
    with open(path, "ab") as file:  # the store would create the file, too
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError("another process has the store locked") from None
                time.sleep(_LOCKED_S)
