"""Settings of the KV disk tier; one of the sections (see ``sections``)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from weft.common.errors import ConfigError
from weft.common.folder import cache_folder, expanded
from weft.config.sections.parallel_section import Section

AUTO_SHARE = 0.1
"""Share of the free space of the disk with ``--kv-disk auto``."""


class TierSection(Section, frozen=True, kw_only=True):
    """KV cache on disk and in an object store, which outlive the process, and in host memory beside a GPU."""

    kv_host: Annotated[
        str | None,
        Meta(
            description="Bytes of pinned host memory of each rank for KV cache blocks that leave the GPU, "
            "e.g. 8G. With --kv-disk: the level before the disk. GPU only. Default: none.",
            extra={"size": True},
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        Meta(
            description="Bytes on disk for KV cache blocks, e.g. 20G. A later process with the same model "
            "loads the blocks instead of computing the prompts. auto: 10% of the free space. The "
            "files contain the text of prompts, in a form that can be read back. Default: no tier."
        ),
    ] = None
    kv_disk_dir: Annotated[
        str | None,
        Meta(description="Folder of the KV disk tier. Default: ~/.cache/weft/kv. Requires --kv-disk."),
    ] = None
    kv_remote: Annotated[
        str | None,
        Meta(
            description="Object store for KV cache blocks, shared by hosts: s3://BUCKET/PREFIX, gs://.., "
            'az://.. and file:///FOLDER (pip install "weft[s3]"), mooncake://MASTER:PORT/PREFIX. With '
            "--kv-disk: the level behind the disk. Whoever reads the bucket can read prompts, and whoever "
            "writes to the bucket can change answers. Default: none."
        ),
    ] = None
    kv_store: Annotated[
        Literal["sessions", "reused", "all"],
        Meta(
            description="Blocks to store. sessions: of requests with a session (x-session-id or "
            "prompt_cache_key), when a turn ends. reused: also blocks that a second request has used. all: "
            "the blocks of every request."
        ),
    ] = "reused"
    kv_disk_ttl: Annotated[
        float,
        Meta(
            ge=0,
            description="Seconds after which a block on disk or in an object store is removed. 0: never.",
        ),
    ] = 7 * 86400.0
    kv_disk_write_rate: Annotated[
        str | None,
        Meta(
            description="Maximum bytes per second that each rank writes to the KV disk tier, e.g. 20M, to "
            "spare an SSD. Blocks wait, and are skipped if evicted meanwhile. Default: no limit.",
            extra={"size": True},
        ),
    ] = None
    kv_disk_shared: Annotated[
        bool, Meta(description="Allow a folder of the KV disk tier on a network file system.")
    ] = False


def disk_folder(tier: TierSection) -> Path:
    """Return the folder of the disk tier."""
    return cache_folder("kv") if tier.kv_disk_dir is None else expanded(tier.kv_disk_dir)


def disk_bytes(tier: TierSection, size: int | None) -> int:
    """Return the bytes of the disk tier. ``size``: the parsed ``kv_disk``; None for "auto".

    Raise ConfigError if the free space is unknown.
    """
    if size is not None:
        return size
    folder = disk_folder(tier)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return int(shutil.disk_usage(folder).free * AUTO_SHARE)
    except OSError as error:
        raise ConfigError(
            f"--kv-disk auto: the free space of {folder} is unknown ({error.strerror}); give a size",
            param="--kv-disk",
        ) from error
