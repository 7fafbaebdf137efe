"""The spare processes of a server's command. See ``weft.engine.ranks.processes``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weft.common.open_files import allow_files
from weft.config.sections.front_section import FrontSection
from weft.engine.ranks.processes import Spares


@contextlib.contextmanager
def open_spares(front: FrontSection, *, torchless: bool) -> Iterator[Spares]:
    """Start the process of the first engine, and yield the server's spare processes. At the end of the block,
    the idle processes end.

    The process imports torch while the command resolves the configuration and imports the API server.
    ``torchless``: True if no engine needs torch. Call from the main thread.
    """
    allow_files()  # children inherit the limit
    most = front.spare_processes if front.engine_restarts and not torchless else 0
    with contextlib.closing(Spares(most, at_once=not torchless)) as spares:
        yield spares
