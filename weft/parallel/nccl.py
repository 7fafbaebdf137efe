"""NCCL communicators of one group and epoch, for CUDA tensors.

Collectives are queued on the current stream; nothing here waits for the device. So a collective whose peer is
gone hangs on the device and raises nowhere: reading a step's result has a deadline, and ``abort`` has
the kernels that hang end, with garbage for a result (``Launcher.broken`` says so).

    formed by ``connect`` ──► used ──► abort ──► ended       ``settle`` waits for the end

What may block for long (forming, aborting, the destructor) runs on threads of its own:

* Forming hangs while a peer that said hello does not go on.
* An abort ends when no CUDA graph is left that was captured with the communicator, and other communicators'
  kernels let it free memory. So all communicators are aborted side by side, and graphs are dropped before
  anybody waits in ``settle``.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.common import env
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.parallel.launcher import CommLost

Tensor = torch.Tensor

log = get_logger(__name__)

_NEVER = timedelta(hours=24)
"""torch's own patience with a collective: its watchdog only logs, and after that sleeps for a minute."""


def check_nccl() -> None:
    """Raises ConfigError where this torch has no NCCL."""
    if not dist.is_nccl_available():
        raise ConfigError(
            "--collectives nccl: this torch was built without NCCL; use --collectives gloo, or --device cpu",
            param="--collectives",
        )


class NcclGroup:
    """The collectives of one rank. Calls come from the thread that launches steps; ``abort`` from any."""

    def __init__(self, group: Any) -> None:
        """``group``: a ``ProcessGroupNCCL`` whose communicator stands, or a process group like it."""
        self._group: Any = group
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self._ended = threading.Event()

    def gather(self, made: Tensor, x: Tensor) -> None:
        """made [size, ...], contiguous, gets every rank's x. Both are uint8."""
        _queue(self._alive()._allgather_base, made, x, distributed_c10d.AllgatherOptions())

    def exchange(self, made: Tensor, x: Tensor, receives: list[int], sends: list[int]) -> None:
        """Rows of x, uint8 [rows, bytes], go to the ranks, and theirs come to ``made``."""
        _queue(self._alive().alltoall_base, made, x, receives, sends, dist.AllToAllOptions())

    def sum(self, x: Tensor) -> None:
        """x, contiguous, becomes the sum over ranks: in NCCL's order, in x's dtype."""
        _queue(self._alive().allreduce, [x], dist.AllreduceOptions())  # whose operation is SUM

    def abort(self) -> None:
        """Collectives in flight end, with garbage, and none can be launched any more. Does not wait."""
        with self._lock:
            group = self._group
            self._group = None
            if group is None:
                return
            self._ending = threading.Thread(
                target=_end, args=(group, self._ended), name="weft-nccl-abort", daemon=True
            )
        self._ending.start()

    def settle(self, timeout: float) -> None:
        """Waits for the end of an aborted group. Raises CommLost after ``timeout`` seconds."""
        if self._ending is not None and not self._ended.wait(timeout):
            raise CommLost("an NCCL communicator of an epoch that has ended does not end")

    def _alive(self) -> Any:
        group = self._group
        if group is None:
            raise CommLost("its NCCL communicator was aborted")
        return group


def _queue(collective: Any, *given: Any) -> None:
    """``collective(*given)`` on the current stream itself, not on one of torch's beside it. The last that is
    given are its options.
    """
    given[-1].asyncOp = False
    work = collective(*given)
    if work is not None:  # of a torch that has a stream of its own anyway: the current one waits for it
        work.wait()


def _end(group: Any, ended: threading.Event) -> None:
    try:
        group.abort()
    except Exception as error:
        log.warning("an NCCL communicator did not abort: %s", str(error).splitlines()[0])
    finally:
        ended.set()
        # The last reference goes with this thread: the destructor waits for the watchdog.


def connect(store: Any, rank: int, size: int, device: torch.device, timeout: float, host: bool) -> NcclGroup:
    """The group of ``size`` ranks that meet at ``store``, of this group and epoch alone; all call it.

    ``device``: of this rank, which shares it with no other. ``host``: whether all ranks are on one. Raises
    CommLost when ranks do not come within ``timeout`` seconds, and what NCCL raises.
    """
    env.prepare_nccl(host)
    made: list[Any] = []
    errors: list[Exception] = []
    late = threading.Event()
    lock = threading.Lock()
    done = threading.Event()

    def form() -> None:
        try:
            group = _form(store, rank, size, device)
            with lock:
                if not late.is_set():
                    made.append(group)
            if late.is_set():
                group.abort()
        except Exception as error:
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=form, name="weft-nccl-form", daemon=True).start()
    done.wait(timeout)
    with lock:
        if not made:
            late.set()
    if errors:
        raise errors[0]
    if not made:
        raise CommLost(f"NCCL did not connect the ranks within {timeout:g} s")
    return NcclGroup(made[0])


def _form(store: Any, rank: int, size: int, device: torch.device) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NEVER
    options.config.blocking = 1  # threads of our own bound how long
    with torch.cuda.device(device):  # of this thread
        group = nccl(store, rank, size, options)
        # Now, and not at the first collective: that may be one that is captured, and must not block.
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
