"""Reading files of an adapter, which a stranger may have written: regular files only, with bounded sizes.

A pipe blocks its reader for ever, and a device has no end. Links are followed, because model hubs store files
as links.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weft.common.errors import ConfigError

MOST_SETTINGS = 16 << 20
"""Maximum bytes of ``adapter_config.json``."""


def read_regular(path: Path, most: int = 0) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes; 0 for no limit.

    Raise OSError if the file can't be opened, and ConfigError for any other kind of file, or a larger file.
    """
    # Without O_NONBLOCK the open of a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ConfigError(f"{path.name} is no regular file", param="--lora-modules")
        if most and facts.st_size > most:
            raise ConfigError(
                f"{path.name} has {facts.st_size} bytes, and at most {most} are read", param="--lora-modules"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most or -1)
    finally:
        os.close(descriptor)
