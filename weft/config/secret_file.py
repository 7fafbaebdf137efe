"""Files with secrets: the file of ``--group-secret``, and configuration files with API keys.

A process with the group secret can join the groups of a server.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.file import field_of, load_yaml
from weft.config.resolved import EngineConfig
from weft.config.sections.all import ParallelSection, TransferSection
from weft.config.transfers import TCP, proves_secret

log = get_logger(__name__)

LEAST_BYTES = 16
_KEYS = frozenset({"api_key", "admin_key", "ssl_keyfile_password"})
_FLAG = "--group-secret"
_MAKE = "make one with `(umask 077; openssl rand -hex 32 > FILE)`, the same on all hosts"


def check_secrets(groups: Iterable[EngineConfig]) -> None:
    """Read the secret of each group that needs a secret, before anything starts. Raise ConfigError."""
    for group in groups:
        if needs_secret(group.parallel, group.transfer):
            name = group.transfer.transfer
            named = name if proves_secret(name) else TCP
            check_secret(read_secret(group.parallel.group_secret, named))


def needs_secret(parallel: ParallelSection, transfer: TransferSection) -> bool:
    """Return True for a group that other hosts reach, or that exchanges caches over a transport with the
    secret."""
    moves = transfer.role != "unified" or transfer.take_embeddings
    proves = moves and proves_secret(transfer.transfer)
    return parallel.hosts > 1 or parallel.advertise is not None or proves


def check_secret(secret: bytes) -> None:
    """Raise ConfigError for a short secret."""
    if len(secret) < LEAST_BYTES:
        raise ConfigError(f"{_FLAG}: the file must hold at least {LEAST_BYTES} bytes: {_MAKE}", param=_FLAG)


def read_secret(file: str | None, transport: str = TCP) -> bytes:
    """Return the secret in ``file``, of any length. ``transport`` needs the secret: its name is for errors.

    Raise ConfigError for a missing file, or a file with access for other users. Exception: a file of root
    with read access for the group, as Kubernetes mounts secrets.
    """
    if file is None:
        raise ConfigError(
            f"--transfer {transport} requires {_FLAG} FILE, a secret that all groups share and that protects "
            f"the KV caches; {_MAKE}",
            param=_FLAG,
        )
    path = Path(file)
    try:
        found = path.stat()
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"{_FLAG} {file}: the file can't be read ({error.strerror}): {_MAKE}", param=_FLAG
        ) from error
    if _opened(found.st_mode) and not _lent_by_root(found.st_mode, found.st_uid, os.geteuid()):
        raise ConfigError(
            f"{_FLAG} {file}: other users of this host can read or change the file: run `chmod 600 {file}`",
            param=_FLAG,
        )
    return secret


def warn_of_readable_keys(file: str | Path | None) -> None:
    """Log a warning if a configuration or topology file with keys is readable or writable by other users.

    None is ignored. Raise OSError for a missing file, and ConfigError for a file that cannot be parsed.
    """
    if file is None or not _opened(Path(file).stat().st_mode):
        return
    loaded = load_yaml(file, Path(file).name, "--config")
    parts = [loaded, loaded.get("front")] if isinstance(loaded, dict) else []
    keys = {field_of(str(key)) for part in parts if isinstance(part, dict) for key in part}
    if keys & _KEYS:
        log.warning(
            "%s holds keys, and other users of this host can read or change it: run `chmod 600 %s`",
            file,
            file,
        )


def warn_of_readable_key(file: str) -> None:
    """Log a warning if users other than the owner can access the private key in ``file``. Exception: a file
    of root that its group may read, as systems with a group for certificates have."""
    try:
        found = os.stat(file)
    except OSError:  # the file has vanished since the key was read
        return
    lent = found.st_uid == 0 != os.geteuid() and not found.st_mode & (0o030 | stat.S_IRWXO)
    if _opened(found.st_mode) and not lent:
        log.warning(
            "%s holds a private key, and other users of this host can read or change it: run `chmod 600 %s`",
            file,
            file,
        )


def _opened(mode: int) -> bool:
    """Return True if users other than the owner have any access under ``mode``."""
    return bool(mode & (stat.S_IRWXG | stat.S_IRWXO))


def _lent_by_root(mode: int, owner: int, user: int) -> bool:
    """Return True for a file of root that its group may read, and nobody else may read or change.

    Kubernetes mounts a secret for a user other than root in this way: owner root, group ``fsGroup``, mode
    0440. Root chose the group, so root has chosen the readers. ``user``: the user of this process; root
    itself can always use a private file.
    """
    return owner == 0 and user != 0 and stat.S_IMODE(mode) & ~(stat.S_IRUSR | stat.S_IRGRP) == 0
