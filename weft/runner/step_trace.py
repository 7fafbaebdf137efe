"""Trace of steps: one event per step in Chrome's trace format (load the file in Perfetto or
chrome://tracing).

Steps with communication also record each micro-batch, on four tracks of a process called ``micro_batches``:
compute and communication of the first and of the second micro-batch. A step without micro-batches counts as
first micro-batch. ``python -m weft.overlap.overlap_report FILE`` sums up a trace.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

import msgspec
import torch

from weft.common.errors import ConfigError
from weft.common.folder import open_private
from weft.common.log import get_logger
from weft.overlap.times import StepTimes
from weft.types.plan import StepPlan

log = get_logger(__name__)


TRACKS = (
    "first micro-batch",
    "second micro-batch",
    "first micro-batch's communication",
    "second micro-batch's communication",
)


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def composition(plan: StepPlan) -> str:
    """Return the composition of a step: ``prefill rows/tokens + decode rows/tokens``."""
    prefill = plan.prefill
    decode = plan.decode
    return f"{prefill.rows}/{prefill.tokens} + {decode.rows}/{decode.tokens}"


def labelled(plan: StepPlan) -> AbstractContextManager[object]:
    """Return a context that names the work of a step in the trace of a torch profiler: the tokens of
    prompts, the rows that decode and the drafts to verify. Without a profiler the context does nothing."""
    if not torch.autograd._profiler_enabled():
        return _NO_LABEL
    drafts = plan.decode.tokens - plan.decode.rows
    return torch.profiler.record_function(
        f"weft step: prefill {plan.prefill.tokens} tokens, decode {plan.decode.rows} rows, {drafts} drafts"
    )


_NO_LABEL = contextlib.nullcontext()


class StepTrace:
    """Writes an event when a step ends. After ``close`` the file is valid JSON; viewers accept the file
    before."""

    def __init__(self, path: str) -> None:
        """Create the file, private to this user, and write the first event. Raises ConfigError if the file
        cannot be written."""
        try:
            self._file: IO[str] | None = open_private(Path(path), "w")
        except OSError as error:
            raise ConfigError(f"--trace: cannot write that file ({error.strerror})", param="trace") from None
        self._file.write("[")
        self._first = True
        self._named = False
        self._origin = time.monotonic()
        about = {"unix_ns": time.time_ns()}  # aligns other traces of the same run
        self._event({"name": "weft_origin", "ph": "M", "pid": 0, "args": about})

    def step(self, plan: StepPlan, launched: float, read: float, times: StepTimes | None = None) -> None:
        """Record a step; do nothing after the end of the trace. ``launched`` and ``read``: monotonic seconds
        of the launch and of the read result. ``times``: adds the tracks of the micro-batches."""
        if self._file is None:
            return
        event: dict[str, Any] = {
            "name": f"step {composition(plan)}",
            "cat": "step",
            "ph": "X",
            **self._span(launched, read),
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
        if times is not None:
            event["args"] |= {
                "micro_batches": times.micro_batches,
                "compute_us": _micros(times.compute),
                "communication_us": _micros(times.communication),
                "hidden_us": _micros(times.hidden),
            }
        self._event(event)
        if times is not None:
            self._micro_batches(plan, times)

    def _micro_batches(self, plan: StepPlan, times: StepTimes) -> None:
        """Record compute and communication of each micro-batch on separate tracks."""
        if not self._named:
            self._named = True
            self._event({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "micro_batches"}})
            for tid, name in enumerate(TRACKS):
                self._event({"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}})
        for micro_batch, began, ended in times.stretches:
            span = self._span(began, ended)
            self._event(
                {
                    "name": f"step {plan.step}",
                    "cat": "compute",
                    "ph": "X",
                    "pid": 1,
                    "tid": micro_batch,
                    **span,
                }
            )
        for flight in (*times.flights, *times.drafting):
            self._event(
                {
                    "name": "collective",
                    "cat": "communication",
                    "ph": "X",
                    "pid": 1,
                    "tid": 2 + flight.micro_batch,
                    **self._span(flight.began, flight.ended),
                    "args": {
                        "step": plan.step,
                        "queued_us": _micros(flight.began - flight.launched),
                        "waited_us": _micros(flight.waited),
                    },
                }
            )

    def _span(self, began: float, ended: float) -> dict[str, int]:
        return {"ts": _micros(began - self._origin), "dur": _micros(ended - began)}

    def _event(self, event: dict[str, Any]) -> None:
        separator = "\n" if self._first else ",\n"
        self._first = False
        self._write(separator + msgspec.json.encode(event).decode())

    def close(self) -> None:
        """End the list and close the file. Idempotent."""
        self._write("\n]\n", last=True)

    def _write(self, text: str, *, last: bool = False) -> None:
        """Write to the file, and with ``last`` close the file. If the file cannot be written (a full disk),
        log a warning and end the trace. After the end nothing is written."""
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
