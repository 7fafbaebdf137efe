"""What a process is called in ``ps``, where the package ``setproctitle`` is there."""

from __future__ import annotations

try:
    from setproctitle import setproctitle
except ImportError:
    setproctitle = None


def set_title(process: str, model: str = "") -> None:
    """``weft: head 0 (spool-text)``. Before threads are started; without the package nothing changes."""
    if setproctitle is not None:
        setproctitle(f"weft: {process} ({model})" if model else f"weft: {process}")
