"""Transfers by transport, as metrics and as sums over engine processes."""

from __future__ import annotations

from weft.front.monitoring.transport_metrics import sent_by_transport
from weft.types.messages import EngineStats, TransferStats
from weft.types.transport_counts import TransportCounts

ONE = TransportCounts().add("tcp").add("shm").add("tcp")


def test_counts_are_sorted_and_added() -> None:
    assert ONE.counts == (("shm", 1), ("tcp", 2))
    assert (ONE + TransportCounts((("nixl", 3), ("tcp", 1)))).counts == (("nixl", 3), ("shm", 1), ("tcp", 3))


def test_each_transport_has_a_row_and_an_engine_without_transfers_has_none() -> None:
    moving = EngineStats(transfers=TransferStats(sent=ONE))
    roles = [("prefill0", "prefill"), ("decode0", "decode")]
    stats = [("prefill0", moving), ("decode0", EngineStats())]
    made = {name: rows for name, _, rows in sent_by_transport(roles, stats)}
    assert made == {
        "transfers_sent": [(("prefill0", "prefill", "shm"), 1.0), (("prefill0", "prefill", "tcp"), 2.0)],
        "embedding_transfers_sent": [],
    }
