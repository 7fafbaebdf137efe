"""Which form of dispatch a step takes: as set, or the one that measured costs say is fastest. No torch."""

from __future__ import annotations

from weft.moe.exchange_cost import ExchangeShape, seconds
from weft.types.exchange import FORMS, Exchange
from weft.types.layout import Layout

MOST_PADDED = 512
"""Tokens of a replica up to which rows may be padded: beyond, filling up costs more than it saves."""

DOUBLINGS = 18
"""Numbers of tokens that are told apart: 1, 2, 4 and so on."""


class Chooser:
    """The rule of one model's routed layers; the same on all ranks, which know the same table."""

    def __init__(self, layout: Layout, setting: str, shape: ExchangeShape) -> None:
        """setting: as ``ParallelSection.moe_dispatch``; shape: of the layers."""
        self._layout = layout
        self._setting = setting
        self._shape = shape
        self._known: dict[int, str] = {}

    @property
    def element(self) -> int:
        """Bytes of what is exchanged."""
        return self._shape.element

    def form(self, tokens: int) -> str:
        """For a step in which no replica has more than ``tokens``."""
        if self._setting == "low-latency" and tokens > MOST_PADDED:
            return "throughput"
        if self._setting != "auto":
            return self._setting
        doubling = min(max(0, tokens - 1).bit_length(), DOUBLINGS - 1)  # so that few are ever computed
        result = self._known.get(doubling)
        if result is None:
            result = self._known[doubling] = self._fastest(1 << doubling)
        return result

    def votes(self) -> list[int]:
        """What ``auto`` would take, as numbers in ``FORMS``, for 1, 2, 4 .. tokens."""
        return [FORMS.index(self.form(1 << doubling)) for doubling in range(DOUBLINGS)]

    def follow(self, votes: list[int]) -> None:
        """Takes what another rank's table says: hosts may have measured for themselves."""
        self._known = {doubling: FORMS[vote] for doubling, vote in enumerate(votes)}

    def _fastest(self, tokens: int) -> str:
        forms = ["throughput", "gather"]
        if tokens <= MOST_PADDED:
            forms.append("low-latency")
        if self._layout.data == 1:
            forms.append("reduce")
        return min(forms, key=lambda form: seconds(form, tokens, self._shape, self._layout))

    def choose(self, rows: int, exchange: Exchange) -> tuple[str, int | None]:
        """The form for a layer that gets ``rows``, and the most rows that a rank is home to, if known.

        Where replicas agreed on nothing (passes of a drafter), a form that needs no agreement.
        """
        places = self._layout.tensor
        if self._layout.data == 1:
            form = exchange.form or self.form(exchange.rows or rows)
            return form, -(-rows // places)
        if exchange.rows:
            form = exchange.form or self.form(exchange.rows)
            return form, -(-exchange.rows // places)
        return "gather" if self._setting == "gather" else "throughput", None
