"""Form of dispatch of a step: as configured, or the fastest form by measured costs. No torch."""

from __future__ import annotations

from weft.moe.exchange_cost import ExchangeShape, seconds
from weft.types.exchange import FORMS, PADS, Exchange
from weft.types.layout import Layout

MOST_PADDED = 512
"""Maximum tokens of a replica for padded forms. Beyond, padding costs more than the form saves."""

DOUBLINGS = 18
"""Number of distinguished token counts: 1, 2, 4 and so on."""


class Chooser:
    """Choice of forms for one model's routed layers. All ranks use the same table, see ``follow``."""

    def __init__(self, layout: Layout, setting: str, shape: ExchangeShape, captured: bool = False) -> None:
        """Create a chooser. ``setting``: see ``ParallelSection.moe_dispatch``; ``shape``: of the layers;
        ``captured``: True if ``auto`` must choose forms that CUDA graphs can hold, for small steps."""
        self._captured = captured
        self._layout = layout
        self._setting = setting
        self._shape = shape
        self._known: dict[int, str] = {}

    @property
    def element(self) -> int:
        """Bytes of one exchanged element."""
        return self._shape.element

    def form(self, tokens: int) -> str:
        """Return the form for a step in which no replica has more than ``tokens`` tokens.

        The setting wins, except "low-latency" for too many tokens. The choice of ``auto`` is cached by
        doublings of ``tokens``.
        """
        if self._setting == "low-latency" and tokens > MOST_PADDED:
            return "throughput"
        if self._setting != "auto":
            return self._setting
        # few distinct counts, so results can be cached
        doubling = min(max(0, tokens - 1).bit_length(), DOUBLINGS - 1)
        result = self._known.get(doubling)
        if result is None:
            result = self._known[doubling] = self._fastest(1 << doubling)
        return result

    def votes(self) -> list[int]:
        """Return the choices of ``auto`` for 1, 2, 4 .. tokens, as numbers in ``FORMS``."""
        return [FORMS.index(self.form(1 << doubling)) for doubling in range(DOUBLINGS)]

    def follow(self, votes: list[int]) -> None:
        """Use the choices of another rank, because hosts may have different measurements."""
        self._known = {doubling: FORMS[vote] for doubling, vote in enumerate(votes)}

    def _fastest(self, tokens: int) -> str:
        """Return the form with the lowest estimated seconds for ``tokens`` tokens."""
        # The host reads sizes in the form "throughput", so its steps are launched op by op.
        forms = ["gather"] if self._captured and tokens <= PADS[-1] else ["throughput", "gather"]
        if tokens <= MOST_PADDED:
            forms.append("low-latency")
        if self._layout.data == 1:
            forms.append("reduce")
        return min(forms, key=lambda form: seconds(form, tokens, self._shape, self._layout))

    def choose(self, rows: int, exchange: Exchange) -> tuple[str, int | None]:
        """Return the form for a layer with ``rows`` rows, and the maximum rows per home rank (None: unknown).

        Without an agreement of the replicas (passes of a drafter) the form must need no agreement.
        """
        places = self._layout.tensor
        if self._layout.data == 1:
            # With one replica all ranks know the number of rows without an agreement.
            form = exchange.form or self.form(exchange.rows or rows)
            return form, -(-rows // places)
        if exchange.rows:
            form = exchange.form or self.form(exchange.rows)
            return form, -(-exchange.rows // places)
        return "gather" if self._setting == "gather" else "throughput", None
