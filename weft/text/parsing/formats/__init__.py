"""The families' declarations, by the names that other servers' flags have for them."""

from __future__ import annotations

from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.formats import hermes, thoughts

CALLS: dict[str, OutputFormat] = {one.name: one for one in (*hermes.FORMATS,)}
"""Values of ``--tool-call-parser``."""
THOUGHTS: dict[str, OutputFormat] = {one.name: one for one in (*thoughts.FORMATS,)}
"""Values of ``--reasoning-parser``."""
