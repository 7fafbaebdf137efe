"""``weft verify --self --kv-disk``: prompts whose blocks come from a disk, against the prompts alone.

Four engines use one new folder in turn:

    stored     stores every block
    loaded     loads the blocks, instead of computing the prompts
    preempted  loads the blocks, in pools that are too small for all outputs
    damaged    one bit of every record is flipped: finds the damage, and computes the prompts
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config.sections.all import Config
from weft.config.sections.tier_section import disk_folder
from weft.store.layout import identity_of
from weft.store.records import PAGE
from weft.store.segment import walk
from weft.types.messages import EngineStats
from weft.types.tiers import TierStats


@contextmanager
def new_folder(config: Config) -> Iterator[Config]:
    """Yield ``config`` with a new folder inside the folder of the disk tier, and remove the new folder at the
    end. Raise ConfigError if no folder can be made."""
    root = disk_folder(config.tier)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(prefix="verify-", dir=root)
    except OSError as error:
        raise ConfigError(
            f"--kv-disk-dir {root}: no folder can be made ({error.strerror})", param="--kv-disk-dir"
        ) from error
    with made as folder:
        tier = msgspec.structs.replace(config.tier, kv_disk_dir=folder, kv_store="all")
        model = msgspec.structs.replace(config.model, dtype="float64")
        cache = msgspec.structs.replace(config.cache, enable_prefix_caching=True)
        yield msgspec.structs.replace(config, tier=tier, model=model, cache=cache)


def damage(folder: Path) -> int:
    """Flip one bit of the payload of every record below ``folder``. Return the number of records."""
    count = 0
    for path in sorted(folder.rglob("*.kv")):
        fd = os.open(path, os.O_RDWR)
        try:
            identity = identity_of(os.pread(fd, PAGE, 0))
            if identity is None:
                continue
            entries, _ = walk(fd, identity, os.fstat(fd).st_size)
            for offset, nbytes in zip(entries["offset"].tolist(), entries["nbytes"].tolist(), strict=True):
                at = offset + PAGE + nbytes // 2
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 0x80]), at)
                count += 1
        finally:
            os.close(fd)
    return count


def tier_stats(check: Callable[[TierStats], bool]) -> Callable[[EngineStats], bool]:
    """Return a check of an engine's statistics that fails without a tier."""
    return lambda stats: stats.tier is not None and check(stats.tier)
