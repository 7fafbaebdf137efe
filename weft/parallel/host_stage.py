"""CUDA tensors through host memory, for collectives that take only CPU tensors (gloo, shared memory).

    device ──copy──► pinned ──collective──► host ──copy──► pinned ──copy──► device
       on the current stream  │ the host waits              on the current stream

Correctness before speed: in every collective the host waits once for the device.
"""

from __future__ import annotations

import time

import torch

from weft.parallel.launcher import CommLost

Tensor = torch.Tensor

_POLL = 0.00005


class HostStage:
    """Moves tensors of one rank's collectives through pinned host memory.

    Used only from the thread and on the stream of compute.
    """

    def __init__(self, timeout: float) -> None:
        """Create the stage. ``timeout``: seconds that the host waits for results of the device."""
        self._timeout = timeout

    def down(self, x: Tensor) -> Tensor:
        """Return x, contiguous, in host memory, after all work queued so far on the current stream.

        Raise CommLost if the device does not reach this point in time.
        """
        if not x.is_cuda:
            return x.contiguous().clone()
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(x, non_blocking=True)
        # The copy runs on the stream that owns x, so the memory of x is not reused before the end of the
        # copy.
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(x.device))
        self._wait(event)
        return host

    def up(self, host: Tensor, device: torch.device) -> Tensor:
        """Return ``host`` on ``device``, usable by the next work on the current stream. Waits for nothing.

        torch does not reuse pinned memory before copies out of the memory have ended.
        """
        if device.type != "cuda":
            return host
        return host.pin_memory().to(device, non_blocking=True)

    def _wait(self, event: torch.cuda.Event) -> None:
        """Block until ``event`` has happened. Raise CommLost after the time-out."""
        deadline = time.monotonic() + self._timeout
        while not event.query():
            if time.monotonic() > deadline:
                raise CommLost("the device did not reach a collective in time")
            time.sleep(_POLL)
