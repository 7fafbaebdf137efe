"""Sequences of a line of a batch: the priority class of batches, and one fair share for the whole batch."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from weft.front.monitoring.batch_times import BatchTimes
from weft.front.monitoring.request_times import RequestTimes
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation
from weft.front.requests.reading import Job
from weft.types.priority import BATCH_PRIORITY

SHARE = "weft.batch"
"""Key of the request's scope for the id of a batch as a client request. Requests of clients lack the key."""


class BatchGeneration(Generation):
    """Choices of a line. The line's own priority orders lines within the class of batches."""

    share = 0
    """Id of the batch as a client request. Set before ``build``."""

    def _build(self, job: Job) -> None:
        priority = BATCH_PRIORITY + max(job.sharing.priority, 0)
        sharing = msgspec.structs.replace(job.sharing, priority=priority)
        super()._build(msgspec.structs.replace(job, sharing=sharing))
        self._submits = [msgspec.structs.replace(submit, owner=self.share) for submit in self._submits]
        self._submitted = {
            index: msgspec.structs.replace(submit, owner=self.share)
            for index, submit in self._submitted.items()
        }


def times_of(front: Front, kind: str, scope: Scope, traceparent: str | None) -> RequestTimes:
    """Return the times of a request, or of a line of a batch."""
    cls = BatchTimes if SHARE in scope else RequestTimes
    return cls(front.metrics, front.trace(kind, traceparent), front.facts(kind, scope))


def generation_of(front: Front, scope: Scope, times: RequestTimes, deadline: float) -> Generation:
    """Return the generation of a request, or of a line of a batch."""
    seed = front.seeds.mint()
    if SHARE not in scope:
        return Generation(front, times=times, deadline=deadline, seed=seed)
    made = BatchGeneration(front, times=times, deadline=deadline, seed=seed)
    made.share = scope[SHARE]
    return made
