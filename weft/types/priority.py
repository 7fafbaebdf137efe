"""The priority class of batches."""

from __future__ import annotations

BATCH_PRIORITY = 1_000_000
"""Smallest priority of batches. A batch sequence uses only slots and blocks that online sequences leave free,
and is preempted at once when an online sequence needs a slot or a block."""
