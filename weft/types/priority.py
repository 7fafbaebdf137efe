"""The priority class of batches."""

from __future__ import annotations

BATCH_PRIORITY = 1_000_000
"""Priorities from here on belong to batches. A batch sequence computes only with what online sequences leave:
no share of the slots is kept for it, and it gives up its slot and its blocks at once."""
