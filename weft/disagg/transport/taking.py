"""Receipt of a write: copy the bytes into this rank's memory and check the digests."""

from __future__ import annotations

import numpy as np

from weft.common.errors import ErrorInfo
from weft.common.log import get_logger
from weft.disagg.protocol.arrivals import Incoming
from weft.disagg.protocol.digests import ranks_seed, span_seeds
from weft.disagg.transport.base import TransferCorrupt
from weft.disagg.transport.peer_links import ByteSource
from weft.disagg.transport.staging_memory import Memory

log = get_logger(__name__)


def take_in(to: Memory, incoming: Incoming, rank: int, address: str) -> ErrorInfo | None:
    """Copy a write's bytes to ``to`` and check the digests. Return None, or the error for a wrong digest.

    ``rank``, ``address``: of the receiver. No write to the receiver's memory is under way after the return.
    """
    source: ByteSource = incoming.content
    seed, done = ranks_seed(incoming.key, source.rank, rank), 0
    try:
        for memory, (region, spans) in zip(source.memory, source.parts, strict=True):
            seeds = span_seeds(seed, region, spans[:, 1], spans[:, 2])
            made = to.take(memory, region, spans, seeds)
            wrong = np.flatnonzero(made != source.digests[done : done + len(spans)])
            done += len(spans)
            if len(wrong):
                log.error(
                    "transfer %d/%d: %d of %d spans from %s to %s, region %d, have wrong digests",
                    incoming.key.transfer,
                    incoming.key.attempt,
                    len(wrong),
                    len(spans),
                    source.peer,
                    address,
                    region,
                )
                return TransferCorrupt("bytes of a transferred cache arrived with a wrong digest").info()
    finally:
        to.settle()
    return None
