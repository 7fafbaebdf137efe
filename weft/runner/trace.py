"""One trace event a step, in Chrome's trace format (load the file in Perfetto or chrome://tracing)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

import msgspec

from weft.common.errors import ConfigError
from weft.types.plan import StepPlan


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
        self._file.write(separator + msgspec.json.encode(event).decode())

    def close(self) -> None:
        """Ends the list. Safe to call twice."""
        if self._file is not None:
            self._file.write("\n]\n")
            self._file.close()
            self._file = None
