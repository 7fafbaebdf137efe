"""Metrics of the trials of ``--overlap auto`` on GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.types.messages import EngineStats

GAUGE = (
    "overlap_step_seconds",
    "Median seconds of captured decode steps on the device. Bucket: rows x tokens per row @ positions. Form: "
    "whole or micro-batches. Chosen: yes for the form of later steps.",
)
"""Name and help."""
LABELS = ("head", "bucket", "form", "chosen")


def overlap_rows(stats: Sequence[tuple[str, EngineStats]]) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield ((engine, bucket, form, chosen), seconds) for each measured form of each ended trial.

    ``stats``: (name, statistics) of each engine process.
    """
    for engine, its in stats:
        for one in its.overlap_choices:
            bucket = f"{one.rows}x{one.each}@{one.context}"
            forms = (("whole", one.whole_seconds, False), ("micro-batches", one.micro_batch_seconds, True))
            for form, seconds, splits in forms:
                if seconds is not None:
                    chosen = "yes" if splits == one.micro_batches else "no"
                    yield (engine, bucket, form, chosen), seconds
