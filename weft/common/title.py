"""What a process is called in ``ps``, where the package ``setproctitle`` is there."""

from __future__ import annotations

import contextlib


def set_title(process: str, model: str = "") -> None:
    """``weft: head 0 (spool-text)``. Before threads are started; without the package nothing changes."""
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"weft: {process} ({model})" if model else f"weft: {process}")
