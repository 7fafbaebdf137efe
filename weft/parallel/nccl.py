"""NCCL communicators of one group and epoch, for CUDA tensors.

Collectives are queued on the current stream; nothing here waits for the device. So a collective with a lost
peer hangs on the device and raises nowhere. The reader of a step's result has a deadline. ``abort`` makes the
hanging kernels end with garbage as the result (see ``Launcher.broken``).

    formed by ``connect`` ──► used ──► abort ──► ended       ``settle`` waits for the end

Calls that may block for long (forming, aborting, the destructor) run on separate threads:

* Forming hangs if a peer arrives and then stops.
* An abort ends only after all CUDA graphs captured with the communicator are gone, and after kernels of other
  communicators allow memory to be freed. So all communicators are aborted side by side, and graphs are
  dropped before any wait in ``settle``.
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
"""Time-out of torch's own watchdog: the watchdog only logs, and then sleeps for a minute."""


def check_nccl() -> None:
    """Raise ConfigError if this torch has no NCCL."""
    if not dist.is_nccl_available():
        raise ConfigError(
            "--collectives nccl: this torch was built without NCCL; use --collectives gloo, or --device cpu",
            param="--collectives",
        )


class NcclGroup:
    """The collectives of one rank. The thread that launches steps makes all calls; ``abort`` is for any
    thread."""

    def __init__(self, group: Any) -> None:
        """Wrap ``group``, a connected ``ProcessGroupNCCL`` or a process group with the same interface."""
        self._group: Any = group
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        self._ended = threading.Event()

    def gather(self, made: Tensor, x: Tensor) -> None:
        """Gather the x of every rank into ``made`` [size, ...], contiguous. Both are uint8."""
        _queue(self._alive()._allgather_base, made, x, distributed_c10d.AllgatherOptions())

    def exchange(self, made: Tensor, x: Tensor, receives: list[int], sends: list[int]) -> None:
        """Exchange rows of x, uint8 [rows, bytes], with all ranks. Received rows go to ``made``."""
        _queue(self._alive().alltoall_base, made, x, receives, sends, dist.AllToAllOptions())

    def sum(self, x: Tensor) -> None:
        """Replace x, contiguous, by the sum over ranks: in NCCL's order, in the dtype of x."""
        _queue(self._alive().allreduce, [x], dist.AllreduceOptions())  # the default operation is SUM

    def abort(self) -> None:
        """End collectives in flight, with garbage as their results, and forbid new ones. Does not wait."""
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
        """Wait for the end of an aborted group. Raise CommLost after ``timeout`` seconds."""
        if self._ending is not None and not self._ended.wait(timeout):
            raise CommLost("the NCCL communicator of an ended epoch does not stop")

    def _alive(self) -> Any:
        """Return the group. Raise CommLost after ``abort``."""
        group = self._group
        if group is None:
            raise CommLost("its NCCL communicator was aborted")
        return group


def _queue(collective: Any, *given: Any) -> None:
    """Call ``collective(*given)`` on the current stream, without torch's own side stream.

    The last argument must be the options.
    """
    given[-1].asyncOp = False
    work = collective(*given)
    if work is not None:  # torch used a side stream anyway: make the current stream wait
        work.wait()


def _end(group: Any, ended: threading.Event) -> None:
    """Abort ``group`` and set ``ended``. Errors are logged."""
    try:
        group.abort()
    except Exception as error:
        log.warning("an NCCL communicator did not abort: %s", str(error).splitlines()[0])
    finally:
        ended.set()
        # The last reference ends with the thread: the destructor waits for the watchdog.


def connect(store: Any, rank: int, size: int, device: torch.device, timeout: float, host: bool) -> NcclGroup:
    """Form the group of ``size`` ranks that meet at ``store``, and return it. All ranks must call.

    ``store`` belongs to this group and epoch alone. ``device`` belongs to this rank alone. ``host`` is True
    if all ranks are on one host. Raise CommLost if ranks do not come within ``timeout`` seconds, and any
    error of NCCL.
    """
    env.prepare_nccl(host)
    made: list[Any] = []
    errors: list[Exception] = []
    late = threading.Event()
    lock = threading.Lock()
    done = threading.Event()

    # Forming may hang forever, so a thread forms the group. The lock decides between "in time" and "late"; a
    # late group is aborted.
    def form() -> None:
        try:
            group = _form(store, rank, size, device)
            with lock:
                if not late.is_set():
                    made.append(group)
            # The caller has given up, so no other code would abort the group.
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
    """Return a connected NCCL group of all ranks that meet at ``store``.

    May block forever. Raises the errors of torch.
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = _NEVER
    options.config.blocking = 1  # separate threads bound the waits
    with torch.cuda.device(device):  # sets the device of the thread
        group = nccl(store, rank, size, options)
        # Connect now. The first collective may be a captured one, and must not block.
        group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
