"""Read from the kernel which pages of a mapped file are in this process's memory."""

from __future__ import annotations

import re
from pathlib import Path


def resident_of(path: Path) -> int:
    """Bytes, of all mappings of the file together."""
    total = 0
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
