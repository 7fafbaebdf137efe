"""CUDA tensors through host memory, for collectives that only take CPU tensors (gloo, shared memory).

    device ──copy──► pinned ──collective──► host ──copy──► pinned ──copy──► device
       on the current stream  │ the host waits              on the current stream

Correct before fast: every collective has the host wait for the device once.
"""

from __future__ import annotations

import time

import torch

from weft.parallel.launcher import CommLost

Tensor = torch.Tensor

_POLL = 0.00005


class HostStage:
    """Collectives of one rank by way of pinned host memory. Used from the thread, and on the stream, that
    computes.
    """

    def __init__(self, timeout: float) -> None:
        """``timeout``: seconds that the host waits for what the device computes."""
        self._timeout = timeout

    def down(self, x: Tensor) -> Tensor:
        """x, contiguous, in host memory: all that is queued before on the current stream is in it.

        Raises CommLost when the device does not get there in time.
        """
        if not x.is_cuda:
            return x.contiguous().clone()
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        # x is read on the stream that its owner uses, so its memory is not reused before the copy is over.
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x.device))
        self._wait(event)
        return host

    def up(self, host: Tensor, device: torch.device) -> Tensor:
        """``host`` on ``device``, for what is queued next on the current stream. Waits for nothing.

        torch keeps pinned memory from being used again until copies out of it have ended.
        """
        if device.type != "cuda":
            return host
        return host.pin_memory().to(device, non_blocking=True)

    def _wait(self, event: torch.cuda.Event) -> None:
        deadline = time.monotonic() + self._timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise CommLost("the device did not reach a collective in time")
            time.sleep(_POLL)
