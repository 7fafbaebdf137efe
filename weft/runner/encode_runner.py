"""Runner of an encode group: executes plans of image updates on one device.

    forward(plan)   the updates of the plan, in order, on a separate thread. Before the first embedding is
                    written, the tower has encoded all images of the plan, in one call
    sample(handle)  nothing
    read(handle)    an empty StepResult, after all updates

An image that the tower cannot encode, even alone, does not fail the step. Only transfers of its embedding
fail on this rank; all other work continues. The transfer reports the failed image to the engine process.
"""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future
from typing import Any, Protocol

import torch

from weft.common.errors import EngineDead, ErrorInfo, ImageFailed
from weft.common.log import get_logger
from weft.config.resolved import KVConfig
from weft.runner.device_queue import DeviceQueue, result_of
from weft.runner.exports import RankTransfers, Reports, TransferThread
from weft.runner.images.image_store import EmbeddedImage, MediaStore
from weft.runner.images.media_departures import Departures
from weft.runner.step_handle import StepHandle
from weft.runner.step_trace import StepTrace
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.types.plan import EMPTY, Encode, MoveMedia, SendMedia, StepPlan, StepResult, TokenMasks, column
from weft.types.transfer import Endpoint

Tensor = torch.Tensor

log = get_logger(__name__)

_NO_ROWS = column([0])


class BatchTower(Protocol):
    """Encoder of images: the contract of ``weft.models.vision``."""

    def embed(self, image: Tensor) -> EmbeddedImage:
        """Encode one image: uint8 [frames, height, width, 3], on the device of the model."""

    def embed_batch(self, images: list[Tensor]) -> list[Any]:
        """Encode images. Return one ``EmbeddedImage`` per image, in order."""


