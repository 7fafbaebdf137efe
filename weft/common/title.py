"""The process title in ``ps``, if the package ``setproctitle`` is installed."""

from __future__ import annotations

import contextlib


def set_title(process: str, model: str = "") -> None:
    """Set the title to ``weft: head 0 (spool-text)``, for example. Call before threads start. No effect
    without the package.
    """
    with contextlib.suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(f"weft: {process} ({model})" if model else f"weft: {process}")
