"""Metrics of transfers by transport."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.types.messages import EngineStats

_Row = tuple[tuple[str, ...], float]
SENT = (
    ("transfers_sent", "KV cache transfers that succeeded, by transport, at the sender."),
    ("embedding_transfers_sent", "Image embedding transfers that succeeded, by transport, at the sender."),
)
"""(name, help) of each counter."""


def sent_by_transport(
    roles: Sequence[tuple[str, str]], stats: Sequence[tuple[str, EngineStats]]
) -> Iterator[tuple[str, str, list[_Row]]]:
    """Yield (name, help, rows) of each counter in ``SENT``. A row is ((engine, role, transport), value).

    ``roles``: (name, role) of each engine process. ``stats``: (name, counters) in the same order.
    """
    for name, text in SENT:
        rows = list[_Row]()
        for who, (_, its) in zip(roles, stats, strict=True):
            moving = its.transfers if name == "transfers_sent" else its.embedding_transfers
            if moving is not None and moving.sent:
                rows += [((*who, transport), float(count)) for transport, count in moving.sent.counts]
        yield name, text, rows
