"""New weights of an engine: the messages of API servers, and the barrier between two steps.

An ``AwaitedSource``: ``take`` waits for the steps in flight, then swaps the weights on all ranks. The events
of the old weights leave before the answer. Running sequences continue with their KV, or are recomputed
(``--on-update``). Sequences admitted after the swap share no prefix with the old version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.common.errors import ErrorInfo, InvalidRequest, ReportedError, Unavailable, WeftError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.engine.weights.group_weights import GroupWeights
from weft.engine.weights.receivers import Receivers, Start
from weft.group.types import GroupLost
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.scheduler.scheduler import Scheduler
from weft.store.fixed_weights import former_updates
from weft.store.shared_files import SharedFiles, delete_stale, token_of
from weft.types.messages import TokenEvent, ToWeights
from weft.types.weights import (
    DropWeights,
    FreeMemory,
    JoinTrainer,
    ReceiveWeights,
    StageWeights,
    UseWeights,
    WeightsChanged,
    WeightsUpdate,
    prefix_name,
)

log = get_logger(__name__)

BUSY_S = 10.0
"""Maximum seconds until an engine that shares sequences with others has none."""
STAGE_S = 900.0
"""Maximum seconds until all ranks have read new weights."""
POLL_S = 0.002
"""Seconds between two polls of ``EngineWeights.update``."""


class EngineWeights:
    """The weights of one engine. Used from the thread that steps."""

    def __init__(
        self,
        config: EngineConfig,
        group: GroupWeights | None,
        scheduler: object,
        drain: Callable[[], list[TokenEvent] | None],
        busy: Callable[[], bool],
        lose: Callable[[GroupLost], None],
        forget: Callable[[], None],
        start: Start,
        stepping: Callable[[], bool] = lambda: False,
        held: Callable[[], bool] = lambda: False,
    ) -> None:
        """``drain``: commits all steps in flight and returns the events; None while the group recovers.
        ``busy``: returns True while a sequence, a transfer or a copy of a KV tier is open. ``lose``: starts
        the recovery of the group. ``forget``: empties the prefix cache, and plans no more copies of it.
        ``start``: see ``Receivers``. ``stepping``: returns True while replicas of the expert-parallel group
        may step with experts of this engine. ``held``: see ``ExpertGroup.held``."""
        self._group, self._drain, self._busy, self._lose = group, drain, busy, lose
        self._forget, self._stepping, self._held = forget, stepping, held
        self._scheduler = scheduler
        self._moves = config.transfer.role != "unified" or config.transfer.take_embeddings
        """True if the engine exchanges KV or embeddings with other engines, which need the same weights."""
        self._together = self._moves or config.parallel.enable_expert_parallel
        """True if other engines compute parts of the same sequences. Weights then change only while no
        sequence is open."""
        self._on_update = config.scheduler.on_update
        self._staging = False
        self._due: UseWeights | FreeMemory | None = None
        self._until = 0.0
        """Time at which a busy engine refuses ``_due``."""
        self._answers: list[WeightsChanged] = []
        self._receivers = Receivers(config.parallel.tensor_parallel_size, config.device, start)
        self._joined = False
        """True after a message to the receivers; False once weights are staged, or memory is freed."""
        self._files = SharedFiles()
        self._next: tuple[str, ...] = ()
        """Files of the update that is not in use yet, also the file that receivers write."""
        self._former: frozenset[str] = frozenset()
        """Files of the weights from before a sleep of level 2, in order from the start of the engine."""
        self._config = config

    @property
    def version(self) -> int:
        """Version of the weights in use; 0 for the weights of the start."""
        return 0 if self._group is None else self._group.version

    @property
    def name(self) -> str | None:
        """Name of the weights in use, see ``WeightsChanged.name``."""
        return None if self._group is None else self._group.name

    def begin(self, message: ToWeights) -> None:
        """Carry out a message. ``finished`` has the answer later."""
        group = self._group
        if group is None:
            if not isinstance(message, DropWeights):
                self._fail(InvalidRequest("this engine takes no new weights"))
        elif isinstance(message, JoinTrainer | ReceiveWeights):
            self._receive(message)
        elif isinstance(message, StageWeights):
            self._joined, self._next = False, message.update.files
            self._files.hold(self._next)
            self._keep_files()  # releases the files of a cancelled update
            group.stage(message.update)
            self._staging = True
        elif isinstance(message, UseWeights | FreeMemory):
            self._staging = self._staging and isinstance(message, UseWeights)
            self._due, self._until = message, time.monotonic() + BUSY_S
            if isinstance(message, FreeMemory):
                self._joined = False
                self._forget()
        else:
            self._staging, self._due = False, None
            group.drop()
            if self._joined:  # another receiver of the group has failed
                self._receivers.close()
            self._files.hold(self._next)  # a receiver may have written a file without a report so far
            self._next = ()
            self._keep_files()

    def leave(self) -> None:
        """Cancel the change that a lost API server has begun. A version that is about to be used is not
        cancelled, because other API servers may know the version."""
        if self._due is None:
            self.begin(DropWeights())
            self._receivers.close()  # the trainer must form a new group with another API server

    def _receive(self, message: JoinTrainer | ReceiveWeights) -> None:
        """Join the group of a trainer, or receive tensors from the trainer."""
        self._joined = True
        try:
            if self._config.parallel.hosts > 1:
                raise InvalidRequest(
                    "a group over several hosts receives no broadcasts: write the weights to a file system "
                    "that all hosts share, and send the path"
                )
            delete_stale()
            if isinstance(message, JoinTrainer):
                self._receivers.join(message)
            else:
                token = token_of(message.file)  # files with another token are of a cancelled update
                self._next = tuple(one for one in self._next if token_of(one) == token)
                self._keep_files()
                self._receivers.receive(message)
                self._next = (*self._next, message.file)
        except OSError as error:
            self._fail(Unavailable(f"no receiver of weights can be started: {error}"))
        except WeftError as error:
            self._fail(error)

    def _keep_files(self) -> None:
        """Release files in shared memory that no update needs."""
        updates = () if self._group is None else self._group.updates
        used = [file for update in updates for file in update.files]
        self._files.keep({*used, *self._next, *self._former})

    def finished(self) -> list[WeightsChanged]:
        """Return the answers since the last call, in order. Does not block."""
        if self._staging and self._group is not None:
            try:
                digest = self._group.staged()
            except WeftError as error:
                self._staging = False
                self._fail(error)
            else:
                if digest is not None:
                    self._staging = False
                    number = self._group.staged_version
                    self._answers.append(self._changed(staged=number, digest=digest))
        try:
            if (received := self._receivers.finished()) is not None:
                self._files.hold((received,))
                self._answers.append(self._changed(digest=received))
        except WeftError as error:
            self._fail(error)
        answers, self._answers = self._answers, []
        return answers

    def close(self, failed: bool = False) -> None:
        """End the receivers, and release the files. ``failed``: another engine will need the files."""
        self._receivers.close()
        if failed:
            self._files.leave()
        else:
            self._files.keep(())

    def update(self, update: WeightsUpdate, poll: Callable[[], object]) -> None:
        """Stage and use ``update`` while no sequence is open. Blocks. ``poll``: handles input of the ranks.

        Raises the error of a refused update.
        """
        try:
            self.begin(StageWeights(update=update))
            self._answer(poll)
            self.begin(UseWeights(version=update.version))
            self._answer(poll)
        finally:
            self.begin(DropWeights())  # after a failure, ranks would keep a second model

    def free(self, weights: bool, poll: Callable[[], object]) -> None:
        """Release the memory of the KV cache, and with ``weights`` also of the weights, to the system.
        Blocks. ``poll``: see ``update``. Raises Unavailable while a sequence is open."""
        self.begin(FreeMemory(weights=weights))
        self._answer(poll)

    def _answer(self, poll: Callable[[], object]) -> WeightsChanged:
        until = time.monotonic() + STAGE_S
        while not (answers := self.finished()):
            if time.monotonic() > until:
                raise Unavailable(f"the ranks did not read the new weights within {STAGE_S:g} s")
            poll()
            time.sleep(POLL_S)
        if answers[-1].error is not None:
            raise ReportedError(answers[-1].error)
        return answers[-1]

    # ---- AwaitedSource

    @property
    def sockets(self) -> Sequence[Any]:
        """Return the descriptor that becomes readable when the engine's rank has staged the weights."""
        return () if self._group is None else (self._group.descriptor,)

    def take(self, scheduler: object) -> list[TokenEvent]:
        """Carry out a pending ``UseWeights`` or ``FreeMemory``, once the steps in flight have committed.
        Return the events of these steps."""
        due = self._due
        if due is None or self._group is None:
            return []
        events: list[TokenEvent] = []
        before, requeued = self.version, False
        try:
            drained = self._drain()
            if drained is None:
                return []
            events = drained
            together = self._must_wait(due)
            if together and time.monotonic() < self._until:
                return events  # sequences that a pause has ended may still hold transfers
            self._due = None
            if together:
                # A retryable error: the API server tries again after the requests have ended.
                raise Unavailable(
                    "requests, or copies to a KV tier, still run on this engine: POST /pause before weights "
                    "change or memory sleeps; then try again"
                )
            if isinstance(due, FreeMemory):
                return self._free(due, events)
            digest = self._group.swap(due.version)
        except GroupLost as lost:
            self._due = None
            self._lose(lost)
            requeued = True
            digest = ""
            if isinstance(due, FreeMemory) or self.version != due.version:
                self._fail(lost)
                return events
        except WeftError as error:
            self._fail(error)
            return events
        if self.version != before:
            if self._on_update == "recompute" and not requeued and isinstance(self._scheduler, Scheduler):
                self._scheduler.begin_again()
            self._rename_prefixes()
        if self.version == due.version:
            self._used()
        log.info("the engine computes with version %d of the weights", self.version)
        self._answers.append(self._changed(digest=digest))
        return events

    def _must_wait(self, due: UseWeights | FreeMemory) -> bool:
        """Return True if ``due`` must wait until no sequence is open, here or in the expert-parallel
        group."""
        if isinstance(due, FreeMemory):
            return self._stepping() or self._busy()
        if self._held() and not self._moves:
            return False  # no replica steps until the versions agree: open sequences wait for this update
        return self._together and (self._stepping() or self._busy())

    def _used(self) -> None:
        """Release the files of former weights. The update in use is no longer the next."""
        assert self._group is not None
        used = {file for update in self._group.updates for file in update.files}
        # After a sleep of level 2, ``restore`` sends the former updates again, one after the other. The first
        # may be that of the weights of the start.
        if not set(self._group.updates[0].files) <= self._former:
            self._former = frozenset()
        self._next = tuple(one for one in self._next if one not in used)
        self._keep_files()

    def _rename_prefixes(self) -> None:
        """Make blocks and embeddings of the old weights impossible to find for later sequences."""
        if isinstance(self._scheduler, Scheduler):
            self._scheduler.use_weights(prefix_name(self.version, self.name))
        elif isinstance(self._scheduler, EncodeScheduler):
            self._scheduler.cache.forget_all()

    def _free(self, due: FreeMemory, events: list[TokenEvent]) -> list[TokenEvent]:
        """Release memory on all ranks, and return ``events``. Raises GroupLost."""
        assert self._group is not None
        self._forget()
        if due.weights:
            former = former_updates(self._config, self._group.updates)
            self._former |= {file for update in former for file in update.files}
        self._group.free(due.weights)
        self._answers.append(self._changed())
        return events

    def serve(self, scheduler: object) -> list[TokenEvent]:
        """Return no events: the scheduler requests nothing."""
        return []

    def _changed(self, staged: int = 0, digest: str = "", error: ErrorInfo | None = None) -> WeightsChanged:
        """Return an answer with the version and the name in use."""
        return WeightsChanged(version=self.version, name=self.name, staged=staged, digest=digest, error=error)

    def _fail(self, error: WeftError) -> None:
        log.warning("new weights, or a sleep, are refused: %s", error.message)
        self._answers.append(self._changed(error=error.info()))
