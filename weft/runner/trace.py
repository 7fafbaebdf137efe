"""One trace event a step, in Chrome's trace format (load the file in Perfetto or chrome://tracing)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TextIO

import msgspec

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.types.plan import StepPlan

log = get_logger(__name__)


def composition(plan: StepPlan) -> str:
    """What a step holds: ``prefill rows/tokens + decode rows/tokens``."""
    prefill, decode = plan.prefill, plan.decode
    return f"{prefill.rows}/{prefill.tokens} + {decode.rows}/{decode.tokens}"


class StepTrace:
    """Writes step events as they end. The list is valid JSON once closed; viewers accept it before."""

    def __init__(self, path: str) -> None:
        try:
            self._file: TextIO | None = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        except OSError as error:
            raise ConfigError(f"--trace: cannot write that file ({error.strerror})", param="trace") from None
        self._file.write("[")
        self._first = True
        self._origin = time.monotonic()

    def step(self, plan: StepPlan, launched: float, read: float) -> None:
        """Records a step by its plan and its times (monotonic seconds): launched, result read."""
        if self._file is None:
            return
        event = {
            "name": f"step {composition(plan)}",
            "cat": "step",
            "ph": "X",
            "ts": round((launched - self._origin) * 1e6),
            "dur": round((read - launched) * 1e6),
            "pid": 0,
            "tid": plan.step % 2,
            "args": {
                "step": plan.step,
                "prefill_rows": plan.prefill.rows,
                "prefill_tokens": plan.prefill.tokens,
                "decode_rows": plan.decode.rows,
                "decode_tokens": plan.decode.tokens,
                "sampled": int(plan.prefill.sample.sum() + plan.decode.sample.sum()),
                "ops": len(plan.ops),
            },
        }
        separator = "\n" if self._first else ",\n"
        self._first = False
        self._write(separator + msgspec.json.encode(event).decode())

    def close(self) -> None:
        """Ends the list. Safe to call twice."""
        self._write("\n]\n", last=True)

    def _write(self, text: str, *, last: bool = False) -> None:
        """A file that cannot be written to (a full disk) ends the trace, never the engine."""
        file = self._file
        if file is None:
            return
        if last:
            self._file = None
        try:
            file.write(text)
            if last:
                file.close()
        except OSError as error:
            self._file = None
            log.warning("--trace: the file cannot be written to (%s); the trace ends", error.strerror)
            with contextlib.suppress(OSError):
                file.close()