class EncodeRunner:
    """Runs whole steps of an encode group. Same interface as ``weft.runner.runner.Runner``."""

    graphs = None
    drafter = None
    transfer: TransferThread | None = None
    reports: Reports | None = None
    endpoint: Endpoint | None = None
    adapters = None
    weights: Any = None
    """The weights of the rank, set by the builder."""

    def __init__(
        self,
        tower: BatchTower,
        kv: KVConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        together: bool = True,
        varying: tuple[str, ...] = (),
        transfers: RankTransfers | None = None,
        trace: StepTrace | None = None,
        step_timeout: float = 600.0,
    ) -> None:
        """Allocate the pool of embeddings and start the device thread.

        ``together``: encode all images of a plan in one call. Otherwise encode one image per call, so that
        the bits of an embedding depend on its image alone. ``varying``: names of ops of the tower that depend
        on the batch. ``transfers``: transfers of embeddings; the pool lies in their memory, and ``close``
        closes the transfers. Without ``transfers`` no embedding can be sent. ``step_timeout``: seconds after
        which a step counts as failed.

        Raises EngineDead if ``kv`` has no limits for images.
        """
        self.kv = kv
        self.varying = (*varying, "images encoded together") if together else ()
        self.embeddings = transfers
        """Transfers of embeddings to other groups; None without transfers."""
        self.wakeup = WakeupDescriptor()
        """Rung when a step has ended."""
        self._tower, self._device, self._together = tower, device, together
        limits = kv.media
        if limits is None:
            raise EngineDead("a group that encodes images has no limits of these")
        memory = None if transfers is None else transfers.memory[0][0]
        self._store = MediaStore(tower, limits, device, dtype, memory=memory)
        self._departures = None if transfers is None else Departures(transfers.transfer, 1 + limits.levels)
        self._spoiled: dict[tuple[bool, bytes], ErrorInfo] = {}
        """Errors of images that could not be encoded, by (True on the host, blocks)."""
        self._queue = DeviceQueue(threaded=True)
        self._trace, self._timeout, self._next_step = trace, step_timeout, -1
        self._failed = False
        self._ended = 0.0
        """Time at which the last completed step ended (monotonic seconds)."""

    def forward(self, plan: StepPlan) -> StepHandle:
        """Launch a step and return a handle. Exceptions of the step are raised in ``read``."""
        handle = StepHandle(plan=plan, launched=time.monotonic(), forwarded=Future())
        handle.forwarded = self._queue.submit(self._step, handle)
        handle.forwarded.add_done_callback(self._has_ended)
        return handle

    def sample(self, handle: StepHandle, masks: TokenMasks | None = None) -> None:
        """Do nothing: an encode group samples no tokens."""
        handle.sampled = handle.forwarded

    def done(self, handle: StepHandle) -> bool:
        """Return True if ``read`` would not wait. A late step also counts as done: ``read`` then raises."""
        return handle.forwarded.done() or time.monotonic() >= self._due(handle)

    def read(self, handle: StepHandle) -> StepResult:
        """Wait for the step and return an empty result. Raises EngineDead after the deadline, and every
        exception of the step."""
        result_of(handle.forwarded, self._due(handle))
        if self._trace is not None:
            self._trace.step(handle.plan, handle.launched, time.monotonic(), handle.times)
        return StepResult(step=handle.plan.step, rows=EMPTY, offsets=_NO_ROWS, tokens=EMPTY, accepted=EMPTY)

    def reset(self) -> None:
        """Forget every step in flight: any step number may come next. Weights and memory stay. Raises
        EngineDead if launched work does not end within the step timeout."""
        result_of(self._queue.submit(self._clear), time.monotonic() + self._timeout)

    def close(self) -> None:
        """Close the device thread, the transfers, the wake-up descriptor and the trace."""
        self._queue.close()
        if self.embeddings is not None:
            self.embeddings.close()
        self.wakeup.close()
        if self._trace is not None:
            self._trace.close()

    def _due(self, handle: StepHandle) -> float:
        """Return the deadline of a step. The time of a step starts when the previous step has ended."""
        return max(handle.launched, self._ended) + self._timeout

    # ---- on the device thread

    def _has_ended(self, forwarded: Future[Any]) -> None:
        self._ended = time.monotonic()
        self.wakeup.ring()

    def _clear(self) -> None:
        self._store.clear()
        self._spoiled.clear()
        self._next_step, self._failed = -1, False

    def _step(self, handle: StepHandle) -> None:
        """Carry out the plan of ``handle``. After an error, every further step raises EngineDead."""
        if self._failed:
            raise EngineDead("an earlier step failed")
        self._failed = True
        self._carry_out(handle)
        self._failed = False

    @torch.inference_mode()
    def _carry_out(self, handle: StepHandle) -> None:
        """Apply the image updates of a plan, in order, and set ``encode_seconds`` of ``handle``.

        An image that cannot be encoded is marked with its error and does not stop the step. Raises EngineDead
        for a step out of order, a plan with rows, or an update of another type.
        """
        plan = handle.plan
        if plan.step != self._next_step >= 0:
            raise EngineDead(f"step {plan.step} follows step {self._next_step - 1}")
        if plan.rows:
            raise EngineDead(f"step {plan.step} has rows, and this group computes none")
        self._next_step = plan.step + 1
        made: dict[int, EmbeddedImage | ErrorInfo] | None = None
        for number, op in enumerate(plan.ops):
            if isinstance(op, Encode):
                # The first Encode runs all images of the plan through the tower in one call.
                if made is None:
                    began = time.monotonic()
                    made = self._encode({n: o for n, o in enumerate(plan.ops) if isinstance(o, Encode)})
                    handle.encode_seconds = time.monotonic() - began
                self._write(op, made.pop(number))
            elif isinstance(op, SendMedia):
                self._send(op)
            elif isinstance(op, MoveMedia):
                self._store.apply([op])
                # An image that failed stays marked at its new place.
                here, there = (False, op.blocks), (True, op.host)
                self._moved(there, here) if op.up else self._moved(here, there)
            else:
                raise EngineDead(
                    f"step {plan.step} has the op {type(op).__name__}, which is not supported here"
                )

    def _encode(self, ops: dict[int, Encode]) -> dict[int, EmbeddedImage | ErrorInfo]:
        """Encode images. Return the embedding or the error of each image, by the index of its op. Never
        raises an Exception: failures are logged."""
        if self._together and len(ops) > 1:
            # If the batch fails, encode one by one below, so that only the broken image fails.
            try:
                images = [self._store.image(op) for op in ops.values()]
                return dict(zip(ops, self._tower.embed_batch(images), strict=True))
            except Exception:
                log.warning("%d images failed together, and are encoded one by one", len(ops), exc_info=True)
        return {number: self._alone(op) for number, op in ops.items()}

    def _alone(self, op: Encode) -> EmbeddedImage | ErrorInfo:
        """Encode one image and return the embedding; the caller stores the embedding. After a failure, log
        the failure and return the error for the client."""
        try:
            return self._tower.embed(self._store.image(op))
        except Exception as error:
            log.warning("an image of %s patches cannot be encoded", op.grid, exc_info=True)
            return ImageFailed(
                f"the image cannot be encoded ({type(error).__name__}): use another image"
            ).info()

    def _write(self, op: Encode, result: EmbeddedImage | ErrorInfo) -> None:
        """Write an embedding into the blocks of ``op``. If ``result`` is an error, or has another number of
        rows than the prompt, mark the blocks with the error instead."""
        place = (False, op.blocks)
        self._clean(place)
        if not isinstance(result, ErrorInfo):
            rows = len(result.main)
            if rows == op.count:
                self._store.write(op.blocks, op.count, result)
                return
            error = ImageFailed(f"the image has {rows} rows in the tower, and {op.count} in the prompt")
            result = error.info()
        self._spoiled[place] = result

    def _send(self, op: SendMedia) -> None:
        """Announce an embedding to its transfer, or fail the transfer if the image could not be encoded.
        Raises EngineDead if this rank has no transfers."""
        if self._departures is None or self.embeddings is None:
            raise EngineDead("an embedding must be sent, but this rank has no transfers of embeddings")
        error = self._spoiled.get((False, op.blocks))
        if error is None:
            self._departures.send(op)
        else:
            self.embeddings.transfer.fail(op.key, error)

    def _moved(self, source: tuple[bool, bytes], target: tuple[bool, bytes]) -> None:
        error = self._spoiled.get(source)
        self._clean(target)
        if error is not None:
            self._spoiled[target] = error

    def _clean(self, place: tuple[bool, bytes]) -> None:
        """Forget errors of blocks that are about to be overwritten."""
        if not self._spoiled:
            return
        on_host, blocks = place[0], set(_numbers(place[1]))
        gone = [one for one in self._spoiled if one[0] == on_host and not blocks.isdisjoint(_numbers(one[1]))]
        for one in gone:
            del self._spoiled[one]


def _numbers(blocks: bytes) -> list[int]:
    return [number for (number,) in struct.iter_unpack("<i", blocks)]
