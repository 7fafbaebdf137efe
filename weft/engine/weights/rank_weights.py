"""New weights on one rank: a thread reads, checks and packs them, then the step thread copies them.

    stage(update) ──thread──► report, wakeup        the model in use does not change
    swap(version)             copy into the memory in use; no step may run
    drop()                    forget staged weights
    free(weights)             give the pages of the caches, and of the weights, back; no sequence may be open

A staged version needs the memory of a second model until the swap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from weft.common.allocator import trim_heap
from weft.common.errors import ConfigError, EngineDead, InvalidRequest, WeftError
from weft.common.log import get_logger
from weft.common.priority import step_back
from weft.models.refill import check_finite, check_refill, held_digest, refill
from weft.runner.free_memory import free_pages
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.store.new_weights import check_source
from weft.store.weight_names import WeightNames, changed
from weft.types.weights import WeightsReport, WeightsUpdate

log = get_logger(__name__)

Tensors: TypeAlias = dict[str, torch.Tensor]
Read: TypeAlias = Callable[[WeightsUpdate], Tensors]
"""Function from an update to the packed tensors of this rank, by place (``refill.weights_of``)."""


_MISFIT = "the checkpoint's weights do not fit its config.json"


@dataclass(slots=True)
class _Staged:
    update: WeightsUpdate
    digest: str = ""
    name: str | None = None
    places: object = None
    """Places of experts for which ``tensors`` were read."""
    tensors: Tensors | None = None
    error: WeftError | None = None


class RankWeights:
    """The weights in use on one rank, and staged weights. Used from the thread that launches steps."""

    def __init__(
        self,
        rank: int,
        held: Callable[[], Tensors],
        read: Read,
        caches: Callable[[], Sequence[torch.Tensor]] = tuple,
        names: WeightNames | None = None,
        places: Callable[[], object] = lambda: None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        """``held``: returns the tensors in use, by place. Called once, before the first update. ``caches``:
        returns the memory of the KV cache that ``free`` gives back. ``names``: names weights by content; None
        without a KV tier. ``places``: returns the present places of experts, compared with ``==``."""
        self.rank = rank
        self._caches, self._names, self._places, self._changed = caches, names, places, changed
        self.updates: tuple[WeightsUpdate, ...] = ()
        """Updates from the last complete one to the version in use, in order."""
        self.name: str | None = None if names is None else ""
        """Name of the weights in use, see ``WeightsChanged.name``."""
        self.version = 0
        """Version in use."""
        self.wakeup = WakeupDescriptor()
        """Signalled when staging has ended."""
        self._find, self._read = held, read
        self._held: Tensors = {}
        self._staged: _Staged | None = None
        self._thread: threading.Thread | None = None
        self._reading = threading.Lock()
        """Held by the only thread that reads: dropped and new weights never take memory together."""
        self._reported = True

    def stage(self, update: WeightsUpdate) -> None:
        """Begin to read ``update``; ``report`` has the result. Replaces staged weights."""
        self.drop()
        self._staged = staged = _Staged(update)
        self._reported = False
        if update.version <= self.version or (update.partial and update.version != self.version + 1):
            staged.error = InvalidRequest(f"version {update.version} can't follow version {self.version}")
            self.wakeup.ring()
            return
        self._thread = threading.Thread(target=self._fill, args=(staged,), name="weft-weights", daemon=True)
        self._thread.start()
        step_back(self._thread)

    def report(self) -> WeightsReport | None:
        """Return the result of ``stage``, once; None before the end. Does not block."""
        self.wakeup.clear()
        staged = self._staged
        if staged is None or self._reported or (self._thread is not None and self._thread.is_alive()):
            return None
        self._reported = True
        self._thread = None
        if staged.error is not None:
            self._staged = None
            error = staged.error.info()
            return WeightsReport(rank=self.rank, version=self.version, error=error)
        number = staged.update.version
        return WeightsReport(rank=self.rank, version=self.version, staged=number, digest=staged.digest)

    def wait(self) -> WeightsReport:
        """Block until the end of ``stage``, and return the report."""
        if self._thread is not None:
            self._thread.join()
        report = self.report()
        assert report is not None
        return report

    @property
    def moved(self) -> bool:
        """True if experts have moved since the staged weights were read: the weights fit no more."""
        return self._staged is not None and self._staged.places != self._places()

    def swap(self, version: int) -> WeightsReport:
        """Copy the staged weights into the memory in use. Idempotent. Raises EngineDead for other weights."""
        if version == self.version:
            return WeightsReport(rank=self.rank, version=version)
        staged = self._staged
        if staged is None or staged.tensors is None or staged.update.version != version:
            raise EngineDead(f"rank {self.rank} has not read version {version} of the weights")
        if self.moved:
            raise EngineDead(f"experts of rank {self.rank} have moved since version {version} was read")
        refill(self._held, staged.tensors)
        if self._changed is not None:
            self._changed()
        update = staged.update
        self.updates = (*self.updates, update) if update.partial else (update,)
        self.version, self.name, self._staged = version, staged.name, None
        digest = staged.digest
        del staged
        trim_heap()
        log.info(
            "rank %d computes with version %d of the weights (samples %s)",
            *(self.rank, version, held_digest(self._held)),
        )
        return WeightsReport(rank=self.rank, version=version, digest=digest)

    def follow(self, updates: Sequence[WeightsUpdate]) -> None:
        """Read and use all ``updates`` behind the version in use. Blocks. Raises the errors of reading."""
        for update in updates:
            if update.version <= self.version:
                continue
            self.version = update.version - 1  # a complete update needs no version before
            self.stage(update)
            report = self.wait()
            if report.error is not None:
                raise EngineDead(f"version {update.version} of the weights: {report.error.message}")
            self.swap(update.version)

    def free(self, weights: bool) -> WeightsReport:
        """Give the pages of the KV cache back; with ``weights`` the pages of the weights, too. An update must
        then fill the weights before the next step."""
        self.drop()
        freed = free_pages(self._caches(), shared=True)
        if weights:
            self._held = self._held or self._find()
            freed += free_pages(self._held.values())
        trim_heap()
        log.info("rank %d sleeps: %.2f GiB of addresses without memory", self.rank, freed / (1 << 30))
        return WeightsReport(rank=self.rank, version=self.version)

    def drop(self) -> None:
        """Forget staged weights. A thread that reads ends by itself."""
        self._staged, self._thread = None, None

    def close(self) -> None:
        """Close the descriptor."""
        self.drop()
        self.wakeup.close()

    def _fill(self, staged: _Staged) -> None:
        """Read the update of ``staged``, in a thread. Returns early once ``staged`` is dropped."""
        with self._reading:
            if self._staged is staged:
                self._fill_alone(staged)
        # A dropped version gives its memory back before the next thread reads.

    def _fill_alone(self, staged: _Staged) -> None:
        try:
            staged.digest = check_source(staged.update.files)
            if self._staged is not staged:
                return
            state = ""
            if self._names is not None:
                staged.name, state = self._names.of(staged.update, self.name or "")
            self._held = self._held or self._find()
            staged.places = self._places()
            tensors = self._read(staged.update)
            if self._names is not None and self._names.state(staged.update) != state:
                raise changed()
            check_refill(self._held, tensors)
            check_finite(tensors)
            if not staged.update.partial and (lacking := self._held.keys() - tensors.keys()):
                raise InvalidRequest(f"the new weights lack {min(lacking)}", param="update_info")
            staged.tensors = tensors
        except ConfigError as error:
            message = error.message.replace(_MISFIT, "the new weights do not fit the model")
            staged.error = InvalidRequest(message, param="update_info")
        except WeftError as error:
            staged.error = error
        except Exception as error:  # files of a client must not end the engine
            log.exception("new weights can't be read")
            staged.error = InvalidRequest(
                f"the new weights can't be read ({type(error).__name__}); see the server's log",
                param="update_info",
            )
        finally:
            self.wakeup.ring()
