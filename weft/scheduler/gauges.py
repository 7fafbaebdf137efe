"""The statistics that a scheduler reports."""

from __future__ import annotations

from weft.scheduler.state import SchedulerState
from weft.types.messages import HeadStats, TransferStats


def head_stats(state: SchedulerState, waiting: int, transfers: TransferStats | None) -> HeadStats:
    """Return counters and gauges. ``waiting``: number of sequences without a slot."""
    counts, embeddings, media = state.counts, state.media.cache, state.kv.media
    return HeadStats(
        steps=counts.steps,
        mixed_steps=counts.mixed_steps,
        idle_steps=counts.idle_steps,
        running=len(state.running),
        waiting=waiting,
        kv_usage=state.caches.usage(),
        prefix_queries=counts.prefix_queries,
        prefix_hits=counts.prefix_hits,
        preemptions=counts.preemptions,
        prompt_tokens=counts.prompt_tokens,
        generation_tokens=counts.generation_tokens,
        drafts=tuple(counts.drafts),
        drafts_accepted=tuple(counts.drafts_accepted),
        row_errors=counts.row_errors,
        recoveries=counts.recoveries,
        requeued=counts.requeued,
        constrained_steps=counts.constrained_steps,
        prefill_rows=counts.prefill_rows,
        prefill_tokens=counts.prefill_tokens,
        decode_rows=counts.decode_rows,
        grammar_errors=counts.grammar_errors,
        free_blocks=state.caches.free_blocks(),
        free_slots=state.slots.available(),
        transfers=transfers,
        embedding_transfers=state.images.stats() if media is not None and media.takes else None,
        images_encoded=embeddings.encoded,
        image_hits=embeddings.hits,
        embedding_bytes=embeddings.nbytes,
        embedding_host_bytes=embeddings.host_nbytes,
    )
